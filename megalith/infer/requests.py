"""Requests of the inference engine, and the steps in which their tokens are sampled."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from megalith.config.generation import SamplingParams
from megalith.errors import DataError
from megalith.infer.adapters import LoadedAdapter
from megalith.infer.outputs import Completion, RequestOutput, StepResults, TokenOutput
from megalith.infer.pooling import HiddenStatePooler
from megalith.infer.sample import SampleRow, TokenCounts
from megalith.infer.stopping_criteria import FinishReason, StoppingCriteria
from megalith.infer.structured_output import Grammar, GrammarState
from megalith.plan.serving.scheduler import SequenceState, StepPlan


@dataclass(slots=True)
class RequestChoice:
    """A sequence in generation: one choice of a request."""

    request: "Request"
    completion: Completion
    state: SequenceState
    stopping: StoppingCriteria
    counts: TokenCounts | None
    """Counts of its tokens, if penalties need them."""

    grammar: GrammarState | None
    """Its position in the grammar of the request; unchanged by preemption."""


@dataclass(slots=True)
class Request:
    output: RequestOutput
    params: SamplingParams
    seed: int
    deadline: float | None
    bad_word_ids: tuple[tuple[int, ...], ...]
    pooler: HiddenStatePooler | None
    """Set if the request asks for an embedding."""

    grammar: Grammar | None
    adapter: LoadedAdapter | None
    """None: the base model."""

    choices: list[RequestChoice] = field(default_factory=list)
    """The first choice, and after its first token the others."""


class ChoiceProgress(NamedTuple):
    """What another engine has generated of a choice, which this one continues."""

    token_ids: Sequence[int]
    finish_reason: FinishReason | None = None
    """Set if the choice has ended."""


class DraftedRow(NamedTuple):
    """A choice with the drafts of its row in a step."""

    choice: RequestChoice
    draft_ids: tuple[int, ...]
    positions: range
    """Rows of logits: after the last known token, and after each draft."""


@dataclass(slots=True)
class InFlightStep:
    """A step that this stage has executed, and whose sampled tokens are not appended yet."""

    plan: StepPlan
    started: float
    """On the monotonic clock."""

    drafted: list[DraftedRow] = field(default_factory=list)
    """Choices that sample."""

    scored: list[RequestChoice] = field(default_factory=list)
    """Choices that end after their prompt without a token."""

    results: StepResults | None = None
    """None on stages that receive them from the last one."""


def make_sample_row(
    choice: RequestChoice, draft_ids: Sequence[int], grammar_mask: Tensor | None = None
) -> SampleRow:
    """Return the sampling inputs of the position after the tokens of a choice and drafts."""
    request, counts, output_ids = choice.request, choice.counts, choice.completion.token_ids
    if draft_ids:
        output_ids = [*output_ids, *draft_ids]
        counts = None if counts is None else counts.with_drafts(draft_ids)
    return SampleRow(
        params=request.params,
        seed=request.seed,
        choice=choice.completion.index,
        position=len(request.output.prompt_token_ids) + len(output_ids),
        prompt_ids=request.output.prompt_token_ids,
        output_ids=output_ids,
        counts=counts,
        end_ids=choice.stopping.end_ids,
        bad_word_ids=request.bad_word_ids,
        grammar_mask=grammar_mask,
    )


def replay_tokens(choice: RequestChoice, token_ids: Sequence[int], *, has_ended: bool) -> None:
    """Append tokens that another engine has generated, whose text its client has.

    Raises:
        DataError: the choice ends with one of them, but should continue.
    """
    choice.state.token_ids += token_ids
    for token in token_ids:
        if choice.grammar is not None and not has_ended:
            choice.grammar.accept(token)
        stop = choice.stopping.check(token)
        output = TokenOutput(
            choice.request.output.request_id, choice.completion.index, token, stop.text
        )
        choice.completion.add(output)
        if stop.finish is not None and not has_ended:
            raise DataError(
                f"progress[{choice.completion.index}]: the choice ends with its token "
                f"{token} ({stop.finish}). Pass its finish_reason."
            )
    if choice.counts is not None:
        choice.counts.update(choice.completion.token_ids)


def deadline_error(deadline_s: float) -> str:
    """Return the error of a request whose deadline has passed."""
    return (
        f"deadline_s={deadline_s}: the request was not finished in time. Use a longer deadline, or "
        "fewer tokens."
    )

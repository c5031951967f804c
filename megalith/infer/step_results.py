"""What the engine computes from the logits and hidden states of a step, on the last pipeline stage:
sampled tokens, log-probs of prompts, embeddings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, zip_longest

import torch
from torch import Tensor

from megalith.errors import CheckpointError
from megalith.infer.logprobs import prompt_logprobs
from megalith.infer.outputs import PromptLogprobs, StepResults
from megalith.infer.requests import (
    DraftedRow,
    InFlightStep,
    Request,
    RequestChoice,
    make_sample_row,
)
from megalith.infer.runner import StepLogits
from megalith.infer.sample import SampledToken, SampleRow, sample_tokens
from megalith.infer.speculative import DraftRow, VerifiedRow
from megalith.infer.structured_output import GrammarError, compute_masks
from megalith.infer.vocab_slice import VocabSlice
from megalith.plan.serving.scheduler import PlannedRow, StepPlan


def compute_results(
    step: InFlightStep, logits: StepLogits, choices: Mapping[int, RequestChoice], vocab: VocabSlice
) -> StepResults:
    """Compute the sampled tokens, log-probs of prompts and embeddings of a step from its logits;
    `choices`: by sequence."""
    results = StepResults()
    for number, prompt_rows in logits.prompt.items():
        results.prompts[number] = _compute_prompt(step.plan, choices[number], prompt_rows, vocab)
    for row in step.plan.rows:
        hidden = logits.prompt_hidden.get(row.seq_id)
        if hidden is not None:
            results.embeddings[row.seq_id] = _pool(choices[row.seq_id], row, hidden)
    masks = [_compute_masks(each, logits.next_token.device) for each in step.drafted]
    valid = [
        (each, mask)
        for each, mask in zip(step.drafted, masks, strict=True)
        if not isinstance(mask, SampledToken)
    ]
    rows = [
        make_sample_row(each.choice, each.draft_ids[:count], None if mask is None else mask[count])
        for each, mask in valid
        for count in range(len(each.draft_ids) + 1)
    ]
    sampled: Iterator[SampledToken] = iter(())
    if rows:
        selected = _select(
            logits.next_token, [index for each, _ in valid for index in each.positions]
        )
        sampled = iter(sample_tokens(selected, rows, vocab))
    for each, mask in zip(step.drafted, masks, strict=True):
        if isinstance(mask, SampledToken):
            results.sampled.append([mask])
        else:
            results.sampled.append(list(islice(sampled, len(each.positions))))
    return results


def make_draft_rows(
    step: InFlightStep,
    results: StepResults,
    choices: Mapping[int, RequestChoice],
    max_total_tokens: Callable[[Request], int],
) -> list[VerifiedRow]:
    """Return the sequences that go on after a step, with the tokens that it has sampled, for which
    the last pipeline stage proposes the drafts of their next step; `choices`: by sequence;
    `max_total_tokens`: returns the largest number of tokens of a choice of a request."""
    rows = []
    for each, sampled in zip(step.drafted, results.sampled, strict=True):
        choice = each.choice
        new_ids = find_accepted_tokens(each.draft_ids, sampled)
        # a choice that forks may end before it is known to the engine
        is_known = choice.state.seq_id in choices
        if new_ids and is_known and not choice.state.one_token_after_prompt:
            token_ids = [*choice.state.token_ids, *new_ids]
            num_drafts = max_total_tokens(choice.request) - len(token_ids) - 1
            make_row = partial(_make_later_row, choice, new_ids)
            row = DraftRow(choice.state.seq_id, token_ids, num_drafts, make_row)
            rows.append(VerifiedRow(row, len(each.draft_ids), len(new_ids) - 1))
    return rows


def find_accepted_tokens(draft_ids: Sequence[int], sampled: Sequence[SampledToken]) -> list[int]:
    """Return the tokens that a row generates: the drafts that equal the sampled tokens, and the
    first one that does not, or the one after all drafts; none if sampling failed.

    >>> sampled = [SampledToken(token=token) for token in (5, 6, 7)]
    >>> find_accepted_tokens([5, 8], sampled), find_accepted_tokens([5, 6], sampled)
    ([5, 6], [5, 6, 7])
    """
    new_ids: list[int] = []
    for result, draft in zip_longest(sampled, draft_ids):
        if result.error is not None:
            return []
        new_ids.append(result.token)
        if result.token != draft:
            break
    return new_ids


def _make_later_row(
    choice: RequestChoice, new_ids: Sequence[int], draft_ids: Sequence[int]
) -> SampleRow:
    return make_sample_row(choice, [*new_ids, *draft_ids])


def _compute_masks(row: DraftedRow, device: torch.device) -> Tensor | SampledToken | None:
    """Return the tokens that the grammar of a row allows, bool [positions, v]; None: all; or
    the error of a grammar that fails. On a GPU this overlaps with the forward pass."""
    grammar = row.choice.grammar
    if grammar is None:
        return None
    try:
        return torch.from_numpy(compute_masks(grammar, row.draft_ids)).to(device)
    except GrammarError as error:
        return SampledToken(token=-1, error=str(error), is_request_error=True)


def _compute_prompt(
    plan: StepPlan, choice: RequestChoice, logits: Tensor, vocab: VocabSlice
) -> PromptLogprobs:
    """Compute the log-probs of the prompt tokens after the processed ones. A preempted request
    processes its prompt again; those that are recorded are not computed."""
    request = choice.request
    recorded, top_n = request.output.prompt_logprobs, request.params.prompt_logprobs
    assert recorded is not None and top_n is not None
    start = next(row.start for row in plan.rows if row.seq_id == choice.state.seq_id)
    first = max(start, len(recorded))
    new = logits[first - start :]
    next_tokens = request.output.prompt_token_ids[first + 1 : first + 1 + len(new)]
    try:
        values = prompt_logprobs(new, next_tokens, top_n, vocab)
    except CheckpointError as error:
        return PromptLogprobs(first, [], str(error))
    return PromptLogprobs(first, values)


def _pool(choice: RequestChoice, row: PlannedRow, hidden: Tensor) -> list[float] | str | None:
    """Pool the hidden states of a chunk; returns the embedding after the last one, or an
    error."""
    pooler = choice.request.pooler
    assert pooler is not None, "its hidden states are requested"
    pooler.add(row.start, hidden)
    if not row.samples:
        return None
    try:
        return pooler.embedding()
    except CheckpointError as error:
        return str(error)


def _select(logits: Tensor, indices: list[int]) -> Tensor:
    """Return the rows of logits [rows, v]; the tensor itself if they are all rows in order."""
    if indices == list(range(len(logits))):
        return logits
    return logits[torch.tensor(indices, device=logits.device)]

"""Results of the inference engine: tokens as they are generated, and finished requests; and the
callbacks that get them."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from megalith.infer.logprobs import TokenLogprobs
from megalith.infer.sample import SampledToken
from megalith.infer.stopping_criteria import FinishReason
from megalith.plan.serving.scheduler import SchedulerStats, StepPlan


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """A generated token of one choice of a request, or the end of a choice without a token."""

    request_id: int
    choice: int
    """Index among the `n` choices of the request."""

    token: int | None
    """None: the choice ended without a new token (aborted, failed, or max_new_tokens=0)."""

    text: str = ""
    """Text that became certain with this token; empty without a tokenizer."""

    logprobs: TokenLogprobs | None = None
    """Log-probs, if requested."""

    finish_reason: FinishReason | None = None
    """Set for the last output of the choice."""

    stop_reason: int | str | None = None
    """Token id or text that stopped the choice."""

    error: str | None = None
    """Why the choice failed, with finish_reason=error."""

    cause: Exception | None = None
    """Exception of the forward pass that failed, on the process that executes it."""

    is_request_error: bool = False
    """Whether the parameters of the request are the cause of the error."""

    weight_version: int = 0
    """Number of weight updates before the token was sampled."""


@dataclass(slots=True)
class Completion:
    """One choice of a request."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probs at each token, if requested."""

    weight_versions: list[tuple[int, int]] = field(default_factory=list)
    """(index, version): this token and those up to the next entry were sampled by this version of
    the weights."""

    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    cause: Exception | None = None

    def add(self, output: TokenOutput) -> None:
        """Append an output of this choice."""
        if output.token is not None:
            version = output.weight_version
            if not self.weight_versions or self.weight_versions[-1][1] != version:
                self.weight_versions.append((len(self.token_ids), version))
            self.token_ids.append(output.token)
        if output.logprobs is not None:
            self.logprobs.append(output.logprobs)
        self.text += output.text
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        self.error, self.cause = output.error, output.cause


@dataclass(slots=True)
class Timings:
    """Times of a request on a monotonic clock, in seconds."""

    arrival_time: float
    scheduled: float | None = None
    """Start of the first step with tokens of the request."""

    first_token: float | None = None
    """None also for a continued request, whose first token another engine has generated."""

    finished: float | None = None

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return None if self.first_token is None else self.first_token - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """A request with its choices."""

    request_id: int
    prompt_token_ids: list[int]
    outputs: list[Completion]
    timings: Timings
    prompt: str | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """For each prompt token after the first, if requested."""

    embedding: list[float] | None = None
    """Pooled hidden state of the prompt, of length 1, if requested."""

    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values were reused from earlier requests."""

    num_preemptions: int = 0

    @property
    def finished(self) -> bool:
        """Whether all choices are finished."""
        return all(completion.finish_reason is not None for completion in self.outputs)


class PromptLogprobs(NamedTuple):
    """Log-probs of the tokens after a chunk of a prompt."""

    first: int
    """Index of the first value among those of the prompt."""

    values: list[TokenLogprobs]
    error: str | None = None
    """Why there are none; the request ends with it."""


class DraftTokens(NamedTuple):
    """Draft tokens of the next step of a sequence."""

    position: int
    """Number of tokens before them."""

    token_ids: list[int]


@dataclass(slots=True)
class StepResults:
    """What is computed from the logits of a step, on the last pipeline stage for all of them."""

    sampled: list[list[SampledToken]] = field(default_factory=list)
    """By row: the tokens after its last known token and after each draft, or one error."""

    prompts: dict[int, PromptLogprobs] = field(default_factory=dict)
    """By sequence."""

    embeddings: dict[int, list[float] | str | None] = field(default_factory=dict)
    """By sequence whose embedding is requested: the embedding, an error, or None before the last
    chunk."""

    drafts: dict[int, DraftTokens] = field(default_factory=dict)
    """By sequence, if the last pipeline stage proposes draft tokens."""


class EngineCallback(Protocol):
    """Observes an engine: metrics, access log, timeline. Methods are called by the engine's thread
    and must not block."""

    def on_request(self, request: RequestOutput) -> None:
        """A request was added."""

    def on_step(self, plan: StepPlan, stats: SchedulerStats, seconds: float) -> None:
        """A step was executed."""

    def on_token(self, output: TokenOutput) -> None:
        """A token was generated."""

    def on_finish(self, request: RequestOutput) -> None:
        """All choices of a request are finished."""

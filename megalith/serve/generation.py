"""Requests of a client of the engine, and the results that it receives."""

import asyncio
from dataclasses import dataclass, field, replace

from megalith.config.generation import SamplingParams
from megalith.config.serve import Pooling
from megalith.infer.stopping_criteria import FinishReason
from megalith.serve.errors import ApiError
from megalith.serve.protocol import (
    AddRequest,
    PromptResult,
    TokenUpdate,
)


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One prompt of a generation."""

    token_ids: list[int]
    params: SamplingParams
    pooling: Pooling | None = None
    """Return an embedding instead of tokens."""

    adapter: str | None = None
    """Name of a LoRA adapter; None: the base model."""


@dataclass(slots=True)
class Generation:
    """Outputs of the requests of one HTTP request: one for each prompt.

    Outputs that are not read yet wait here, at most those of the requests; the engine never waits
    for a reader.
    """

    num_unfinished: int
    """Choices of all prompts that have not ended."""

    prompts: list[PromptResult | None]
    """By prompt, known before its first update."""

    _updates: list[tuple[int, TokenUpdate]] = field(default_factory=list)
    _error: ApiError | None = None
    _event: asyncio.Event = field(default_factory=asyncio.Event)

    async def next(self, *, timeout: float | None = None) -> list[tuple[int, TokenUpdate]]:
        """Wait for updates and return all, as (prompt index, update); none after `timeout`
        seconds.

        Raises:
            ApiError: a request failed.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._event.wait()
        except TimeoutError:
            return []
        self._event.clear()
        if self._error is not None:
            raise self._error
        updates, self._updates = self._updates, []
        for _, update in updates:
            self.num_unfinished -= update.finish_reason is not None
            if update.finish_reason == "error":
                raise ApiError(find_error_status(update), update.error or "the request failed")
        return updates

    def put(self, prompt: int, update: TokenUpdate) -> None:
        """Add an update of a prompt."""
        self._updates.append((prompt, update))
        self._event.set()

    def fail(self, error: ApiError) -> None:
        """End with an error."""
        self._error = error
        self._event.set()


def find_error_status(update: TokenUpdate) -> int:
    """Return the HTTP status of a failed request."""
    if update.is_timeout:
        return 408
    return 400 if update.is_request_error else 500


@dataclass(slots=True)
class SentProgress:
    """What was received of a choice."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class InFlightRequest:
    """A request that the engine has not finished."""

    generation: Generation
    uid: str
    """X-Request-Id of its HTTP request."""

    prompt: int
    message: AddRequest
    block_keys: list[int]
    choices: list[SentProgress]
    adapter_fingerprint: bytes | None = None
    """SHA-256 of the weights of its adapter when it was sent first, or again without tokens."""

    num_attempts: int = 0
    """Replicas to which it was sent."""

    is_aborted: bool = False
    expiry: asyncio.TimerHandle | None = None
    """Ends it at its deadline, if its replica is not the first of a group."""

    @property
    def num_unfinished(self) -> int:
        """Number of choices that have not ended."""
        return sum(choice.finish_reason is None for choice in self.choices)

    @property
    def has_tokens(self) -> bool:
        """Whether tokens were received."""
        return any(choice.token_ids for choice in self.choices)

    def make_message(self) -> AddRequest:
        """Return the message to a replica, which continues after the tokens that were received."""
        if not self.num_attempts:
            return self.message
        params = dict(self.message.params)
        if self.generation.prompts[self.prompt] is not None:
            params.pop("prompt_logprobs", None)  # received
        progress = [[choice.token_ids, choice.finish_reason] for choice in self.choices]
        fingerprint = None
        if self.has_tokens:  # else no weights were used
            fingerprint = self.adapter_fingerprint
        return replace(
            self.message, params=params, progress=progress, adapter_fingerprint=fingerprint
        )

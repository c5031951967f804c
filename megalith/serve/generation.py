"""Requests of a client of the engine, and the results that it receives."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

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


@dataclass(slots=True, eq=False)
class Generation:
    """Outputs of the requests of one HTTP request: one for each prompt.

    Outputs that are not read yet wait here, at most those of the requests; the engine never waits
    for a reader.
    """

    num_unfinished: int
    """Choices of all prompts that have not ended."""

    prompts: list[PromptResult | None]
    """By prompt, known before its first update."""

    direct: "DirectStream | None" = None
    """Sends updates without the reader."""

    _updates: list[tuple[int, TokenUpdate]] = field(default_factory=list)
    _error: Exception | None = None
    _waiter: "asyncio.Future[None] | None" = None
    """Of the reader, while it waits."""

    _timeout: float = math.inf
    """Seconds that the reader waits."""

    _timer: asyncio.TimerHandle | None = None
    """Ends the wait of the reader; one timer serves many waits, because to start one for each token
    of each stream takes longer than all else here."""

    _expiry: float = math.inf
    """Time of the event loop at which the wait ends."""

    async def next(self, *, timeout: float | None = None) -> list[tuple[int, TokenUpdate]]:
        """Wait for updates and return all, as (prompt index, update); none after `timeout` seconds
        in which nothing was sent.

        Raises:
            ApiError: a request failed.
        """
        if not self._updates and self._error is None:
            await self._wait(math.inf if timeout is None else timeout)
        if self._error is not None:
            raise self._error
        updates, self._updates = self._updates, []
        for _, update in updates:
            if update.finish_reason is not None:
                self.num_unfinished -= 1
                if update.finish_reason == "error":
                    raise ApiError(find_error_status(update), update.error or "the request failed")
        return updates

    def put(self, prompt: int, update: TokenUpdate) -> None:
        """Add an update of a prompt, and deliver it."""
        self.add(prompt, update)
        self.deliver()

    def add(self, prompt: int, update: TokenUpdate) -> None:
        """Add an update of a prompt, which `deliver` delivers."""
        self._updates.append((prompt, update))

    def deliver(self) -> None:
        """Send the updates, or wake up the reader. If it does not wait, it reads them later."""
        if self._waiter is None or self._waiter.done():
            return
        if self.direct is not None and self._error is None:
            try:
                if self._send(self.direct):
                    return
            except Exception as error:  # the reader raises it, other generations continue
                self._error = error
        self._waiter.set_result(None)

    def fail(self, error: ApiError) -> None:
        """End with an error."""
        self._error = error
        self._wake_up()

    def close(self) -> None:
        """Release the timer, when nothing is read any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send(self, direct: "DirectStream") -> bool:
        """Send the updates without the reader, which has sent all before them; False: it must."""
        if not direct.writer.is_ready:
            return False
        data = direct.encode(self._updates)
        if data is None:
            return False
        self._updates = []
        if data:
            direct.writer.write(data)
            self._expiry = asyncio.get_running_loop().time() + self._timeout
        return True

    async def _wait(self, timeout: float) -> None:
        """Wait for an update or an error, or `timeout` seconds."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        self._timeout, self._expiry = timeout, loop.time() + timeout
        if timeout < math.inf and (self._timer is None or self._timer.when() > self._expiry):
            self._start_timer(loop)
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _start_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self.close()
        self._timer = loop.call_at(self._expiry, self._on_timer, loop)

    def _on_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the wait if its time has passed; else continue until then."""
        self._timer = None
        if self._waiter is None or self._expiry == math.inf:
            return
        if loop.time() >= self._expiry:
            self._wake_up()
        else:
            self._start_timer(loop)

    def _wake_up(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ChunkWriter(Protocol):
    """Sends chunks of the body of a streamed response at once, without a task."""

    @property
    def is_ready(self) -> bool:
        """Whether a chunk can be sent now: the response has begun, and the client is not slow."""

    def write(self, data: bytes) -> None:
        """Send a chunk, if `is_ready`."""

    def hold(self, data: bytes) -> None:
        """Send a chunk with the end of the response, which follows at once."""


@dataclass(frozen=True, slots=True)
class DirectStream:
    """Sends updates of a stream as they arrive: to wake up a task for each token of each stream
    takes longer than to send it."""

    writer: ChunkWriter
    encode: Callable[[list[tuple[int, TokenUpdate]]], bytes | None]
    """Returns the events of updates, empty if there are none yet; None, without an effect: the
    reader must process them."""


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

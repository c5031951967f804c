"""Outputs of a generation as the choices of a response, complete or as deltas of a stream."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from megalith.serve.errors import name_structured_output
from megalith.serve.generation import ChunkWriter, DirectStream, Generation, PromptRequest
from megalith.serve.protocol import Logprobs, TokenUpdate
from megalith.serve.sse import PING_SECONDS
from megalith.serve.state import RequestContext, ServerState

T = TypeVar("T")
MIN_BUILT_IN_THREAD_POSITIONS = 256
"""Positions with log-probs of a response that is built on another thread (heuristic: 2 ms)."""


@dataclass(slots=True)
class ChoiceDelta:
    """Consecutive outputs of one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: str | None = None
    """stop, length, abort or tool_calls."""

    stop_reason: int | str | None = None

    def add(self, update: TokenUpdate) -> None:
        """Append an output."""
        self.text += update.text
        if update.token is not None:
            self.token_ids.append(update.token)
        if update.logprobs is not None:
            self.logprobs.append(Logprobs(*update.logprobs))
        if update.finish_reason is not None:
            reason = update.finish_reason
            self.finish_reason = "length" if reason == "context" else reason
            self.stop_reason = update.stop_reason

    def extend(self, delta: "ChoiceDelta") -> None:
        """Append the outputs of a later delta."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def is_ready(self, interval: int) -> bool:
        """Whether it is sent now: it has text and at least `interval` tokens, or the choice
        ended."""
        if self.finish_reason is not None:
            return True
        return bool(self.text) and len(self.token_ids) >= interval


ChoiceKey = tuple[int, int]
"""Index of the prompt, and of the choice among its `n`."""


@dataclass(slots=True)
class Usage:
    """Token counts of a request."""

    generation: Generation
    num_prompt_tokens: int
    num_completion_tokens: int = 0

    def add(self, delta: ChoiceDelta) -> None:
        """Count the tokens of a delta."""
        self.num_completion_tokens += len(delta.token_ids)

    def add_updates(self, updates: Sequence[tuple[int, TokenUpdate]]) -> None:
        """Count the tokens of updates that end no choice: each has one."""
        self.num_completion_tokens += len(updates)

    def to_json(self) -> dict[str, Any]:
        """Return the usage object of the OpenAI API."""
        cached = sum(
            prompt.num_cached_tokens for prompt in self.generation.prompts if prompt is not None
        )
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def merge_texts(updates: Sequence[tuple[int, TokenUpdate]]) -> dict[ChoiceKey, str] | None:
    """Return the new text of each choice; None: a choice has ended."""
    texts: dict[ChoiceKey, str] = {}
    for prompt, update in updates:
        if update.finish_reason is not None:
            return None
        key = (prompt, update.choice)
        texts[key] = texts.get(key, "") + update.text
    return texts


def build_direct_stream(
    writer: ChunkWriter | None,
    encode: Callable[[Usage, Sequence[tuple[int, TokenUpdate]]], bytes | None],
    usage: Usage,
    *,
    interval: int,
    has_logprobs: bool,
) -> DirectStream | None:
    """Return the sender of updates that need only their text; None: they need more. `interval`:
    tokens between two chunks."""
    if writer is None or interval > 1 or has_logprobs:
        return None
    return DirectStream(writer, partial(encode, usage))


class GeneratedResponse(Protocol):
    """The response to a request that generates text."""

    async def complete(self, uid: str) -> dict[str, Any]:
        """Return the response when all choices are finished."""

    def stream(self, uid: str, writer: ChunkWriter | None = None) -> AsyncGenerator[bytes, None]:
        """Yield the events of the stream but those that `writer` has sent, between two others."""


async def respond(
    response: GeneratedResponse,
    state: ServerState,
    context: RequestContext,
    prompts: Sequence[PromptRequest],
    *,
    stream: bool,
) -> dict[str, Any] | AsyncGenerator[bytes, None]:
    """Return the response to a request with these prompts, or the events of its stream.

    Raises:
        ApiError: the queue is full, or the request cannot be processed.
    """
    num_sequences = sum(prompt.params.n for prompt in prompts)
    state.check_capacity(num_sequences, sum(len(prompt.token_ids) for prompt in prompts))
    if stream:
        return response.stream(context.request_id, context.writer)
    return await response.complete(context.request_id)


@asynccontextmanager
async def generate(
    state: ServerState,
    prompts: Sequence[PromptRequest],
    uid: str,
    names: Mapping[str, str] | None = None,
) -> AsyncIterator[Generation]:
    """Generate from prompts; the generation is aborted at the end of the context. `names`: of
    fields in errors about structured output.

    Raises:
        ApiError: a request is invalid or failed.
    """
    with name_structured_output(names or {}):
        async with state.client.generate(prompts, uid=uid) as generation:
            yield generation


async def run_if_large(build: Callable[[], T], num_positions: int) -> T:
    """Return the result of a function that builds log-probs of a number of positions; on another
    thread if they are many, so that other streams continue."""
    if num_positions < MIN_BUILT_IN_THREAD_POSITIONS:
        return build()
    return await asyncio.to_thread(build)


async def collect_choices(generation: Generation) -> dict[ChoiceKey, ChoiceDelta]:
    """Return all choices when they are finished, in the order of prompts and choices.

    Raises:
        ApiError: a request failed.
    """
    choices: dict[ChoiceKey, ChoiceDelta] = {}
    while generation.num_unfinished:
        for prompt, update in await generation.next():
            choices.setdefault((prompt, update.choice), ChoiceDelta()).add(update)
    return dict(sorted(choices.items()))


async def iterate_deltas(
    generation: Generation, *, interval: int
) -> AsyncGenerator[list[tuple[ChoiceKey, ChoiceDelta]], None]:
    """Yield the deltas of all choices as they are generated; outputs that accumulated while the
    reader was slow are one delta. An empty list: nothing happened for a while.

    Raises:
        ApiError: a request failed.
    """
    pending: dict[ChoiceKey, ChoiceDelta] = {}
    while generation.num_unfinished:
        updates = await generation.next(timeout=PING_SECONDS)
        for prompt, update in updates:
            pending.setdefault((prompt, update.choice), ChoiceDelta()).add(update)
        ready = [key for key, delta in pending.items() if delta.is_ready(interval)]
        if ready or not updates:
            yield [(key, pending.pop(key)) for key in ready]

"""POST /v1/completions: continuations of prompts."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from megalith.config.generation import SamplingParams
from megalith.data.tokenizer import StreamDecoder, Tokenizer, encode_prompt
from megalith.errors import DataError
from megalith.serve.choices import (
    ChoiceDelta,
    ChoiceKey,
    Usage,
    build_direct_stream,
    collect_choices,
    generate,
    iterate_deltas,
    merge_texts,
    respond,
    run_if_large,
)
from megalith.serve.errors import ApiError, invalid
from megalith.serve.generation import ChunkWriter, Generation, PromptRequest
from megalith.serve.model_info import ServedModel
from megalith.serve.protocol import Logprobs, TokenUpdate
from megalith.serve.sampling_fields import (
    COMMON_FIELDS,
    RequestOptions,
    fit_context,
    max_tokens_name,
    read_bool,
    read_options,
    read_params,
)
from megalith.serve.sse import DONE, PING, TextEvent, event
from megalith.serve.state import RequestContext, ServerState
from megalith.serve.token_text import CompletionLogprobs

DEFAULT_MAX_TOKENS = 16
FIELDS = frozenset((*COMMON_FIELDS, "prompt", "echo", "best_of", "suffix"))
MIN_ENCODED_IN_THREAD_CHARACTERS = 4096
"""Longer prompts are tokenized on another thread, so that other streams continue (heuristic)."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt of a request."""

    token_ids: list[int]
    text: str | None
    """None: the request has token ids."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A valid request with encoded prompts."""

    options: RequestOptions
    prompts: list[EncodedPrompt]
    params: list[SamplingParams]
    """Of each prompt."""

    echo: bool
    returns_token_ids: bool

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def num_choices(self) -> int:
        """Number of choices of each prompt."""
        return self.params[0].n

    def to_prompts(self) -> list[PromptRequest]:
        """Return the prompts for the engine."""
        return [
            PromptRequest(prompt.token_ids, params, adapter=self.options.model.adapter)
            for prompt, params in zip(self.prompts, self.params, strict=True)
        ]


async def create_completion(
    state: ServerState, context: RequestContext
) -> dict[str, Any] | AsyncGenerator[bytes, None]:
    """Return the response, or the events of its stream.

    Raises:
        ApiError: the request is invalid or cannot be processed.
    """
    request = await parse_completion_request(state, context.body)
    response = _CompletionResponse(request, state)
    return await respond(
        response, state, context, request.to_prompts(), stream=request.options.stream
    )


async def parse_completion_request(
    state: ServerState, body: Mapping[str, Any]
) -> CompletionRequest:
    """Return the request of a JSON body.

    Raises:
        ApiError: it is invalid.
    """
    options = read_options(
        body, state, endpoint="/v1/completions", known=FIELDS, unsupported={"suffix": (None, "")}
    )
    model = options.model
    n = body.get("n") or 1
    if body.get("best_of") not in (None, n):
        raise invalid(f"best_of={body['best_of']!r:.60} must be n={n!r:.60}. Remove it.", "best_of")
    echo, logprobs = read_bool(body, "echo"), body.get("logprobs")
    params = read_params(
        body,
        model,
        state,
        logprobs=(logprobs, "logprobs"),
        echoes=echo,
    )
    if body.get(max_tokens_name(body)) is None:
        limit = max(DEFAULT_MAX_TOKENS, params.min_tokens)
        params = replace(params, max_new_tokens=limit)
    prompts = await encode_prompts(body.get("prompt"), model)
    return CompletionRequest(
        options,
        prompts,
        [
            fit_context(params, len(prompt.token_ids), model, body, prompt_field="prompt")
            for prompt in prompts
        ],
        echo,
        read_bool(body, "return_prompt_tokens"),
    )


async def encode_prompts(
    value: Any,  # JSON
    model: ServedModel,
    *,
    name: str = "prompt",
) -> list[EncodedPrompt]:
    """Return the prompts of a request: a text, token ids, or a list of either; `name`: their field.

    Raises:
        ApiError: they are invalid.
    """
    if value is None:
        raise invalid(f'{name} is missing. Use a string, such as "Hello".', name)
    is_batch = isinstance(value, list) and (not value or isinstance(value[0], str | list))
    items = value if is_batch else [value]
    if not items:
        raise invalid(f"{name} is an empty list. Use at least one text.", name)
    prompts = []
    for index, item in enumerate(items):
        where = f"{name}[{index}]" if is_batch else name
        if isinstance(item, str):
            prompts.append(EncodedPrompt(await encode_text(item, model, where), item))
        else:
            check_token_ids(item, model, where)
            prompts.append(EncodedPrompt(item, None))
    return prompts


async def encode_text(text: str, model: ServedModel, name: str) -> list[int]:
    """Return the token ids of a text, tokenized on another thread if it is long.

    Raises:
        ApiError: it cannot be encoded, or is longer than any text that fits the context.
    """
    model.check_length(text, name)
    try:
        if len(text) < MIN_ENCODED_IN_THREAD_CHARACTERS:
            return encode_prompt(text, model.tokenizer)
        return await asyncio.to_thread(encode_prompt, text, model.tokenizer)
    except DataError as error:
        raise invalid(f"{name}: {error}", name.partition("[")[0]) from None


def check_token_ids(value: Any, model: ServedModel, name: str) -> None:  # JSON
    """Check that a value is a list of token ids of the model.

    Raises:
        ApiError: it is not.
    """
    param = name.partition("[")[0]
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        kind = "a list with other values than ids" if isinstance(value, list) else repr(value)[:60]
        raise invalid(
            f"{name} is {kind}, but must be a string or a list of token ids, such as [17, 4].",
            param,
        )
    if not value:
        raise invalid(f"{name} has 0 tokens. Use at least one.", param)
    if min(value) < 0 or max(value) >= model.info.vocab_size:
        index = next(i for i, x in enumerate(value) if not 0 <= x < model.info.vocab_size)
        raise invalid(
            f"{name}[{index}]={str(value[index])[:20]}: token ids of the model are from 0 to "
            f"{model.info.vocab_size - 1}. Use an id of its tokenizer.",
            param,
        )


class _CompletionResponse:
    """The response to one request."""

    def __init__(self, request: CompletionRequest, state: ServerState) -> None:
        self._request, self._state = request, state
        self._head: dict[str, Any] = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": request.options.model.name,
            "system_fingerprint": None,
        }
        self._echoes = [
            _echo_text(prompt, request.options.model.tokenizer) if request.echo else ""
            for prompt in request.prompts
        ]
        self._logprobs: dict[ChoiceKey, CompletionLogprobs] = {}
        """Of the choices with outputs."""

        self._text_events: dict[ChoiceKey, TextEvent] = {}
        """Of the choices with outputs that were encoded as such."""

    async def complete(self, uid: str) -> dict[str, Any]:
        """Return the response when all choices are finished."""
        async with generate(self._state, self._request.to_prompts(), uid) as generation:
            usage = Usage(generation, self._request.num_prompt_tokens)
            batch = list((await collect_choices(generation)).items())
            for _, delta in batch:
                usage.add(delta)
            choices = await self._build_choices(batch, generation)
            return self._head | {"choices": choices, "usage": usage.to_json()}

    async def stream(
        self, uid: str, writer: ChunkWriter | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of the stream but those that `writer` has sent, between two others."""
        async with generate(self._state, self._request.to_prompts(), uid) as generation:
            usage = Usage(generation, self._request.num_prompt_tokens)
            generation.direct = build_direct_stream(
                writer,
                self._encode_updates,
                usage,
                interval=self._request.options.interval,
                has_logprobs=self._request.params[0].logprobs is not None,
            )
            deltas = iterate_deltas(generation, interval=self._request.options.interval)
            events: list[bytes] = []
            async with aclosing(deltas):
                async for batch in deltas:
                    for _, delta in batch:
                        usage.add(delta)
                    events = await self._encode(batch, generation)
                    if generation.num_unfinished:  # else the last events are sent at once
                        yield b"".join(events) or PING
            if self._request.options.include_usage:
                events.append(event(self._head | {"choices": [], "usage": usage.to_json()}))
            yield b"".join((*events, DONE))

    async def _encode(
        self, batch: Sequence[tuple[ChoiceKey, ChoiceDelta]], generation: Generation
    ) -> list[bytes]:
        """Return the events of consecutive outputs of choices."""
        if all(self._has_text_only(key, delta) for key, delta in batch):
            return [self._text_event(key).encode(delta.text) for key, delta in batch]
        choices = await self._build_choices(batch, generation)
        return [event(self._chunk(choice)) for choice in choices]

    def _encode_updates(
        self, usage: Usage, updates: Sequence[tuple[int, TokenUpdate]]
    ) -> bytes | None:
        """Return the events of updates; None: some have more than a text."""
        texts = merge_texts(updates)
        if texts is None or not texts.keys() <= self._text_events.keys():
            return None
        usage.add_updates(updates)
        return b"".join(
            [self._text_events[key].encode(text) for key, text in texts.items() if text]
        )

    def _has_text_only(self, key: ChoiceKey, delta: ChoiceDelta) -> bool:
        """Whether outputs are neither the first nor the last of a choice, and only their text is
        requested."""
        return (
            key in self._logprobs
            and delta.finish_reason is None
            and not self._request.returns_token_ids
            and self._request.params[0].logprobs is None
        )

    def _text_event(self, key: ChoiceKey) -> TextEvent:
        """Return the event of outputs of which only the text is requested."""
        if key not in self._text_events:
            self._text_events[key] = TextEvent(
                lambda text: self._chunk(self._text_choice(key, ChoiceDelta(text)))
            )
        return self._text_events[key]

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON of an event with consecutive outputs of a choice."""
        extra = {"usage": None} if self._request.options.include_usage else {}
        return self._head | {"choices": [choice]} | extra

    async def _build_choices(
        self, batch: Sequence[tuple[ChoiceKey, ChoiceDelta]], generation: Generation
    ) -> list[dict[str, Any]]:
        """Return the JSON of choices, built on another thread if they have many log-probs."""
        num_positions = sum(len(delta.logprobs) for _, delta in batch)
        if self._request.echo and self._request.params[0].logprobs is not None:
            new = [
                prompt for (prompt, choice), _ in batch if (prompt, choice) not in self._logprobs
            ]
            num_positions += sum(len(self._request.prompts[prompt].token_ids) for prompt in new)

        def build() -> list[dict[str, Any]]:
            return [self._choice(key, delta, generation) for key, delta in batch]

        return await run_if_large(build, num_positions)

    def _choice(self, key: ChoiceKey, delta: ChoiceDelta, generation: Generation) -> dict[str, Any]:
        """Return the JSON of consecutive outputs of a choice; the first ones contain the echo."""
        prompt, _ = key
        request = self._request
        is_first = key not in self._logprobs
        if is_first:
            # Without an echo the offsets count from the start of the output.
            self._logprobs[key] = CompletionLogprobs(
                self._state.token_texts(), request.options.model.tokenizer
            )
        result = self._text_choice(key, delta)
        if is_first:
            result["text"] = self._echoes[prompt] + delta.text
        if request.params[prompt].logprobs is not None:
            positions: list[Logprobs | int] = list(delta.logprobs)
            if is_first and request.echo:
                positions = self._prompt_positions(prompt, generation) + positions
            result["logprobs"] = self._logprobs[key].add(positions)
        if request.returns_token_ids:
            result["generation_token_ids"] = delta.token_ids
            if is_first:
                result["prompt_token_ids"] = request.prompts[prompt].token_ids
        return result

    def _text_choice(self, key: ChoiceKey, delta: ChoiceDelta) -> dict[str, Any]:
        """Return the JSON of consecutive outputs of which only the text is requested."""
        prompt, choice = key
        return {
            "index": prompt * self._request.num_choices + choice,
            "text": delta.text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _prompt_positions(self, prompt: int, generation: Generation) -> list[Logprobs | int]:
        """Return the log-probs of the prompt tokens; the first token has none."""
        result = generation.prompts[prompt]
        if result is None or result.prompt_logprobs is None:
            raise ApiError(500, "the log-probs of the prompt are missing.")
        first = self._request.prompts[prompt].token_ids[0]
        return [first, *(Logprobs(*item) for item in result.prompt_logprobs)]


def _echo_text(prompt: EncodedPrompt, tokenizer: Tokenizer) -> str:
    """Return the text of a prompt, that of the request if it has one."""
    if prompt.text is not None:
        return prompt.text
    decoder = StreamDecoder(tokenizer)
    return "".join(decoder.push(token) for token in prompt.token_ids) + decoder.finish()

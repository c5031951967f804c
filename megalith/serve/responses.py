"""POST /v1/responses: the Responses API of OpenAI, without stored responses."""

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from typing import Any

from megalith.serve.chat import ChoiceParser, EncodedConversation, read_conversation
from megalith.serve.choices import (
    ChoiceDelta,
    Usage,
    build_direct_stream,
    collect_choices,
    generate,
    iterate_deltas,
    merge_texts,
    respond,
    run_if_large,
)
from megalith.serve.errors import ApiError, invalid, rename_fields
from megalith.serve.generation import ChunkWriter, Generation
from megalith.serve.protocol import TokenUpdate
from megalith.serve.response_input import (
    ENDPOINT,
    convert_format,
    convert_tool_choice,
    convert_tools,
    read_input,
)
from megalith.serve.response_items import ResponseItems
from megalith.serve.sampling_fields import (
    SAMPLING_FIELDS,
    RequestOptions,
    check_unsupported,
    read_bool,
    read_options,
)
from megalith.serve.sse import PING, PING_SECONDS
from megalith.serve.state import RequestContext, ServerState
from megalith.serve.token_text import chat_logprobs

LOGPROBS = "message.output_text.logprobs"
INCLUDES = (LOGPROBS, "reasoning.encrypted_content")
"""Values of `include`; the second changes nothing, because reasoning is returned as text."""

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "previous_response_id": (None,),
    "conversation": (None,),
    "prompt": (None,),
    "background": (None, False),
    "store": (None, False),
    "max_tool_calls": (None,),
    "truncation": (None, "disabled"),
    "text.verbosity": (None, "medium"),
    "reasoning.effort": (None, "none"),
}
"""Fields of the OpenAI API with the values that are supported."""

FIELDS = frozenset(
    (
        *SAMPLING_FIELDS,
        *UNSUPPORTED,
        "model",
        "input",
        "instructions",
        "max_output_tokens",
        "include",
        "top_logprobs",
        "text",
        "reasoning",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "stream",
        "stream_options",
        "streaming_interval",
        "truncate_to_fit",
        "chat_template_kwargs",
        "metadata",
        "user",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    )
)
CHAT_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    r"response_format\.json_schema": "text.format",
    "response_format": "text.format",
    r"(tools\[\d+\]|tool_choice)\.function": r"\1",
}
"""Names of fields by their name in chat requests (regular expressions)."""


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A valid request."""

    conversation: EncodedConversation
    options: RequestOptions
    top_logprobs: int | None
    """Most likely tokens at each position; None: no log-probs."""

    echoed: dict[str, Any]
    """Fields that the response repeats."""


async def create_response(
    state: ServerState, context: RequestContext
) -> dict[str, Any] | AsyncGenerator[bytes, None]:
    """Return the response, or the events of its stream.

    Raises:
        ApiError: the request is invalid or cannot be processed.
    """
    request = await parse_responses_request(state, context.body)
    response = _Response(request, state)
    prompts = [request.conversation.to_prompt()]
    return await respond(response, state, context, prompts, stream=request.options.stream)


async def parse_responses_request(state: ServerState, body: Mapping[str, Any]) -> ResponsesRequest:
    """Return the request of a JSON body.

    Raises:
        ApiError: it is invalid.
    """
    text = _read_object(body, "text")
    nested = {f"text.{key}": value for key, value in text.items()}
    nested |= {f"reasoning.{key}": value for key, value in _read_object(body, "reasoning").items()}
    check_unsupported(nested, UNSUPPORTED, ENDPOINT)
    options = read_options(body, state, endpoint=ENDPOINT, known=FIELDS, unsupported=UNSUPPORTED)
    num_top = _read_top_logprobs(body)
    with rename_fields(CHAT_NAMES):
        chat = {
            **body,
            "max_tokens": body.get("max_output_tokens"),
            "max_completion_tokens": None,
            "messages": read_input(body),
            "tools": convert_tools(body.get("tools")),
            "tool_choice": convert_tool_choice(body.get("tool_choice")),
            "response_format": convert_format(text.get("format")),
        }
        conversation = await read_conversation(chat, options.model, state, num_top=num_top)
    params = conversation.params
    parallel = body.get("parallel_tool_calls") is None or read_bool(body, "parallel_tool_calls")
    return ResponsesRequest(
        conversation,
        options,
        num_top,
        {
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": _read_object(body, "metadata"),
            "parallel_tool_calls": parallel,
            "temperature": params.temperature,
            "text": {"format": text.get("format") or {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": params.top_p or 1.0,
            "top_logprobs": num_top or 0,
            "user": body.get("user"),
        },
    )


def _read_object(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return an object of a request, empty if it is missing."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise invalid(f"{name}={value!r:.60} must be an object. Remove it.", name)
    return value or {}


def _read_top_logprobs(body: Mapping[str, Any]) -> int | None:
    """Return the number of log-probs at each position; None: no log-probs."""
    include = body.get("include") or []
    if not isinstance(include, list) or any(item not in INCLUDES for item in include):
        raise invalid(f"include={include!r:.100} must be a list. Use [{LOGPROBS!r}].", "include")
    num_top = body.get("top_logprobs")
    if LOGPROBS in include:
        return num_top or 0
    if num_top:
        raise invalid(f"top_logprobs needs include=[{LOGPROBS!r}]. Set both.", "top_logprobs")
    return None


class _Response:
    """The response to one request."""

    def __init__(self, request: ResponsesRequest, state: ServerState) -> None:
        self._request, self._state = request, state
        self._id, self._created_at = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._parser = ChoiceParser(request.conversation)
        self._items = ResponseItems()
        self._finish_reason: str | None = None

    async def complete(self, uid: str) -> dict[str, Any]:
        """Return the response when it is finished."""
        async with self._generate(uid) as generation:
            usage = self._count_usage(generation)
            (output,) = (await collect_choices(generation)).values()
            usage.add(output)
            await run_if_large(lambda: self._add(output), len(output.logprobs))
            return self._finish(usage)

    async def stream(
        self, uid: str, writer: ChunkWriter | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of the stream but those that `writer` has sent, between two others."""
        is_first, sent = True, time.monotonic()
        try:
            async with self._generate(uid) as generation:
                usage = self._count_usage(generation)
                deltas = iterate_deltas(generation, interval=self._request.options.interval)
                direct = build_direct_stream(
                    writer,
                    self._encode_updates,
                    usage,
                    interval=self._request.options.interval,
                    has_logprobs=self._request.top_logprobs is not None,
                )
                async with aclosing(deltas):
                    async for batch in deltas:
                        if is_first:
                            response = self._response("in_progress")
                            self._items.add_event("response.created", response=response)
                            self._items.add_event("response.in_progress", response=response)
                        is_first = False
                        for _, delta in batch:
                            usage.add(delta)
                            self._add(delta)
                        events = self._items.take_events()
                        # a parser may withhold text for long
                        if events or not batch or time.monotonic() - sent > PING_SECONDS:
                            yield events or PING
                            sent = time.monotonic()
                            generation.direct = direct
                response = self._finish(usage)
                self._items.add_event(f"response.{response['status']}", response=response)
                yield self._items.take_events()
        except ApiError as error:
            if is_first:
                raise
            self._state.metrics.count_error(error.status)
            failed = self._response("failed", error=error.message)
            self._items.add_event("response.failed", response=failed)
            yield self._items.take_events()

    def _encode_updates(
        self, usage: Usage, updates: Sequence[tuple[int, TokenUpdate]]
    ) -> bytes | None:
        """Return the events of updates; None: the output has ended."""
        texts = merge_texts(updates)
        if texts is None:
            return None
        usage.add_updates(updates)
        for text in texts.values():
            self._add(ChoiceDelta(text))
        return self._items.take_events()

    def _generate(self, uid: str) -> AbstractAsyncContextManager[Generation]:
        conversation = self._request.conversation
        names = {  # the names in chat requests are renamed here, because the error is not raised
            internal: name.replace("response_format.json_schema", "text.format")
            for internal, name in conversation.output.field_names.items()
        }
        return generate(self._state, [conversation.to_prompt()], uid, names)

    def _count_usage(self, generation: Generation) -> Usage:
        return Usage(generation, len(self._request.conversation.token_ids))

    def _add(self, delta: ChoiceDelta) -> None:
        """Add consecutive outputs to the items."""
        logprobs = []
        if self._request.top_logprobs is not None:
            texts = self._state.token_texts()
            num_top = self._request.top_logprobs
            logprobs = chat_logprobs(texts, delta.logprobs, num_top=num_top)
        self._items.add(self._parser.parse(delta), logprobs)
        self._finish_reason = delta.finish_reason

    def _finish(self, usage: Usage) -> dict[str, Any]:
        """Return the response after the end of the generation."""
        is_complete = self._finish_reason in ("stop", "tool_calls")
        status = "completed" if is_complete else "incomplete"
        self._items.close(status)
        if self._finish_reason == "abort":
            return self._response("failed", usage, error="the request was aborted.")
        return self._response(status, usage)

    def _response(
        self, status: str, usage: Usage | None = None, *, error: str | None = None
    ) -> dict[str, Any]:
        is_incomplete = status == "incomplete"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "background": False,
            "error": None if error is None else {"code": "server_error", "message": error},
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "model": self._request.conversation.model.name,
            "output": list(self._items.finished),
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "truncation": "disabled",
            "usage": None if usage is None else _usage_json(usage),
        } | self._request.echoed


def _usage_json(usage: Usage) -> dict[str, Any]:
    counts = usage.to_json()
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }

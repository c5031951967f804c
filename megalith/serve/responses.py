"""POST /v1/responses: the Responses API of OpenAI, without stored responses."""

import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count
from typing import Any

from megalith.config.generation import SamplingParams
from megalith.serve.chat import end_with_turn, read_messages, render_messages
from megalith.serve.choices import ChoiceDelta, Usage, collect_choices, iterate_deltas
from megalith.serve.client import PromptRequest
from megalith.serve.errors import ApiError, invalid, rename_fields
from megalith.serve.model_info import ServedModel
from megalith.serve.sampling_fields import (
    SAMPLING_FIELDS,
    check_unsupported,
    count_unknown,
    fit_context,
    read_int,
    read_params,
    read_stream_options,
)
from megalith.serve.sse import PING, named_event
from megalith.serve.state import RequestContext, ServerState
from megalith.serve.token_text import chat_logprobs
from megalith.serve.tools import OutputFormat

ENDPOINT = "/v1/responses"
ROLES = ("user", "assistant", "system", "developer")
PARTS = ("input_text", "output_text")
LOGPROBS = "message.output_text.logprobs"
INCLUDES = (LOGPROBS, "reasoning.encrypted_content")
"""Values of `include`; the second changes nothing, because there is no reasoning."""

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "previous_response_id": (None,),
    "conversation": (None,),
    "prompt": (None,),
    "background": (None, False),
    "store": (None, False),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "truncation": (None, "disabled"),
    "text.format": (None, {"type": "text"}),
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
        "stream",
        "stream_options",
        "streaming_interval",
        "truncate_to_fit",
        "chat_template_kwargs",
        "parallel_tool_calls",
        "max_tool_calls",
        "metadata",
        "user",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    )
)
CHAT_NAMES = {"max_tokens": "max_output_tokens", "messages": "input"}
"""Names of fields by their name in chat requests."""


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A valid request with its encoded conversation."""

    model: ServedModel
    token_ids: list[int]
    params: SamplingParams
    top_logprobs: int | None
    """Most likely tokens at each position; None: no log-probs."""

    stream: bool
    interval: int
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
    state.check_capacity(1, len(request.token_ids))
    response = _Response(request, state)
    if request.stream:
        return response.stream(context.request_id)
    return await response.complete(context.request_id)


async def parse_responses_request(state: ServerState, body: Mapping[str, Any]) -> ResponsesRequest:
    """Return the request of a JSON body.

    Raises:
        ApiError: it is invalid.
    """
    model = state.find_model(body.get("model"))
    nested = {
        f"{name}.{key}": value
        for name in ("text", "reasoning")
        for key, value in _read_object(body, name).items()
    }
    check_unsupported({**body, **nested}, UNSUPPORTED, ENDPOINT)
    count_unknown(body, FIELDS, state)
    stream, _ = read_stream_options(body)
    interval = read_int(body, "streaming_interval", at_least=1, at_most=1024, default=1)
    num_top = _read_top_logprobs(body)
    fields = {**body, "max_tokens": body.get("max_output_tokens"), "max_completion_tokens": None}
    with rename_fields(CHAT_NAMES):
        params = read_params(fields, model, state, logprobs=(num_top, "top_logprobs"))
        messages = read_messages(read_input(body))
        prompt = await render_messages(model, messages, body, add_generation_prompt=True, tools=())
        token_ids = prompt.token_ids
        params = fit_context(params, len(token_ids), model, fields, prompt_field="input")
    return ResponsesRequest(
        model,
        token_ids,
        end_with_turn(params, model, OutputFormat()),
        num_top,
        stream,
        interval or 1,
        {
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": _read_object(body, "metadata"),
            "temperature": params.temperature,
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


def read_input(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the instructions and the input of a request as messages of a chat request.

    Raises:
        ApiError: they are invalid.
    """
    value, instructions = body.get("input"), body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise invalid(f"instructions={instructions!r:.60} must be a text.", "instructions")
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(value, str):
        return [*messages, {"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        what = " is missing" if value is None else f"={value!r:.60} must be a text or a list"
        raise invalid(f'input{what}. Use "Hello".', "input")
    items = [_read_item(item, f"input[{index}]") for index, item in enumerate(value)]
    return messages + items


def _read_item(item: Any, name: str) -> dict[str, Any]:  # JSON
    example = '{"role": "user", "content": "Hello"}'
    if not isinstance(item, dict):
        raise invalid(f"{name}={item!r:.60} must be an object. Use {example}.", "input")
    kind, role, content = item.get("type", "message"), item.get("role"), item.get("content")
    if kind != "message":
        raise invalid(f"{name}.type={kind!r:.60} is not supported. Use {example}.", "input")
    if role not in ROLES:
        raise invalid(
            f"{name}.role={role!r:.60} must be one of {', '.join(ROLES)}. Use user.", "input"
        )
    if isinstance(content, list):
        content = "".join(
            _read_part(part, f"{name}.content[{index}]") for index, part in enumerate(content)
        )
    if not isinstance(content, str):
        raise invalid(
            f"{name}.content={content!r:.60} must be a text or a list of parts. Use {example}.",
            "input",
        )
    return {"role": role, "content": content}


def _read_part(part: Any, name: str) -> str:  # JSON
    if isinstance(part, dict) and part.get("type") in PARTS and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    kind = part.get("type") if isinstance(part, dict) else part
    raise invalid(
        f"{name}.type={kind!r:.60} is not supported by this model. Use "
        '{"type": "input_text", "text": "Hello"}.',
        "input",
    )


class _Response:
    """The response to one request: one message with one text."""

    def __init__(self, request: ResponsesRequest, state: ServerState) -> None:
        self._request, self._state = request, state
        self._id, self._item_id = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._created_at = int(time.time())
        self._sequence_numbers = count()
        self._output = ChoiceDelta()
        """What was generated so far."""

    async def complete(self, uid: str) -> dict[str, Any]:
        """Return the response when it is finished."""
        async with self._generate(uid) as generation:
            usage = Usage(generation, len(self._request.token_ids))
            (self._output,) = (await collect_choices(generation)).values()
            usage.add(self._output)
            return self._finished(usage)

    async def stream(self, uid: str) -> AsyncGenerator[bytes, None]:
        """Yield the events of the stream."""
        is_first = True
        try:
            async with self._generate(uid) as generation:
                usage = Usage(generation, len(self._request.token_ids))
                deltas = iterate_deltas(generation, interval=self._request.interval)
                async with aclosing(deltas):
                    async for batch in deltas:
                        events = self._first_events() if is_first else []
                        is_first = False
                        for _, delta in batch:
                            usage.add(delta)
                            self._output.extend(delta)
                            events += self._delta_events(delta)
                        yield b"".join(events) or PING
                yield b"".join(self._last_events(usage))
        except ApiError as error:
            if is_first:
                raise
            self._state.metrics.count_error(error.status)
            failed = self._response("failed", [], error=error.message)
            yield self._event("response.failed", response=failed)

    def _generate(self, uid: str) -> Any:  # the context manager of EngineClient.generate
        request = PromptRequest(
            self._request.token_ids, self._request.params, adapter=self._request.model.adapter
        )
        return self._state.client.generate([request], uid=uid)

    # --- events

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = next(self._sequence_numbers)
        return named_event(kind, {"type": kind, "sequence_number": number} | fields)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        """Return an event about the text."""
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **fields)

    def _first_events(self) -> list[bytes]:
        response = self._response("in_progress", [])
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event(
                "response.output_item.added", output_index=0, item=self._item("in_progress", [])
            ),
            self._part_event("response.content_part.added", part=self._part(ChoiceDelta())),
        ]

    def _delta_events(self, delta: ChoiceDelta) -> list[bytes]:
        if not delta.text and not delta.logprobs:
            return []
        part = self._part(delta)
        return [
            self._part_event(
                "response.output_text.delta", delta=part["text"], logprobs=part["logprobs"]
            )
        ]

    def _last_events(self, usage: Usage) -> list[bytes]:
        part, response = self._part(self._output), self._finished(usage)
        return [
            self._part_event(
                "response.output_text.done", text=part["text"], logprobs=part["logprobs"]
            ),
            self._part_event("response.content_part.done", part=part),
            self._event("response.output_item.done", output_index=0, item=response["output"][0]),
            self._event(f"response.{response['status']}", response=response),
        ]

    # --- objects

    def _finished(self, usage: Usage) -> dict[str, Any]:
        """Return the response after the end of the generation."""
        reason = self._output.finish_reason
        status = "completed" if reason == "stop" else "incomplete"
        item = self._item(status, [self._part(self._output)])
        if reason == "abort":
            return self._response("failed", [item], usage, error="the request was aborted.")
        return self._response(status, [item], usage)

    def _response(
        self,
        status: str,
        output: list[dict[str, Any]],
        usage: Usage | None = None,
        *,
        error: str | None = None,
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
            "model": self._request.model.name,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            "usage": None if usage is None else _usage_json(usage),
        } | self._request.echoed

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _part(self, delta: ChoiceDelta) -> dict[str, Any]:
        num_top = self._request.top_logprobs
        logprobs = []
        if num_top is not None:
            texts = self._state.token_texts()
            logprobs = chat_logprobs(texts, delta.logprobs, num_top=num_top)
        return {
            "type": "output_text",
            "text": delta.text,
            "annotations": [],
            "logprobs": logprobs,
        }


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

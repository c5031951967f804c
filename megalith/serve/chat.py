"""POST /v1/chat/completions: the next message of a conversation."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, replace
from typing import Any

from megalith import storage
from megalith.config.generation import SamplingParams
from megalith.errors import ConfigError, DataError
from megalith.infer.parsers.harmony import HarmonyParser
from megalith.infer.parsers.parsed_text import ParsedText, ToolCall
from megalith.infer.parsers.registry import begins_with_reasoning
from megalith.infer.stopping_criteria import add_turn_end
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
from megalith.serve.errors import invalid
from megalith.serve.generation import ChunkWriter, Generation, PromptRequest
from megalith.serve.limits import MAX_TEMPLATE_VARIABLES_BYTES
from megalith.serve.model_info import RenderedPrompt, ServedModel
from megalith.serve.protocol import TokenUpdate
from megalith.serve.sampling_fields import (
    COMMON_FIELDS,
    RequestOptions,
    fit_context,
    read_bool,
    read_options,
    read_params,
)
from megalith.serve.sse import DONE, PING, PING_SECONDS, TextEvent, event
from megalith.serve.state import RequestContext, ServerState
from megalith.serve.token_text import chat_logprobs
from megalith.serve.tools import OutputFormat, read_output_format

ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS = frozenset(
    (
        *COMMON_FIELDS,
        "messages",
        "top_logprobs",
        "chat_template_kwargs",
        "response_format",
        "parallel_tool_calls",
        "tools",
        "tool_choice",
        "functions",
        "function_call",
        "audio",
        "modalities",
        "prediction",
        "web_search_options",
        "reasoning_effort",
    )
)
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "web_search_options": (None,),
    "reasoning_effort": (None, "none"),
}
"""Fields of the OpenAI API with the values that are supported."""

RESERVED_VARIABLES = (
    "messages",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
)
"""Template variables that requests cannot set."""


@dataclass(frozen=True, slots=True)
class EncodedConversation:
    """An encoded conversation, and how the next message is generated."""

    model: ServedModel
    token_ids: list[int]
    params: SamplingParams
    output: OutputFormat
    has_reasoning: bool
    """Whether the output begins with reasoning."""

    def to_prompt(self) -> PromptRequest:
        """Return the prompt for the engine."""
        return PromptRequest(self.token_ids, self.params, adapter=self.model.adapter)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A valid request."""

    conversation: EncodedConversation
    options: RequestOptions
    top_logprobs: int | None
    """Most likely tokens at each position; None: no log-probs."""

    returns_token_ids: bool


async def create_chat_completion(
    state: ServerState, context: RequestContext
) -> dict[str, Any] | AsyncGenerator[bytes, None]:
    """Return the response, or the events of its stream.

    Raises:
        ApiError: the request is invalid or cannot be processed.
    """
    request = await parse_chat_request(state, context.body)
    response = _ChatResponse(request, state)
    prompts = [request.conversation.to_prompt()]
    return await respond(response, state, context, prompts, stream=request.options.stream)


async def parse_chat_request(state: ServerState, body: Mapping[str, Any]) -> ChatRequest:
    """Return the request of a JSON body.

    Raises:
        ApiError: it is invalid.
    """
    options = read_options(
        body, state, endpoint="/v1/chat/completions", known=FIELDS, unsupported=UNSUPPORTED
    )
    logprobs, top_logprobs = read_bool(body, "logprobs"), body.get("top_logprobs")
    if top_logprobs is not None and not logprobs:
        raise invalid("top_logprobs needs logprobs=true. Remove it, or set both.", "top_logprobs")
    num_top = (0 if top_logprobs is None else top_logprobs) if logprobs else None
    return ChatRequest(
        await read_conversation(body, options.model, state, num_top=num_top),
        options,
        num_top,
        read_bool(body, "return_prompt_tokens"),
    )


async def read_conversation(
    body: Mapping[str, Any], model: ServedModel, state: ServerState, *, num_top: int | None
) -> EncodedConversation:
    """Return the conversation of a chat request; `num_top`: see `ChatRequest.top_logprobs`.

    Raises:
        ApiError: it is invalid.
    """
    params = read_params(body, model, state, logprobs=(num_top, "top_logprobs"))
    output = read_output_format(body, model, state)
    messages = read_messages(body.get("messages"))
    prompt = await render_messages(
        model, messages, body, add_generation_prompt=True, tools=output.tools
    )
    has_reasoning = output.reasoning_parser is not None and begins_with_reasoning(prompt.text)
    params = output.add_structure(params, has_reasoning=has_reasoning)
    params = fit_context(params, len(prompt.token_ids), model, body, prompt_field="messages")
    params = end_with_turn(params, model, output)
    return EncodedConversation(model, prompt.token_ids, params, output, has_reasoning)


def read_messages(value: Any) -> list[dict[str, Any]]:  # JSON
    """Return the messages of a request for the chat template.

    Raises:
        ApiError: they are invalid.
    """
    example = '[{"role": "user", "content": "Hello"}]'
    if not isinstance(value, list) or not value:
        what = " is missing" if value is None else f"={value!r:.60} must be a list of messages"
        raise invalid(f"messages{what}. Use {example}.", "messages")
    return [_read_message(item, f"messages[{index}]") for index, item in enumerate(value)]


def _read_message(value: Any, name: str) -> dict[str, Any]:  # JSON
    if not isinstance(value, dict):
        raise invalid(
            f'{name}={value!r:.60} must be an object with the keys "role" and "content".',
            "messages",
        )
    role = value.get("role")
    if role not in ROLES:
        raise invalid(
            f"{name}.role={role!r:.60} must be one of {', '.join(ROLES)}. Use user.", "messages"
        )
    content = value.get("content")
    if isinstance(content, list):
        content = "".join(
            _read_part(part, f"{name}.content[{index}]") for index, part in enumerate(content)
        )
    if content is None and role == "assistant":
        content = ""
    if not isinstance(content, str):
        raise invalid(
            f"{name}.content={content!r:.60} must be a string, or a list of parts such as "
            '{"type": "text", "text": "Hello"}.',
            "messages",
        )
    message = {**value, "role": role, "content": content}
    if role == "developer":  # templates of models know the older name only
        message["role"] = "system"
    if value.get("tool_calls") is not None:
        message["tool_calls"] = _read_tool_calls(value["tool_calls"], f"{name}.tool_calls")
    return message


def _read_tool_calls(value: Any, name: str) -> list[dict[str, Any]]:  # JSON
    """Return the tool calls of a message; templates need their arguments as an object."""
    example = '[{"type": "function", "function": {"name": "f", "arguments": "{}"}}]'
    if not isinstance(value, list):
        raise invalid(f"{name}={value!r:.60} must be a list. Use {example}.", "messages")
    calls = []
    for index, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(
                f"{name}[{index}]={call!r:.80} must be a call of a function. Use {example}.",
                "messages",
            )
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = storage.parse_json(arguments)
            except ValueError:
                arguments = None
        if not isinstance(arguments, dict):
            raise invalid(
                f"{name}[{index}].function.arguments={function['arguments']!r:.80} must be a JSON "
                f"object as a string. Use {example}.",
                "messages",
            )
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls


def _read_part(part: Any, name: str) -> str:  # JSON
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    kind = part.get("type") if isinstance(part, dict) else part
    raise invalid(
        f"{name}.type={kind!r:.60} is not supported by this model. Use "
        '{"type": "text", "text": "Hello"}.',
        "messages",
    )


async def render_messages(
    model: ServedModel,
    messages: list[dict[str, Any]],
    body: Mapping[str, Any],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Any],
) -> RenderedPrompt:
    """Return a conversation as text and token ids, rendered on another thread.

    Raises:
        ApiError: the template variables are invalid, there is no template, or it rejects the
            messages.
    """
    variables = read_template_variables(body.get("chat_template_kwargs"))
    try:
        return await asyncio.to_thread(
            model.render,
            messages,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
            tools=tools,
        )
    except DataError as error:
        raise invalid(f"messages: {error}", "messages") from None


def read_template_variables(value: Any) -> dict[str, Any]:  # JSON
    """Return the variables that a request sets in the chat template.

    Raises:
        ApiError: they are too large, or replace variables of the server.
    """
    name = "chat_template_kwargs"
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid(
            f'{name}={value!r:.60} must be an object, such as {{"enable_thinking": false}}.', name
        )
    reserved = [key for key in value if key in RESERVED_VARIABLES]
    if reserved:
        raise invalid(f"{name} cannot set {reserved[0]}. Remove it.", name)
    nbytes = len(json.dumps(value))
    if nbytes > MAX_TEMPLATE_VARIABLES_BYTES:
        raise invalid(
            f"{name} has {nbytes} bytes, but the limit is {MAX_TEMPLATE_VARIABLES_BYTES}. "
            "Use fewer.",
            name,
        )
    return value


def end_with_turn(
    params: SamplingParams, model: ServedModel, output: OutputFormat
) -> SamplingParams:
    """Return the parameters with what ends an assistant turn as additional stops, and with the
    special tokens that the parsers read in the text.

    Raises:
        ApiError: there are too many stop strings.
    """
    stop_ids, texts = model.info.turn_end_ids, model.info.turn_end_texts
    if output.is_harmony:
        specials = model.tokenizer.specials
        stop_ids = [specials[text] for text in HarmonyParser.turn_ends if text in specials]
        texts = [text for text in HarmonyParser.turn_ends if text not in specials]
    params = replace(params, visible_special_tokens=output.visible_special_tokens)
    try:
        return add_turn_end(params, stop_ids, texts)
    except ConfigError as error:
        raise invalid(str(error), "stop") from None


class ChoiceParser:
    """Parses the outputs of one choice."""

    def __init__(self, conversation: EncodedConversation) -> None:
        output, params = conversation.output, conversation.params
        self._parser = output.build_parser(
            has_reasoning=conversation.has_reasoning, hides_markers=params.skip_special_tokens
        )
        self._is_named = output.tool_choice == "named"
        self.num_tool_calls = 0

    def parse(self, delta: ChoiceDelta) -> ParsedText:
        """Return the parts of consecutive outputs; changes the finish reason of the last ones if
        tools are called."""
        parsed = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            parsed.add(self._parser.finish())
        self.num_tool_calls += len(parsed.tool_calls)
        if delta.finish_reason == "stop" and self.num_tool_calls and not self._is_named:
            delta.finish_reason = "tool_calls"
        return parsed


def tool_call_json(call: ToolCall) -> dict[str, Any]:
    """Return a call in the format of the API, with a new id."""
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


class _ChatResponse:
    """The response to one request."""

    def __init__(self, request: ChatRequest, state: ServerState) -> None:
        self._request, self._conversation, self._state = request, request.conversation, state
        self._parsers = [ChoiceParser(request.conversation) for _ in range(self._num_choices)]
        self._text_events: dict[int, TextEvent] = {}
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if request.options.stream else "chat.completion",
            "created": int(time.time()),
            "model": request.conversation.model.name,
            "system_fingerprint": None,
        }

    async def complete(self, uid: str) -> dict[str, Any]:
        """Return the response when all choices are finished."""
        async with self._generate(uid) as generation:
            usage = Usage(generation, len(self._conversation.token_ids))
            batch = await collect_choices(generation)
            for delta in batch.values():
                usage.add(delta)

            def build() -> list[dict[str, Any]]:
                return [self._choice(index, delta) for (_, index), delta in batch.items()]

            num_positions = sum(len(delta.logprobs) for delta in batch.values())
            choices = await run_if_large(build, num_positions)
            return self._head | {"choices": choices, "usage": usage.to_json()}

    async def stream(
        self, uid: str, writer: ChunkWriter | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of the stream but those that `writer` has sent, between two others."""
        async with self._generate(uid) as generation:
            usage = Usage(generation, len(self._conversation.token_ids))
            deltas = iterate_deltas(generation, interval=self._request.options.interval)
            direct = build_direct_stream(
                writer,
                self._encode_updates,
                usage,
                interval=self._request.options.interval,
                has_logprobs=self._request.top_logprobs is not None,
            )
            events, sent = self._first_events(), time.monotonic()
            async with aclosing(deltas):
                async for batch in deltas:
                    for (_, index), delta in batch:
                        usage.add(delta)
                        events += self._events(index, delta)
                    if not generation.num_unfinished:  # the last events are sent at once
                        break
                    # a parser may withhold text for long
                    if events or not batch or time.monotonic() - sent > PING_SECONDS:
                        yield b"".join(events) or PING
                        events, sent = [], time.monotonic()
                        generation.direct = direct
            if self._request.options.include_usage:
                events.append(event(self._head | {"choices": [], "usage": usage.to_json()}))
            yield b"".join((*events, DONE))

    @property
    def _num_choices(self) -> int:
        return self._conversation.params.n

    def _generate(self, uid: str) -> AbstractAsyncContextManager[Generation]:
        prompts = [self._conversation.to_prompt()]
        return generate(self._state, prompts, uid, self._conversation.output.field_names)

    def _choice(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        parsed = self._parsers[index].parse(delta)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": parsed.content,
            "refusal": None,
        }
        if parsed.tool_calls:
            message["content"] = parsed.content or None
            message["tool_calls"] = [tool_call_json(call) for call in parsed.tool_calls]
        if self._conversation.has_reasoning:
            message["reasoning_content"] = parsed.reasoning or None
        choice = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._request.returns_token_ids:
            choice["generation_token_ids"] = delta.token_ids
            choice["prompt_token_ids"] = self._conversation.token_ids
        return choice

    def _first_events(self) -> list[bytes]:
        """Return the events with the role of each choice."""
        delta = {"role": "assistant", "content": ""}
        return [self._event(index, delta) for index in range(self._num_choices)]

    def _events(self, index: int, delta: ChoiceDelta) -> list[bytes]:
        """Return the events of consecutive outputs: their parts, and the end of the choice."""
        events = []
        parser = self._parsers[index]
        first_call = parser.num_tool_calls
        parsed = parser.parse(delta)
        parts: dict[str, Any] = {}
        if parsed.reasoning:
            parts["reasoning_content"] = parsed.reasoning
        if parsed.tool_calls:
            parts["tool_calls"] = [
                {"index": number, **tool_call_json(call)}
                for number, call in enumerate(parsed.tool_calls, first_call)
            ]
        if parsed.content or (delta.logprobs and not parts):
            parts["content"] = parsed.content
        if parts.keys() == {"content"} and self._request.top_logprobs is None:
            events.append(self._text_event(index).encode(parsed.content))
        elif parts:
            events.append(self._event(index, parts, logprobs=self._logprobs(delta)))
        if delta.finish_reason is not None:
            events.append(self._event(index, {}, end=delta))
        return events

    def _encode_updates(
        self, usage: Usage, updates: Sequence[tuple[int, TokenUpdate]]
    ) -> bytes | None:
        """Return the events of updates; None: a choice has ended."""
        texts = merge_texts(updates)
        if texts is None:
            return None
        usage.add_updates(updates)
        return b"".join(
            [
                data
                for (_, index), text in texts.items()
                for data in self._events(index, ChoiceDelta(text))
            ]
        )

    def _text_event(self, index: int) -> TextEvent:
        """Return the event of a choice that has only content."""
        if index not in self._text_events:
            self._text_events[index] = TextEvent(
                lambda text: self._chunk(index, {"content": text}, logprobs=None, end=None)
            )
        return self._text_events[index]

    def _event(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        end: ChoiceDelta | None = None,
    ) -> bytes:
        return event(self._chunk(index, delta, logprobs=logprobs, end=end))

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None,
        end: ChoiceDelta | None,
    ) -> dict[str, Any]:
        """Return the JSON of an event."""
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": None if end is None else end.finish_reason,
        }
        if end is not None:
            choice["stop_reason"] = end.stop_reason
        extra = {"usage": None} if self._request.options.include_usage else {}
        return self._head | {"choices": [choice]} | extra

    def _logprobs(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        num_top = self._request.top_logprobs
        if num_top is None:
            return None
        content = chat_logprobs(self._state.token_texts(), delta.logprobs, num_top=num_top)
        return {"content": content, "refusal": None}

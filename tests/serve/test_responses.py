"""POST /v1/responses of a running server, compared with chat completions and the model in this
process."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from openai.types.responses import (
    Response,
    ResponseFailedEvent,
    ResponseOutputMessage,
    ResponseStreamEvent,
)
from pydantic import TypeAdapter

from megalith.config.generation import SamplingParams
from megalith.config.server import ServeConfig
from megalith.infer.llm import LLM
from megalith.serve.chat import EncodedConversation
from megalith.serve.errors import ApiError
from megalith.serve.generation import Generation
from megalith.serve.metrics import HttpMetrics
from megalith.serve.protocol import TokenUpdate
from megalith.serve.response_input import read_input
from megalith.serve.responses import ResponsesRequest, _Response
from megalith.serve.sampling_fields import RequestOptions
from megalith.serve.state import ServerState
from megalith.serve.tools import OutputFormat
from tests.serve.servers import Server
from tests.serve.test_http import ONLY_A, generate

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
LOGPROBS = "message.output_text.logprobs"
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
PROMPT = (
    "<|im_start|>system\nbe brief<|im_end|>\n"
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
)
THOUGHT = {"type": "reasoning_text", "text": "so"}
SEEDED: dict[str, Any] = {"extra_body": {"seed": 2, "ignore_eos": True}}


def post(server: Server, **body: Any) -> dict[str, Any]:
    """The JSON response of a request that succeeds."""
    response = server.post(RESPONSES, {"model": "tiny", "input": "hi"} | body)
    assert response.status_code == 200, response.text
    document: dict[str, Any] = response.json()
    Response.model_validate(document)
    return document


def stream(server: Server, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream."""
    text = server.post(RESPONSES, {"model": "tiny", "input": "hi", "stream": True} | body).text
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        document = json.loads(data.removeprefix("data: "))
        assert name == f"event: {document['type']}"
        EVENT.validate_python(document)
        events.append(document)
    return events


def test_client_reads_a_response(server: Server, llm: LLM) -> None:
    expected = generate(llm, PROMPT, seed=2, max_new_tokens=6, ignore_eos=True).outputs[0]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        response = client.responses.create(
            model="tiny",
            instructions="be brief",
            input="hi",
            max_output_tokens=6,
            metadata={"a": "b"},
            **SEEDED,
        )
    assert response.output_text == expected.text
    assert (response.status, response.object, response.model) == ("incomplete", "response", "tiny")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    (message,) = response.output
    assert isinstance(message, ResponseOutputMessage)
    assert (message.role, message.status) == ("assistant", "incomplete")
    assert response.id.startswith("resp_") and message.id.startswith("msg_")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (len(PROMPT), 6)
    assert (response.instructions, response.max_output_tokens) == ("be brief", 6)
    assert response.metadata == {"a": "b"} and response.error is None
    assert (response.temperature, response.top_p, response.previous_response_id) == (1, 1, None)


def test_response_is_completed_by_a_stop(server: Server) -> None:
    document = post(server, max_output_tokens=9, stop="aaa", **ONLY_A)
    assert (document["status"], document["incomplete_details"]) == ("completed", None)
    assert document["output"][0]["status"] == "completed"
    assert document["output"][0]["content"][0]["text"] == ""
    assert document["usage"]["output_tokens"] == 3


def test_items_are_the_messages_of_a_chat(server: Server) -> None:
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "h"}] * 2},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "yes", "annotations": []}],
        },
        {"role": "user", "content": "more"},
    ]
    assert read_input({"instructions": "always", "input": items}) == [
        {"role": "system", "content": "always"},
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "hh"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "more"},
    ]
    document = post(server, input=items, max_output_tokens=8, seed=4, ignore_eos=True)
    chat = {"model": "tiny", "messages": read_input({"input": items}), "max_tokens": 8, "seed": 4}
    answer = server.post(CHAT, chat | {"ignore_eos": True}).json()
    content = answer["choices"][0]["message"]["content"]
    assert document["output"][0]["content"][0]["text"] == content
    assert document["usage"]["input_tokens"] == answer["usage"]["prompt_tokens"]


def test_calls_and_reasoning_of_a_turn_are_one_message() -> None:
    call = {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "f", "arguments": "{}"}
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [THOUGHT]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "see"}]},
        call,
        {**call, "call_id": "2"},
        {"type": "function_call_output", "call_id": "2", "output": "6"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    function = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert read_input({"input": items})[1:] == [
        {
            "role": "assistant",
            "content": "see",
            "reasoning_content": "so",
            "tool_calls": [{"id": "1", **function}, {"id": "2", **function}],
        },
        {"role": "tool", "tool_call_id": "2", "name": "f", "content": "6"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]


def test_structured_output_of_a_response(server: Server) -> None:
    pytest.importorskip("llguidance", reason="matches grammars, which needs the library")
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "n", "schema": schema | {"additionalProperties": False}}
    document = post(server, text={"format": form})
    assert json.loads(document["output"][0]["content"][0]["text"]) == {"a": 1}
    assert document["text"]["format"] == form
    document = post(server, text={"format": {"type": "json_object"}}, max_output_tokens=9)
    assert document["output"][0]["content"][0]["text"].startswith("{")


@pytest.mark.parametrize("interval", [1, 3])
def test_stream_equals_the_complete_response(server: Server, interval: int) -> None:
    body: dict[str, Any] = {"max_output_tokens": 12, "seed": 3, "ignore_eos": True}
    body |= {"include": [LOGPROBS], "top_logprobs": 2, "instructions": "x"}
    expected = post(server, **body)
    events = stream(server, streaming_interval=interval, **body)
    kinds = [event["type"].removeprefix("response.") for event in events]
    num_deltas = kinds.count("output_text.delta")
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * num_deltas,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas, (text_done, part_done, item_done, last) = events[4:-4], events[-4:]
    (part,) = expected["output"][0]["content"]
    assert "".join(event["delta"] for event in deltas) == text_done["text"] == part["text"]
    streamed = [entry["token"] for event in deltas for entry in event["logprobs"]]
    assert streamed == [entry["token"] for entry in part["logprobs"]] and len(streamed) == 12
    assert all(2 <= len(entry["top_logprobs"]) <= 3 for entry in part["logprobs"])
    assert part_done["part"]["text"] == part["text"]
    assert last["response"]["output"] == [item_done["item"]]
    assert {event["item_id"] for event in deltas} == {item_done["item"]["id"]}
    assert events[0]["response"]["id"] == last["response"]["id"]
    assert events[0]["response"]["status"] == "in_progress"
    for name in ("status", "incomplete_details", "instructions", "top_logprobs"):
        assert last["response"][name] == expected[name]
    assert last["response"]["usage"]["output_tokens"] == 12


def test_clients_read_streams(server: Server) -> None:
    options: dict[str, Any] = {"model": "tiny", "input": "hi", "max_output_tokens": 200}
    options["extra_body"] = {"allowed_token_ids": [97, 98], "stop_token_ids": [98]}
    options["extra_body"] |= {"seed": 2, "min_tokens": 3}  # aaa...b

    async def read() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            events = await client.responses.create(stream=True, **options)
            deltas = [e.delta async for e in events if e.type == "response.output_text.delta"]
            return "".join(deltas)

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        expected = client.responses.create(**options).output_text
        with client.responses.stream(**options) as events:
            kinds = [event.type for event in events]
            final = events.get_final_response()
    assert expected.startswith("aaa") and final.output_text == expected == asyncio.run(read())
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


class Client:
    """Stands for the client of an engine: one generation, which the test fills."""

    failed = None

    def __init__(self) -> None:
        self.generation = Generation(1, [None])

    @asynccontextmanager
    async def generate(self, requests: Any, *, uid: str) -> AsyncIterator[Generation]:
        yield self.generation


def test_error_after_the_first_event_is_an_event() -> None:
    client: Any = Client()
    state = ServerState(ServeConfig(), client, HttpMetrics("m"))
    model: Any = SimpleNamespace(name="m", adapter=None)
    conversation = EncodedConversation(model, [1], SamplingParams(), OutputFormat(), False)
    echoed = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    options = RequestOptions(model, stream=True, include_usage=False, interval=1)
    request = ResponsesRequest(conversation, options, None, echoed)
    generation = client.generation

    async def read() -> list[bytes]:
        events = _Response(request, state).stream("uid")
        generation.put(0, TokenUpdate(1, 0, 97, "a", None, None, None, None, False))
        first = await anext(events)
        generation.fail(ApiError(408, "too late"))
        return [first, *[event async for event in events]]

    first, last = asyncio.run(read())
    assert first.startswith(b"event: response.created") and b'"delta":"a"' in first
    document = json.loads(last.split(b"data: ")[1])
    assert isinstance(EVENT.validate_python(document), ResponseFailedEvent)
    assert document["sequence_number"] == 5
    assert document["response"]["error"]["message"] == "too late"
    assert 'request_errors_total{code="408",model_name="m"} 1.0' in state.metrics.render()


def body(**fields: Any) -> dict[str, Any]:
    """A request with some fields replaced."""
    return {"model": "tiny", "input": "x", "max_output_tokens": 1} | fields


FUNCTION = {"type": "function", "name": "f"}
BAD_REQUESTS: tuple[tuple[dict[str, Any], int, str | None, str], ...] = (
    (body(model="gpt"), 404, "model", "has no such model"),
    ({"model": "tiny"}, 400, "input", 'input is missing. Use "Hello"'),
    (body(input=[]), 400, "input", "input=[] must be a string or a list"),
    (body(input=3), 400, "input", "input=3 must be a string or a list"),
    (body(input=["x"]), 400, "input", "input[0]='x' must be an object"),
    (body(input=[{"role": "tool", "content": ""}]), 400, "input", "input[0].role='tool' must be"),
    (body(input=[{"role": "user"}]), 400, "input", "input[0].content=None must be a string"),
    (
        body(input=[{"type": "function_call_output", "call_id": "1", "output": ""}]),
        400,
        "input",
        "input[0].call_id='1' is no call_id of a function_call before it. Use",
    ),
    (
        body(input=[{"type": "computer_call"}]),
        400,
        "input",
        "type='computer_call' is not supported",
    ),
    (
        body(input=[{"type": "function_call", "call_id": 1, "name": "f", "arguments": "{}"}]),
        400,
        "input",
        "must have the strings call_id, name and arguments. Use",
    ),
    (
        body(input=[{"type": "function_call", "call_id": "1", "name": "f", "arguments": "["}]),
        400,
        "input",
        "input[0].arguments='[' must be a JSON object as a string. Use",
    ),
    (
        body(input=[{"role": "user", "content": [{"type": "input_image"}]}]),
        400,
        "input",
        "input[0].content[0].type='input_image' is not supported",
    ),
    (body(input="x" * 256), 400, "input", "tokens, but the context of the model"),
    (body(instructions=[]), 400, "instructions", "instructions=[] must be a string"),
    (body(previous_response_id="resp_1"), 400, "previous_response_id", "Remove it"),
    (body(conversation="c"), 400, "conversation", "conversation='c' is not supported"),
    (body(background=True), 400, "background", "background=True is not supported"),
    (body(store=True), 400, "store", "store=True is not supported by /v1/responses. Use False"),
    (body(n=2), 400, "n", "n=2 is not supported"),
    (body(tools=[{"type": "function"}]), 400, "tools", "tools[0].name=None must have 1 to 64"),
    (
        body(tools=[{"type": "web_search"}]),
        400,
        "tools",
        "tools[0].type='web_search' is not supported by /v1/responses. Use {",
    ),
    (body(tool_choice="required"), 400, "tool_choice", "tool_choice needs tools. Pass tools"),
    (body(tool_choice={"type": "mcp"}), 400, "tool_choice", "={'type': 'mcp'} is not supported"),
    (
        body(tools=[FUNCTION], tool_choice={"type": "function", "name": "g"}),
        400,
        "tool_choice",
        "tool_choice.name='g' is none of the tools. Use one of f.",
    ),
    (body(tools=[FUNCTION]), 400, "tool_choice", 'tool_choice="auto" needs a parser of tool calls'),
    (body(max_tool_calls=1), 400, "max_tool_calls", "max_tool_calls=1 is not supported"),
    (body(truncation="auto"), 400, "truncation", "Use 'disabled'"),
    (body(text=3), 400, "text", "text=3 must be an object"),
    (
        body(text={"format": {"type": "xml"}}),
        400,
        "text.format",
        "text.format={'type': 'xml'} must have the type text, json_object or json_schema.",
    ),
    (
        body(text={"format": {"type": "json_schema", "name": "n", "schema": 1}}),
        400,
        "text.format",
        "text.format.schema=1 must be a JSON schema.",
    ),
    (
        body(text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "x"}}}),
        400,
        "text",
        "text.format.schema is not valid: Invalid type: x. Correct it.",
    ),
    (body(reasoning={"effort": "high"}), 400, "reasoning.effort", "reasoning.effort='high'"),
    (body(include=["x"]), 400, "include", "include=['x'] must be a list. Use ["),
    (body(top_logprobs=2), 400, "top_logprobs", "top_logprobs needs include="),
    (body(include=[LOGPROBS], top_logprobs=21), 400, "top_logprobs", "top_logprobs=21 must be"),
    (body(max_output_tokens=-1), 400, "max_output_tokens", "max_output_tokens=-1 must be"),
    (body(max_output_tokens=999), 400, "max_output_tokens", "Set max_output_tokens to"),
    (body(temperature=-1), 400, "temperature", "temperature=-1"),
    (body(stream=1), 400, "stream", "stream=1 must be true or false"),
    (body(metadata=[1]), 400, "metadata", "metadata=[1] must be an object"),
    (body(deadline_s=1e-9), 408, None, "deadline_s=1e-09"),
)


@pytest.mark.parametrize("streams", [False, True])
def test_invalid_requests_name_the_field(server: Server, streams: bool) -> None:
    failures = []
    for request, status, param, text in BAD_REQUESTS:
        response = server.post(RESPONSES, {"stream": streams} | request)
        error = response.json()["error"]
        matches = (response.status_code, error["param"]) == (status, param)
        if not matches or text not in error["message"]:
            failures.append(f"{request!r:.100}: {response.status_code} {error}")
    assert not failures, "\n".join(failures)

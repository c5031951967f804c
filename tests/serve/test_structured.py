"""Structured output and tools of a running server."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from megalith.config.server import ServeConfig, ServeRun, serve_problems
from megalith.data.chat_template import BUILT_IN, ChatTemplate
from megalith.data.tokenizer import ByteTokenizer
from megalith.serve.errors import ApiError
from megalith.serve.tools import MAX_TOOLS, read_output_format, read_tools
from tests.serve.servers import CONFIG, Server, make_run, running_server

pytest.importorskip("llguidance", reason="matches grammars, which needs the library")

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{% for message in messages "
    "%}{{ message.role }}:{{ message.content }}{% for call in message.tool_calls or [] %}"
    "({{ call.function.name }} {{ call.function.arguments.a }}){% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}assistant:"
    "{% if not think %}<think></think>{% endif %}{% endif %}"
)
CHAT = "/v1/chat/completions"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
ADD = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/digit"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "parameters": ADD}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "x"}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with parsers, and a template that tells the model about tools."""
    folder = tmp_path_factory.mktemp("structured")
    run = make_run(folder / "run", replace(CONFIG, max_seq_len=768, init_std=0.2))
    (folder / "template.jinja").write_text(TEMPLATE)
    options = ["--served-model-name", "tiny", "--template", str(folder / "template.jinja")]
    with running_server(run, *options, "--parsers", "hermes", "deepseek-r1") as running:
        yield running


@contextmanager
def open_client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(server: Server, **body: Any) -> dict[str, Any]:
    """The JSON response of a chat request that succeeds."""
    response = server.post(CHAT, {"model": "tiny", "messages": HELLO, "seed": 1} | body)
    assert response.status_code == 200, response.text
    document: dict[str, Any] = response.json()
    return document


def error_of(server: Server, path: str = CHAT, **body: Any) -> dict[str, Any]:
    """The error of a request with status 400."""
    response = server.post(path, {"model": "tiny", "messages": HELLO} | body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def is_add(arguments: str) -> bool:
    """Whether the arguments of `add` have its schema."""
    values = json.loads(arguments)
    return set(values) == {"a", "b"} and values["a"] in range(10) and values["b"] in ("x", "y")


# --- structures


def test_response_format_with_a_json_schema(server: Server) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "flag", "schema": SCHEMA}}
    for choice in chat(server, response_format=schema, n=4)["choices"]:
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"])["a"], bool)
    strict = {**SCHEMA, "additionalProperties": False}
    schema["json_schema"] = {"name": "flag", "schema": strict, "strict": True}
    choices = chat(server, response_format=schema, n=4)["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    values = [json.loads(choice["message"]["content"]) for choice in choices]
    assert all(value in ({"a": True}, {"a": False}) for value in values)


def test_response_format_json_object(server: Server) -> None:
    choices = chat(server, response_format={"type": "json_object"}, n=8)["choices"]
    texts = [c["message"]["content"] for c in choices if c["finish_reason"] == "stop"]
    assert texts and all(isinstance(json.loads(text), dict) for text in texts)


def test_client_parses_a_pydantic_model(server: Server) -> None:
    class Point(BaseModel):
        x: bool
        name: str | None

    with open_client(server) as client:
        for seed in range(20):
            try:
                completion = client.chat.completions.parse(
                    model="tiny",
                    messages=[{"role": "user", "content": "hi"}],
                    response_format=Point,
                    seed=seed,
                    logit_bias={"34": 4},  # quotes, so that the name ends
                )
            except openai.LengthFinishReasonError:
                continue
            assert isinstance(completion.choices[0].message.parsed, Point)
            return
    raise AssertionError("all texts are truncated")


def test_structured_outputs_of_completions_and_chats(server: Server) -> None:
    for body in ({"prompt": "x", "n": 3}, {"messages": HELLO, "n": 3}):
        path = "/v1/completions" if "prompt" in body else CHAT
        for structure, pattern in (
            ({"regex": "[a-c]{5}"}, "[a-c]{5}"),
            ({"choice": ["yes", "no"]}, "yes|no"),
            ({"grammar": 'start: "a"+ "b"'}, "a+b"),
            ({"json": {"const": 7}}, "7"),
        ):
            request = {"model": "tiny", "structured_outputs": structure, "max_tokens": 200}
            response = server.post(path, request | body)
            assert response.status_code == 200, response.text
            for choice in response.json()["choices"]:
                text = choice["text"] if "prompt" in body else choice["message"]["content"]
                assert re.fullmatch(pattern, text) and choice["finish_reason"] == "stop"


def test_text_that_ends_a_turn_may_occur_in_a_structure(server: Server) -> None:
    (choice,) = chat(server, structured_outputs={"choice": ["a;b"]})["choices"]
    assert choice["message"]["content"] == "a;b"


def test_reasoning_is_separate_from_the_content(server: Server) -> None:
    body: dict[str, Any] = {"max_tokens": 20, "chat_template_kwargs": {"think": True}}
    (choice,) = chat(server, **body)["choices"]
    assert choice["message"]["content"] == "" and choice["message"]["reasoning_content"]
    events = stream(server, **body)
    deltas = [event["choices"][0]["delta"] for event in events]
    text = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert text == choice["message"]["reasoning_content"]
    assert "".join(delta.get("content", "") for delta in deltas) == ""
    (choice,) = chat(server, max_tokens=20)["choices"]  # its prompt ends the reasoning
    assert choice["message"]["content"] and "reasoning_content" not in choice["message"]


def test_structure_begins_after_the_reasoning(server: Server) -> None:
    body: dict[str, Any] = {"chat_template_kwargs": {"think": True}, "max_tokens": 60}
    (choice,) = chat(server, structured_outputs={"choice": ["ab"]}, **body)["choices"]
    assert choice["finish_reason"] == "length" and len(choice["message"]["reasoning_content"]) > 9


# --- tools


def stream(server: Server, **body: Any) -> list[Any]:
    """The events of a chat stream."""
    request = {"model": "tiny", "messages": HELLO, "seed": 1, "stream": True} | body
    response = server.post(CHAT, request)
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]", events
    return [json.loads(event) for event in events[:-1]]


def test_required_tool_choice_calls_tools(server: Server) -> None:
    names = set()
    body: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "n": 8, "temperature": 5}
    for choice in chat(server, **body)["choices"]:
        assert choice["finish_reason"] in ("tool_calls", "length")
        for call in choice["message"].get("tool_calls", []):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            names.add(name)
            assert is_add(arguments) if name == "add" else arguments == "{}"
            assert call["type"] == "function" and re.fullmatch("call_[0-9a-f]{24}", call["id"])
        if choice["finish_reason"] == "tool_calls":
            assert choice["message"]["content"] is None
    assert names == {"add", "now"}
    for choice in chat(server, parallel_tool_calls=False, **body)["choices"]:
        assert choice["finish_reason"] == "tool_calls"
        assert len(choice["message"]["tool_calls"]) == 1


def test_named_tool_choice_calls_the_tool(server: Server) -> None:
    choice_field = {"type": "function", "function": {"name": "add"}}
    (choice,) = chat(server, tools=TOOLS, tool_choice=choice_field)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "add" and is_add(call["function"]["arguments"])
    assert choice["finish_reason"] == "stop"
    (choice,) = chat(server, tools=TOOLS, tool_choice=choice_field, max_tokens=3)["choices"]
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
    assert choice["message"]["content"].startswith("{")


def test_auto_tool_choice_parses_calls(server: Server) -> None:
    text = f"See.\n{CALL}\n{CALL}"
    body: dict[str, Any] = {"tools": TOOLS, "structured_outputs": {"choice": [text]}}
    (choice,) = chat(server, **body)["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "See."
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert calls == [{"name": "add", "arguments": '{"a": 1, "b": "x"}'}] * 2
    (choice,) = chat(server, **body, tool_choice="none")["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", text)
    broken = {"tools": TOOLS, "structured_outputs": {"choice": ["<tool_call>{</tool_call>"]}}
    (choice,) = chat(server, **broken)["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == (
        "stop",
        "<tool_call>{</tool_call>",
    )


def test_stream_has_the_calls_of_the_complete_response(server: Server) -> None:
    for body in (
        {"structured_outputs": {"choice": [f"See.\n{CALL}\n{CALL}"]}},
        {"tool_choice": "required", "seed": 3},
        {"tool_choice": {"type": "function", "function": {"name": "add"}}},
    ):
        (expected,) = chat(server, tools=TOOLS, **body)["choices"]
        events = [event["choices"][0] for event in stream(server, tools=TOOLS, **body)]
        deltas = [event["delta"] for event in events]
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert [call["index"] for call in calls] == list(range(len(calls))) and calls
        assert [call["function"] for call in calls] == [
            call["function"] for call in expected["message"]["tool_calls"]
        ]
        assert "".join(delta.get("content", "") for delta in deltas) == (
            expected["message"]["content"] or ""
        )
        assert events[-1]["finish_reason"] == expected["finish_reason"]
        assert {event["finish_reason"] for event in events[:-1]} == {None}


def test_client_reads_tool_calls(server: Server) -> None:
    with open_client(server) as client:
        options: dict[str, Any] = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "seed": 1}
        answer = client.chat.completions.create(**options, tool_choice="required")
        assert answer.choices[0].message.tool_calls
        chunks = list(
            client.chat.completions.create(
                **options,
                stream=True,
                extra_body={"structured_outputs": {"choice": [f"See. {CALL}"]}},
            )
        )
        deltas = [chunk.choices[0].delta for chunk in chunks]
        (call,) = [call for delta in deltas for call in delta.tool_calls or []]
        assert call.function is not None and call.function.name == "add"
        assert "".join(delta.content or "" for delta in deltas) == "See."
        assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_template_gets_tools_calls_and_results(server: Server) -> None:
    arguments = '{"a": 5}'
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "6"},
    ]
    response = server.post("/tokenize", {"model": "tiny", "messages": messages, "tools": TOOLS})
    assert bytes(response.json()["tokens"]).decode() == (
        "[add][now]user:hi;assistant:(add 5);tool:6;assistant:<think></think>"
    )
    body: dict[str, Any] = {"messages": messages, "tools": TOOLS, "max_tokens": 1}
    with_tools = chat(server, **body)["usage"]["prompt_tokens"]
    without = chat(server, **body, tool_choice="none")["usage"]["prompt_tokens"]
    assert with_tools - without == len("[add][now]")


# --- errors


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | function}


REQUIRED = {"tool_choice": "required"}
FUNCTION_F = {"type": "function", "function": {"name": "f"}}
BAD_REQUESTS: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"tools": {}}, "tools", "tools={} must be a list. Use [{"),
    ({"tools": [tool(name=f"f{i}") for i in range(129)]}, "tools", "has 129 tools, but the limit"),
    ({"tools": [{"type": "x"}]}, "tools", "tools[0]={'type': 'x'} must be an object of the type"),
    ({"tools": [{"type": "function"}]}, "tools", "tools[0].function=None must be an object"),
    ({"tools": [tool(name="a b")]}, "tools", "tools[0].function.name='a b' must have 1 to 64"),
    ({"tools": [tool(), tool()]}, "tools", "tools[1].function.name='f' occurs twice"),
    ({"tools": [tool(parameters=5)]}, "tools", "function.parameters=5 must be a JSON schema of an"),
    (
        {"tools": [tool(parameters={"type": "array"})]},
        "tools",
        "must be a JSON schema of an object",
    ),
    (
        {"tools": [tool(parameters={"a": "x" * 66000})]},
        "tools",
        "tools[0].function.parameters has 66009 bytes, but the limit is 65536",
    ),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools. Pass tools"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "must be none, auto, required or a"),
    ({"tools": TOOLS, "tool_choice": FUNCTION_F}, "tool_choice", "Use one of add, now."),
    ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls", "must be true or false"),
    ({"tools": [tool(strict=1)]}, "tools", "tools[0].function.strict=1 must be true or false."),
    (
        {"tools": [tool(strict=True)], "structured_outputs": {"regex": "a"}},
        "tools",
        "strict=true and structured_outputs both define the output. Remove one of them.",
    ),
    (
        {"tools": TOOLS, "parallel_tool_calls": False, "structured_outputs": {"regex": "a"}},
        "parallel_tool_calls",
        "parallel_tool_calls=false and structured_outputs both define the output.",
    ),
    (
        {"tools": [tool(parameters={"properties": {"a": {"not": {}}}})], "tool_choice": FUNCTION_F},
        "tools",
        'tools is not valid at #/properties/a: Unimplemented keys: ["not"]. Correct it.',
    ),
    (
        {
            "tools": [tool(parameters={"properties": {"a": {"type": "x"}}})],
            "tool_choice": "required",
        },
        "tools",
        "tools is not valid: ",
    ),
    (
        {"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}},
        "tool_choice",
        "tool_choice enforces a tool call, and response_format or structured_outputs another",
    ),
    (
        {"tools": TOOLS, "response_format": {"type": "json_object"}},
        "response_format",
        'response_format allows no tool calls. Remove it, or use tool_choice "none" or "required"',
    ),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "response_format",
        "response_format and structured_outputs both define the output. Remove one of them.",
    ),
    ({"response_format": 5}, "response_format", "response_format=5 must have the type text, json_"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}},
        "response_format",
        "response_format.json_schema.schema=1 must be a JSON schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}},
        "response_format",
        "response_format.json_schema.schema is not valid: Invalid type: strin. Correct it.",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"enum": ["x" * 66000]}},
            }
        },
        "response_format",
        "response_format.json_schema.schema has 66014 bytes, but the limit is 65536.",
    ),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "regex is not valid: unclosed"),
    (
        {"structured_outputs": {}},
        "structured_outputs",
        "must have exactly one of json, json_object",
    ),
    ({"structured_outputs": {"rex": "a"}}, None, "structured_outputs.rex: there is no such field."),
    (
        {"messages": [{"role": "assistant", "tool_calls": 5}]},
        "messages",
        "messages[0].tool_calls=5 must be a list. Use [{",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        "messages",
        "messages[0].tool_calls[0]={'id': '1'} must be a call of a function.",
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
                }
            ]
        },
        "messages",
        "tool_calls[0].function.arguments='{' must be a JSON object as a string.",
    ),
)  # type: ignore[assignment]  # one message has no field


def test_invalid_requests_are_reported(server: Server) -> None:
    for body, param, message in BAD_REQUESTS:
        error = error_of(server, **body)
        assert error["param"] == param and message in error["message"], (body, error)


def test_invalid_structure_of_a_stream_and_a_completion_is_reported(server: Server) -> None:
    error = error_of(server, structured_outputs={"regex": "("}, stream=True)
    assert error["param"] == "structured_outputs"
    error = error_of(server, "/v1/completions", prompt="x", structured_outputs={"regex": "("})
    assert error["param"] == "structured_outputs" and "unclosed group" in error["message"]


def test_as_many_tools_as_allowed_are_valid() -> None:
    assert len(read_tools([tool(name=f"f{index}") for index in range(MAX_TOOLS)])) == MAX_TOOLS


def test_grammar_that_is_too_complex_ends_only_its_own_request(server: Server) -> None:
    good = {"structured_outputs": {"regex": "[a-z]{9}"}}
    expected = chat(server, **good)["choices"][0]["message"]["content"]
    body = {"model": "tiny", "messages": HELLO}
    bad = {"structured_outputs": {"regex": "(a|aa|aaa){1000}{1000}"}}
    response = server.post(CHAT, body | bad)
    assert response.status_code == 400
    error = response.json()["error"]
    assert "structured_outputs cannot be matched" in error["message"]
    assert error["type"] == "invalid_request_error"
    bad = {"structured_outputs": {"regex": "a"}, "allowed_token_ids": [5]}
    message = error_of(server, **bad)["message"]
    assert "allowed_token_ids and the grammar mask all tokens" in message
    assert chat(server, **good)["choices"][0]["message"]["content"] == expected
    assert server.get("/ready").status_code == 200


def test_unknown_parsers_and_several_of_a_kind_are_reported() -> None:
    for names, message in (
        (
            ("hermes2",),
            "--parsers=hermes2: there is no such parser. Did you mean hermes? Rea",
        ),
        (("x",), "tool calls: gpt-oss, hermes, json, llama3-json, qwen3-coder."),
        (("qwen3", "deepseek-r1"), "--parsers=qwen3 deepseek-r1: these are all for reasoning. Use"),
    ):
        (problem,) = serve_problems(ServeRun(server=ServeConfig(parsers=names)))
        assert message in problem
    assert serve_problems(ServeRun(server=ServeConfig(parsers=("hermes", "qwen3")))) == []


def test_auto_tool_choice_needs_a_parser_and_a_template_with_tools() -> None:
    model: Any = SimpleNamespace(
        template=ChatTemplate("chatml", BUILT_IN["chatml"]), tokenizer=ByteTokenizer()
    )
    for names, param, message in (
        ((), "tool_choice", 'tool_choice="auto" needs a parser of tool calls: start the server'),
        (("json",), "tools", "the chat template chatml does not tell the model about tools. Start"),
    ):
        state: Any = SimpleNamespace(config=ServeConfig(parsers=names))
        with pytest.raises(ApiError) as raised:
            read_output_format({"tools": TOOLS}, model, state)
        assert raised.value.param == param and message in raised.value.message
        output = read_output_format({"tools": TOOLS, "tool_choice": "required"}, model, state)
        assert output.structure is not None


def test_strict_tools_need_a_parser_of_json_arguments() -> None:
    model: Any = SimpleNamespace(template=ChatTemplate("t", TEMPLATE), tokenizer=ByteTokenizer())
    state: Any = SimpleNamespace(config=ServeConfig(parsers=("qwen3-coder",)))
    with pytest.raises(ApiError) as raised:
        read_output_format({"tools": [tool(strict=True)]}, model, state)
    assert raised.value.param == "tools"
    assert "with the parser qwen3-coder, whose arguments are not JSON. Use" in raised.value.message
    output = read_output_format({"tools": TOOLS, "parallel_tool_calls": False}, model, state)
    assert output.structure is not None and output.enforces_calls
    assert read_output_format({"tools": TOOLS}, model, state).structure is None
    state.config = ServeConfig(parsers=("hermes",))
    (_, now), strict = TOOLS, tool(strict=True, parameters=ADD)
    structure = read_output_format({"tools": [strict, now]}, model, state).structure
    assert structure is not None and structure.grammar is not None
    assert "additionalProperties" in structure.grammar and "(open body)* TEXT" in structure.grammar

"""A server whose model writes reasoning, tool calls and answers between special tokens."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from megalith.config.data import TokenizerConfig
from megalith.data.huggingface import HuggingFaceTokenizer
from megalith.infer.parsers.harmony import END, MESSAGE, HarmonyParser
from tests.infer.tokenizers import make_marked_tokenizer
from tests.serve.servers import CONFIG, Server, make_run, running_server

pytest.importorskip("llguidance", reason="matches grammars, which needs the library")
CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{% for message in messages "
    "%}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": ADD, "strict": True}}]
RESPONSES = "/v1/responses"
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
RESPONSE_TOOLS = [{"type": "function", "name": "add", "parameters": ADD, "strict": True}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    """Its tokens are bytes and the markers of the format."""
    folder = tmp_path_factory.mktemp("marked")
    tokenizer = make_marked_tokenizer(folder, HarmonyParser.markers)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    return tokenizer


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: HuggingFaceTokenizer
) -> Iterator[Server]:
    """A server with the parser of the format."""
    folder = tmp_path_factory.mktemp("harmony")
    config = replace(CONFIG, vocab_size=tokenizer.vocab_size, max_seq_len=768, init_std=0.2)
    named = TokenizerConfig(kind="huggingface", path=tokenizer.path)
    run = make_run(folder / "run", config, named)
    (folder / "template.jinja").write_text(TEMPLATE)
    options = ["--served-model-name", "tiny", "--template", str(folder / "template.jinja")]
    with running_server(run, *options, "--parsers", "gpt-oss") as running:
        yield running


def chat(server: Server, **body: Any) -> list[dict[str, Any]]:
    """The choices of a chat request that succeeds."""
    request = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "seed": 1} | body
    response = server.post(CHAT, request)
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = response.json()["choices"]
    texts = [text for c in choices for text in c["message"].values() if isinstance(text, str)]
    assert not any(marker in text for text in texts for marker in HarmonyParser.markers)
    return choices


def bias(tokenizer: HuggingFaceTokenizer, **values: float) -> dict[str, float]:
    """The logit bias of tokens by text."""
    names = {"end": END, "message": MESSAGE, "space": " ", "eos": "<|endoftext|>"}
    return {
        str(tokenizer.encode_marked(names.get(name, name))[0]): value
        for name, value in values.items()
    }


def test_reasoning_and_structured_answer(server: Server, tokenizer: HuggingFaceTokenizer) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": ADD}}
    likely = bias(tokenizer, end=8, a=3)
    choices = chat(server, response_format=schema, n=8, max_tokens=300, logit_bias=likely)
    stopped = [c["message"] for c in choices if c["finish_reason"] == "stop"]
    assert stopped and all(json.loads(one["content"])["a"] in range(10) for one in stopped)
    assert any(one["reasoning_content"] for one in stopped)


def test_required_and_optional_calls(server: Server, tokenizer: HuggingFaceTokenizer) -> None:
    likely = bias(tokenizer, c=4, space=9, end=8, eos=4)
    num_calls = 0
    for tool_choice in ("auto", "required"):
        body: dict[str, Any] = {"tools": TOOLS, "tool_choice": tool_choice, "n": 12}
        for choice in chat(server, **body, max_tokens=300, logit_bias=likely):
            calls = choice["message"].get("tool_calls", [])
            assert all(json.loads(c["function"]["arguments"])["a"] in range(10) for c in calls)
            if tool_choice == "required" and choice["finish_reason"] != "length":
                assert len(calls) == 1 and choice["finish_reason"] == "tool_calls"
            num_calls += len(calls)
    assert num_calls > 2


def test_special_tokens_of_the_format_are_never_content(
    server: Server, tokenizer: HuggingFaceTokenizer
) -> None:
    likely = bias(tokenizer, **dict.fromkeys(HarmonyParser.markers, 3.0), a=3)
    choices = chat(server, n=16, max_tokens=100, logit_bias=likely, temperature=2)
    assert any(choice["message"]["content"] for choice in choices)
    assert any(choice["stop_reason"] in tokenizer.specials.values() for choice in choices)


def test_response_has_reasoning_and_calls(server: Server, tokenizer: HuggingFaceTokenizer) -> None:
    likely = bias(tokenizer, a=6, c=6, space=6, end=6)
    body: dict[str, Any] = {"model": "tiny", "input": "hi", "tools": RESPONSE_TOOLS}
    body |= {"tool_choice": "required", "logit_bias": likely, "max_output_tokens": 300}
    for seed in range(20):
        body["seed"] = seed
        document = server.post(RESPONSES, body).raise_for_status().json()
        Response.model_validate(document)
        if [item["type"] for item in document["output"]] == ["reasoning", "function_call"]:
            break
    thought, call = document["output"]
    assert thought["content"][0]["text"] and thought["status"] == "completed"
    assert call["name"] == "add" and json.loads(call["arguments"])["a"] in range(10)
    assert document["status"] == "completed" and document["tools"] == RESPONSE_TOOLS

    text = server.post(RESPONSES, body | {"stream": True}).raise_for_status().text
    lines = [block.split("\n")[1] for block in text.removesuffix("\n\n").split("\n\n")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    for event in events:
        EVENT.validate_python(event)
    kinds = [event["type"].removeprefix("response.") for event in events]
    num_deltas = kinds.count("reasoning_text.delta")
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["reasoning_text.delta"] * num_deltas,
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    deltas = [e["delta"] for e in events if e["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == thought["content"][0]["text"] and num_deltas > 0
    assert events[-3]["arguments"] == events[-4]["delta"] == call["arguments"]
    assert [event["output_index"] for event in events[-5:-1]] == [1] * 4
    assert [item["type"] for item in events[-1]["response"]["output"]] == [
        "reasoning",
        "function_call",
    ]

    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "6"}
    user = {"role": "user", "content": "hi"}
    again = {"model": "tiny", "input": [user, thought, call, result], "max_output_tokens": 5}
    assert server.post(RESPONSES, again).raise_for_status().json()["usage"]["input_tokens"] > 20


def test_client_accumulates_the_items_of_a_stream(
    server: Server, tokenizer: HuggingFaceTokenizer
) -> None:
    options: dict[str, Any] = {"model": "tiny", "input": "hi", "tools": RESPONSE_TOOLS}
    options |= {"tool_choice": {"type": "function", "name": "add"}, "max_output_tokens": 300}
    options["extra_body"] = {"logit_bias": bias(tokenizer, a=6, c=6, space=6, end=6), "seed": 1}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        response = client.responses.create(**options)
        with client.responses.stream(**options) as events:
            final = list(events)[-1]
    assert final.type == "response.completed"
    (call,) = [item for item in final.response.output if item.type == "function_call"]
    (expected,) = [item for item in response.output if item.type == "function_call"]
    assert (call.name, call.arguments) == ("add", expected.arguments)

"""A server whose model writes reasoning, tool calls and answers between special tokens."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

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

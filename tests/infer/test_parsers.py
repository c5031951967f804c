"""Parsers of reasoning and tool calls: the same result for every split of the text into pieces."""

import json
import random
from typing import Any

import pytest

from megalith.infer.parsers.harmony import MAX_HEADER_CHARACTERS, HarmonyParser
from megalith.infer.parsers.parsed_text import MarkerRemover, ParsedText, ToolCall
from megalith.infer.parsers.reasoning import ThinkParser
from megalith.infer.parsers.registry import (
    TOOL_CALL_FORMATS,
    OutputParser,
    begins_with_reasoning,
    find_reasoning_parser,
    find_tool_call_parser,
)
from megalith.infer.parsers.tool_calls import NamedCallParser, ToolCallParser
from tests.cases import loop_over

TOOLS: dict[str, Any] = {
    "add": {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "flag": {"type": "boolean"},
            "text": {"type": "string"},
            "items": {"type": "array"},
            "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        },
    },
    "now": {},
}
ADD = '{"name": "add", "arguments": {"a": 1, "text": "x}é<"}}'
ADDED = ToolCall("add", '{"a": 1, "text": "x}é<"}')
NAME_NOW = '{"name": "now"}'
NOW = ToolCall("now", "{}")


def parse(parser: OutputParser, pieces: list[str]) -> ParsedText:
    """The parts of a text that arrives in pieces."""
    result = ParsedText()
    for piece in pieces:
        result.add(parser.push(piece))
    result.add(parser.finish())
    return result


def build(kind: str, *, reasoning: bool = False) -> OutputParser:
    """A parser; `named` is the one of a named tool choice."""
    calls: ToolCallParser | None = None
    if kind == "named":
        calls = NamedCallParser("add")
    elif kind:
        calls = TOOL_CALL_FORMATS[kind](TOOLS)
    return OutputParser(ThinkParser() if reasoning else None, calls)


def hermes(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


HERMES_CASES: list[tuple[str, str, list[ToolCall]]] = [
    ("no call, a < b ", "no call, a < b ", []),
    (" \n", " \n", []),
    (hermes(f"\n{ADD}\n"), "", [ADDED]),
    (f"Let me see.\n\n{hermes(ADD)}\n{hermes(NAME_NOW)}\n", "Let me see.", [ADDED, NOW]),
    (f"{hermes(ADD)} after", " after", [ADDED]),
    (f"<tool_call>{ADD}", "", [ADDED]),
    ("<tool_call>" + ADD[:-9], "<tool_call>" + ADD[:-9], []),
    (f"a {hermes('{bad')} b", f"a {hermes('{bad')} b", []),
    (hermes('{"name": "other"}'), hermes('{"name": "other"}'), []),
    (hermes('{"name": ["add"]}'), hermes('{"name": ["add"]}'), []),
    (hermes('{"name": "add", "arguments": 3}'), hermes('{"name": "add", "arguments": 3}'), []),
    (
        hermes('{"name": "add", "arguments": {"a": NaN}}'),
        hermes('{"name": "add", "arguments": {"a": NaN}}'),
        [],
    ),
    (hermes('{"name": "add", "arguments": "{\\"a\\": 2}"}'), "", [ToolCall("add", '{"a": 2}')]),
    (
        hermes('{"name": "now", "arguments": {"t": "\\ud800"}}'),
        "",
        [ToolCall("now", '{"t": "\\ud800"}')],
    ),
    ("<tool_cal", "<tool_cal", []),
]
JSON_CASES: list[tuple[str, str, list[ToolCall]]] = [
    ("text {", "text {", []),
    ("", "", []),
    (f"\n{ADD}", "", [ADDED]),
    (f"[{ADD}, {ADD}]\n", "", [ADDED, ADDED]),
    (f'{ADD}; {{"name": "now", "parameters": {{}}}}', "", [ADDED, NOW]),
    (f"<|python_tag|>{ADD}", "", [ADDED]),
    (f"{ADD} and more", " and more", [ADDED]),
    ('{"answer": 42} ', '{"answer": 42} ', []),
    ('[{"name": "add", "argum', '[{"name": "add", "argum', []),
    (f'[{ADD}, {{"name": "n', ', {"name": "n', [ADDED]),
    ("<|python", "<|python", []),
    ("[1, 2]", "[1, 2]", []),
]


def coder(name: str, **parameters: str) -> str:
    parts = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(parts)}</function>\n</tool_call>"


CODER_CASES: list[tuple[str, str, list[ToolCall]]] = [
    (coder("now"), "", [NOW]),
    (
        "Yes.\n" + coder("add", a="3", flag="True", text="12\n<b>", items="[1, {}]", either="7"),
        "Yes.",
        [
            ToolCall(
                "add",
                json.dumps(
                    {"a": 3, "flag": True, "text": "12\n<b>", "items": [1, {}], "either": 7}
                ),
            )
        ],
    ),
    (coder("add", a="three", other="1"), "", [ToolCall("add", '{"a": "three", "other": "1"}')]),
    (coder("add", a="null"), "", [ToolCall("add", '{"a": null}')]),
    (coder("other"), coder("other"), []),
    (
        coder("add", a="1").replace("</function>", ""),
        coder("add", a="1").replace("</function>", ""),
        [],
    ),
    (
        coder("add", a="1").replace("<parameter", "noise <parameter"),
        coder("add", a="1").replace("<parameter", "noise <parameter"),
        [],
    ),
    ("<tool_call>\n<function=add>", "<tool_call>\n<function=add>", []),
]


def message(header: str, text: str, end: str = "end") -> str:
    return f"<|channel|>{header}<|message|>{text}<|{end}|>"


NEXT = "<|start|>assistant"
FUNCTION = "commentary to=functions.add <|constrain|>json"
ARGUMENTS = '{"a": 1, "text": "x}é<"}'
THOUGHT = message("analysis", "so ")
HARMONY_CASES: list[tuple[str, str, str, list[ToolCall]]] = [
    (f"{THOUGHT}{NEXT}{message('final', 'Hi <b>')}", "so ", "Hi <b>", []),
    (f"{THOUGHT}{NEXT}<|channel|>final<|message|>Hi", "so ", "Hi", []),
    (
        f"{THOUGHT}{NEXT}{message('commentary', 'Adding.')}{NEXT}"
        f"{message(FUNCTION, ARGUMENTS, 'call')}",
        "so ",
        "Adding.",
        [ADDED],
    ),
    (f"<|channel|>{FUNCTION}<|message|>{ARGUMENTS}", "", "", [ADDED]),
    (f" to=functions.now{message('commentary', '', 'call')}", "", "", [NOW]),
    (f"{NEXT} to=functions.add{message('analysis json', ARGUMENTS, 'call')}", "", "", [ADDED]),
    (message("analysis", "a") + NEXT + message("analysis", "b"), "a\nb", "", []),
    (message("commentary", "a") + NEXT + message("final", "b", "return"), "", "a\nb", []),
    (message("analysis to=python code", "1 + 1", "call"), "1 + 1", "", []),
    # malformed
    ("plain text", "", "plain text", []),
    (" \n text", "", " \n text", []),
    ("<b>bold</b>", "", "<b>bold</b>", []),
    ("t", "", "t", []),
    ("", "", "", []),
    ("<|channel|>anal", "", "", []),
    ("<|message|>a", "", "a", []),
    ("<|channel|>final<|message|>a<|channel|>analysis<|message|>b", "b", "a", []),
    ("<|channel|>final<|message|>a<|start|>assistant<|channel|>", "", "a", []),
    (message("commentary to=functions.other", "{}", "call"), "", "{}", []),
    (message(FUNCTION, '{"a": ', "call"), "", '{"a": ', []),
    (message(FUNCTION, "[1]", "call") + NEXT + message("final", "b"), "", "[1]\nb", []),
    ("<|channel|>" + "x" * MAX_HEADER_CHARACTERS, "", "x" * MAX_HEADER_CHARACTERS, []),
    ("<|channel|>" * 40, "", "", []),
    (f"<|x {'y' * 300}<|end|>b", "", f"<|x {'y' * 300}\nb", []),
]
CASES = [
    *[("hermes", *case) for case in HERMES_CASES],
    *[("gpt-oss", text, content, calls) for text, _, content, calls in HARMONY_CASES],
    *[("json", *case) for case in JSON_CASES],
    *[("llama3-json", *case) for case in JSON_CASES],
    *[("qwen3-coder", *case) for case in CODER_CASES],
    ("named", '{"a": 1}', "", [ToolCall("add", '{"a": 1}')]),
    ("named", '{"a": ', '{"a": ', []),
]


@loop_over("case", CASES)
def test_calls_and_content_of_the_whole_text(case: tuple[str, str, str, list[ToolCall]]) -> None:
    kind, text, content, calls = case
    result = parse(build(kind), [text])
    assert (result.content, result.tool_calls) == (content, calls)
    assert kind == "gpt-oss" or result.reasoning == ""
    assert all(isinstance(json.loads(call.arguments), dict) for call in result.tool_calls)


THINKING = [
    ("<think>\nso\n\nthen\n</think>\n\nanswer\n", "so\n\nthen", "answer\n"),
    ("so</think>answer", "so", "answer"),
    (" \n<think>so", "so", ""),
    ("so </thi", "so </thi", ""),
    ("<thi", "<thi", ""),
    ("<think></think>x", "", "x"),
    ("a <think> b</think></think>c", "a <think> b", "</think>c"),
    ("\n", "\n", ""),
    ("so\n\n", "so\n\n", ""),
    ("</think>\n", "", ""),
]


@loop_over("case", THINKING)
def test_reasoning_and_content_of_the_whole_text(case: tuple[str, str, str]) -> None:
    text, reasoning, content = case
    result = parse(build("", reasoning=True), [text])
    assert (result.reasoning, result.content) == (reasoning, content)


@loop_over("case", HARMONY_CASES)
def test_reasoning_of_harmony_messages(case: tuple[str, str, str, list[ToolCall]]) -> None:
    assert parse(build("gpt-oss"), [case[0]]).reasoning == case[1]


@loop_over("seed", range(40))
def test_any_sequence_of_harmony_markers_is_parsed_alike_in_pieces(seed: int) -> None:
    generator = random.Random(seed)
    pieces = [*HarmonyParser.markers, "final", "analysis", " to=functions.add", "{}", "a", " ", "<"]
    for _ in range(8):
        text = "".join(generator.choices([*pieces, "x" * 130], k=generator.randrange(12)))
        expected = parse(build("gpt-oss"), [text])
        assert parse(build("gpt-oss"), split_randomly(text, generator)) == expected, text
        assert parse(build("gpt-oss"), list(text)) == expected, text


def test_markers_are_removed_across_pieces() -> None:
    remover = MarkerRemover(("<a>", "<abc>"))
    pieces = [remover.push(text) for text in ("x<", "a", "bc>y<a><", "q<ab")]
    assert [*pieces, remover.push("", is_end=True)] == ["x", "", "y", "<q", "<ab"]
    parser = OutputParser(ThinkParser(), None, hidden=ThinkParser.markers)
    result = parse(parser, ["<think>a<think>b</think>c</thi", "nk>d"])
    assert result == ParsedText(content="cd", reasoning="ab")


def split_randomly(text: str, generator: random.Random) -> list[str]:
    """Pieces of a text, some of them empty."""
    cuts = sorted(generator.choices(range(len(text) + 1), k=generator.randrange(len(text) + 2)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@loop_over("seed", range(40))
def test_every_split_of_a_text_has_the_same_result(seed: int) -> None:
    generator = random.Random(seed)
    for kind, text, *_ in CASES:
        for reasoning in (False, True) if kind != "gpt-oss" else (False,):
            whole = f"{generator.choice(THINKING)[0]}</think>\n{text}" if reasoning else text
            expected = parse(build(kind, reasoning=reasoning), [whole])
            pieces = split_randomly(whole, generator)
            assert parse(build(kind, reasoning=reasoning), pieces) == expected, (kind, pieces)
            assert parse(build(kind, reasoning=reasoning), list(whole)) == expected, (kind, whole)


def test_only_text_that_may_begin_a_marker_is_withheld() -> None:
    parser = build("hermes", reasoning=True)
    deltas = [parser.push(piece) for piece in ("<think>a", "b <", "/t", "c</think>", "d <t", "x")]
    assert [delta.reasoning for delta in deltas] == ["a", "b ", "", "</tc", "", ""]
    assert [delta.content for delta in deltas] == ["", "", "", "", "d", " <tx"]
    deltas = [parser.push(piece) for piece in ("<tool_call>", ADD, "</tool_call>", "\n")]
    assert [len(delta.tool_calls) for delta in deltas] == [0, 0, 1, 0]


def test_prompt_that_ends_the_reasoning_disables_it() -> None:
    assert begins_with_reasoning("assistant\n") and begins_with_reasoning("assistant\n<think>\n")
    assert not begins_with_reasoning("assistant\n<think>\n\n</think>\n\n")


def test_parsers_are_selected_by_kind() -> None:
    assert find_reasoning_parser(("gpt-oss",)) == find_tool_call_parser(("gpt-oss",)) == "gpt-oss"
    names = ("hermes", "qwen3")
    assert (find_reasoning_parser(names), find_tool_call_parser(names)) == ("qwen3", "hermes")
    assert find_reasoning_parser(()) is find_tool_call_parser(("qwen3",)) is None


def test_text_without_parsers_is_content() -> None:
    text = f"<think>a</think>{hermes(ADD)}"
    assert parse(OutputParser(None, None), [text]) == ParsedText(content=text)


@pytest.mark.parametrize("kind", sorted(TOOL_CALL_FORMATS))
def test_long_call_in_small_pieces(kind: str) -> None:
    value = "x" * 20_000
    call = {"name": "add", "arguments": {"text": value}}
    text = coder("add", text=value) if kind == "qwen3-coder" else json.dumps(call)
    if kind == "gpt-oss":
        text = message(FUNCTION, json.dumps(call["arguments"]), "call")
    result = parse(build(kind), list(hermes(text) if kind == "hermes" else text))
    assert [json.loads(one.arguments) for one in result.tool_calls] == [{"text": value}]


def test_json_call_with_many_braces_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []

    class CountingDecoder(json.JSONDecoder):
        def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
            texts.append(s)
            return super().raw_decode(s, idx)

    monkeypatch.setattr("megalith.infer.parsers.tool_calls._DECODER", CountingDecoder())
    call = json.dumps({"name": "add", "arguments": {"items": [{"b": '}"{'}] * 50}})
    result = parse(build("json"), [call[start : start + 3] for start in range(0, len(call), 3)])
    assert [one.name for one in result.tool_calls] == ["add"] and len(texts) == 1

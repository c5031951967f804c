"""Lark grammars of outputs with reasoning and tool calls, in the formats that the parsers read.

A marker that is a special token of the tokenizer is matched as that token, another one as text.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megalith.infer.parsers.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, RECIPIENT, START
from megalith.infer.parsers.tool_calls import CLOSE, OPEN
from megalith.infer.structured_output import JSON_OPTIONS

Specials = Mapping[str, int]  # ids of the special tokens by text
Schemas = Mapping[str, Mapping[str, Any]]  # JSON schema of the arguments by name of the tool
ANY = "/(?s:.*)/"
CALL_KEYS = {"hermes": "arguments", "json": "arguments", "llama3-json": "parameters"}
"""Parsers of calls in JSON, with the key of the arguments."""


def allow_reasoning(end: str, specials: Specials) -> str:
    """Return the grammar of a structure after reasoning, which ends with a marker."""
    return f"start: reasoning /\\n*/ @structure\n{_until('reasoning', end, specials)}"


def build_json_calls_grammar(schemas: Schemas, *, parallel: bool) -> str:
    """Return the grammar of a JSON list of calls {"name", "arguments"}, at least one and without
    `parallel` exactly one."""
    more = ' (", " call)*' if parallel else ""
    return f'start: "[" call{more} "]"\n{_json_calls(schemas, "arguments")}'


def build_optional_calls_grammar(
    parser: str, schemas: Schemas, specials: Specials, *, parallel: bool
) -> str:
    """Return the grammar of a text that may contain tool calls in the format of a parser, without
    `parallel` at most one. The arguments of qwen3-coder are any text, because it is not JSON."""
    if parser == "gpt-oss":  # a call ends the turn, so there is at most one
        final = f"final: {_channel('final', specials)} {ANY}"
        return f"{build_harmony_calls_grammar(schemas, specials, last='final | call')}\n{final}"
    if parser in ("json", "llama3-json"):
        more = ' ("; " call)*' if parallel else ""
        text = r"TEXT: /([^\s,;\[\]{<](?s:.*))?/"
        return f"start: TEXT | call{more}\n{text}\n{_json_calls(schemas, CALL_KEYS[parser])}"
    body = _until("body", CLOSE, specials)
    if parser in CALL_KEYS:
        calls = _json_calls(schemas, CALL_KEYS[parser])
        body = f'body: "\\n"? call "\\n"? {_marker(CLOSE, specials)}\n{calls}'
    return "\n".join(
        [
            f"start: {'(open body)* TEXT' if parallel else 'TEXT | open body'}",
            _until("open", OPEN, specials),
            f"TEXT: {ANY} & ~({ANY} {json.dumps(OPEN)} {ANY})",
            body,
        ]
    )


def build_harmony_calls_grammar(schemas: Schemas, specials: Specials, *, last: str = "call") -> str:
    """Return the grammar of a call of one of the tools in the harmony format; `last`: expression
    of what follows the messages without recipient."""
    constrain, message = _marker(CONSTRAIN, specials), _marker(MESSAGE, specials)
    calls = [
        f"{_marker(CHANNEL, specials)} {json.dumps(f'commentary {RECIPIENT}{name} ')} {constrain} "
        f'"json" {message} {_json(schema)}'
        for name, schema in schemas.items()
    ]
    notes = _harmony_notes(last, specials, channels=("analysis", "commentary"))
    return f"{notes}\n{_alternatives(calls)}"


def build_harmony_final_grammar(specials: Specials) -> str:
    """Return the grammar of a structure that is the final message in the harmony format, after
    reasoning: text in commentary would be content too."""
    last = f"{_channel('final', specials)} @structure"
    return _harmony_notes(last, specials, channels=("analysis",))


def _harmony_notes(last: str, specials: Specials, *, channels: Sequence[str]) -> str:
    """Return the rules of messages without a recipient, and of what follows them."""
    notes = " | ".join(_channel(name, specials) for name in channels)
    return (
        f'start: (note {_marker(START, specials)} "assistant")* ({last})\n'
        f"note: ({notes}) note_text\n"
        f"{_until('note_text', END, specials)}"
    )


def _channel(name: str, specials: Specials) -> str:
    """Return the expression of the header of a message without a recipient."""
    return f"{_marker(CHANNEL, specials)} {json.dumps(name)} {_marker(MESSAGE, specials)}"


def _json_calls(schemas: Schemas, key: str) -> str:
    """Return the rules of a call {"name", KEY} in JSON."""
    calls = []
    for name, schema in schemas.items():
        head = json.dumps(f'{{"name": {json.dumps(name)}, "{key}": ')
        calls.append(f'{head} {_json(schema)} "}}"')
    return _alternatives(calls)


def _alternatives(calls: list[str]) -> str:
    """Return the rules of a call, one of several."""
    rules = [f"call_{index}: {call}" for index, call in enumerate(calls)]
    names = " | ".join(f"call_{index}" for index in range(len(calls)))
    return "\n".join([f"call: {names}", *rules])


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}"


def _marker(text: str, specials: Specials) -> str:
    """Return the expression of a marker."""
    return f"<[{specials[text]}]>" if text in specials else json.dumps(text)


def _until(rule: str, end: str, specials: Specials) -> str:
    """Return a rule of any text up to a marker, which is part of it."""
    if end in specials:
        return f"{rule}: {ANY} {_marker(end, specials)}"
    return f"{rule}[suffix={json.dumps(end)}]: {ANY}"

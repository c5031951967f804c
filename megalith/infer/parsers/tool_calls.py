"""Tool calls in generated text, in the formats that models are trained on.

Every parser takes the text in pieces of any size and withholds only what may belong to a call. A
call is returned when it is complete; text that looks like a call but is none is content.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from megalith.infer.parsers.parsed_text import ParsedText, ToolCall, split_at_marker

Tools = Mapping[str, Mapping[str, Any]]  # JSON schema of the arguments by name of the tool
OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


class ToolCallParser(Protocol):
    """Finds tool calls in the text of one choice."""

    markers: ClassVar[tuple[str, ...]]
    """Texts of the format that are special tokens of some tokenizers."""

    def push(self, text: str) -> ParsedText:
        """Add text; return the parts that later text cannot change."""

    def finish(self) -> ParsedText:
        """Return the withheld text, at the end of the output."""


def read_call(value: object, tools: Tools) -> ToolCall | None:
    """Return the call of parsed JSON {"name", "arguments" or "parameters"}; None if it is not a
    call of one of the tools."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON inside JSON
        arguments = _parse(arguments)
    if value["name"] not in tools or not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], _to_json(arguments))


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)


def _parse(text: str) -> object:
    """Return the value of a JSON text; None if it is not JSON."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _to_json(arguments: Mapping[str, object]) -> str:
    """Return arguments as JSON text that can be encoded."""
    text = json.dumps(arguments, ensure_ascii=False)
    is_unicode = not any("\ud800" <= character <= "\udfff" for character in text)
    return text if is_unicode else json.dumps(arguments)


class HermesParser:
    """Calls `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes, Qwen 2.5 and
    Qwen3 write them. Whitespace around calls is not content."""

    markers: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._buffer = self._space = ""
        self._is_inside = self._has_calls = False

    def push(self, text: str) -> ParsedText:
        """Add text; return the parts that later text cannot change."""
        self._buffer += text
        result = ParsedText()
        while True:
            marker = CLOSE if self._is_inside else OPEN
            before, is_complete, rest = split_at_marker(self._buffer, marker)
            if not self._is_inside:
                self._add_content(before, result)
                self._buffer = rest
            elif is_complete:
                self._buffer = rest
                self._add_call(before, CLOSE, result)
            if not is_complete:
                return result
            self._is_inside = not self._is_inside

    def finish(self) -> ParsedText:
        """Return the withheld text; the last call may lack its end."""
        result = ParsedText()
        if self._is_inside:
            self._add_call(self._buffer, "", result)
        else:
            self._add_content(self._buffer, result)
        if not self._has_calls:
            result.content += self._space
        return result

    def _add_content(self, text: str, result: ParsedText) -> None:
        """Add text outside of calls, its last whitespace when more text follows."""
        text = self._space + text
        content = text.rstrip()
        result.content += content
        self._space = text[len(content) :]

    def _add_call(self, body: str, end: str, result: ParsedText) -> None:
        call = self._read_body(body)
        if call is None:
            self._add_content(f"{OPEN}{body}{end}", result)
            return
        self._has_calls, self._space = True, ""
        result.tool_calls.append(call)

    def _read_body(self, body: str) -> ToolCall | None:
        """Return the call between the markers; None if it is malformed."""
        return read_call(_parse(body), self._tools)


class Qwen3CoderParser(HermesParser):
    """Calls `<tool_call><function=NAME><parameter=NAME>value</parameter></function></tool_call>`,
    as Qwen3-Coder and Nemotron 3 write them."""

    _FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
    _PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)

    def _read_body(self, body: str) -> ToolCall | None:
        function = self._FUNCTION.fullmatch(body)
        if function is None or function[1] not in self._tools:
            return None
        properties = self._tools[function[1]].get("properties", {})
        arguments: dict[str, object] = {}
        position, text = 0, function[2]
        while position < len(text) and text[position:].strip():
            parameter = self._PARAMETER.match(text, position)
            if parameter is None:
                return None
            arguments[parameter[1]] = _convert(parameter[2], properties.get(parameter[1], {}))
            position = parameter.end()
        return ToolCall(function[1], _to_json(arguments))


def _convert(text: str, schema: Any) -> object:  # the JSON schema of the parameter
    """Return the value of a parameter written as plain text: JSON, unless its type is a string."""
    if not isinstance(schema, dict) or not {"anyOf", "oneOf", "$ref"} & schema.keys():
        kind = schema.get("type", "string") if isinstance(schema, dict) else "string"
        if kind == "string":
            return text
    if text in ("True", "False", "None"):  # as Python writes them
        return {"True": True, "False": False, "None": None}[text]
    value = _parse(text)
    return text if value is None and text != "null" else value


class _ObjectScanner:
    """Finds the end of a JSON object in a text that grows; looks at every character once."""

    def __init__(self) -> None:
        self._position = self._depth = 0
        self._is_string = self._is_escaped = False

    def is_complete(self, text: str) -> bool:
        """Return whether the object at the start of the text may be complete: its braces outside of
        strings are balanced."""
        for character in text[self._position :]:
            self._position += 1
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_string:
                self._is_escaped = character == "\\"
                self._is_string = character != '"'
            elif character == '"':
                self._is_string = True
            elif character in "{}":
                self._depth += 1 if character == "{" else -1
                if self._depth == 0:
                    return True
        return False


class JsonParser:
    """Calls as JSON objects {"name", "arguments" or "parameters"} at the start of the text, alone,
    in a list, or separated by semicolons, as Llama 3 writes them."""

    markers: ClassVar[tuple[str, ...]] = (PYTHON_TAG,)
    _SEPARATORS = re.compile(r"[\s,;\[\]]*")

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._buffer = ""
        self._is_content = self._has_calls = False
        self._scanner = _ObjectScanner()

    def push(self, text: str) -> ParsedText:
        """Add text; return the parts that later text cannot change."""
        self._buffer += text
        result = ParsedText()
        while not self._is_content:
            rest = self._skip_separators()
            if not rest or PYTHON_TAG.startswith(rest):
                return result
            if not rest.startswith("{"):
                self._is_content = True
            elif not self._scanner.is_complete(rest):
                return result
            else:
                self._take_call(rest, result)
        if self._is_content:
            result.content, self._buffer = self._buffer, ""
        return result

    def finish(self) -> ParsedText:
        """Return the withheld text, unless it only separates calls."""
        rest, self._buffer = self._buffer, ""
        if self._has_calls and not self._SEPARATORS.sub("", rest, count=1):
            rest = ""
        return ParsedText(content=rest)

    def _skip_separators(self) -> str:
        """Return the buffer from the next call on."""
        rest = self._buffer[self._end_of_separators(self._buffer) :]
        if not self._has_calls and rest.startswith(PYTHON_TAG):
            rest = rest.removeprefix(PYTHON_TAG).lstrip()
        return rest

    def _end_of_separators(self, text: str) -> int:
        match = self._SEPARATORS.match(text)
        return 0 if match is None else match.end()

    def _take_call(self, rest: str, result: ParsedText) -> None:
        """Remove the object at the start of the text; all of it is content if it is no call."""
        try:
            value, end = _DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            value, end = None, 0
        call = read_call(value, self._tools)
        if call is None:
            self._is_content = True
            return
        self._has_calls = True
        result.tool_calls.append(call)
        self._buffer, self._scanner = rest[end:], _ObjectScanner()


class NamedCallParser:
    """The entire text is the arguments of one tool, enforced by a grammar."""

    markers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, name: str) -> None:
        self._name, self._text = name, ""

    def push(self, text: str) -> ParsedText:
        """Add text; later text may change all of it."""
        self._text += text
        return ParsedText()

    def finish(self) -> ParsedText:
        """Return the call; truncated arguments are content."""
        arguments = _parse(self._text)
        if not isinstance(arguments, dict):
            return ParsedText(content=self._text)
        return ParsedText(tool_calls=[ToolCall(self._name, _to_json(arguments))])

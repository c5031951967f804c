"""Parsers by the names of the server option `--parsers`, and the parser of one choice."""

from collections.abc import Callable, Mapping

from megalith.config.server import REASONING_PARSERS, TOOL_CALL_PARSERS
from megalith.infer.parsers.parsed_text import ParsedText
from megalith.infer.parsers.reasoning import END_THINK, ThinkParser
from megalith.infer.parsers.tool_calls import (
    HermesParser,
    JsonParser,
    Qwen3CoderParser,
    ToolCallParser,
    Tools,
)

TOOL_CALL_FORMATS: Mapping[str, Callable[[Tools], ToolCallParser]] = {
    "hermes": HermesParser,
    "json": JsonParser,
    "llama3-json": JsonParser,
    "qwen3-coder": Qwen3CoderParser,
}
assert set(TOOL_CALL_FORMATS) == set(TOOL_CALL_PARSERS)


class OutputParser:
    """Splits the text of one choice into reasoning, content and tool calls."""

    def __init__(self, reasoning: ThinkParser | None, calls: ToolCallParser | None) -> None:
        self._reasoning, self._calls = reasoning, calls

    def push(self, text: str) -> ParsedText:
        """Add text; return the parts that later text cannot change."""
        parsed = ParsedText(text) if self._reasoning is None else self._reasoning.push(text)
        return self._parse_content(parsed)

    def finish(self) -> ParsedText:
        """Return the withheld text, at the end of the output."""
        parsed = ParsedText() if self._reasoning is None else self._reasoning.finish()
        parsed = self._parse_content(parsed)
        if self._calls is not None:
            parsed.add(self._calls.finish())
        return parsed

    def _parse_content(self, parsed: ParsedText) -> ParsedText:
        """Find tool calls in the content."""
        if self._calls is None or not parsed.content:
            return parsed
        result = self._calls.push(parsed.content)
        result.reasoning = parsed.reasoning
        return result


def find_reasoning_parser(names: tuple[str, ...]) -> str | None:
    """Return the reasoning parser among the names of a server."""
    return next((name for name in names if name in REASONING_PARSERS), None)


def find_tool_call_parser(names: tuple[str, ...]) -> str | None:
    """Return the tool-call parser among the names of a server."""
    return next((name for name in names if name in TOOL_CALL_PARSERS), None)


def begins_with_reasoning(prompt: str) -> bool:
    """Whether the output after a rendered prompt begins with reasoning: a template that disables
    it ends the reasoning in the prompt."""
    return not prompt.rstrip().endswith(END_THINK)

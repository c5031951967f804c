"""Parsers by the names of the server option `--parsers`, and the parser of one choice."""

from collections.abc import Callable, Collection, Mapping

from megalith.config.server import REASONING_PARSERS, TOOL_CALL_PARSERS
from megalith.infer.parsers.harmony import HarmonyParser
from megalith.infer.parsers.parsed_text import MarkerRemover, ParsedText
from megalith.infer.parsers.reasoning import END_THINK, ThinkParser
from megalith.infer.parsers.tool_calls import (
    HermesParser,
    JsonParser,
    Qwen3CoderParser,
    ToolCallParser,
    Tools,
)

REASONING_FORMATS: Mapping[str, Callable[[], ThinkParser]] = dict.fromkeys(
    ("deepseek-r1", "nemotron-v3", "qwen3"), ThinkParser
)
TOOL_CALL_FORMATS: Mapping[str, Callable[[Tools], ToolCallParser]] = {
    "gpt-oss": HarmonyParser,
    "hermes": HermesParser,
    "json": JsonParser,
    "llama3-json": JsonParser,
    "qwen3-coder": Qwen3CoderParser,
}
assert {*REASONING_FORMATS, "gpt-oss"} == set(REASONING_PARSERS)  # its parser is one for both
assert set(TOOL_CALL_FORMATS) == set(TOOL_CALL_PARSERS)


class OutputParser:
    """Splits the text of one choice into reasoning, content and tool calls."""

    def __init__(
        self,
        reasoning: ThinkParser | None,
        calls: ToolCallParser | None,
        *,
        hidden: Collection[str] = (),
    ) -> None:
        """`hidden`: markers that are removed where they are not part of the format."""
        self._reasoning, self._calls = reasoning, calls
        self._content_remover, self._reasoning_remover = (
            MarkerRemover(hidden),
            MarkerRemover(hidden),
        )

    def push(self, text: str) -> ParsedText:
        """Add text; return the parts that later text cannot change."""
        parsed = ParsedText(text) if self._reasoning is None else self._reasoning.push(text)
        return self._hide_markers(self._parse_content(parsed))

    def finish(self) -> ParsedText:
        """Return the withheld text, at the end of the output."""
        parsed = ParsedText() if self._reasoning is None else self._reasoning.finish()
        parsed = self._parse_content(parsed)
        if self._calls is not None:
            parsed.add(self._calls.finish())
        return self._hide_markers(parsed, is_end=True)

    def _parse_content(self, parsed: ParsedText) -> ParsedText:
        """Find tool calls in the content."""
        if self._calls is None or not parsed.content:
            return parsed
        result = ParsedText(reasoning=parsed.reasoning)
        result.add(self._calls.push(parsed.content))
        return result

    def _hide_markers(self, parsed: ParsedText, *, is_end: bool = False) -> ParsedText:
        parsed.content = self._content_remover.push(parsed.content, is_end=is_end)
        parsed.reasoning = self._reasoning_remover.push(parsed.reasoning, is_end=is_end)
        return parsed


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

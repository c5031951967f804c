"""Parts of generated text, and the search for markers in text that arrives in pieces."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple


class ToolCall(NamedTuple):
    """A call of a tool in generated text."""

    name: str
    arguments: str
    """JSON object."""


@dataclass(slots=True)
class ParsedText:
    """Parts of generated text, or new parts of a stream."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, other: "ParsedText") -> None:
        """Append the parts that follow."""
        self.content += other.content
        self.reasoning += other.reasoning
        self.tool_calls += other.tool_calls


def split_at_marker(text: str, *markers: str) -> tuple[str, str, str]:
    """Return the text before the first of several markers, the marker, empty if none occurs, and
    the rest: the text after it, or the end that may begin a marker.

    >>> split_at_marker("a</b>c", "</b>"), split_at_marker("a</", "</b>", "<i>")
    (('a', '</b>', 'c'), ('a', '', '</'))
    """
    positions = [(text.find(marker), marker) for marker in markers if marker in text]
    if positions:
        position, marker = min(positions)
        return text[:position], marker, text[position + len(marker) :]
    sizes = range(min(max(map(len, markers), default=1) - 1, len(text)), 0, -1)
    starts = (text[len(text) - size :] for size in sizes)
    rest = next((end for end in starts if any(each.startswith(end) for each in markers)), "")
    return text[: len(text) - len(rest)], "", rest


class MarkerRemover:
    """Removes markers from a text that arrives in pieces."""

    def __init__(self, markers: Collection[str]) -> None:
        self._markers, self._buffer = markers, ""

    def push(self, text: str, *, is_end: bool = False) -> str:
        """Add text; return the text without markers that later text cannot change."""
        self._buffer += text
        result, marker = "", "first"
        while marker:
            before, marker, self._buffer = split_at_marker(self._buffer, *self._markers)
            result += before
        if is_end:
            result, self._buffer = result + self._buffer, ""
        return result

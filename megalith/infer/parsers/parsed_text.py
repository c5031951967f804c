"""Parts of generated text, and the search for markers in text that arrives in pieces."""

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


def split_at_marker(text: str, marker: str) -> tuple[str, bool, str]:
    """Return the text before a marker, whether it occurs, and the rest: the text after it, or the
    end that may begin it.

    >>> split_at_marker("a</b>c", "</b>"), split_at_marker("a</", "</b>")
    (('a', True, 'c'), ('a', False, '</'))
    """
    before, separator, after = text.partition(marker)
    if separator:
        return before, True, after
    sizes = range(min(len(marker) - 1, len(text)), 0, -1)
    size = next((size for size in sizes if marker.startswith(text[-size:])), 0)
    return text[: len(text) - size], False, text[len(text) - size :]

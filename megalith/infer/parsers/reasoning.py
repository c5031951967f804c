"""Reasoning in generated text: the part before the answer, between markers."""

from typing import ClassVar

from megalith.infer.parsers.parsed_text import ParsedText, split_at_marker

THINK, END_THINK = "<think>", "</think>"


class ThinkParser:
    """Splits `<think>reasoning</think>answer`, as DeepSeek-R1, Qwen3 and Nemotron 3 write it; the
    first marker may be part of the prompt. Newlines next to the markers belong to neither part."""

    markers: ClassVar[tuple[str, ...]] = (THINK, END_THINK)

    def __init__(self) -> None:
        self._buffer = ""
        self._state = "start"

    def push(self, text: str) -> ParsedText:
        """Add text; return the parts that later text cannot change."""
        self._buffer += text
        if self._state == "start":
            stripped = self._buffer.lstrip()
            if THINK.startswith(stripped) and stripped != THINK:
                return ParsedText()
            self._buffer = stripped.removeprefix(THINK)
            self._state = "before reasoning"
        if self._state == "before reasoning":
            self._skip_newlines("reasoning")
        result = ParsedText()
        if self._state == "reasoning":
            before, is_end, rest = split_at_marker(self._buffer, END_THINK)
            result.reasoning = before.rstrip("\n")
            self._buffer = rest if is_end else before[len(result.reasoning) :] + rest
            if is_end:
                self._state = "before content"
        if self._state == "before content":
            self._skip_newlines("content")
        if self._state == "content":
            result.content, self._buffer = self._buffer, ""
        return result

    def finish(self) -> ParsedText:
        """Return the withheld text, at the end of the output."""
        rest, self._buffer = self._buffer, ""
        return ParsedText(content=rest) if self._state == "content" else ParsedText(reasoning=rest)

    def _skip_newlines(self, state: str) -> None:
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer:
            self._state = state

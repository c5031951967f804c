"""The harmony format of gpt-oss: messages in channels for reasoning, tool calls and the answer.

An output is a sequence of messages `<|channel|>NAME<|message|>TEXT<|end|>`, each but the first
after `<|start|>assistant`. The channel is analysis (reasoning), commentary (preambles, tool calls)
or final (the answer). A call names its tool in the header, ` to=functions.NAME`, before or after
the channel; `<|call|>` and `<|return|>` end the output.
Source: OpenAI, "OpenAI harmony response format", cookbook.openai.com/articles/openai-harmony.
"""

import re
from typing import ClassVar

from megalith.infer.parsers.parsed_text import ParsedText, split_at_marker
from megalith.infer.parsers.tool_calls import Tools, read_call

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
RECIPIENT = "to=functions."
MAX_HEADER_CHARACTERS = 256
"""A longer text without `<|message|>` is content (heuristic: a header is a channel and a tool)."""


class HarmonyParser:
    """Splits messages in the harmony format. Text without a header is content, and so are calls of
    unknown tools or with malformed arguments; messages to other recipients are reasoning."""

    markers: ClassVar[tuple[str, ...]] = (START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN)
    turn_ends: ClassVar[tuple[str, ...]] = (CALL, RETURN)
    """What ends a turn; `<|end|>` ends only a message."""

    _BODY_ENDS = (START, END, CHANNEL, CALL, RETURN)
    _HEADER_STARTS = ("<|", "to=")
    _RECIPIENT = re.compile(r"\bto=(functions\.)?([^\s<]+)")

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._buffer = ""
        self._arguments: list[str] = []
        """Of an incomplete call."""
        self._part = ""  # content, reasoning or call; empty: a header, or text without one
        self._tool = ""
        self._separator = ""
        self._has_text = {"content": False, "reasoning": False}

    def push(self, text: str) -> ParsedText:
        """Add text; return the parts that later text cannot change."""
        self._buffer += text
        result = ParsedText()
        while self._read_header() if not self._part else self._read_body(result):
            pass
        return result

    def finish(self) -> ParsedText:
        """Return the withheld text, at the end of the output; an incomplete header is dropped."""
        result = ParsedText()
        rest, self._buffer = self._buffer, ""
        if self._part == "call":
            self._add_call(self._take_arguments() + rest, result)
        elif self._part or not rest.lstrip().startswith((*self.markers, "to=")):
            self._add(self._part or "content", rest, result)
        return result

    def _read_header(self) -> bool:
        """Read the header of a message; False: it may be incomplete."""
        stripped = self._buffer.lstrip()
        if not stripped.startswith(self._HEADER_STARTS):
            if any(start.startswith(stripped) for start in self._HEADER_STARTS):
                return False
            self._begin("content")
            return True
        end = stripped.find(MESSAGE, 0, MAX_HEADER_CHARACTERS)
        if end < 0 and len(stripped) < MAX_HEADER_CHARACTERS:
            return False
        if end < 0:  # no header: its first marker is removed, so that it is not read again
            self._buffer = re.sub(r"^<\|\w{0,32}\|>", "", stripped)
            self._begin("content")
            return True
        header = stripped[:end].rpartition(START)[2]
        self._buffer = stripped[end + len(MESSAGE) :]
        recipient = self._RECIPIENT.search(header)
        if recipient is not None and recipient[1]:
            self._tool = recipient[2]
            self._begin("call")
        else:
            channel = header.rpartition(CHANNEL)[2].split()[:1]
            is_reasoning = recipient is not None or channel == ["analysis"]
            self._begin("reasoning" if is_reasoning else "content")
        return True

    def _begin(self, part: str) -> None:
        self._part = part
        self._separator = "\n" if self._has_text.get(part) else ""

    def _read_body(self, result: ParsedText) -> bool:
        """Read the text of a message; False: it may be incomplete."""
        before, end, rest = split_at_marker(self._buffer, *self._BODY_ENDS)
        self._buffer = rest
        if self._part != "call":
            self._add(self._part, before, result)
        else:
            self._arguments.append(before)
            if end:
                self._add_call(self._take_arguments(), result)
        if not end:
            return False
        if end in (START, CHANNEL):  # the message has no end
            self._buffer = end + rest
        self._part = ""
        return True

    def _take_arguments(self) -> str:
        """Return the arguments of the call that were read."""
        arguments, self._arguments = "".join(self._arguments), []
        return arguments

    def _add(self, part: str, text: str, result: ParsedText) -> None:
        """Add text of a message, on a new line after the previous message of the part."""
        if not text:
            return
        text, self._separator = self._separator + text, ""
        self._has_text[part] = True
        result.add(ParsedText(reasoning=text) if part == "reasoning" else ParsedText(text))

    def _add_call(self, body: str, result: ParsedText) -> None:
        call = read_call({"name": self._tool, "arguments": body.strip() or "{}"}, self._tools)
        if call is None:
            self._begin("content")
            self._add("content", body, result)
        else:
            result.tool_calls.append(call)

"""The words of a shell script: quotes, variables, arrays and comments. Nothing is
run."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megalith.errors import ConfigError

_OPERATOR = re.compile(r"&&|\|\||;;|<<<|<<-?|>>|>&|<&|&>>?|\|&|[;&|<>()\n]")
_NAME = re.compile(r"\w+|[@*#?$!-]")
_ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=\(")


@dataclass(frozen=True, slots=True)
class WordPart:
    """A piece of a word."""

    kind: Literal["text", "variable", "arithmetic", "command"]
    text: str
    """Letters as they are; the inside of `${...}` or `$((...))`; a command as it was written."""

    quoted: bool
    """Between quotes: not divided at blanks."""


@dataclass(frozen=True, slots=True)
class Word:
    """One word, still to be filled in."""

    parts: tuple[WordPart, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Operator:
    """What stands between commands: a line's end, `;`, `&&`, `|`, a redirection, a bracket."""

    text: str
    line: int
    glued: bool = False
    """No blank before it, as in `2>&1`."""


@dataclass(frozen=True, slots=True)
class ArrayLiteral:
    """`NAME=( ... )` or `NAME+=( ... )`."""

    name: str
    append: bool
    words: tuple[Word, ...]
    line: int


Token = Word | Operator | ArrayLiteral


def tokens(text: str) -> Iterator[Token]:
    """The words and operators of a script, comments and here-documents left out.

    Raises:
        ConfigError: a quote or bracket is not closed.
    """
    reader = _Reader(text)
    while (token := reader.token()) is not None:
        yield token


def parts_of(text: str) -> tuple[WordPart, ...]:
    """The pieces of a text as between double quotes; used for the default in `${NAME:-default}`."""
    reader = _Reader(text)
    return tuple(reader.quoted(end=None))


class _Reader:
    """Walks through a script."""

    def __init__(self, text: str) -> None:
        self.text = text.replace("\r\n", "\n")
        self.at = 0
        self.heredocs: list[str] = []

    @property
    def line(self) -> int:
        """The line being read."""
        return self.text.count("\n", 0, self.at) + 1

    def token(self) -> Token | None:
        """The next token, None at the end."""
        self.skip_blanks()
        if self.at >= len(self.text):
            return None
        line = self.line
        array = _ARRAY.match(self.text, self.at)
        if array:
            self.at = array.end()
            return ArrayLiteral(array[1], bool(array[2]), tuple(self.array_words(line)), line)
        operator = _OPERATOR.match(self.text, self.at)
        if operator:
            return self.operator(operator[0], line)
        return Word(tuple(self.word()), line)

    def operator(self, text: str, line: int) -> Operator:
        """An operator; after a line that opens here-documents, these are skipped."""
        glued = self.at > 0 and self.text[self.at - 1] not in " \t\n"
        self.at += len(text)
        if text in ("<<", "<<-"):
            self.skip_blanks()
            self.heredocs.append("".join(part.text for part in self.word()))
        elif text == "\n" and self.heredocs:
            for end in self.heredocs:
                match = re.compile(rf"^[ \t]*{re.escape(end)}$", re.MULTILINE).search(
                    self.text, self.at
                )
                self.at = match.end() if match else len(self.text)
            self.heredocs = []
        return Operator(text, line, glued)

    def skip_blanks(self) -> None:
        """Go past blanks, continued lines and comments, but not past a line's end."""
        while self.at < len(self.text):
            if self.text[self.at] in " \t":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def array_words(self, line: int) -> Iterator[Word]:
        """The words up to the bracket that closes an array."""
        while True:
            self.skip_blanks()
            if self.at >= len(self.text):
                raise ConfigError(
                    f"line {line}: the array that ( opens is not closed. Use ) behind its last "
                    "word."
                )
            if self.text[self.at] in "\n)":
                self.at += 1
                if self.text[self.at - 1] == ")":
                    return
            else:
                yield Word(tuple(self.word()), self.line)

    def word(self) -> Iterator[WordPart]:
        """The pieces of one word; it ends at a blank or an operator."""
        start = self.at
        while self.at < len(self.text):
            character = self.text[self.at]
            if character in " \t" or _OPERATOR.match(self.text, self.at):
                break
            if self.text.startswith("\\\n", self.at):
                self.at += 2
            elif character == "\\":
                self.at += 2
                yield WordPart("text", self.text[self.at - 1 : self.at], True)
            elif character == "'":
                end = self.find("'", self.at + 1)
                yield WordPart("text", self.text[self.at + 1 : end], True)
                self.at = end + 1
            elif character == '"':
                self.at += 1
                yield WordPart("text", "", True)  # an empty word is a word
                yield from self.quoted(end='"')
                self.at += 1
            elif character in "$`":
                yield self.dollar(quoted=False)
            else:
                self.at += 1
                yield WordPart("text", character, False)
        assert self.at > start, f"no word at {start}"

    def quoted(self, *, end: str | None) -> Iterator[WordPart]:
        """The pieces up to the closing quote, or to the end of the text."""
        line = self.line
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == end:
                return
            if character == "\\" and self.text[self.at + 1 : self.at + 2] in (
                "$",
                "`",
                '"',
                "\\",
                "\n",
            ):
                self.at += 2
                yield WordPart("text", self.text[self.at - 1].replace("\n", ""), True)
            elif character in "$`":
                yield self.dollar(quoted=True)
            else:
                self.at += 1
                yield WordPart("text", character, True)
        if end is not None:
            raise ConfigError(
                f"line {line}: the quote {end} is not closed. Use another {end} behind the text."
            )

    def dollar(self, *, quoted: bool) -> WordPart:
        """A variable, an arithmetic expression, or a command whose output is meant."""
        start = self.at
        if self.text[start] == "`":
            self.at = self.find("`", start + 1) + 1
            return WordPart("command", self.text[start : self.at], quoted)
        if self.text.startswith("$((", start):
            self.at = self.find("))", start) + 2
            return WordPart("arithmetic", self.text[start + 3 : self.at - 2], quoted)
        if self.text.startswith(("$(", "${"), start):
            self.at = self.closing(start + 1)
            kind: Literal["command", "variable"] = (
                "command" if self.text[start + 1] == "(" else "variable"
            )
            inside = (
                self.text[start : self.at]
                if kind == "command"
                else self.text[start + 2 : self.at - 1]
            )
            return WordPart(kind, inside, quoted)
        name = _NAME.match(self.text, start + 1)
        if name is None:
            self.at += 1
            return WordPart("text", "$", quoted)
        # $10 means ${1}0: only one digit belongs to a parameter
        self.at = start + 2 if name[0][0].isdigit() else name.end()
        return WordPart("variable", self.text[start + 1 : self.at], quoted)

    def closing(self, start: int) -> int:
        """Behind the bracket that closes the one at `start`."""
        opening, closing, depth = self.text[start], {"(": ")", "{": "}"}[self.text[start]], 0
        for place in range(start, len(self.text)):
            depth += (self.text[place] == opening) - (self.text[place] == closing)
            if depth == 0:
                return place + 1
        raise ConfigError(f"line {self.line}: ${opening} is not closed. Use {closing} behind it.")

    def find(self, text: str, start: int) -> int:
        """Where `text` stands next."""
        place = self.text.find(text, start)
        if place < 0:
            raise ConfigError(
                f"line {self.line}: expected {text} later. Use it to close what opens there."
            )
        return place

"""Tokens and variables of shell scripts, as far as they are known without running anything."""

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megalith.errors import ConfigError

MAX_WORK = 300_000
"""Characters of expansions and words that are read in one script. Heuristic: long scripts need a
hundredth."""

MAX_DEFAULTS = 20
"""Nested defaults, as in ${A:-${B:-...}}. Heuristic: scripts nest two."""

_MAX_ARITHMETIC = 200
"""Longest arithmetic expression that is evaluated, in characters. Heuristic."""

_MAX_INT = 2**63
"""Limit of bash integers, which have 64 bits."""

_EXPANSION = re.compile(r"(#?)(\w+|[@*#?$!-])(?:\[([^\]]*)\])?(:?[-=+?])?(.*)", re.DOTALL)
_COMPARE: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_ARITHMETIC: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.Div: operator.floordiv,
}
_OPERATOR = re.compile(r"&&|\|\||;;|<<<|<<-?|>>|>&|<&|&>>?|\|&|[;&|<>()\n]")
_NAME = re.compile(r"\w+|[@*#?$!-]")
_ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=\(")


@dataclass(frozen=True, slots=True)
class WordPart:
    """Part of a word."""

    kind: Literal["text", "variable", "arithmetic", "command"]
    text: str
    """Literal text; the inside of `${...}` or `$((...))`; a command as it was written."""

    quoted: bool
    """Whether it is quoted, so that blanks do not split it."""


@dataclass(frozen=True, slots=True)
class Word:
    """One word before expansion."""

    parts: tuple[WordPart, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Operator:
    """Separator of commands: end of line, `;`, `&&`, `|`, redirection or bracket."""

    text: str
    line: int
    glued: bool = False
    """Whether no blank precedes it, as in `2>&1`."""


@dataclass(frozen=True, slots=True)
class ArrayLiteral:
    """`NAME=( ... )` or `NAME+=( ... )`."""

    name: str
    append: bool
    words: tuple[Word, ...]
    line: int


Token = Word | Operator | ArrayLiteral


def tokenize(text: str) -> Iterator[Token]:
    """Yield the words and operators of a script, without comments and here-documents.

    Raises:
        ConfigError: a quote or bracket is not closed.
    """
    reader = _Tokenizer(text)
    while (token := reader.token()) is not None:
        yield token


def split_parts(text: str) -> tuple[WordPart, ...]:
    """Return the parts of a text in double quotes, such as the default in `${NAME:-default}`."""
    reader = _Tokenizer(text)
    return tuple(reader.quoted(end=None))


class _Tokenizer:
    """Position in a script that is tokenized."""

    def __init__(self, text: str) -> None:
        self.text = text.replace("\r\n", "\n")
        self.at = 0
        self.heredocs: list[str] = []

    @property
    def line(self) -> int:
        """Current line number."""
        return self.text.count("\n", 0, self.at) + 1

    def token(self) -> Token | None:
        """Return the next token; None at the end."""
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
        """Return an operator; here-documents are skipped after the line that opens them."""
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
        """Skip blanks, continued lines and comments, but not the end of a line."""
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
        """Yield the words up to the bracket that closes an array."""
        while True:
            self.skip_blanks()
            if self.at >= len(self.text):
                raise ConfigError(
                    f"line {line}: the array that ( opens is not closed. Use ) after its last word."
                )
            if self.text[self.at] in "\n)":
                self.at += 1
                if self.text[self.at - 1] == ")":
                    return
            else:
                yield Word(tuple(self.word()), self.line)

    def word(self) -> Iterator[WordPart]:
        """Yield the parts of one word, which ends at a blank or an operator."""
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
        """Yield the parts up to the closing quote, or to the end of the text."""
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
                f"line {line}: the quote {end} is not closed. Use another {end} after the text."
            )

    def dollar(self, *, quoted: bool) -> WordPart:
        """Return a variable, an arithmetic expression or a command substitution."""
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
        """Return the position after the bracket that closes the one at `start`."""
        opening, closing, depth = self.text[start], {"(": ")", "{": "}"}[self.text[start]], 0
        for place in range(start, len(self.text)):
            depth += (self.text[place] == opening) - (self.text[place] == closing)
            if depth == 0:
                return place + 1
        raise ConfigError(f"line {self.line}: ${opening} is not closed. Use {closing} after it.")

    def find(self, text: str, start: int) -> int:
        """Return the next position of `text`."""
        place = self.text.find(text, start)
        if place < 0:
            raise ConfigError(
                f"line {self.line}: expected a closing {text}, and there is none. Add it."
            )
        return place


# --- variables


@dataclass(slots=True)
class Variables:
    """Values of variables, and which of them are uncertain."""

    fixed: Mapping[str, str]
    """Variables set by the caller, which the script cannot change; "1", "2" ... are its
    arguments."""

    values: dict[str, list[str]] = field(default_factory=dict)
    """Variables set by the script; one that is no array has one value."""

    arrays: set[str] = field(default_factory=set)
    """Names of arrays."""

    uncertain: dict[str, int] = field(default_factory=dict)
    """Variables that a condition may have changed, with the line of the condition."""

    work: int = 0
    """Sum of the amounts passed to `charge`."""

    defaults: int = 0
    """Nesting depth of the defaults that are being expanded."""

    def charge(self, amount: int) -> None:
        """Add to the work of reading the script, which variables and functions may multiply without
        limit.

        Raises:
            ConfigError: the limit is exceeded.
        """
        self.work += amount
        if self.work > MAX_WORK:
            raise ConfigError(
                f"its variables and functions expand to more than {MAX_WORK:,} characters and "
                "words. Use a shorter "
                f"script, or pass the arguments themselves."
            )

    def assign(
        self,
        name: str,
        literal: Word | ArrayLiteral,
        *,
        append: bool,
        active: bool | None,
        line: int,
    ) -> None:
        """Set a variable. `active` None: the condition at `line` decides whether it is set."""
        if name in self.fixed:
            return
        words = literal.words if isinstance(literal, ArrayLiteral) else (literal,)
        uncertain_lines = [
            self.uncertain[used]
            for word in words
            for used in variable_names(word)
            if used in self.uncertain
        ]
        if isinstance(literal, ArrayLiteral):
            values = [value for word in words for value in self.expand_word(word)]
            self.arrays.add(name)
        else:
            values = [self.expand_text(literal.parts)]
        before = self.values.get(name, [])
        if append:
            values = (
                [*before, *values] if name in self.arrays else ["".join([*before[:1], *values])]
            )
        if uncertain_lines or (active is None and values != before):
            self.uncertain.setdefault(name, uncertain_lines[0] if uncertain_lines else line)
        elif not append:
            self.uncertain.pop(name, None)
        self.values[name] = values

    def expand_word(self, word: Word) -> list[str]:
        """Return a word with its variables expanded; unquoted values are split at blanks, so it may
        become several words or none."""
        fields: list[str] = []
        open_field = is_empty = False
        for part in word.parts:
            pieces, was_split = self.expand_part(part)
            # "${NONE[@]}" of an empty array is no word at all
            is_empty |= part.quoted and not pieces
            for number, piece in enumerate(pieces):
                if number == 0 and open_field and not (was_split and piece == ""):
                    fields[-1] += piece
                elif piece or part.quoted:
                    fields.append(piece)
                open_field = bool(fields)
            if was_split and pieces and pieces[-1] == "":
                open_field = False
        return [] if is_empty and fields == [""] else fields

    def expand_part(self, part: WordPart) -> tuple[list[str], bool]:
        """Return the fields of one part of a word, and whether they were split at blanks (an empty
        last one then ends a field)."""
        if part.kind == "text":
            return [part.text], False
        values = self.expand(part)
        if part.quoted or part.kind != "variable":
            return values, False
        text = " ".join(values)
        return re.split(r"\s+", text) if text else [], True

    def expand_text(self, parts: Sequence[WordPart]) -> str:
        """Return the expanded parts as one text, as in an assignment."""
        return "".join(
            " ".join(self.expand(part)) if part.kind != "text" else part.text for part in parts
        )

    def expand(self, part: WordPart) -> list[str]:
        """Return the values of a variable, an expression or a command; unknown ones stay as they
        were written."""
        if part.kind == "command":
            return [part.text]
        if part.kind == "arithmetic":
            value = self.arithmetic(part.text)
            return [f"$(({part.text}))"] if value is None else [str(value)]
        match = _EXPANSION.fullmatch(part.text)
        if match is None:
            return [f"${{{part.text}}}"]
        length, name, index, operation, rest = match.groups()
        values = self.lookup(name, index)
        self.charge(sum(1 + len(value) for value in values or ()))
        if length or (rest and not operation):
            return [f"${{{part.text}}}"]  # lengths and replacements are not evaluated
        if operation and operation[-1] in "-=":
            empty = values is None or (operation[0] == ":" and values in ([], [""]))
            return [self.default(rest)] if empty else values or []
        if operation and operation[-1] == "+":
            return [self.default(rest)] if values not in (None, [], [""]) else []
        return [f"${{{name}}}"] if values is None else values

    def default(self, text: str) -> str:
        """Expand the text after `:-` or `:+`.

        Raises:
            ConfigError: defaults are nested too deeply.
        """
        self.charge(len(text))
        if self.defaults >= MAX_DEFAULTS:
            raise ConfigError(
                f"a ${{...}} has more than {MAX_DEFAULTS} defaults inside each other. Pass --set "
                "NAME=VALUE for it."
            )
        self.defaults += 1
        value = self.expand_text(split_parts(_unquote(text)))
        self.defaults -= 1
        return value

    def lookup(self, name: str, index: str | None) -> list[str] | None:
        """Return the values of a variable; None if it is not set."""
        if name in ("@", "*"):
            return [self.fixed[key] for key in sorted(self.fixed) if key.isdecimal()]
        if name == "#":
            return [str(sum(key.isdecimal() for key in self.fixed))]
        if name in self.fixed:
            return [self.fixed[name]]
        values = self.values.get(name)
        if values is None or index in ("@", "*"):
            return values
        if index is not None:
            return [values[int(index)]] if index.isdecimal() and int(index) < len(values) else None
        return values[:1] if name in self.arrays else values

    def arithmetic(self, text: str) -> int | None:
        """Return the value of `$((...))`; None if a part of it is no known whole number."""
        plain = re.sub(r"\$\{?(\w+)\}?", r"\1", text)
        if len(plain) > _MAX_ARITHMETIC:
            return None
        try:
            value = self.evaluate(ast.parse(plain.strip(), mode="eval").body)
            return value if abs(value) < _MAX_INT else None
        except (SyntaxError, ValueError, ZeroDivisionError):
            return None

    def evaluate(self, node: ast.expr) -> int:
        """Evaluate an expression of whole numbers; divisions round down."""
        match node:
            case ast.Constant(value=int(value)):
                return value
            case ast.Name(id=name):
                values = self.lookup(name, None)
                if values is None or len(values) != 1:
                    raise ValueError(f"{name} must be one whole number")
                return int(values[0])
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.evaluate(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return _ARITHMETIC[type(op)](self.evaluate(left), self.evaluate(right))
        raise ValueError(f"{ast.dump(node)} is not evaluated: use whole numbers and + - * / %")

    def test(self, words: Sequence[Word]) -> bool | None:
        """Evaluate `[ ... ]`, `[[ ... ]]` or `test ...`; None if unknown."""
        texts = [self.expand_text(word.parts) for word in words]
        if any(name in self.uncertain for word in words for name in variable_names(word)) or any(
            "$" in text for text in texts
        ):
            return None
        texts = [text for text in texts if text not in ("[", "[[", "]", "]]", "test")]
        negated = texts[:1] == ["!"]
        answer = _evaluate_test(texts[1:] if negated else texts)
        return answer if answer is None or not negated else not answer


def variable_names(word: Word) -> list[str]:
    """Return the variables in a word."""
    matches = [_EXPANSION.fullmatch(part.text) for part in word.parts if part.kind == "variable"]
    return [match[2] for match in matches if match]


def _evaluate_test(words: list[str]) -> bool | None:
    """Evaluate a test whose words are all known; None for other tests, such as those of files."""
    match words:
        case ["-z", text]:
            return text == ""
        case ["-n", text] | [text]:
            return text != ""
        case [left, "=" | "==", right]:
            return fnmatch.fnmatchcase(left, right)
        case [left, "!=", right]:
            return not fnmatch.fnmatchcase(left, right)
        case [left, ("-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge") as comparison, right]:
            if re.fullmatch(r"-?\d+", left) and re.fullmatch(r"-?\d+", right):
                return _COMPARE[comparison](int(left), int(right))
    return None


def _unquote(text: str) -> str:
    """Return the default of `${NAME:-"default"}` without its quotes."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text

"""What the variables of a shell script hold, as far as it is known without running it."""

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megalith.errors import ConfigError
from megalith.megatron.shell import ArrayLiteral, Word, WordPart, parts_of

MAX_WORK = 300_000
"""Characters that expansions give, and words that are read, in one script. Heuristic: long scripts
need a hundredth."""

MAX_DEFAULTS = 20
"""Nested defaults, as in ${A:-${B:-...}}. Heuristic: scripts nest two."""

_MAX_ARITHMETIC = 200
"""Characters of an arithmetic expression that is followed. Heuristic."""

_MAX_INT = 2**63
"""Bash computes with 64 bits."""

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


@dataclass(slots=True)
class Variables:
    """Values by name, and which of them cannot be relied on."""

    fixed: Mapping[str, str]
    """Set from outside; the script cannot change them. "1", "2" ... are the script's own
    arguments."""

    values: dict[str, list[str]] = field(default_factory=dict)
    """What the script set; a plain variable has one value."""

    arrays: set[str] = field(default_factory=set)
    """The names that are arrays."""

    unsure: dict[str, int] = field(default_factory=dict)
    """Variables that a condition may have changed, with the line where it stands."""

    work: int = 0
    """What `charge` has added up."""

    defaults: int = 0
    """Defaults that are being filled in now, one inside the other."""

    def charge(self, amount: int) -> None:
        """Add to the work of reading the script, which variables and functions may multiply without
        end.

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
        """Set a variable; `active` None: it may have been set, by the condition at `line`."""
        if name in self.fixed:
            return
        words = literal.words if isinstance(literal, ArrayLiteral) else (literal,)
        doubtful = [
            self.unsure[used] for word in words for used in names_in(word) if used in self.unsure
        ]
        if isinstance(literal, ArrayLiteral):
            values = [value for word in words for value in self.fill(word)]
            self.arrays.add(name)
        else:
            values = [self.joined(literal.parts)]
        before = self.values.get(name, [])
        if append:
            values = (
                [*before, *values] if name in self.arrays else ["".join([*before[:1], *values])]
            )
        if doubtful or (active is None and values != before):
            self.unsure.setdefault(name, doubtful[0] if doubtful else line)
        elif not append:
            self.unsure.pop(name, None)
        self.values[name] = values

    def fill(self, word: Word) -> list[str]:
        """A word with its variables filled in; blanks divide unquoted ones, so it may become
        several words or none."""
        fields: list[str] = []
        open_field = vanished = False
        for part in word.parts:
            pieces, divided = self.pieces(part)
            vanished |= (
                part.quoted and not pieces
            )  # "${NONE[@]}" of an empty array is no word at all
            for number, piece in enumerate(pieces):
                if number == 0 and open_field and not (divided and piece == ""):
                    fields[-1] += piece
                elif piece or part.quoted:
                    fields.append(piece)
                open_field = bool(fields)
            if divided and pieces and pieces[-1] == "":
                open_field = False
        return [] if vanished and fields == [""] else fields

    def pieces(self, part: WordPart) -> tuple[list[str], bool]:
        """The fields of one piece of a word, and whether blanks divided them (an empty end then
        closes a field)."""
        if part.kind == "text":
            return [part.text], False
        values = self.expand(part)
        if part.quoted or part.kind != "variable":
            return values, False
        text = " ".join(values)
        return re.split(r"\s+", text) if text else [], True

    def joined(self, parts: Sequence[WordPart]) -> str:
        """The same as one text, as an assignment takes it."""
        return "".join(
            " ".join(self.expand(part)) if part.kind != "text" else part.text for part in parts
        )

    def expand(self, part: WordPart) -> list[str]:
        """The values that a variable, an expression or a command stands for; unknown ones stay as
        they were written."""
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
            return [f"${{{part.text}}}"]  # lengths and replacements are not followed
        if operation and operation[-1] in "-=":
            empty = values is None or (operation[0] == ":" and values in ([], [""]))
            return [self.default(rest)] if empty else values or []
        if operation and operation[-1] == "+":
            return [self.default(rest)] if values not in (None, [], [""]) else []
        return [f"${{{name}}}"] if values is None else values

    def default(self, text: str) -> str:
        """Fill in the text after `:-` or `:+`.

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
        value = self.joined(parts_of(_unquoted(text)))
        self.defaults -= 1
        return value

    def lookup(self, name: str, index: str | None) -> list[str] | None:
        """The values of a variable, None when nothing sets it."""
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
        """The value of `$((...))`; None when something in it is not a known whole number."""
        plain = re.sub(r"\$\{?(\w+)\}?", r"\1", text)
        if len(plain) > _MAX_ARITHMETIC:
            return None
        try:
            value = self.number(ast.parse(plain.strip(), mode="eval").body)
            return value if abs(value) < _MAX_INT else None
        except (SyntaxError, ValueError, ZeroDivisionError):
            return None

    def number(self, node: ast.expr) -> int:
        """A whole number out of an expression; divisions are those of whole numbers."""
        match node:
            case ast.Constant(value=int(value)):
                return value
            case ast.Name(id=name):
                values = self.lookup(name, None)
                if values is None or len(values) != 1:
                    raise ValueError(f"{name} must be one whole number")
                return int(values[0])
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.number(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return _ARITHMETIC[type(op)](self.number(left), self.number(right))
        raise ValueError(f"{ast.dump(node)} is not followed: use whole numbers and + - * / %")

    def test(self, words: Sequence[Word]) -> bool | None:
        """The answer of `[ ... ]`, `[[ ... ]]` or `test ...`; None if unknown."""
        texts = [self.joined(word.parts) for word in words]
        if any(name in self.unsure for word in words for name in names_in(word)) or any(
            "$" in text for text in texts
        ):
            return None
        texts = [text for text in texts if text not in ("[", "[[", "]", "]]", "test")]
        negated = texts[:1] == ["!"]
        answer = _judge(texts[1:] if negated else texts)
        return answer if answer is None or not negated else not answer


def names_in(word: Word) -> list[str]:
    """The variables that a word uses."""
    matches = [_EXPANSION.fullmatch(part.text) for part in word.parts if part.kind == "variable"]
    return [match[2] for match in matches if match]


def _judge(words: list[str]) -> bool | None:
    """The answer of a test whose words are all known; None for questions about files and the
    like."""
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


def _unquoted(text: str) -> str:
    """The default of `${NAME:-"default"}` without its quotes."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text

"""A list of Megatron's arguments as typed values, with everything in it that cannot be read."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from megalith import storage
from megalith.config.fields import Plain
from megalith.errors import MAX_PROBLEMS, ConfigError, did_you_mean
from megalith.megatron.already import ALREADY, EXPLAINED
from megalith.megatron.elsewhere import OTHERS, REMOVED
from megalith.megatron.mapped import MAPPED
from megalith.megatron.table import FlagRow, Takes, expand
from megalith.megatron.waiting import LATER, MODEL, NUMBERS

ROWS: Mapping[str, FlagRow] = {name: row for row in MAPPED for name in (row.name, *row.aliases)}
"""Every flag that becomes settings of ours, under each of its spellings."""

UNMAPPED = expand((*ALREADY, *EXPLAINED, *LATER, *NUMBERS, *MODEL, *REMOVED, *OTHERS))
"""Every flag that becomes nothing here, with the reason."""

FILE_FLAGS = ("--data-args-path", "--per-split-data-args-path")
"""Flags whose file holds the words of others; `with_files` puts these in their place."""

_MAX_ADVICE = 20
"""Problems that come with the nearest name, which takes tens of milliseconds to find among all
flags."""

_WORDS: Mapping[Takes, str] = {
    "int": "a whole number",
    "float": "a number",
    "text": "one word",
    "place": "a path",
}
_VARIABLE = re.compile(r"(?:\$\{?|(?=`))(\w+|[@*#?(`])")


@dataclass(frozen=True, slots=True)
class Arguments:
    """What was typed."""

    words: Mapping[str, tuple[str, ...]]
    """The words behind each flag, under its first spelling; the last of two counts."""

    values: Mapping[str, Plain]
    """Those of the flags that become settings, as values."""

    problems: tuple[str, ...]
    """What cannot be read, as messages."""

    def given(self, name: str) -> bool:
        """Was this flag typed?"""
        return name in self.words

    def value(self, name: str) -> Plain:
        """The value of a flag that becomes settings, or the one Megatron assumes."""
        row = ROWS[name]
        return self.values.get(name, False if row.takes == "nothing" else row.default)

    def typed(self, name: str) -> str:
        """The flag as it was typed, or with the value that Megatron assumes."""
        if name in self.words:
            return " ".join((name, *self.words[name]))
        row = ROWS.get(name)
        assumed = "" if row is None or row.default is None else f" {row.default}"
        return f"{name}{assumed} (left out)"


def known_flags() -> list[str]:
    """Every flag of Megatron's that the table explains."""
    return sorted({*ROWS, *UNMAPPED, *FILE_FLAGS})


def read_arguments(words: Sequence[str]) -> Arguments:
    """The flags of a list of arguments. Nothing is raised: all that is wrong is in `problems`."""
    words_by_flag: dict[str, tuple[str, ...]] = {}
    problems: list[str] = []
    for name, behind in _flags(words, problems):
        if name in ROWS:
            words_by_flag[ROWS[name].name] = behind
        elif name in UNMAPPED:
            words_by_flag[name] = behind
            problems += [_stray(name, behind)] if UNMAPPED[name].alone and behind else []
        elif name in FILE_FLAGS:
            problems.append(
                f"{name} has {len(behind)} values, and none was read. Use {name} with one file."
            )
        else:
            near = did_you_mean(name, known_flags()) if len(problems) < _MAX_ADVICE else ""
            advice = near or " Remove it, or use the name that Megatron gives it."
            problems.append(f"{_shown(name, behind)}: Megatron has no such argument.{advice}")
    values: dict[str, Plain] = {}
    for name, behind in words_by_flag.items():
        if name in ROWS:
            value, problem = _value(ROWS[name], behind)
            problems += [problem] if problem else []
            values |= {} if problem else {name: value}
    return Arguments(words_by_flag, values, tuple(problems))


def with_files(words: Sequence[str]) -> list[str]:
    """The same arguments, with the prefixes that a file lists in place of the flag that names the
    file.

    Raises:
        ConfigError: the file cannot be read, or is not what Megatron expects.
    """
    result = list(
        takewhile(lambda word: not word.startswith("--"), words)
    )  # a problem, which `read_arguments` tells
    for name, behind in _flags(words[len(result) :], []):
        if name not in FILE_FLAGS or len(behind) != 1:
            result += [name, *behind]
        elif name == FILE_FLAGS[0]:
            result += ["--data-path", *_read(name, behind[0]).split()]
        else:
            result += _split_paths(name, behind[0])
    return result


def _read(name: str, path: str) -> str:
    try:
        return storage.read_text(Path(path), allow_pipe=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{name} {path}: {error}. Pass a file of data prefixes, or the prefixes."
        ) from None


def _split_paths(name: str, path: str) -> list[str]:
    """A JSON object of prefixes for each split, as flags."""
    try:
        splits = storage.parse_json(_read(name, path))
    except ValueError as error:
        raise ConfigError(
            f"{name} {path} is not JSON: {error}. Use an object with train, valid and test."
        ) from None
    if not isinstance(splits, dict) or not set(splits) <= {"train", "valid", "test"}:
        raise ConfigError(
            f"{name} {path} holds {splits!s:.60}: expected an object with train, valid and test."
        )
    words: list[str] = []
    for split, value in splits.items():
        prefixes = value.split() if isinstance(value, str) else [str(word) for word in value or ()]
        words += [f"--{split}-data-path", *prefixes] if prefixes else []
    return words


def same_value(left: str, right: str) -> bool:
    """Are two texts the same value? Numbers may be written in several ways."""
    try:
        return float(left) == float(right)
    except ValueError:
        return left == right


def _flags(words: Sequence[str], problems: list[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Each flag with the words up to the next one; words before the first flag are a problem."""
    flags: list[tuple[str, list[str]]] = []
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--") and len(word) > 2:
            flags.append((name, [value] if equals else []))
        elif flags:
            flags[-1][1].append(word)
        elif len(problems) < MAX_PROBLEMS:
            problems.append(
                f"{word:.200} stands before the first argument. Use Megatron's --name value, or "
                "--script FILE."
            )
    return [(name, tuple(behind)) for name, behind in flags]


def _value(row: FlagRow, words: tuple[str, ...]) -> tuple[Plain, str | None]:
    """The value behind a flag, or what is wrong with it."""
    typed = _shown(row.name, words)
    unset = [name for word in words for name in _VARIABLE.findall(word)]
    if unset and row.takes != "place":
        return None, _unset(typed, unset[0])
    if row.takes == "words":
        return list(
            words
        ), None if words else f"{row.name} has no value. Use {row.name} with one or more prefixes."
    if row.takes == "nothing":
        return (None, _stray(row.name, words)) if words else (True, None)
    if len(words) != 1:
        expected = _WORDS.get(row.takes) or f"one of {', '.join(row.choices)}"
        return (
            None,
            f"{typed}: expected {expected}, found {len(words)} words. Use {row.name} with one.",
        )
    return _one(row, words[0])


def _shown(name: str, words: Sequence[str]) -> str:
    """Return an argument as it was typed, cut where it is very long."""
    text = f"{name:.200}" + "".join(f" {word:.200}" for word in words[:20])
    return text if len(words) <= 20 else f"{text} ..."


def _stray(name: str, words: tuple[str, ...]) -> str:
    """The message about words behind a flag that stands alone."""
    typed = _shown(name, words)
    unset = [variable for word in words for variable in _VARIABLE.findall(word)]
    return (
        _unset(typed, unset[0])
        if unset
        else f"{typed}: expected nothing after {name}. Use {name} alone."
    )


def _unset(typed: str, variable: str) -> str:
    if variable in ("(", "`"):
        return (
            f"{typed}: what that command prints is not known here. Pass {typed.split()[0]} "
            "with its value."
        )
    return f"{typed}: nothing says what ${variable} is. Pass --set {variable}=VALUE."


def _one(row: FlagRow, word: str) -> tuple[Plain, str | None]:
    if row.takes == "choice" and word not in row.choices:
        advice = did_you_mean(word, row.choices) or f" Use one of {', '.join(row.choices)}."
        return None, f"{row.name} {word:.200}: Megatron has no such choice.{advice}"
    if row.takes in ("int", "float"):
        try:
            number = (int if row.takes == "int" else float)(word)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            return (
                None,
                f"{row.name} {word:.200}: expected {_WORDS[row.takes]}. Set {row.name} to one.",
            )
        return number, None
    return word, None

"""Parse Megatron's arguments by the table `flags.yaml`, and collect the settings and reports that
they become."""

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import yaml

from megalith import storage
from megalith.config.fields import Plain, describe
from megalith.config.train import TrainRun
from megalith.errors import MAX_PROBLEMS, ConfigError, did_you_mean

# --- the table of Megatron's flags, `flags.yaml`: what `from-megatron` does with each of them

FlagType: TypeAlias = Literal[
    "any", "switch", "int", "float", "str", "choice", "list", "path", "file"
]
"""What follows a flag. A `switch` takes no value; a `path` is not read, so it may contain unset
shell variables; a `file` contains arguments."""

Effect: TypeAlias = Literal["none", "numbers", "model"]
"""What differs if a flag is ignored: only speed, memory or logs; the loss; the model, its data or
its initial weights."""

Program: TypeAlias = Literal["train", "serve"]
"""Programs of Megatron that read a flag: pretrain_gpt.py, or the text generation servers."""

Verdict: TypeAlias = Literal["mapped", "already", "explained", "not mapped"]
"""Becomes settings; implemented or without effect here; done differently; not implemented."""


FastSafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The loader of libyaml, which is seven times as fast, if PyYAML was built with it (measured with
this table: 0.17 s and 1.15 s, November 2026)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronFlag:
    """One entry of the table."""

    flag: str
    """Name, as typed."""

    verdict: Verdict
    """What becomes of it."""

    program: Program = "train"
    """Program that reads it."""

    type: FlagType = "any"
    """Type of its value."""

    setting: tuple[str, ...] = ()
    """The settings that a mapped flag determines, alone or with others."""

    aliases: tuple[str, ...] = ()
    """Other names."""

    choices: tuple[str, ...] = ()
    """Values of a `choice`."""

    default: Plain = None
    """Value that Megatron assumes if the flag is left out."""

    factor: float | None = None
    """Factor between its value and that of the setting."""

    reason: str = ""
    """How the value of a mapped flag is converted, empty if it is copied; of the others, why they
    become no setting."""

    effect: Effect = "none"
    """What differs if the flag is ignored."""

    requires: str | None = None
    """Flag without which this one has no effect."""

    matching_values: tuple[str, ...] = ()
    """Values for which a run of Megalith does the same."""

    def __post_init__(self) -> None:
        allowed_values = {
            "verdict": Verdict,
            "program": Program,
            "type": FlagType,
            "effect": Effect,
        }
        for attribute, allowed in allowed_values.items():
            value = getattr(self, attribute)
            assert value in get_args(allowed), f"{self.flag}: {attribute}={value}"
        is_mapped = self.verdict == "mapped"
        assert is_mapped == bool(self.setting), f"{self.flag}: only a mapped flag has settings"
        assert is_mapped or self.reason, f"{self.flag}: no reason"
        assert bool(self.choices) == (self.type == "choice"), f"{self.flag}: choices of {self.type}"


@functools.cache
def read_flag_table() -> tuple[MegatronFlag, ...]:
    """Return the table that ships with the package, in its order."""
    text = resources.files(__package__).joinpath("flags.yaml").read_text(encoding="utf-8")
    table = yaml.load(text, Loader=FastSafeLoader)
    return tuple(_build_flag(entry, table["reasons"]) for entry in table["flags"])


@functools.cache
def mapped_flags(program: Program = "train") -> Mapping[str, MegatronFlag]:
    """Return the flags that become settings of a program, under each of their names; no `file` is
    one."""
    return {
        name: flag
        for flag in read_flag_table()
        if (flag.verdict, flag.program) == ("mapped", program) and flag.type != "file"
        for name in (flag.flag, *flag.aliases)
    }


@functools.cache
def unmapped_flags(program: Program = "train") -> Mapping[str, MegatronFlag]:
    """Return the flags that become no setting of a program, under each of their names."""
    return {
        name: flag
        for flag in read_flag_table()
        if (flag.verdict, flag.program) != ("mapped", program) and flag.type != "file"
        for name in (flag.flag, *flag.aliases)
    }


@functools.cache
def known_flags() -> tuple[str, ...]:
    """Return the sorted names of all flags of Megatron."""
    return tuple(sorted(name for flag in read_flag_table() for name in (flag.flag, *flag.aliases)))


def _build_flag(entry: Mapping[str, Plain], reasons: Mapping[str, str]) -> MegatronFlag:
    """Return an entry of `flags`; the reason of a flag that is not mapped is a key of
    `reasons`."""
    fields: dict[str, Plain] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()
    }
    if entry["verdict"] != "mapped":
        fields["reason"] = reasons[entry["reason"]]
    return MegatronFlag(**fields)


FILE_FLAGS = "--data-args-path", "--per-split-data-args-path"
"""Flags whose file contains the values of other flags, which `expand_file_flags` inserts."""

_MAX_ADVICE = 20
"""Problems for which the nearest name is searched, which takes tens of milliseconds each."""

_TYPE_NAMES: Mapping[FlagType, str] = {
    "int": "a whole number",
    "float": "a number",
    "str": "one word",
    "path": "a path",
}
_VARIABLE = re.compile(r"(?:\$\{?|(?=`))(\w+|[@*#?(`])")


@dataclass(frozen=True, slots=True)
class Arguments:
    """Parsed arguments."""

    words: Mapping[str, tuple[str, ...]]
    """The words after each flag, by its first name; the last occurrence of a flag counts."""

    values: Mapping[str, Plain]
    """Values of the mapped flags."""

    problems: tuple[str, ...]
    """Messages about arguments that cannot be parsed."""

    program: Program = "train"
    """Program whose arguments they are."""

    def given(self, name: str) -> bool:
        """Return whether this flag was given."""
        return name in self.words

    def value(self, name: str) -> Plain:
        """Return the value of a mapped flag, or the one that Megatron assumes."""
        flag = mapped_flags(self.program)[name]
        return self.values.get(name, False if flag.type == "switch" else flag.default)

    def typed(self, name: str) -> str:
        """Return the flag as it was typed, or with the value that Megatron assumes."""
        if name in self.words:
            return " ".join((name, *self.words[name]))
        flag = mapped_flags(self.program).get(name)
        assumed = "" if flag is None or flag.default is None else f" {flag.default}"
        return f"{name}{assumed} (left out)"


def parse_arguments(words: Sequence[str], program: Program = "train") -> Arguments:
    """Parse the arguments of a program. Raises nothing: all messages are in `problems`."""
    mapped, unmapped = mapped_flags(program), unmapped_flags(program)
    words_by_flag: dict[str, tuple[str, ...]] = {}
    problems: list[str] = []
    for name, values in _split_flags(words, problems):
        if name in mapped:
            words_by_flag[mapped[name].flag] = values
        elif name in unmapped:
            words_by_flag[unmapped[name].flag] = values
            if unmapped[name].type == "switch" and values:
                problems.append(_unexpected_value(name, values))
        elif name in FILE_FLAGS:
            problems.append(
                f"{name} has {len(values)} values, and none was read. Use {name} with one file."
            )
        else:
            near = did_you_mean(name, known_flags()) if len(problems) < _MAX_ADVICE else ""
            advice = near or " Remove it, or use the name that Megatron gives it."
            problems.append(f"{_shorten(name, values)}: Megatron has no such argument.{advice}")
    typed_values: dict[str, Plain] = {}
    for name, values in words_by_flag.items():
        if name not in mapped:
            continue
        value, problem = _parse_value(mapped[name], values)
        if problem is None:
            typed_values[name] = value
        else:
            problems.append(problem)
    return Arguments(words_by_flag, typed_values, tuple(problems), program)


def expand_file_flags(words: Sequence[str]) -> list[str]:
    """Return the arguments with each flag of `FILE_FLAGS` replaced by the contents of its file.

    Raises:
        ConfigError: the file cannot be read, or does not have the format that Megatron expects.
    """
    # `parse_arguments` reports them
    result = list(takewhile(lambda word: not word.startswith("--"), words))
    for name, values in _split_flags(words[len(result) :], []):
        if name not in FILE_FLAGS or len(values) != 1:
            result += [name, *values]
        elif name == FILE_FLAGS[0]:
            result += ["--data-path", *_read_file(name, values[0]).split()]
        else:
            result += _read_split_paths(name, values[0])
    return result


def _read_file(name: str, path: str) -> str:
    try:
        return storage.read_text(Path(path), allow_pipe=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{name} {path}: {error}. Pass a file of data prefixes, or the prefixes."
        ) from None


def _read_split_paths(name: str, path: str) -> list[str]:
    """Return the data prefixes of each split in a JSON file, as arguments."""
    try:
        splits = storage.parse_json(_read_file(name, path))
    except ValueError as error:
        raise ConfigError(
            f"{name} {path} is not JSON: {error}. Use an object with train, valid and test."
        ) from None
    if not isinstance(splits, dict) or not set(splits) <= {"train", "valid", "test"}:
        raise ConfigError(
            f"{name} {path} contains {splits!s:.60}: expected an object with train, valid and test."
        )
    words: list[str] = []
    for split, value in splits.items():
        prefixes = value.split() if isinstance(value, str) else [str(word) for word in value or ()]
        words += [f"--{split}-data-path", *prefixes] if prefixes else []
    return words


def _split_flags(words: Sequence[str], problems: list[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Return each flag with the words up to the next one; words before the first flag are added to
    `problems`."""
    flags: list[tuple[str, list[str]]] = []
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--") and len(word) > 2:
            flags.append((name, [value] if equals else []))
        elif flags:
            flags[-1][1].append(word)
        elif len(problems) < MAX_PROBLEMS:
            problems.append(
                f"{word:.200} precedes the first argument. Use Megatron's --name value, or "
                "--script FILE."
            )
    return [(name, tuple(values)) for name, values in flags]


def _parse_value(flag: MegatronFlag, words: tuple[str, ...]) -> tuple[Plain, str | None]:
    """Return the value of a mapped flag, or a message about what is wrong with it."""
    typed = _shorten(flag.flag, words)
    unset = [name for word in words for name in _VARIABLE.findall(word)]
    if unset and flag.type != "path":
        return None, _unset_variable(typed, unset[0])
    if flag.type == "list":
        no_value = f"{flag.flag} has no value. Use {flag.flag} with one or more values."
        return list(words), None if words else no_value
    if flag.type == "switch":
        return (None, _unexpected_value(flag.flag, words)) if words else (True, None)
    if len(words) != 1:
        expected = _TYPE_NAMES.get(flag.type) or f"one of {', '.join(flag.choices)}"
        message = f"expected {expected}, got {len(words)} words. Use {flag.flag} with one."
        return None, f"{typed}: {message}"
    return _parse_word(flag, words[0])


def _parse_word(flag: MegatronFlag, word: str) -> tuple[Plain, str | None]:
    if flag.type == "choice" and word not in flag.choices:
        advice = did_you_mean(word, flag.choices) or f" Use one of {', '.join(flag.choices)}."
        return None, f"{flag.flag} {word:.200}: Megatron has no such choice.{advice}"
    if flag.type not in ("int", "float"):
        return word, None
    try:
        number = (int if flag.type == "int" else float)(word)
        is_finite = math.isfinite(number)
    except (ValueError, OverflowError):  # no number, or an integer above every float
        is_finite = False
    if is_finite:
        return number, None
    expected = f"expected {_TYPE_NAMES[flag.type]}. Set {flag.flag} to one."
    return None, f"{flag.flag} {word:.200}: {expected}"


def _shorten(name: str, words: Sequence[str]) -> str:
    """Return an argument as it was typed, shortened if it is very long."""
    text = f"{name:.200}" + "".join(f" {word:.200}" for word in words[:20])
    return text if len(words) <= 20 else f"{text} ..."


def _unexpected_value(name: str, words: tuple[str, ...]) -> str:
    """Return the message about words after a switch."""
    typed = _shorten(name, words)
    unset = [variable for word in words for variable in _VARIABLE.findall(word)]
    if unset:
        return _unset_variable(typed, unset[0])
    return f"{typed}: expected nothing after {name}. Use {name} alone."


def _unset_variable(typed: str, variable: str) -> str:
    if variable in ("(", "`"):
        return (
            f"{typed}: the output of that command is not known, because nothing is run. Pass "
            f"{typed.split()[0]} with its value."
        )
    return f"{typed}: ${variable} is not set. Pass --set {variable}=VALUE."


# --- settings and reports


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagReport:
    """What became of one argument."""

    verdict: Verdict
    """What became of it."""

    flag: str
    """The argument as it was typed; `(left out)` follows a value that Megatron assumes."""

    text: str
    """The reason, or how the value was converted; may be empty if it is mapped."""

    setting: str | None = None
    """Dotted name of the setting that it became."""

    value: Plain = None
    """The value of that setting."""

    effect: Effect = "none"
    """What differs because the argument is ignored."""


def list_refused(entries: Iterable[FlagReport], *, strict: bool) -> list[str]:
    """Return messages about the arguments without which the model or training, or with `strict` its
    numbers, would differ."""
    effects = ("model", "numbers") if strict else ("model",)
    return [f"{entry.flag}: {entry.text}." for entry in entries if entry.effect in effects]


@dataclass(slots=True)
class Draft:
    """Settings, reports and problems of a run while its arguments are translated."""

    arguments: Arguments
    """The arguments."""

    settings: dict[str, Plain] = field(default_factory=dict)
    """Values by dotted name."""

    entries: list[FlagReport] = field(default_factory=list)
    """Reports on the arguments."""

    problems: list[str] = field(default_factory=list)
    """Why the run cannot be written at all."""

    unsure: set[str] = field(default_factory=set)
    """Settings computed from missing or wrong arguments; they are not reported."""

    silent: set[str] = field(default_factory=set)
    """Arguments that are not reported for that reason."""

    def put(
        self, flag: str, setting: str, value: Plain, text: str = "", *, of: Iterable[str] = ()
    ) -> None:
        """Set a setting from a flag; reported if the flag was given or the value differs from our
        default.

        of: further flags and settings from which the value was computed; nothing is reported if
        one of them is unknown.
        """
        self.settings[setting] = value
        if not all(self.sure(name) for name in of):
            self.unsure.add(setting)
            self.silent.add(flag)
        elif self.arguments.given(flag) or value != _default_settings().get(setting):
            typed = self.arguments.typed(flag)
            self.entries.append(
                FlagReport(verdict="mapped", flag=typed, text=text, setting=setting, value=value)
            )

    def sure(self, name: str) -> bool:
        """Return whether the value of a flag or setting is known, and no count below one."""
        value = self.arguments.value(name) if name.startswith("--") else self.settings.get(name)
        return (
            value is not None
            and name not in self.unsure
            and not (isinstance(value, int) and value < 1)
        )

    def copy(self, name: str) -> None:
        """Set the setting of a flag to its value; without a value our default stays."""
        flag, value = mapped_flags()[name], self.arguments.value(name)
        if value is not None:
            self.put(name, flag.setting[0], value if flag.factor is None else value * flag.factor)

    def report(self, verdict: Verdict, flag: str, text: str, effect: Effect = "none") -> None:
        """Report on a flag that becomes no setting."""
        typed = self.arguments.typed(flag)
        self.entries.append(FlagReport(verdict=verdict, flag=typed, text=text, effect=effect))

    def need(self, flag: str, what: str) -> bool:
        """Return whether a flag was given that Megatron requires, too; if not, that is a
        problem."""
        if self.arguments.value(flag) is None and not any(
            text.startswith(flag) for text in self.arguments.problems
        ):
            self.problems.append(f"{flag} is missing: Megatron needs it. Pass {flag} with {what}.")
        return self.arguments.value(flag) is not None

    def number(self, flag: str) -> int:
        """Return the whole number after a mapped flag; 1 if it is missing, which is already a
        problem."""
        value = self.arguments.value(flag)
        return value if isinstance(value, int) and value > 0 else 1


_UNREAD: Mapping[Program, str] = {
    "train": "belongs to inference, and training does not read it: use --serve to translate it",
    "serve": "`megalith serve` reads the model, its tokenizer and weights from the checkpoint",
}
"""Why the flags of the other program have no effect, by program."""


def report_unmapped(draft: Draft) -> None:
    """Report on every given flag that becomes no setting."""
    for name, flag in unmapped_flags(draft.arguments.program).items():
        words = draft.arguments.words.get(name)
        if words is None:
            continue
        if flag.program != draft.arguments.program:
            draft.report("already", name, _UNREAD[draft.arguments.program])
        elif flag.requires is not None and not draft.arguments.given(flag.requires):
            draft.report("already", name, f"takes effect only with {flag.requires}")
        elif words and all(_matches(flag, word) for word in words):
            draft.report("already", name, "Megalith does the same")
        else:
            draft.report(flag.verdict, name, flag.reason, flag.effect)


def report_unused(draft: Draft) -> None:
    """Report on every given flag without a report: other arguments override it."""
    reported = {entry.flag.split()[0] for entry in draft.entries}
    for name in draft.arguments.values:
        if name not in reported and name not in draft.silent:
            draft.report("already", name, "has no effect with the other arguments")


def _matches(flag: MegatronFlag, word: str) -> bool:
    return any(_is_same_value(word, value) for value in flag.matching_values)


def _is_same_value(left: str, right: str) -> bool:
    """Return whether two texts are the same value; numbers may be written differently.

    >>> _is_same_value("1e-2", ".01"), _is_same_value("1", "one")
    (True, False)
    """
    try:
        return float(left) == float(right)
    except ValueError:
        return left == right


@functools.cache
def _default_settings() -> Mapping[str, Plain]:
    return {leaf.path: leaf.default for leaf in describe(TrainRun)}

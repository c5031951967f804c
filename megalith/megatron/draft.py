"""A run under translation: the settings so far, and a report on every argument."""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from megalith.config.fields import Plain, describe
from megalith.config.train import TrainRun
from megalith.megatron.arguments import ROWS, UNMAPPED, Arguments, same_value
from megalith.megatron.table import Effect, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagReport:
    """What became of one argument."""

    verdict: Literal["mapped"] | Verdict
    """Became a setting, is so anyway, is done differently, or is not done."""

    flag: str
    """The argument as it was typed; `(left out)` behind the value that Megatron assumes."""

    text: str
    """Why, or how it was converted; may be empty for one that is mapped."""

    setting: str | None = None
    """Dotted name of the setting it became."""

    value: Plain = None
    """The value of that setting."""

    effect: Effect = "none"
    """What is missing because of it."""


@dataclass(slots=True)
class Draft:
    """Collects settings, entries and problems while the arguments are gone through."""

    arguments: Arguments
    """What was typed."""

    settings: dict[str, Plain] = field(default_factory=dict)
    """Values by dotted name."""

    entries: list[FlagReport] = field(default_factory=list)
    """Reports on the arguments."""

    problems: list[str] = field(default_factory=list)
    """What keeps the run from being written at all."""

    unsure: set[str] = field(default_factory=set)
    """Settings computed from what is missing or wrong, of a run that is refused: their values are
    shown to nobody."""

    silent: set[str] = field(default_factory=set)
    """Arguments that are not reported for that reason."""

    def put(
        self, flag: str, setting: str, value: Plain, text: str = "", *, of: Iterable[str] = ()
    ) -> None:
        """A setting and the argument it comes from, listed if it was given or differs from our
        default.

        of: further arguments and settings that the value was computed from; nothing is listed where
        one is not known.
        """
        self.settings[setting] = value
        if not all(self.sure(name) for name in of):
            self.unsure.add(setting)
            self.silent.add(flag)
        elif self.arguments.given(flag) or value != _default(setting):
            typed = self.arguments.typed(flag)
            self.entries.append(
                FlagReport(verdict="mapped", flag=typed, text=text, setting=setting, value=value)
            )

    def sure(self, name: str) -> bool:
        """Is the value of an argument or a setting there, and no count below one?"""
        value = self.arguments.value(name) if name.startswith("--") else self.settings.get(name)
        return (
            value is not None
            and name not in self.unsure
            and not (isinstance(value, int) and value < 1)
        )

    def copy(self, flag: str) -> None:
        """A setting that has the argument's value; left out without a default, ours stays."""
        row, value = ROWS[flag], self.arguments.value(flag)
        if value is not None:
            self.put(flag, row.fields[0], value if row.factor is None else value * row.factor)

    def say(self, verdict: Verdict, flag: str, text: str, effect: Effect = "none") -> None:
        """What is to be known about an argument that becomes nothing."""
        typed = self.arguments.typed(flag)
        self.entries.append(FlagReport(verdict=verdict, flag=typed, text=text, effect=effect))

    def need(self, flag: str, what: str) -> bool:
        """Was this argument given? If not, the run cannot be written: Megatron needs it, too."""
        if self.arguments.value(flag) is None and not any(
            text.startswith(flag) for text in self.arguments.problems
        ):
            self.problems.append(f"{flag} is missing: Megatron needs it. Pass {flag} with {what}.")
        return self.arguments.value(flag) is not None

    def count(self, flag: str, default: int) -> int:
        """The whole number behind an argument that becomes no setting."""
        words = self.arguments.words.get(flag, ())
        return (
            int(words[0])
            if len(words) == 1 and words[0].isdecimal() and int(words[0]) > 0
            else default
        )

    def number(self, flag: str) -> int:
        """The whole number behind an argument that becomes one; 1 where it is missing, which is a
        problem by then."""
        value = self.arguments.value(flag)
        return value if isinstance(value, int) and value > 0 else 1


def judge_unmapped(draft: Draft) -> None:
    """An entry for every argument that was given and becomes nothing."""
    for name, flag in UNMAPPED.items():
        words = draft.arguments.words.get(name)
        if words is None:
            continue
        group, typed = flag.group, " ".join((name, *words))
        if group.switch is not None and not draft.arguments.given(group.switch):
            entry = FlagReport(
                verdict="already", flag=typed, text=f"is read with {group.switch} only"
            )
        elif _is_idle(flag.idle, words):
            entry = FlagReport(
                verdict="already", flag=typed, text="asks for what is so here anyway"
            )
        else:
            entry = FlagReport(
                verdict=group.verdict, flag=typed, text=group.reason, effect=group.effect
            )
        draft.entries.append(entry)


def mention_the_rest(draft: Draft) -> None:
    """Add an entry for every argument without one: other arguments decided what it could
    have."""
    reported = {entry.flag.split()[0] for entry in draft.entries}
    for name in draft.arguments.values:
        if name not in reported and name not in draft.silent:
            draft.say("already", name, "decides nothing beside the other arguments")


def _is_idle(idle: tuple[str, ...], words: Iterable[str]) -> bool:
    """Does every value ask for nothing?"""
    words = list(words)
    return bool(words) and all(any(same_value(word, value) for value in idle) for word in words)


def _default(setting: str) -> Plain:
    return _defaults().get(setting)


@functools.cache
def _defaults() -> Mapping[str, Plain]:
    return {leaf.path: leaf.default for leaf in describe(TrainRun)}

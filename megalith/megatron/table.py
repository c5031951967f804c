"""What a row of the table of Megatron's arguments says."""

from dataclasses import dataclass
from typing import Literal

from megalith.config.fields import Plain

Takes = Literal["nothing", "int", "float", "text", "place", "words", "choice"]
"""What stands behind a flag. A `place` is a path of which nothing here is read: it may hold an
unset shell variable."""

Effect = Literal["none", "numbers", "model"]
"""What goes missing when a flag is not followed: nothing but speed, memory or logs; the digits
of the loss; the network itself, its data or its first weights."""

Verdict = Literal["already", "explained", "not mapped"]
"""So here anyway, or of no concern; done differently here; not done here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagRow:
    """A flag that becomes settings of ours."""

    name: str
    """As it is typed."""

    takes: Takes
    """What stands behind it."""

    fields: tuple[str, ...]
    """The settings it decides, alone or with others."""

    default: Plain = None
    """What Megatron assumes when it is left out."""

    aliases: tuple[str, ...] = ()
    """Other spellings."""

    choices: tuple[str, ...] = ()
    """The words of a `choice`."""

    factor: float | None = None
    """Its value is copied to the field; a number here multiplies it on the way."""

    how: str = ""
    """How it is converted, for the reader of the documentation; empty: copied as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagGroup:
    """Flags that become nothing here, for one reason."""

    verdict: Verdict
    """Text of the report."""

    effect: Effect
    """What is missing without them."""

    reason: str
    """Why, and what to do instead."""

    flags: str
    """Their names; `--flag!` stands alone, `--flag=a|b` asks for nothing when its value is a or
    b."""

    switch: str | None = None
    """They say nothing unless this flag is given, too."""


@dataclass(frozen=True, slots=True)
class Unmapped:
    """One flag of a group."""

    name: str
    group: FlagGroup
    idle: tuple[str, ...]
    """Values under which it asks for nothing."""
    alone: bool
    """It takes no value."""


def expand(groups: tuple[FlagGroup, ...]) -> dict[str, Unmapped]:
    """Every flag of the groups under its name."""
    flags = {}
    for group in groups:
        for word in group.flags.split():
            name, _, idle = word.partition("=")
            alone, name = name.endswith("!"), name.removesuffix("!")
            assert name not in flags, f"{name} is in two groups"
            flags[name] = Unmapped(name, group, tuple(idle.split("|")) if idle else (), alone)
    return flags

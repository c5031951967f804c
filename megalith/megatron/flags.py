"""The table of Megatron's flags, `flags.yaml`: what `from-megatron` does with each of them."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Literal, TypeAlias, get_args

import yaml

from megalith.config.fields import Plain

FlagType: TypeAlias = Literal[
    "any", "switch", "int", "float", "str", "choice", "list", "path", "file"
]
"""What follows a flag. A `switch` takes no value; a `path` is not read, so it may contain unset
shell variables; a `file` contains arguments."""

Effect: TypeAlias = Literal["none", "numbers", "model"]
"""What differs if a flag is ignored: only speed, memory or logs; the loss; the model, its data or
its initial weights."""

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
        for field, allowed in (("verdict", Verdict), ("type", FlagType), ("effect", Effect)):
            value = getattr(self, field)
            assert value in get_args(allowed), f"{self.flag}: {field}={value}"
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
def mapped_flags() -> Mapping[str, MegatronFlag]:
    """Return the flags that become settings, under each of their names; no `file` is one."""
    flags = (flag for flag in read_flag_table() if flag.verdict == "mapped" and flag.type != "file")
    return {name: flag for flag in flags for name in (flag.flag, *flag.aliases)}


@functools.cache
def unmapped_flags() -> Mapping[str, MegatronFlag]:
    """Return the flags that become no setting, by name."""
    return {flag.flag: flag for flag in read_flag_table() if flag.verdict != "mapped"}


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

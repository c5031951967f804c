"""Introspection of config trees, and valid ranges of their settings."""

import math
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Literal

import pytest

from megalith.config.fields import (
    Example,
    Ge,
    Gt,
    Le,
    Lt,
    describe,
    describe_type,
    field_ranges,
    find_section_type,
    hint_at,
    range_problems,
    setting_names,
    unknown_setting,
)
from megalith.config.train import TrainRun
from megalith.config.tree import apply_overrides


@dataclass(frozen=True, kw_only=True)
class Inner:
    """A section."""

    width: int = 3
    """How wide,
    over two lines."""

    names: tuple[str, ...] = ("a",)


@dataclass(frozen=True, kw_only=True)
class Root:
    """A root."""

    title: str
    """What it is called."""

    inner: Inner = field(default_factory=Inner)
    maybe: Inner | None = None
    by_name: dict[str, int] = field(default_factory=dict)


def test_every_leaf_is_described_once_in_the_order_of_the_fields() -> None:
    assert setting_names(Root) == [
        "title",
        "inner.width",
        "inner.names",
        "maybe.width",
        "maybe.names",
        "by_name",
    ]


def test_setting_has_its_default_and_one_line_documentation() -> None:
    settings = {setting.path: setting for setting in describe(Root)}
    assert settings["title"].required
    assert settings["title"].doc == "What it is called."
    assert not settings["inner.width"].required
    assert settings["inner.width"].default == 3
    assert settings["inner.width"].doc == "How wide, over two lines."
    assert settings["inner.names"].default == ["a"]
    assert settings["inner.names"].doc == ""


def test_hint_at_resolves_optional_sections_and_mappings() -> None:
    assert hint_at(Root, "maybe.width") is int
    assert hint_at(Root, "by_name.anything") is int
    assert hint_at(Root, "inner") is Inner
    assert hint_at(Root, "inner.width.deeper") is None
    assert hint_at(Root, "nothing.at.all") is None


@pytest.mark.parametrize(
    "hint, words",
    [
        (int, "a whole number"),
        (bool, "true or false"),
        (float | None, "a number or null"),
        (Literal["a", "b"], "one of a, b"),
        (tuple[str, ...], "a list of text"),
        (list[int], "a list of a whole number"),
        (tuple[int, str], "a list of 2: a whole number, text"),
        (dict[str, int], "a mapping"),
        (Inner, "a mapping"),
    ],
)
def test_types_are_described_in_words(hint: object, words: str) -> None:
    assert describe_type(hint) == words


def test_unknown_name_without_similar_names_lists_its_section() -> None:
    assert unknown_setting(Root, "inner.qqqq", "1") == (
        "inner.qqqq=1: there is no such setting. Use one of inner.width, inner.names."
    )
    assert unknown_setting(Root, "qqqq").endswith("Use one of title, inner, maybe, by_name.")
    assert unknown_setting(Root, "inner.width.x").endswith(
        "inner.width is a single value. Set inner.width instead."
    )


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """A section with valid ranges."""

    count: Annotated[int | None, Ge(1), Le(1 << 20)] = None
    rate: Annotated[float, Ge(0), Lt(1)] = 0.5
    scale: Annotated[float | None, Gt(0), Example(50.0)] = None
    sizes: Annotated[tuple[int, ...], Ge(1)] = ()
    spreads: Annotated[tuple[tuple[str, float], ...], Ge(0)] = ()
    offset: float = 0.25
    inner: tuple["Ranges", ...] = ()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (Ranges(count=0), "a.count=0 must be at least 1. Set a.count to 1 or more."),
        (
            Ranges(count=1 << 21),
            "a.count=2097152 must be at most 1048576. Set a.count to 1048576 or less.",
        ),
        (
            Ranges(rate=-0.5),
            "a.rate=-0.5 must be a finite number of at least 0. Set a.rate to 0 or more.",
        ),
        (Ranges(rate=1.0), "a.rate=1.0 must be below 1. Use 0.5."),
        (Ranges(scale=0.0), "a.scale=0.0 must be a finite number above 0. Use 50.0."),
        (Ranges(scale=math.nan), "a.scale=nan must be a finite number above 0. Use 50.0."),
        (Ranges(scale=math.inf), "a.scale=inf must be a finite number above 0. Use 50.0."),
        (
            Ranges(scale=2e6),
            "a.scale=2000000.0 must be at most 1e+06. Set a.scale to 1e+06 or less.",
        ),
        (Ranges(sizes=(1, 0)), "a.sizes[1]=0 must be at least 1. Set a.sizes[1] to 1 or more."),
        (
            Ranges(spreads=(("x", -1.0),)),
            "a.spreads[0][1]=-1.0 must be a finite number of at least 0. Set a.spreads[0][1] to 0 "
            "or more.",
        ),
        (Ranges(offset=math.nan), "a.offset=nan must be a finite number. Use 0.25."),
        (
            Ranges(offset=-2e6),
            "a.offset=-2000000.0 must be a finite number of at least -1e+06. Set a.offset to "
            "-1e+06 or more.",
        ),
        (
            Ranges(inner=(Ranges(), Ranges(count=0))),
            "a.inner[1].count=0 must be at least 1. Set a.inner[1].count to 1 or more.",
        ),
    ],
)
def test_number_out_of_range_is_reported_with_a_valid_value(section: Ranges, message: str) -> None:
    assert range_problems(section, "a") == [message]


def test_all_numbers_out_of_range_are_reported_together_or_by_type() -> None:
    section = Ranges(count=0, rate=1.0, sizes=(0, 0), offset=math.inf)
    assert len(range_problems(section)) == 5
    assert len(range_problems(section, kinds=(int,))) == 3
    assert len(range_problems(section, kinds=(float,))) == 2
    assert range_problems(Ranges()) == []


def test_metadata_does_not_change_the_type_of_a_setting() -> None:
    assert hint_at(Ranges, "count") == int | None
    settings = {setting.path: setting for setting in describe(Ranges)}
    assert describe_type(settings["rate"].hint) == "a number"
    assert [str(bound) for bound in settings["rate"].bounds] == ["at least 0", "below 1"]
    changed = apply_overrides(Ranges(), {"count": "7", "sizes": ["3", "4"]})
    assert changed == replace(Ranges(), count=7, sizes=(3, 4))


def _sections(cls: type) -> set[type]:
    """Return a config class and the classes of all sections in it."""
    assert is_dataclass(cls)
    inner = [find_section_type(hint_at(cls, one.name)) for one in fields(cls)]
    return {cls}.union(*(_sections(section) for section in inner if section is not None))


def test_every_default_and_example_is_in_the_range_of_its_field() -> None:
    checked = 0
    for cls in _sections(TrainRun):
        for name, valid in field_ranges(cls).items():
            for value in (valid.default, valid.example):
                if isinstance(value, int | float) and not isinstance(value, bool):
                    assert all(bound.holds(value) for bound in valid.bounds), f"{cls}.{name}"
                    checked += 1
    assert checked > 80

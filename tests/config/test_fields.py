"""Introspection of config trees."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from megalith.config.fields import describe, describe_type, hint_at, setting_names, unknown_setting


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


def test_a_setting_knows_its_default_and_its_documentation_in_one_line() -> None:
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

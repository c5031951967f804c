"""Tables of settings."""

from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from megalith.cli.output import build_difference_table, build_run_table, format_value


@dataclass(frozen=True, kw_only=True)
class Inner:
    """A section."""

    width: int = 3
    """Shape [t, h], in brackets."""


@dataclass(frozen=True, kw_only=True)
class Root:
    """A root."""

    name: str
    inner: Inner = field(default_factory=Inner)


def rendered(table: Table) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115  # closed with the process
    console.print(table)
    return console.export_text()


def test_a_changed_setting_shows_its_default_and_what_it_means() -> None:
    text = rendered(build_run_table(Root(name="x", inner=Inner(width=4))))
    assert "inner.width" in text
    assert "4  (default 3)" in text
    assert "Shape [t, h], in brackets." in text


def test_a_default_is_shown_without_remark() -> None:
    assert "default" not in rendered(build_run_table(Root(name="x")))


def test_two_runs_are_shown_side_by_side() -> None:
    text = rendered(build_difference_table([("a.b", 1, None), ("c", ["[x]"], "")], "left", "right"))
    assert "left" in text
    assert "unset" in text
    assert '["[x]"]' in text


def test_values_are_shown_as_in_yaml() -> None:
    assert [format_value(value) for value in (None, True, "a", "", 1e-5, [])] == [
        "unset",
        "true",
        "a",
        '""',
        "1e-05",
        "[]",
    ]

"""`pyproject.toml`, `constraints.txt` and the page about dependencies say the same."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GROUPS = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}


def canonical(name: str) -> str:
    """The name as an index spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: list[str]) -> list[str]:
    """The packages asked for, our own groups left out."""
    results = [re.split(r"[^\w.-]", requirement)[0] for requirement in requirements]
    return [name for name in results if name != "megalith"]


def pins() -> dict[str, str]:
    """Package -> version in constraints.txt."""
    lines = [
        line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()
    ]
    return {canonical(line.split("==")[0]): line.split("==")[1] for line in lines if line}


@pytest.mark.parametrize("group", GROUPS)
def test_every_dependency_is_pinned_and_explained(group: str) -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text()
    for name in names(GROUPS[group]):
        assert canonical(name) in pins(), f"{name} is not in constraints.txt"
        assert re.search(rf"^\|.*\b{re.escape(name)}\b.*\|", page, re.MULTILINE), (
            f"{name} is not explained"
        )


def test_only_the_checker_has_an_exact_version() -> None:
    exact = [requirement for requirement in PROJECT["dependencies"] if "==" in requirement]
    assert exact == ["spmd_types==0.3.1"]
    assert pins()["spmd-types"] == "0.3.1"


def test_the_installed_checker_is_the_pinned_one() -> None:
    assert version("spmd_types") == pins()["spmd-types"]

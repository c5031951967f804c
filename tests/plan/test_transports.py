"""Which ways there are for tokens to reach experts, and what is said of one that is not there."""

from pathlib import Path

import pytest

from megalith.plan.transports import BUILT_IN, GROUP, installed_transports, transport_problems


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that brings two ways, one under a name that is taken."""
    info = tmp_path / "fast_wires-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fast-wires\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nfast = fast_wires:build\nexchange = fast_wires:other\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_what_is_here_is_no_problem() -> None:
    assert [transport_problems(name) for name in BUILT_IN] == [[]] * 3


def test_a_package_that_is_installed_brings_its_own_and_takes_no_name(package: Path) -> None:
    assert dict(installed_transports()).keys() == {"fast"}
    assert installed_transports()["fast"].value == "fast_wires:build"
    assert transport_problems("fast") == []


def test_a_way_that_is_not_there_is_answered_with_those_that_are(package: Path) -> None:
    assert transport_problems("exchang") == [
        "parallel.dispatcher=exchang is no way for tokens to reach experts. Did you mean exchange? Use one of "
        "exchange, gather, reference, fast, or install the package that brings it."
    ]

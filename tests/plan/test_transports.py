"""Which ways there are for tokens to reach experts, and what is said of one that is not there."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megalith.plan.transports import BUILT_IN, GROUP, installed_transports, transport_problems


@pytest.fixture
def package(install_package: Callable[[str, dict[str, str]], Path]) -> Path:
    """An installed package that brings two ways, one under a name that is taken."""
    return install_package(GROUP, {"fast": "fast_wires:build", "alltoall": "fast_wires:other"})


def test_what_is_here_is_no_problem() -> None:
    assert [transport_problems(name) for name in BUILT_IN] == [[]] * 3


def test_a_package_that_is_installed_brings_its_own_and_takes_no_name(package: Path) -> None:
    assert dict(installed_transports()).keys() == {"fast"}
    assert installed_transports()["fast"].value == "fast_wires:build"
    assert transport_problems("fast") == []


def test_a_way_that_is_not_there_is_answered_with_those_that_are(package: Path) -> None:
    assert transport_problems("alltoal") == [
        "parallel.dispatcher=alltoal is not a known token dispatcher. Did you mean alltoall? Use "
        "one of alltoall, allgather, reference, fast, or install the package that provides it."
    ]

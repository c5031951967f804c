"""Known token dispatchers, and the error for an unknown one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megalith.plan.layers.moe import BUILT_IN, GROUP, installed_transports, transport_problems


@pytest.fixture
def package(install_package: Callable[[str, dict[str, str]], Path]) -> Path:
    """An installed package that brings two ways, one under a name that is taken."""
    return install_package(GROUP, {"fast": "fast_wires:build", "alltoall": "fast_wires:other"})


def test_built_in_dispatchers_are_valid() -> None:
    assert [transport_problems(name) for name in BUILT_IN] == [[]] * 3


def test_installed_package_adds_dispatchers_except_built_in_names(package: Path) -> None:
    assert dict(installed_transports()).keys() == {"fast"}
    assert installed_transports()["fast"].value == "fast_wires:build"
    assert transport_problems("fast") == []


def test_unknown_dispatcher_is_rejected_with_the_known_ones(package: Path) -> None:
    assert transport_problems("alltoal") == [
        "parallel.dispatcher=alltoal is not a known token dispatcher. Did you mean alltoall? Use "
        "one of alltoall, allgather, reference, fast, or install the package that provides it."
    ]

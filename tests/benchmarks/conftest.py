"""Benchmarks are scripts: a test runs them as a user does, with sizes that take seconds."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def run_benchmark() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run benchmarks/NAME with the given arguments."""

    def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(FOLDER / name), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)

    return run


@pytest.fixture
def beside_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test import the scripts and their parts as they import each other."""
    monkeypatch.syspath_prepend(str(FOLDER))

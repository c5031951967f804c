"""The benchmarks of Muon run, and count steps correctly."""

import importlib
import json
import subprocess
from collections.abc import Callable

import pytest


@pytest.mark.slow
def test_benchmark_runs_from_the_command_line(
    run_benchmark: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_benchmark(
        "muon.py", "--recipe", "llama_6m", "--rounds", "2", "--warmup", "0", "--json"
    )
    assert not done.stderr
    report = json.loads(done.stdout)
    assert report["rounds"] == 2
    assert set(report["wall"]) == {"bf16"}


def test_first_step_at_a_loss_is_interpolated_between_evaluations(beside_benchmarks: None) -> None:
    find_step = importlib.import_module("learning").find_step
    losses = [(10, 5.0), (20, 4.0), (30, 3.0), (40, 3.5)]
    assert find_step(losses, 3.5) == 25.0
    assert find_step(losses, 4.0) == 20.0
    assert find_step(losses, 6.0) == 10.0
    assert find_step(losses, 2.9) is None

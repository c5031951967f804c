"""The benchmark of the training step runs, and says honestly which bars hold."""

import importlib
import json
import subprocess
from collections.abc import Callable
from types import ModuleType

import pytest

from benchmarks.paired import Turns

pytest.importorskip("transformers")


@pytest.fixture
def train(beside_benchmarks: None) -> ModuleType:
    return importlib.import_module("train")


def turns(**seconds: float) -> Turns:
    """Three rounds in which every contender always took the same time."""
    taken = {name: [value] * 3 for name, value in seconds.items()}
    return Turns(taken, taken)


def test_bars_are_measured_against_the_better_peer_and_the_faster_attention(
    train: ModuleType,
) -> None:
    case = next(case for case in train.CASES if case.name == "6m-bf16")
    taken = turns(ours=1.0, eager=2.0, compiled=1.1, matmuls=0.5, attention=0.2, sdpa=0.3)
    report = train.evaluate(case, taken, {"ours": 8.0}, tokens=100)
    assert (report.best_peer, report.attention) == ("compiled", "attention")
    assert report.against_peer.median == pytest.approx(1.1)
    assert report.against_limit.median == pytest.approx(0.7)
    assert report.tokens_per_second["ours"] == 100.0
    assert report.holds == {
        "ours/best peer >= 1.0": True,
        "its lower quartile >= 0.97": True,
        "ours/limit >= 0.75": False,
        "goal: ours/best peer >= 1.25": False,
    }


def test_fp32_has_another_bar_and_no_goal(train: ModuleType) -> None:
    case = next(case for case in train.CASES if case.name == "29m-fp32")
    taken = turns(ours=1.0, eager=0.99, matmuls=0.7, attention=0.2, sdpa=0.11)
    report = train.evaluate(case, taken, {}, tokens=100)
    assert report.holds == {
        "ours/best peer >= 1.0": False,
        "its lower quartile >= 0.97": True,
        "ours/limit >= 0.8": True,
    }


def test_contenders_that_compute_something_else_are_not_compared(train: ModuleType) -> None:
    train.check_losses({"ours": 8.0, "eager": 8.00001}, 1e-5)
    with pytest.raises(SystemExit, match="loss of eager is 8.01, of ours 8.0: expected the same"):
        train.check_losses({"ours": 8.0, "eager": 8.01}, 1e-5)


@pytest.mark.slow
def test_benchmark_runs_from_the_command_line(
    run_benchmark: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    arguments = (
        "--case",
        "tiny-fp32",
        "--case",
        "tiny-bf16",
        "--rounds",
        "1",
        "--warmup",
        "0",
        "--threads",
        "1",
    )
    done = run_benchmark("train.py", *arguments, "--no-compiled", "--json")
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout)
    assert [report["case"] for report in reports] == ["tiny-fp32", "tiny-bf16"]
    for report in reports:
        assert set(report["tokens_per_second"]) == {
            "ours",
            "eager",
            "matmuls",
            "attention",
            "sdpa",
            "limit",
        }
        assert report["losses"]["eager"] == pytest.approx(report["losses"]["ours"], rel=1e-3)
        assert report["against_limit"]["median"] > 0

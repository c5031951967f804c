"""benchmarks/experts.py compares layers that compute the same, and says what it found."""

import json
import subprocess
from collections.abc import Callable

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
TINY = (
    "--tokens",
    "16",
    "--experts",
    "4",
    "--top-k",
    "2",
    "--hidden",
    "16",
    "--ffn",
    "8",
    "--rounds",
    "2",
)


@pytest.mark.slow
def test_experts_are_compared_with_every_implementation_of_transformers(run_benchmark: Run) -> None:
    pytest.importorskip("transformers")
    peers = ("--peer", "grouped_mm", "--peer", "eager", "--peer", "batched_mm")
    done = run_benchmark("experts.py", *TINY, *peers, "--json")
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout)
    assert [report["dtype"] for report in reports] == ["fp32", "bf16"]
    for report in reports:
        assert set(report["milliseconds"]) == {
            "ours",
            "kept",
            *peers[1::2],
            "one by one",
            "grouped",
        }
        assert report["holds"] == (
            report["against_peer"]["median"] >= 1 and report["against_limit"]["median"] >= 0.65
        )
        best = report["milliseconds"][report["best_peer"]]["median"]
        assert best == min(report["milliseconds"][peer]["median"] for peer in peers[1::2])


@pytest.mark.slow
def test_report_states_whether_the_bars_hold(run_benchmark: Run) -> None:
    pytest.importorskip("transformers")
    done = run_benchmark("experts.py", *TINY, "--dtype", "fp32")
    assert done.returncode == 0, done.stderr
    assert "of the matmuls" in done.stdout
    assert done.stdout.rstrip().endswith(("holds", "MISSED"))

"""The comparison of exchanges behind computing runs on two ranks."""

import json
import subprocess
from collections.abc import Callable

import pytest


@pytest.mark.slow
def test_benchmark_runs_from_the_command_line(
    run_benchmark: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    small = (
        "--hidden",
        "16",
        "--layers",
        "1",
        "--microbatches",
        "2",
        "--seq-len",
        "16",
        "--rounds",
        "2",
        "--warmup",
        "0",
    )
    done = run_benchmark("expert_overlap.py", *small, "--latency-ms", "1", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["rounds"] == 2 and report["faster"].keys() == {"shared", "pairs"}
    assert all(waited > 0 for waited in report["exposed_ms"].values())

"""The comparison of divided optimizer state runs on two ranks."""

import json
import subprocess
from collections.abc import Callable

import pytest


@pytest.mark.slow
def test_benchmark_runs_from_the_command_line(
    run_benchmark: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_benchmark("zero.py", "--case", "tiny", "--rounds", "2", "--json")
    assert done.returncode == 0, done.stderr
    (report,) = json.loads(done.stdout)
    assert report["rounds"] == 2
    for other in ("fsdp2", "ddp"):
        assert (
            report["against"][other]["wall"]["lower"] <= report["against"][other]["wall"]["median"]
        )
    assert report["mib"]["ours"] > 0

"""The comparison with DistributedDataParallel runs on two ranks."""

import json
import subprocess
from collections.abc import Callable

import pytest


@pytest.mark.slow
def test_benchmark_runs_from_the_command_line(
    run_benchmark: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    pytest.importorskip("transformers")
    done = run_benchmark("ddp.py", "--case", "tiny", "--rounds", "2", "--json")
    assert done.returncode == 0, done.stderr
    (report,) = json.loads(done.stdout)
    assert report["rounds"] == 2
    assert (
        report["against_ddp"]["lower"]
        <= report["against_ddp"]["median"]
        <= report["against_ddp"]["upper"]
    )

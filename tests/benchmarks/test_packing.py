"""benchmarks/packing.py compares the same documents in other rows, and says what it found."""

import json
import subprocess
from collections.abc import Callable

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.slow
def test_packing_reads_the_same_tokens_in_fewer_rows(run_benchmark: Run) -> None:
    done = run_benchmark("packing.py", "--documents", "6", "--rounds", "1", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["padded_rows"] == 6 > found["packed_rows"]
    assert (
        found["padded_fill"] == pytest.approx(0.6, abs=0.01)
        and found["packed_fill"] > found["padded_fill"]
    )
    assert found["holds"] == (found["times_as_fast"]["median"] >= 1.1)

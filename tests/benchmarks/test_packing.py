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
    document = json.loads(done.stdout)
    assert document["padded_rows"] == 6 > document["packed_rows"]
    assert (
        document["padded_fill"] == pytest.approx(0.6, abs=0.01)
        and document["packed_fill"] > document["padded_fill"]
    )
    assert document["holds"] == (document["times_as_fast"]["median"] >= 1.1)

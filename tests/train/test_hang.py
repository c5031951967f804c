"""A training run of which one rank hangs, or enters something else, ends by itself and says who and
where."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megalith.testing.tiny import tiny_yaml

ROOT = Path(__file__).resolve().parent.parent.parent

RANK = """
import os, sys
from contextlib import ExitStack
from megalith.cli import main
from megalith.data.loader import Loader
from megalith.testing import inject
from megalith.train import distributed
from megalith.train.callbacks import replicas

watches, watch, read = [], distributed.HangWatch, Loader.next

def watched(*args, **kwargs):
    watches.append(watch(*args, **kwargs))
    return watches[0]

def impatient(loader):  # from the third step on: ranks of a busy machine may start many seconds apart
    watches[0].timeout_seconds = 1.0
    return inject.hang() if os.environ["RANK"] == "1" else read(loader)

with ExitStack() as planted:
    if sys.argv[1] == "hang":
        planted.enter_context(inject.patched(distributed, "HangWatch", watched))
        planted.enter_context(inject.on_call(Loader, "next", 2, impatient))
    if sys.argv[1] == "skip" and os.environ["RANK"] == "1":
        planted.enter_context(inject.on_call(replicas, "compare_replicas", 0, inject.skip))
    sys.exit(main.main(sys.argv[2:]))
"""

PARENT = """
import sys
from megalith.errors import RankError
from megalith.launch.launcher import run_workers
try:
    sys.exit(run_workers(sys.argv[2:], 2, command=[sys.executable, sys.argv[1]]))
except RankError as error:
    print(error)
    sys.exit(1)
"""


def train(tmp_path: Path, how: str, settings: dict[str, str]) -> tuple[float, str]:
    """Train on two ranks with that fault in rank 1; return the seconds and the output."""
    (tmp_path / "rank.py").write_text(RANK)
    file = tiny_yaml(tmp_path / "tiny.yaml", {"parallel.dp": "2", **settings})
    words = [str(tmp_path / "rank.py"), how, "train", str(file), "--run", str(tmp_path / "run")]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PARENT, *words],
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return time.monotonic() - began, done.stdout


def test_a_hanging_rank_ends_the_run_after_the_timeout_and_is_named(tmp_path: Path) -> None:
    _, output = train(tmp_path, "hang", {"parallel.timeout_seconds": "60"})
    first = next(line for line in output.splitlines() if "did not arrive" in line)
    assert first.startswith("rank 1 (dp=1) did not arrive at all_reduce ")
    assert " over dp of int64 [4], at megalith/data/loader.py:" in first
    assert "in hang < " in output, "where the missing rank is"
    assert "megalith/train/synchronizer.py:" in output
    assert "Traceback" not in output
    assert "did not arrive" in (tmp_path / "run" / "log.txt").read_text()
    stacks = (tmp_path / "run" / "hang_rank_1.txt").read_text()
    assert "inject.py" in stacks.partition("Stacks of all its threads:")[2]


@pytest.mark.slow  # another start of two ranks
def test_check_collectives_reports_skipped_collective_immediately(tmp_path: Path) -> None:
    settings = {"parallel.check_collectives": "true", "parallel.timeout_seconds": "120"}
    seconds, output = train(tmp_path, "skip", settings)
    assert seconds < 60
    assert (
        "CollectiveError: ranks [0, 1] are about to start different operations as number " in output
    )
    assert "  rank 0 (dp=0): gather_objects " in output
    assert "  rank 1 (dp=1): barrier " in output

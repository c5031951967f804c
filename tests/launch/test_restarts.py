"""A job is started again after a fault, and never after a signal, a user's error or a stop."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megalith.cli import train
from megalith.errors import ConfigError, RankError, UserError
from megalith.launch import launcher
from megalith.launch.launcher import restart_delay, run_workers

ROOT = Path(__file__).resolve().parent.parent.parent

WORKER = """
import os, signal, sys, time
from pathlib import Path
from megalith.errors import ConfigError
from megalith.launch.launcher import worker_main

here, rank, num_faults = Path(sys.argv[2]), int(os.environ["RANK"]), int(sys.argv[3])

def work():
    starts = here / f"starts{rank}"
    starts.write_text((starts.read_text() if starts.exists() else "") + "x")
    if rank == 0:
        ends = sys.argv[1] in ("stop", "suspect") or len(starts.read_text()) > num_faults
        time.sleep(0.1 if ends else 30)
        return 0
    if len(starts.read_text()) > num_faults:
        return 0
    first = here / "starts0"
    while not first.exists() or len(first.read_text()) < len(starts.read_text()):
        time.sleep(0.01)
    return globals()[sys.argv[1]]()

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def fail():
    raise ValueError("a bug")

def refuse():
    raise ConfigError("parallel.tp=3 is odd. Set it to 2.")

def stop():
    os._exit(75)

def suspect():
    os._exit(76)

def terminate():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)

def wait():
    time.sleep(30)

sys.exit(worker_main(work, os.environ))
"""

PARENT = """
import sys
from megalith.errors import RankError
from megalith.launch.launcher import run_workers
sys.exit(run_workers(sys.argv[2:], 2, command=[sys.executable, sys.argv[1]], restarts=3))
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program whose rank 1 has a fault in its first starts; nothing waits long."""
    monkeypatch.setattr(launcher, "NOTICE_SECONDS", 0.05)
    monkeypatch.setattr(launcher, "RESTART_DELAYS", (0.0, 0.01))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    file = tmp_path / "worker.py"
    file.write_text(WORKER)
    return file


def launch(script: Path, how: str, num_faults: int, restarts: int) -> int:
    """`run_workers` with that program on two ranks."""
    words = [how, str(script.parent), str(num_faults)]
    return run_workers(words, 2, command=[sys.executable, str(script)], restarts=restarts)


def num_starts(script: Path) -> list[int]:
    """How often each rank was started."""
    return [len((script.parent / f"starts{rank}").read_text()) for rank in range(2)]


def test_a_job_is_started_again_after_a_killed_rank(
    script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(script, "die", 2, 3) == 0
    assert num_starts(script) == [3, 3]
    assert capfd.readouterr().err.splitlines() == [
        "megalith: rank 1 was killed by signal 9 (SIGKILL); job restart 1 of 3",
        "megalith: rank 1 was killed by signal 9 (SIGKILL); job restart 2 of 3 in 0.01 s",
    ]


def test_the_last_failure_is_raised_after_all_restarts(
    script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankError, match="ValueError: a bug"):
        launch(script, "fail", 5, 1)
    assert num_starts(script) == [2, 2]
    expected = "megalith: rank 1: ValueError: a bug; job restart 1 of 1\n"
    assert capfd.readouterr().err == expected


@pytest.mark.parametrize(
    ("how", "error"),
    [("refuse", UserError), ("terminate", RankError)],
)
def test_a_job_is_not_started_again_after_a_final_exit(
    script: Path, how: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        launch(script, how, 5, 3)
    assert num_starts(script) == [1, 1]


@pytest.mark.parametrize(("how", "code"), [("stop", 75), ("suspect", 76)])
def test_a_job_that_stopped_after_a_save_is_not_started_again(
    script: Path, how: str, code: int
) -> None:
    assert launch(script, how, 5, 3) == code
    assert num_starts(script) == [1, 1]


def test_a_job_is_not_started_again_after_a_signal(script: Path) -> None:
    words = [sys.executable, "-c", PARENT, str(script), "wait", str(script.parent), "5"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 30
        while not all((script.parent / f"starts{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert errors == "megalith: interrupted by SIGTERM\n"
    assert num_starts(script) == [1, 1]


def test_delays_grow_with_the_restarts_of_the_last_hour() -> None:
    assert [restart_delay([5000.0] * n, 5001.0) for n in range(4)] == [0.0, 10.0, 60.0, 60.0]
    assert restart_delay([0.0, 5000.0], 5001.0) == 10.0


def test_a_negative_number_of_restarts_is_rejected() -> None:
    with pytest.raises(ConfigError, match="--restarts=-1 must not be negative"):
        train.main(["tiny_cpu", "--restarts", "-1"])


def test_restarts_are_rejected_under_another_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="such as --max-restarts of torchrun"):
        train.main(["tiny_cpu", "--restarts", "1"])


@pytest.mark.parametrize(
    ("words", "rank", "text"),
    [
        (["--spares", "2"], None, "--spares=2 with restart.max_in_place=0"),
        (["--spares", "-1", "--nproc", "2"], None, "--spares=-1 with"),
        (["--restart.max_in_place", "3"], None, "restart.max_in_place=3 with --nproc=1"),
        (["--restart.max_in_place", "3"], "0", "another launcher, such as torchrun, has started"),
    ],
)
def test_restarts_in_place_that_are_not_possible_are_rejected(
    monkeypatch: pytest.MonkeyPatch, words: list[str], rank: str | None, text: str
) -> None:
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(ConfigError, match=text):
        train.main(["tiny_cpu", *words])

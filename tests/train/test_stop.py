"""The first signal is noted, handlers come back, and time runs out."""

import os
import pty
import signal
import sys
import time
from pathlib import Path
from typing import Literal

import pytest
import torch

from megalith.errors import ConfigError
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.testing.tiny import tiny_run
from megalith.train.callbacks.base import Outcome
from megalith.train.callbacks.stop import (
    JobLimits,
    Stopper,
    read_job_end_time,
    read_job_limits,
    record_sigusr1,
)
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder


def test_first_signal_is_recorded_and_the_old_handler_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    output: list[str] = []
    with Stopper(max_minutes=None, print_line=output.append) as stopper:
        assert stopper.reason is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopper.reason == "SIGTERM"
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL  # a second signal ends the process
    assert signal.getsignal(signal.SIGTERM) == before
    assert "finishing the step and saving" in output[0]


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_every_stop_signal_is_noted(number: signal.Signals) -> None:
    with Stopper(max_minutes=None, print_line=lambda text: None) as stopper:
        os.kill(os.getpid(), number)
        assert stopper.reason == number.name


def test_hangup_ignored_by_nohup_stays_ignored() -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stopper(max_minutes=None, print_line=print) as stopper:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stopper.reason is None
    finally:
        signal.signal(signal.SIGHUP, previous)


UNTIL_HANGUP = """
import sys, time
from pathlib import Path
from megalith.train.callbacks.stop import Stopper

with Stopper(max_minutes=None, print_line=lambda text: print(text, flush=True)) as stopper:
    Path(sys.argv[1], "ready").touch()
    deadline = time.monotonic() + 120
    while stopper.reason is None and time.monotonic() < deadline:
        time.sleep(0.01)
    print("saving", flush=True)
    Path(sys.argv[1], "saved").write_text(str(stopper.reason))
"""


@pytest.mark.usefixtures("interruptible")
def test_run_saves_when_its_terminal_is_closed(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", UNTIL_HANGUP, str(tmp_path)])
    deadline = time.monotonic() + 120
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.close(terminal)  # the kernel sends SIGHUP, and writing to the terminal fails from now on
    assert os.waitpid(pid, 0)[1] == 0
    assert (tmp_path / "saved").read_text() == "SIGHUP"


def test_time_limit_is_a_reason() -> None:
    with Stopper(max_minutes=0.0, print_line=print) as stopper:
        assert stopper.reason == "time limit"


@pytest.mark.parametrize(
    ("action", "reason", "saves", "text"),
    [
        ("stop", "SIGUSR1", False, ["SIGUSR1: finishing the step and saving"]),
        ("save", None, True, ["SIGUSR1: saving after the step"]),
        ("ignore", None, False, []),
    ],
)
def test_sigusr1_stops_saves_or_is_ignored_and_may_be_repeated(
    action: Literal["stop", "save", "ignore"], reason: str | None, saves: bool, text: list[str]
) -> None:
    output: list[str] = []
    with Stopper(max_minutes=None, print_line=output.append, sigusr1_action=action) as stopper:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (stopper.reason, stopper.is_save_requested, output) == (reason, saves, text)


def test_sigusr1_before_training_is_recorded() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with record_sigusr1():
        os.kill(os.getpid(), signal.SIGUSR1)
        with Stopper(max_minutes=None, print_line=print) as stopper:
            assert stopper.reason == "SIGUSR1"
    assert signal.getsignal(signal.SIGUSR1) == before


def test_end_time_of_a_slurm_job_is_read() -> None:
    assert read_job_end_time({}) is None
    assert read_job_end_time({"SLURM_JOB_END_TIME": "1767225600"}) == 1767225600.0
    with pytest.raises(ConfigError, match="SLURM_JOB_END_TIME=soon in the environment is not a"):
        read_job_end_time({"SLURM_JOB_END_TIME": "soon"})


def test_time_between_sigterm_and_sigkill_is_known_under_torchrun() -> None:
    assert read_job_limits({}) == JobLimits()
    environment = {"SLURM_JOB_END_TIME": "1767225600", "TORCHELASTIC_RUN_ID": "long"}
    assert read_job_limits(environment) == JobLimits(1767225600.0, 30.0)


@pytest.mark.parametrize(
    ("end", "margin", "outcome"),
    [
        (90.0, "2", Outcome("stopped", 1, "end of the Slurm job")),
        (30.0, "none", Outcome("stopped", 1, "end of the Slurm job")),
        (3000.0, "none", Outcome("done", 2)),
        (-5.0, "none", Outcome("done", 2)),
    ],
)
def test_run_stops_before_the_end_of_a_slurm_job(
    tmp_path: Path, end: float, margin: str, outcome: Outcome
) -> None:
    run = tiny_run({"train.steps": "2", "train.exit_margin_minutes": margin})
    result = run_training(
        run,
        RunFolder(tmp_path),
        build_single_rank_mesh(),
        torch.device("cpu"),
        show=False,
        job_limits=JobLimits(time.time() + end),
    )
    assert result == outcome
    assert ("is in the past, so it is ignored" in (tmp_path / "log.txt").read_text()) == (end < 0)

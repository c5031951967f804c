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

from megalith.config.train import TrainRun
from megalith.errors import ConfigError
from megalith.observe.metrics import read_metrics
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.callbacks.base import Callback, Outcome
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


class StopInEvaluation(Callback):
    """Sends SIGTERM to this process when the evaluation after a step begins."""

    name = "stop_in_evaluation"

    def __init__(self, step: int) -> None:
        self.step = step

    def before_evaluate(self, step: int) -> None:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def evaluate_and_stop(rank: int, world: int, run: TrainRun, path: Path, step: int) -> Outcome:
    """Train; the last rank gets SIGTERM in the evaluation after `step`."""
    mesh = build_single_rank_mesh()
    if world > 1:
        mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    callbacks = [StopInEvaluation(step)] if rank == world - 1 else []
    device = torch.device("cpu")
    return run_training(run, RunFolder(path), mesh, device, show=False, callbacks=callbacks)


def evaluated_steps(path: Path) -> list[float]:
    return [row["step"] for row in read_metrics(path / "metrics.jsonl") if "eval_loss" in row]


LONG_EVALUATION = {
    "train.steps": "4",
    "train.eval_every": "2",
    "train.eval_steps": "20",
    "checkpoint.every": "0",
}


def test_signal_ends_an_evaluation_and_the_step_is_saved(tmp_path: Path) -> None:
    run = tiny_run(LONG_EVALUATION)
    assert evaluate_and_stop(0, 1, run, tmp_path, 2) == Outcome("stopped", 2, "SIGTERM")
    assert evaluated_steps(tmp_path) == []
    assert [each.name for each in (tmp_path / "checkpoints").glob("step_*")] == ["step_0000002"]
    text = "step 2: the evaluation of eval has ended without results, because the run stops"
    assert text in (tmp_path / "log.txt").read_text()
    assert evaluate_and_stop(0, 1, run, tmp_path, 4) == Outcome("done", 4)
    assert (tmp_path / "checkpoints" / "step_0000004").exists()


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"parallel.pp": "2"}])
def test_signal_to_one_rank_ends_the_evaluation_of_all(
    tmp_path: Path, layout: dict[str, str]
) -> None:
    run = tiny_run(LONG_EVALUATION | layout)
    outcomes = run_ranks(evaluate_and_stop, 2, run, tmp_path, 2)
    assert [(each.kind, each.step) for each in outcomes] == [("stopped", 2)] * 2
    assert evaluated_steps(tmp_path) == []
    assert {each.kind for each in run_ranks(evaluate_and_stop, 2, run, tmp_path, 0)} == {"done"}
    assert evaluated_steps(tmp_path) == [4]

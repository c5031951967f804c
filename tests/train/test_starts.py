"""Starts of a run: each start and exit has a line with its cause; a run in a crash loop continues
from an older tier, then from an older checkpoint, and is then rejected."""

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalith.checkpoint import local, lock
from megalith.cli.main import main
from megalith.cli.train import RESTART_COUNTS, TrainCommand, _reset_attempts
from megalith.errors import CheckpointError, DataError, RankError
from megalith.launch.launcher import LAUNCHER, Failure
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run, tiny_yaml
from megalith.train import starts
from megalith.train.callbacks.base import Callback, FinishedStep, Outcome, StepMetrics
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder
from megalith.train.start_records import (
    append_record,
    read_records,
    read_starts,
    record_failure_of_launch,
    record_failure_of_rank,
    reset_attempts,
)
from megalith.train.starts import StartLog

CPU = torch.device("cpu")
SHORT = {
    "train.steps": "6",
    "train.eval_every": "none",
    "train.eval_steps": "0",
    "checkpoint.every": "2",
}


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record pauses instead of waiting."""
    recorded: list[float] = []
    clock = SimpleNamespace(**{**vars(time), "sleep": recorded.append})
    monkeypatch.setattr(starts, "time", clock)
    return recorded


class Fail(Callback):
    """Fails after a step."""

    collective = True

    def __init__(self, step: int, error: type[Exception] = ZeroDivisionError) -> None:
        self.step, self.error = step, error

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        if finished.step == self.step:
            raise self.error(f"planted after step {self.step}")


def train(path: Path, *callbacks: Callback, **settings: str) -> Outcome:
    """Run the tiny run as the command does."""
    run, mesh = tiny_run(SHORT | settings), build_single_rank_mesh()
    log = StartLog(path, rank=0, escalates=True)
    return run_training(
        run, RunFolder(path), mesh, CPU, show=False, callbacks=callbacks, starts=log
    )


def fail(path: Path, step: int = 5, **settings: str) -> None:
    """Run the tiny run until it fails."""
    with pytest.raises(ZeroDivisionError):
        train(path, Fail(step), **settings)


def test_each_start_and_exit_has_a_line(tmp_path: Path) -> None:
    path = tmp_path / "run"
    fail(path)
    train(path)
    (first, second), problems = read_starts(path)
    assert not problems
    assert (first.number, first.step, first.checkpoint, first.tier) == (1, 0, None, "none")
    assert (first.world_size, len(first.hosts)) == (1, 1) and "tp=1" in first.layout
    assert first.began <= first.time
    assert first.exit is not None and first.exit.code == 1 and first.exit.rank == 0
    assert "ZeroDivisionError: planted after step 5" in first.exit.cause
    assert (second.number, second.step) == (2, 4)
    assert (second.checkpoint, second.tier) == ("step_0000004", "persistent")
    assert second.exit is not None
    assert (second.exit.code, second.exit.cause, second.exit.step) == (0, "done", 6)


def test_crash_loop_continues_from_an_older_checkpoint_and_is_then_rejected(
    tmp_path: Path, pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run"
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            fail(path)
    # The first start had no checkpoint; the later ones had that of step 4.
    assert [start.step for start in read_starts(path)[0]] == [0, 4, 4, 2, 2]
    assert "2 starts ended with the same cause" in caplog.text
    assert "before a checkpoint newer than step 4: this start uses the previous" in caplog.text
    assert pauses == [10.0, 60.0]
    with pytest.raises(CheckpointError) as error:
        train(path)
    lines = str(error.value).splitlines()
    assert lines[0] == (
        f"{path}: the last 4 starts ended with the same cause before there was a newer checkpoint, "
        "also with older ones, so this start is rejected:"
    )
    assert " ".join(lines[1].split()) == "start time ranks hosts checkpoint step cause of the exit"
    assert [line.split()[0] for line in lines[2:6]] == ["2", "3", "4", "5"]
    assert "step_0000004 (persistent)" in lines[2] and "step_0000002 (persistent)" in lines[5]
    assert "ZeroDivisionError: planted after step 5" in lines[5]
    assert lines[6] == (
        f"Remove the cause (see {path / 'log.txt'}), and run the same command again with "
        "--reset-attempts; 4 more starts are possible then."
    )
    assert len(read_starts(path)[0]) == 5, "a rejected start has no line"
    assert reset_attempts(path)
    assert train(path).kind == "done"
    assert read_starts(path)[0][-1].step == 4


@pytest.mark.slow
def test_crash_loop_of_a_local_checkpoint_uses_the_persistent_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "SHARED_MEMORY", tmp_path / "memory")
    (tmp_path / "memory").mkdir()
    settings = {"checkpoint.local.every": "1", "checkpoint.every": "2"}
    path = tmp_path / "run"
    for _ in range(5):
        fail(path, 6, **settings)
    attempts = [(start.tier, start.step) for start in read_starts(path)[0]]
    assert attempts == [
        ("none", 0),
        ("local", 5),
        ("local", 5),
        ("persistent", 4),
        ("persistent", 2),
    ]


def test_errors_that_the_user_can_fix_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for _ in range(5):
        with pytest.raises(DataError):
            train(path, Fail(5, DataError))
    attempts = read_starts(path)[0]
    assert [start.step for start in attempts] == [0, 4, 4, 4, 4]
    assert {start.exit.code for start in attempts if start.exit} == {2}


@pytest.mark.slow
def test_runs_of_the_python_api_are_recorded_and_not_escalated(tmp_path: Path) -> None:
    run, path = tiny_run(SHORT), tmp_path / "run"
    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            run_training(
                run,
                RunFolder(path),
                build_single_rank_mesh(),
                CPU,
                show=False,
                callbacks=[Fail(3)],
            )
    assert [start.step for start in read_starts(path)[0]] == [0, 2, 2, 2, 2]


def test_a_new_folder_is_removed_if_its_first_start_fails_before_training(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(CheckpointError):
        train(path, **{"checkpoint.load": str(tmp_path / "missing")})
    assert not path.exists()


def _train_rank(rank: int, world: int, path: Path) -> None:
    run = tiny_run(SHORT | {"parallel.dp": "2"})
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    log = StartLog(path, rank=rank, escalates=True)
    callbacks = [Fail(3)] if rank == 1 else []
    run_training(run, RunFolder(path), mesh, CPU, show=False, callbacks=callbacks, starts=log)


def test_errors_of_all_ranks_are_written_by_rank_0(tmp_path: Path) -> None:
    world = build_single_rank_mesh().world
    first = StartLog(tmp_path, rank=0)
    first.write_start(world, step=0, newest_step=0, layout="", checkpoint=None, tier="none")
    other = StartLog(tmp_path, rank=3)
    other.number = first.number
    errors = DataError("x"), RankError("y"), RuntimeError("Connection closed by peer")
    for log in (other, first):
        for error in errors:
            with pytest.raises(type(error)), log.record_failure():
                raise error
    exits = [each for each in read_records(tmp_path / "starts.jsonl")[0] if each["kind"] == "exit"]
    assert [(each["rank"], each["code"]) for each in exits] == [(0, 2), (0, 1), (0, 1)]
    assert [each["is_consequence"] for each in exits] == [False, True, True]


@pytest.mark.slow
def test_the_rank_that_failed_first_writes_the_cause(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="ZeroDivisionError"):
        run_ranks(_train_rank, 2, tmp_path)
    ((start,), _) = read_starts(tmp_path)
    assert start.exit is not None and start.exit.rank == 1
    assert "ZeroDivisionError" in start.exit.cause and not start.exit.is_consequence


def test_a_launcher_writes_the_exit_of_its_own_starts_once(tmp_path: Path) -> None:
    failure = Failure(1, "was killed by signal 9 (SIGKILL)", "", 0)
    record_failure_of_launch(tmp_path, failure, 1)
    assert not (tmp_path / "starts.jsonl").exists(), "there is no start"
    world = build_single_rank_mesh().world
    own = StartLog(tmp_path, rank=0, environment={LAUNCHER: f"{os.getpid()}:/tmp/x"})
    fields: dict[str, Any] = {"step": 0, "newest_step": 0, "layout": "", "tier": "none"}
    own.write_start(world, checkpoint=None, **fields)
    with pytest.raises(ZeroDivisionError), own.record_failure():
        raise ZeroDivisionError
    assert read_starts(tmp_path)[0][0].exit is None, "left to the launcher"
    record_failure_of_launch(tmp_path, failure, 1)
    record_failure_of_launch(tmp_path, failure, 1)
    assert len(read_records(tmp_path / "starts.jsonl")[0]) == 2
    other = StartLog(tmp_path, rank=0, environment={LAUNCHER: "1:/tmp/x"})
    other.write_start(world, checkpoint=None, **fields)
    record_failure_of_launch(tmp_path, failure, 1)
    ended = [start.exit is not None for start in read_starts(tmp_path)[0]]
    assert ended == [True, False] and other.number == 2


def test_a_failure_before_a_start_is_not_assigned_to_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The container was killed during the earlier start. In the new one, the launcher has the same
    process id, or another launcher starts the ranks; it fails before the new start is written."""
    failure = Failure(1, "was killed by signal 9 (SIGKILL)", "", 0)
    fields: dict[str, Any] = {"step": 0, "newest_step": 0, "layout": "", "tier": "none"}
    for number, environment in enumerate(({LAUNCHER: f"{os.getpid()}:/tmp/x"}, {})):
        path = tmp_path / str(number)
        path.mkdir()
        with monkeypatch.context() as earlier:
            earlier.setattr(lock, "_started", lambda pid: "an earlier process")
            log = StartLog(path, rank=0, environment=environment)
            log.write_start(build_single_rank_mesh().world, checkpoint=None, **fields)
        record_failure_of_launch(path, failure, 1)
        record_failure_of_rank(path, failure, 1, began=time.time() + 1)
        ((start,), _) = read_starts(path)
        assert start.exit is None
        record_failure_of_rank(path, failure, 1, began=start.time - 1)
        ((start,), _) = read_starts(path)
        assert (start.exit is None) == (LAUNCHER in environment), "the launcher writes its own"


def test_suspect_hosts_are_written_once(tmp_path: Path) -> None:
    for number in range(1, 5):
        append_record(
            tmp_path / "starts.jsonl",
            {
                "kind": "start",
                "start": number,
                "time": 1.0,
                "began": 0.0,
                "step": number,
                "newest_step": number,
                "world_size": 2,
                "hosts": ["n1", "n2"],
                "layout": "",
                "checkpoint": None,
                "tier": "none",
            },
        )
        append_record(
            tmp_path / "starts.jsonl",
            {
                "kind": "exit",
                "start": number,
                "time": 2.0,
                "cause": f"{number} x",
                "code": 1,
                "rank": 1,
                "host": "n2",
            },
        )
    log = StartLog(tmp_path, rank=0, escalates=True)
    for _ in range(2):
        log.decide(
            build_single_rank_mesh().world,
            newest_step=9,
            has_older_tier=False,
            has_older_checkpoint=False,
        )
    ((suspect,), _) = read_records(tmp_path / "suspects.jsonl")
    assert (suspect["host"], suspect["rank"], suspect["kind"]) == ("n2", 1, "recurring")
    assert suspect["exits"] is False
    assert suspect["reason"] == "named by faults of starts 1, 2, 3, 4"


def test_incomplete_and_damaged_lines_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "starts.jsonl"
    file.write_bytes(b'{"kind": "start", "start": 1}\nnot JSON\n[1]\n{"kind": "ex')
    attempts, problems = read_starts(tmp_path)
    assert attempts == []
    assert [problem.removeprefix(f"{file}: ") for problem in problems] == [
        "line 2 is ignored (Expecting value: line 1 column 1 (char 0))",
        "line 3 is ignored (it is not an object)",
        '{"kind": "start", "start": 1} is ignored (it lacks time)',
    ]
    append_record(file, {"kind": "reset"})
    assert json.loads(file.read_bytes().splitlines()[-1]) == {"kind": "reset"}


@pytest.mark.slow
def test_the_command_rejects_a_crash_loop_and_starts_again_after_a_reset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, path = tiny_yaml(tmp_path / "tiny.yaml", SHORT), tmp_path / "run"
    for _ in range(5):
        fail(path)
    words = ["train", str(file), "--run", str(path)]
    assert main(words) == 2
    assert "so this start is rejected" in capsys.readouterr().err
    assert main([*words, "--reset-attempts"]) == 0


@pytest.mark.slow
def test_the_launcher_records_a_killed_rank_and_the_next_start_continues(tmp_path: Path) -> None:
    fault = {"kind": "kill", "rank": 1, "step": 5, "confirm": "true"}
    settings = {f"fault_injector.{name}": str(value) for name, value in fault.items()}
    file = tiny_yaml(tmp_path / "tiny.yaml", SHORT | settings | {"parallel.dp": "2"})
    path = tmp_path / "run"
    command = [sys.executable, "-m", "megalith", "train", str(file), "--run", str(path)]
    codes = [
        subprocess.run([*command, "--nproc", "2"], capture_output=True, timeout=240).returncode
        for _ in range(2)
    ]
    assert codes == [1, 0]
    (first, second), problems = read_starts(path)
    assert first.exit is not None and second.exit is not None and not problems
    assert (first.exit.cause, first.exit.rank) == ("was killed by signal 9 (SIGKILL)", 1)
    assert (first.exit.code, first.launcher is None, second.step) == (1, False, 4)
    assert (second.exit.cause, second.exit.code) == ("done", 0)
    assert main(["report", str(path), "--json"]) == 0


def test_files_that_cannot_be_read_or_written_are_reported(tmp_path: Path) -> None:
    (tmp_path / "starts.jsonl").mkdir()
    assert read_starts(tmp_path) == (
        [],
        [f"{tmp_path / 'starts.jsonl'} cannot be read (Is a directory)"],
    )
    with pytest.raises(
        CheckpointError,
        match=r"--reset-attempts: .*starts\.jsonl cannot be written \(Is a directory\)\. Make it",
    ):
        reset_attempts(tmp_path)


@pytest.mark.parametrize(
    ("variables", "is_reset"),
    [
        ({}, True),
        ({"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"}, True),
        ({"RANK": "1", "TORCHELASTIC_RESTART_COUNT": "0"}, False),
        ({"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "1"}, False),
        ({"RANK": "0", "SLURM_RESTART_COUNT": "2"}, False),
    ],
)
def test_attempts_are_reset_once_by_a_command_that_is_run_again_after_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_reset: bool
) -> None:
    for name in ("RANK", LAUNCHER, *RESTART_COUNTS):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "starts.jsonl"
    file.write_text("{}\n")
    _reset_attempts(tiny_run(), TrainCommand(recipe="tiny", run=str(tmp_path)))
    assert ("reset" in file.read_text()) == is_reset

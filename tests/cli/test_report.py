"""`megalith report`: a run with a kill, a repeated part and a rollback; incomplete files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.checkpoint.lock import lock_run
from megalith.cli.main import main
from megalith.cli.report import format_seconds
from megalith.errors import RankError
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.plan.goodput import CAUSES
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.callbacks import events
from megalith.train.callbacks.base import Callback, FinishedStep, RunView, StepMetrics
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder
from megalith.train.step import StepRequest, StepStats

CPU = torch.device("cpu")
SETTINGS = {
    "train.steps": "8",
    "train.eval_every": "4",
    "train.eval_steps": "1",
    "checkpoint.every": "2",
}
KILL = {
    "fault_injector.kind": "kill",
    "fault_injector.step": "6",
    "fault_injector.confirm": "true",
}


class RollBackOnce(Callback):
    """Requests a rollback in step 8, and records an event of its own."""

    def on_start(self, run: RunView) -> None:
        self.run, self.is_done = run, False

    def before_update(self, stats: StepStats) -> StepRequest | None:
        if self.run.step + 1 != 8 or self.is_done:
            return None
        self.is_done = True
        self.run.record_event("fault", {"step": 8, "kind": "planted"})
        return StepRequest.ROLLBACK

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        if finished.step == 7:
            self.run.record_event("waiting", {"seconds": 0.001})


def train_rank(rank: int, world: int, path: Path, settings: dict[str, str]) -> None:
    """Train on one rank, with a rollback if no fault is planted."""
    events.STEPS_SECONDS = 0.0  # each step is written at once: the kill loses none
    run, mesh = tiny_run(settings), build_single_rank_mesh()
    callbacks = [RollBackOnce()] if run.fault_injector is None else []
    run_training(run, RunFolder(path), mesh, CPU, show=False, callbacks=callbacks)


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that was killed in step 6, continued at step 4, and was rolled
    back from step 8 to step 6."""
    path = tmp_path_factory.mktemp("report") / "run"
    with pytest.raises(RankError, match="was killed by signal 9"):
        run_ranks(train_rank, 1, path, SETTINGS | KILL)
    run_ranks(train_rank, 1, path, SETTINGS)
    return path


def report(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the document of the command."""
    assert main(["report", str(path), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_killed_and_rolled_back_run(killed_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(killed_run, capsys)
    first, second = found["starts"]
    # Step 5 of the first start, and step 7 before the rollback, were repeated.
    assert (found["num_steps"], found["num_repeated_steps"], found["num_faults"]) == (8, 2, 1)
    assert (first["step"], first["last_step"], first["exit"]) == (0, 5, None)
    assert (second["step"], second["last_step"], second["exit"]["cause"]) == (4, 8, "done")
    causes = found["causes"]
    assert list(causes) == list(CAUSES)
    assert sum(causes.values()) == pytest.approx(found["wall_seconds"], rel=1e-9)
    # No downtime: the process of the second start began before the first one was killed.
    for cause in ("productive", "start-up", "load", "save", "evaluate", "repeated"):
        assert causes[cause] > 0, cause
    assert causes["waiting"] == 0.002, "step 7 ran twice"
    assert causes["skipped"] == 0
    assert found["goodput"] == pytest.approx(causes["productive"] / found["wall_seconds"])
    counts = found["event_counts"]
    assert (counts["start"], counts["rollback"], counts["evaluate"], counts["end"]) == (2, 1, 2, 1)
    assert counts["fault"] == 1, "events of callbacks are kept"
    assert found["optimal_interval_steps"] >= 1 and found["checkpoint_every"] == 2
    assert found["problems"] == [] and found["notes"] == [] and not found["running"]


def test_text_and_plot(killed_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(killed_run), "--plot"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        f"{killed_run}: 2 starts, 1 fault, 8 steps and 2 repeated ones; the run is not in progress"
    )
    assert lines[1].startswith("goodput ")
    rows = [line.split()[0] for line in lines[4 : 4 + len(CAUSES)]]
    assert rows == list(CAUSES)
    starts = [line for line in lines if line.startswith(("1 ", "2 "))]
    assert " 1-5 " in starts[0] and starts[0].endswith("no exit was recorded")
    assert " 5-8 " in starts[1] and starts[1].endswith("done (exit code 0)")
    assert any(line.startswith("optimal checkpoint interval: ") for line in lines)
    assert lines[-1] == f"drew {killed_run}/plots/goodput.png"
    assert (killed_run / "plots" / "goodput.png").stat().st_size > 1000


def copy_files(source: Path, target: Path, *names: str) -> Path:
    """Copy some files of a run to another folder."""
    target.mkdir()
    for name in ("config.yaml", *names):
        (target / name).write_bytes((source / name).read_bytes())
    return target


def test_incomplete_files(
    killed_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_files(killed_run, tmp_path / "a", "events.jsonl")
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event": "save"}\nnot JSON\n{"event": "ste')
    found = report(folder, capsys)
    assert found["num_steps"] == 8
    assert found["notes"] == ["starts.jsonl has no line of start 1, 2, so its exit is not known"]
    damaged, incomplete = found["problems"]
    assert "is ignored (Expecting value: line 1 column 1 (char 0))" in damaged
    assert incomplete.endswith("{'event': 'save'} is ignored (start is not a number)")
    folder = copy_files(killed_run, tmp_path / "b", "starts.jsonl")
    assert main(["report", str(folder)]) == 0
    output = capsys.readouterr()
    assert "goodput 0.0%" in output.out
    assert "optimal checkpoint interval: not known, because nothing was saved" in output.out
    assert output.err == (
        "megalith report: events.jsonl has no line of start 1, 2: it ended before training, or the "
        "file is incomplete\n"
    )


def test_folder_without_files_is_rejected(
    killed_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_files(killed_run, tmp_path / "c")
    assert main(["report", str(folder)]) == 2
    assert capsys.readouterr().err == (
        f"megalith report: {folder} has neither starts.jsonl nor events.jsonl with a start of the "
        "run, so its time is not known. They are written since version 0.2.0: train in the folder "
        "with `megalith train`, or name another run.\n"
    )


def test_run_in_progress(
    killed_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_files(killed_run, tmp_path / "d", "events.jsonl", "starts.jsonl")
    with lock_run(folder):
        assert main(["report", str(folder)]) == 0
    assert "; the run is in progress" in capsys.readouterr().out


def test_durations_are_short() -> None:
    assert [format_seconds(value) for value in (0, 59.94, 60, 3599, 86_399)] == [
        "0.000 s",
        "59.9 s",
        "1 min 0 s",
        "59 min 59 s",
        "23 h 59 min",
    ]

"""Requests of `megalith request`: all ranks execute them in the same step, their results are
written, and training continues with the same bits."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.checkpoint.lock import LockHolder, find_running_process
from megalith.config.train import TrainRun
from megalith.data.loader import StepBatches
from megalith.observe.metrics import read_metrics
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.callbacks import requests
from megalith.train.callbacks.base import Callback, Outcome, RunView
from megalith.train.loop import run_training
from megalith.train.request_files import write_request
from megalith.train.run_folder import RunFolder

CPU = torch.device("cpu")
SETTINGS = {
    "train.steps": "10",
    "train.eval_every": "none",
    "checkpoint.every": "0",
    "checkpoint.keep": "9",
    "schedule.style": "constant",
}


class Requester(Callback):
    """Writes request files before given steps, as another process would; rank 0 reads them in the
    next step."""

    def __init__(self, actions: Mapping[int, str]) -> None:
        self.actions = actions

    def on_start(self, run: RunView) -> None:
        self.run = run

    def before_step(self, step: int, batches: StepBatches) -> None:
        if self.run.is_writer and step in self.actions:
            folder = self.run.folder.path
            write_request(folder, self.actions[step], find_running_process(folder))


def train(path: Path, settings: Mapping[str, str], actions: Mapping[int, str]) -> Outcome:
    run = tiny_run(SETTINGS | settings)
    return run_training(
        run,
        RunFolder(path),
        build_single_rank_mesh(),
        CPU,
        show=False,
        callbacks=[Requester(actions)],
    )


def _train_rank(
    rank: int, world: int, run: TrainRun, path: Path, actions: Mapping[int, str]
) -> Outcome:
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    before, requests.POLL_SECONDS = requests.POLL_SECONDS, 0.0
    try:
        return run_training(
            run, RunFolder(path), mesh, CPU, show=False, callbacks=[Requester(actions)]
        )
    finally:
        requests.POLL_SECONDS = before


@pytest.fixture
def polls_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "POLL_SECONDS", 0.0)


def result(path: Path, action: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(
        (path / "requests" / f"{action}.result.json").read_text(encoding="utf-8")
    )
    return values


def hashes(path: Path, step: int) -> dict[str, list[str]]:
    manifest = json.loads((path / "checkpoints" / f"step_{step:07d}" / "manifest.json").read_text())
    return {
        key: [box["sha256"] for box in tensor["boxes"]]
        for key, tensor in manifest["tensors"].items()
    }


def test_ranks_execute_requests_in_the_same_step_and_resume_is_bitwise_equal(
    tmp_path: Path,
) -> None:
    run = tiny_run(SETTINGS | {"parallel.dp": "2", "parallel.zero": "1", "profile.ranks": "[]"})
    path = tmp_path / "requested"
    actions = {1: "save", 2: "evaluate", 3: "profile", 7: "stop"}
    outcomes = run_ranks(_train_rank, 2, run, path, actions)
    assert [(each.kind, each.step) for each in outcomes] == [("stopped", 8)] * 2
    assert outcomes[0].reason == "megalith request"
    assert [folder.name for folder in sorted((path / "checkpoints").glob("step_*"))] == [
        "step_0000002",
        "step_0000008",
    ]
    rows = read_metrics(path / "metrics.jsonl")
    (evaluation,) = [row for row in rows if "eval_loss" in row]
    assert evaluation["step"] == 3
    traces = sorted((path / "profile" / "step_0000006").iterdir())
    assert [trace.name for trace in traces] == ["rank_00000.json", "rank_00001.json"]
    assert all(json.loads(trace.read_text())["traceEvents"] for trace in traces)
    assert not list((path / "requests").glob("*[!t].json")), "requests are removed"
    save, evaluate, profile, stop = (
        result(path, action) for action in ("save", "evaluate", "profile", "stop")
    )
    assert {each["status"] for each in (save, evaluate, profile, stop)} == {"done"}
    assert (save["step"], save["message"]) == (2, f"saved {path}/checkpoints/step_0000002")
    assert evaluate["step"] == 3 and evaluate["metrics"]["eval_loss"] == evaluation["eval_loss"]
    assert profile["message"] == f"profiled steps 6 to 7: {path}/profile/step_0000006"
    assert (stop["step"], stop["message"]) == (8, "stopped after step 8 and saved")

    run_ranks(_train_rank, 2, run, path, {})
    run_ranks(_train_rank, 2, run, tmp_path / "whole", {})
    assert hashes(path, 10) == hashes(tmp_path / "whole", 10)
    losses = [
        [row["loss"] for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]
        for folder in (path, tmp_path / "whole")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 10


@pytest.mark.usefixtures("polls_always")
def test_requests_that_cannot_be_executed_are_rejected_with_the_reason(tmp_path: Path) -> None:
    folder = tmp_path / "requests"
    folder.mkdir()
    write_request(tmp_path, "stop", LockHolder("earlier", "host", "machine", 1, "2"))
    (folder / "save.json").write_text("{")
    (folder / "sav.json").write_text("{}")
    (folder / "note.txt").write_text("kept")
    settings = {"train.steps": "4", "train.eval_steps": "0", "profile.start": "3"}
    actions = {1: "evaluate", 2: "profile", 4: "save"}
    assert train(tmp_path, settings, actions) == Outcome("done", 4)
    stop, evaluate, profile, save = (
        result(tmp_path, action) for action in ("stop", "evaluate", "profile", "save")
    )
    assert stop["status"] == evaluate["status"] == profile["status"] == "failed"
    assert stop["message"] == "the job that it was for has ended; request it again if needed"
    assert evaluate["message"] == (
        "this run has no samples for an evaluation. Set train.eval_steps to at least 1 and "
        "provide validation data."
    )
    assert profile["message"] == ("steps 3 to 4 are profiled already. Request it again after them.")
    assert (save["status"], save["message"]) == (
        "failed",
        "the run ended at step 4 before it was executed",
    )
    log = (tmp_path / "log.txt").read_text()
    assert f"removed: {folder}/save.json is not a request (" in log
    assert (
        f"{folder}/sav.json requests an unknown action. Use `megalith request {tmp_path}` with one "
        "of save, evaluate, profile, stop." in log
    )
    assert {file.name for file in folder.iterdir() if ".result." not in file.name} == {"note.txt"}


@pytest.mark.usefixtures("polls_always")
def test_pending_request_fails_if_the_run_ends_with_an_error(tmp_path: Path) -> None:
    callbacks = [Requester({1: "save"}), Failing()]
    with pytest.raises(ValueError, match="broken"):
        run_training(
            tiny_run(SETTINGS),
            RunFolder(tmp_path),
            build_single_rank_mesh(),
            CPU,
            show=False,
            callbacks=callbacks,
        )
    assert result(tmp_path, "save")["message"] == "the run ended with an error: broken"


class Failing(Callback):
    """Ends the run in step 2, in which rank 0 has read the request."""

    collective = True

    def before_step(self, step: int, batches: StepBatches) -> None:
        if step == 2:
            raise ValueError("broken")


def test_folder_of_requests_is_listed_at_most_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[float] = []
    clock = iter(0.3 * step for step in range(1, 11))
    monkeypatch.setattr(requests.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(requests, "list_requests", lambda folder: listed.append(0.0) or [])
    callback = requests.RunRequests("id", None, None)  # type: ignore[arg-type]  # not used
    callback.on_start(_View(tmp_path))  # type: ignore[arg-type]
    for step in range(10):
        callback.before_step(step, None)  # type: ignore[arg-type]
    assert len(listed) == 3  # at 0.3, 1.5 and 2.7 s


class _View:
    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)

"""Runs whose saves are asynchronous: checkpoints, metrics and resumed steps are those of a run with
synchronous saves, whatever happens to the writer processes."""

import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.checkpoint import async_save, staging
from megalith.checkpoint.async_save import WriterSettings
from megalith.checkpoint.load import verify_checkpoint
from megalith.checkpoint.save import SaveReport
from megalith.errors import CheckpointError
from megalith.observe.metrics import read_metrics
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.callbacks import health
from megalith.train.callbacks.base import Callback, FinishedStep, Outcome, RunView, StepMetrics
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder
from megalith.train.step import StepRequest, WriteGuard

CPU = torch.device("cpu")
BASE = {"train.eval_steps": "0", "checkpoint.every": "2", "checkpoint.keep": "none"}
ASYNC = {"checkpoint.async_save": "true"}
EXPERTS = {
    "model.moe.num_experts": "4",
    "model.moe.top_k": "2",
    "model.moe.ffn_hidden_size": "10",
    "model.moe.router.score": "sigmoid",
    "model.moe.router.expert_bias": "true",
}
FIELDS = "step", "loss", "grad_norm", "lr", "tokens"


def train(path: Path, settings: Mapping[str, str], *callbacks: Callback) -> Outcome:
    """The tiny run on one process."""
    run = tiny_run(BASE | settings)
    mesh = build_single_rank_mesh()
    return run_training(run, RunFolder(path), mesh, CPU, show=False, callbacks=callbacks)


def rows(path: Path) -> list[dict[str, Any]]:
    return [{name: row[name] for name in FIELDS} for row in read_metrics(path / "metrics.jsonl")]


def hashes(path: Path) -> dict[str, dict[str, list[str]]]:
    """SHA-256 of every box, by checkpoint and tensor."""
    return {
        manifest.parent.name: {
            key: [box["sha256"] for box in tensor["boxes"]]
            for key, tensor in json.loads(manifest.read_text())["tensors"].items()
        }
        for manifest in sorted((path / "checkpoints").glob("step_*/manifest.json"))
    }


class Watch(Callback):
    """Records the saves that are reported to it, and acts after a step."""

    def __init__(self, request: StepRequest = StepRequest.NONE, *, step: int = 0) -> None:
        self.requested, self.step = request, step
        self.saved: list[tuple[str, bool]] = []
        self.failed: list[str] = []

    def on_start(self, run: RunView) -> None:
        self.run = run

    def before_step(self, step: int, batches: Any) -> None:
        if step == self.step:
            self.step = 0  # once: the step is repeated after a rollback
            self.run.request(self.requested)

    def after_save(self, report: SaveReport) -> None:
        is_complete = verify_checkpoint(report.path) == []
        self.saved.append((report.path.name, is_complete))

    def after_save_failed(self, error: CheckpointError) -> None:
        self.failed.append(str(error))


class SignalWriter(Callback):
    """Sends a signal to the writer process of one rank after the first save, so that the second one
    fails; a stopped process is noticed after 0.2 s."""

    def __init__(self, number: int, rank: int = 0) -> None:
        self.number, self.rank = number, rank

    def on_start(self, run: RunView) -> None:
        self.run = run

    def after_save(self, report: SaveReport) -> None:
        if report.path.name == "step_0000002" and self.run.mesh.world.rank == self.rank:
            saver = SAVERS[-1]
            os.kill(saver.writer_pid or 0, self.number)
            if self.number == signal.SIGSTOP:
                saver._settings = WriterSettings(timeout_seconds=0.2)

    def after_save_failed(self, error: CheckpointError) -> None:
        SAVERS[-1]._settings = WriterSettings()


SAVERS: list[async_save.AsyncSaver] = []


@pytest.fixture
def record_savers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the savers of runs in `SAVERS`."""
    start_recording(monkeypatch)


def start_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `record_savers`."""
    create = health.AsyncSaver

    def build(*arguments: Any) -> async_save.AsyncSaver:
        SAVERS.append(create(*arguments))
        return SAVERS[-1]

    monkeypatch.setattr(health, "AsyncSaver", build)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with synchronous saves."""
    path = tmp_path_factory.mktemp("reference")
    train(path, {"checkpoint.async_save": "false"})
    return path


def test_run_equals_one_with_synchronous_saves(tmp_path: Path, reference: Path) -> None:
    watch = Watch()
    assert train(tmp_path, ASYNC, watch) == Outcome("done", 8)
    assert watch.saved == [(f"step_000000{step}", True) for step in (2, 4, 6, 8)]
    assert hashes(tmp_path) == hashes(reference)
    assert rows(tmp_path) == rows(reference)
    log = (tmp_path / "log.txt").read_text()
    assert "checkpoint step_0000002: " in log and " staged in 0.0 s, blocked " in log


def test_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, reference: Path) -> None:
    """It stops while a save is in flight, which is completed first."""
    watch = Watch(StepRequest.STOP_NOW, step=5)
    outcome = train(tmp_path, ASYNC, watch)
    assert (outcome.kind, outcome.step, outcome.saved) == ("stopped", 4, True)
    assert watch.saved[-1] == ("step_0000004", True)
    assert train(tmp_path, ASYNC) == Outcome("done", 8)
    assert hashes(tmp_path) == hashes(reference)
    assert rows(tmp_path) == rows(reference)


def test_rollback_restores_the_save_that_was_in_flight(tmp_path: Path) -> None:
    for name, mode in (("sync", {"checkpoint.async_save": "false"}), ("async", ASYNC)):
        train(tmp_path / name, mode, Watch(StepRequest.ROLLBACK, step=5))
    assert hashes(tmp_path / "sync") == hashes(tmp_path / "async")
    log = (tmp_path / "async" / "log.txt").read_text()
    assert "step 5: rolled back to the checkpoint of step 4" in log


class SkipLater(Callback):
    """Skips the updates of all steps from 5 on."""

    def on_start(self, run: RunView) -> None:
        self.run = run

    def before_step(self, step: int, batches: Any) -> None:
        if step >= 5:
            self.run.request(StepRequest.SKIP)


def test_checkpoint_before_skipped_steps_is_not_deleted(tmp_path: Path) -> None:
    train(tmp_path, ASYNC | {"checkpoint.keep": "1", "train.steps": "9"}, SkipLater())
    assert list(hashes(tmp_path)) == ["step_0000004", "step_0000009"]


def test_small_saves_are_synchronous_by_default(tmp_path: Path) -> None:
    train(tmp_path, {})
    assert "staged in" not in (tmp_path / "log.txt").read_text()


def test_too_little_memory_is_an_error_or_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_save, "free_memory", lambda: 1000)
    monkeypatch.setattr(health, "MIN_NBYTES", 0)
    needs = r"asynchronous saves need \d\d\d kB of host memory .*, and 1.0 kB are free"
    with pytest.raises(CheckpointError, match=rf"checkpoint.async_save=true: {needs}. Set check"):
        train(tmp_path / "true", ASYNC)
    train(tmp_path / "auto", {})
    log = (tmp_path / "auto" / "log.txt").read_text()
    assert log.count("saves are synchronous (checkpoint.async_save): asynchronous saves need") == 1


def test_saves_that_wait_for_each_other_name_the_setting_to_change(tmp_path: Path) -> None:
    train(tmp_path, ASYNC | {"checkpoint.every": "1", "train.steps": "6"})
    log = (tmp_path / "log.txt").read_text()
    assert "step 2: waited 0." in log or "step 2: waited " in log
    assert ", as did the 2 saves before: increase checkpoint.every (1 now) or" in log


@pytest.mark.parametrize("waits", [True, False])
def test_update_waits_for_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """The injected fault: without the wait, weights, optimizer state and expert biases of the next
    step are in the checkpoint."""
    copy, updated = staging.StagingRegion.copy, threading.Event()

    class Update(Callback):
        def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
            if finished.step == 3:
                updated.set()

    def copy_late(*arguments: Any) -> None:
        updated.wait(0.1 if waits else 60)
        copy(*arguments)

    monkeypatch.setattr(staging.StagingRegion, "copy", copy_late)
    if not waits:
        monkeypatch.setattr(WriteGuard, "wait", lambda self: None)
    settings = EXPERTS | {"train.steps": "4"}
    train(tmp_path / "sync", settings | {"checkpoint.async_save": "false"})
    train(tmp_path / "async", settings | ASYNC, Update())
    expected, saved = (hashes(tmp_path / name)["step_0000002"] for name in ("sync", "async"))
    differ = {key for key in expected if expected[key] != saved[key]}
    if waits:
        assert not differ
        return
    biases = {key for key in expected if "balancing_bias" in key}
    assert biases and biases <= differ
    assert {key for key in expected if key.startswith("optimizer.exp_avg.")} <= differ


@pytest.mark.usefixtures("record_savers")
def test_killed_writer_costs_one_save(tmp_path: Path, reference: Path) -> None:
    watch = Watch()
    assert train(tmp_path, ASYNC, watch, SignalWriter(signal.SIGKILL)) == Outcome("done", 8)
    assert [name for name, _ in watch.saved] == ["step_0000002", "step_0000006", "step_0000008"]
    assert ["was ended by SIGKILL" in text for text in watch.failed] == [True]
    expected = hashes(reference)
    assert hashes(tmp_path) == {name: expected[name] for name, _ in watch.saved}
    assert rows(tmp_path) == rows(reference)
    assert not list((tmp_path / "checkpoints").glob("*.tmp-*"))
    log = (tmp_path / "log.txt").read_text()
    assert "the run continues without this checkpoint: step 4 was not saved" in log


@pytest.mark.usefixtures("record_savers")
def test_unresponsive_writer_costs_one_save(tmp_path: Path, reference: Path) -> None:
    watch = Watch()
    train(tmp_path, ASYNC, watch, SignalWriter(signal.SIGSTOP))
    assert ["made no progress for " in text for text in watch.failed] == [True]
    assert [name for name, _ in watch.saved] == ["step_0000002", "step_0000006", "step_0000008"]
    assert rows(tmp_path) == rows(reference)


@pytest.mark.usefixtures("record_savers")
def test_too_many_failed_saves_end_the_run(tmp_path: Path) -> None:
    settings = ASYNC | {"checkpoint.max_save_failures": "1"}
    with pytest.raises(CheckpointError, match="step 4 was not saved to .* was ended by SIGKILL"):
        train(tmp_path, settings, SignalWriter(signal.SIGKILL))
    assert list(hashes(tmp_path)) == ["step_0000002"]


class Fail(Callback):
    """Ends the run with an error in a step."""

    collective = True

    def before_step(self, step: int, batches: Any) -> None:
        if step == 5:
            raise RuntimeError("planted")


def test_save_in_flight_is_completed_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="planted"):
        train(tmp_path, ASYNC, Fail())
    deadline = time.monotonic() + 60
    while not (tmp_path / "checkpoints" / "step_0000004").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert verify_checkpoint(tmp_path / "checkpoints" / "step_0000004") == []


def _train_on_ranks(rank: int, world: int, path: Path, settings: dict[str, str], kill: bool) -> Any:
    """Train on several ranks; the writer of the last one is killed after the first save."""
    run = tiny_run(BASE | settings)
    watch = Watch()
    with pytest.MonkeyPatch.context() as patch:
        start_recording(patch)
        mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
        callbacks = [watch, *([SignalWriter(signal.SIGKILL, world - 1)] if kill else [])]
        run_training(run, RunFolder(path), mesh, CPU, show=False, callbacks=callbacks)
    return [name for name, _ in watch.saved], watch.failed


def test_ranks_save_and_fail_together(tmp_path: Path) -> None:
    layout = {"parallel.dp": "2", "parallel.zero": "1", "precision.params": "bf16"}
    run_ranks(
        _train_on_ranks, 2, tmp_path / "sync", layout | {"checkpoint.async_save": "false"}, False
    )
    first, second = run_ranks(_train_on_ranks, 2, tmp_path / "async", layout | ASYNC, True)
    assert first == second
    saved, (error,) = first
    assert saved == ["step_0000002", "step_0000006", "step_0000008"]
    assert "rank 1: the writer process" in error and "was ended by SIGKILL" in error
    expected = hashes(tmp_path / "sync")
    assert hashes(tmp_path / "async") == {name: expected[name] for name in saved}
    assert rows(tmp_path / "async") == rows(tmp_path / "sync")

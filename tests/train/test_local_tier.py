"""Runs with local checkpoints: a run that was interrupted between two persistent checkpoints
continues from the newest local one, bit for bit."""

import json
import logging
import os
import re
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.checkpoint.load import open_checkpoint
from megalith.checkpoint.local import LocalTier
from megalith.errors import CheckpointError, ConfigError, DamagedCheckpointError
from megalith.observe.metrics import read_metrics
from megalith.parallel.grad_sync import ShardedParam
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.testing.inject import patched
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.callbacks.base import Callback, Outcome, RunView
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder
from megalith.train.step import StepRequest

CPU = torch.device("cpu")
BASE = {
    "train.eval_steps": "0",
    "train.steps": "7",
    "checkpoint.every": "4",
    "checkpoint.keep": "none",
    "checkpoint.async_save": "false",
}
LOCAL = {"checkpoint.local.every": "1"}
FIELDS = "step", "loss", "grad_norm", "lr", "tokens"


class Killed(BaseException):
    """Ends a run as a kill does: nothing is saved."""


class KillAt(Callback):
    """Ends the run before a step, or requests something there."""

    def __init__(self, step: int, request: StepRequest | None = None) -> None:
        self.step, self.requested = step, request

    def on_start(self, run: RunView) -> None:
        self.run = run

    def before_step(self, step: int, batches: Any) -> None:
        if step == self.step and self.requested is None:
            raise Killed
        if step == self.step and self.requested is not None:
            self.step = 0
            self.run.request(self.requested)


def train(path: Path, settings: Mapping[str, str], *callbacks: Callback) -> Outcome:
    """The tiny run on one process."""
    run = tiny_run(BASE | settings)
    mesh = build_single_rank_mesh()
    return run_training(run, RunFolder(path), mesh, CPU, show=False, callbacks=callbacks)


def local_settings(path: Path) -> dict[str, str]:
    return LOCAL | {"checkpoint.local.folder": str(path.with_name(f"{path.name}.local"))}


def rank_folder(path: Path, rank: int = 0) -> Path:
    """The folder of the local checkpoints of a rank of the run in `path`."""
    (folder,) = path.with_name(f"{path.name}.local").glob(f"megalith-*/rank_{rank:05d}")
    return folder


def rows(path: Path) -> list[dict[str, Any]]:
    return [{name: row[name] for name in FIELDS} for row in read_metrics(path / "metrics.jsonl")]


def assert_last_checkpoints_equal(path: Path, other: Path) -> None:
    """Compare every bit of every tensor after the last step."""
    one, two = (open_checkpoint(each / "checkpoints" / "step_0000007") for each in (path, other))
    assert one.manifest.tensors.keys() == two.manifest.tensors.keys()
    for key in sorted(one.manifest.tensors):
        assert torch.equal(one.read(key), two.read(key)), key
    assert one.state == two.state


def log_of(path: Path) -> str:
    return (path / "log.txt").read_text()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without local checkpoints."""
    path = tmp_path_factory.mktemp("reference") / "run"
    train(path, {})
    return path


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A run killed in step 7, with local checkpoints of steps 5 and 6, and a persistent one of step
    4."""
    path = tmp_path / "run"
    with pytest.raises(Killed):
        train(path, local_settings(path), KillAt(7))
    return path


def test_run_resumes_from_the_newest_local_checkpoint(killed: Path, reference: Path) -> None:
    assert [each.name for each in sorted(rank_folder(killed).iterdir())] == [
        "step_0000005",
        "step_0000006",
    ]
    train(killed, local_settings(killed))
    assert f"resuming {killed} at step 6 from its local checkpoint" in log_of(killed)
    assert rows(killed) == rows(reference)
    assert_last_checkpoints_equal(killed, reference)
    assert not list(killed.with_name("run.local").iterdir())  # the persistent one holds the end


class Preempted(Callback):
    """Sends SIGTERM to this process in a step."""

    name = "preempted"

    def __init__(self, step: int) -> None:
        self.step = step

    def before_step(self, step: int, batches: Any) -> None:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("grace", "fails", "tier"),
    [("0", False, "local"), ("0", True, "persistent"), ("1000", False, "persistent")],
)
def test_preempted_run_is_saved_locally_if_a_persistent_save_takes_too_long(
    tmp_path: Path, reference: Path, grace: str, fails: bool, tier: str
) -> None:
    """Step 4 is saved regularly, step 6 before the exit."""
    path = tmp_path / "run"
    settings = local_settings(path) | {
        "checkpoint.local.every": "100",
        "train.termination_grace_seconds": grace,
    }

    def fail(*arguments: Any, **options: Any) -> None:
        raise CheckpointError("the local checkpoint of step 6 was not saved. The folder is full.")

    with patched(LocalTier, "save", fail) if fails else nullcontext():
        outcome = train(path, settings, Preempted(5))
    assert outcome == Outcome("stopped", 6, "SIGTERM", tier=tier)
    has_step = (path / "checkpoints" / "step_0000006").exists()
    assert has_step == (tier == "persistent")
    message = f"step 6 is saved in the local tier ({path}.local/megalith-"
    log = log_of(path)
    assert (message in log) == (tier == "local")
    if tier == "local":
        assert re.search(r"0\.0 s are left, and a persistent save has taken \d+\.\d s", log)
        assert "on others it continues from the newest persistent checkpoint" in log
    train(path, settings)
    assert rows(path) == rows(reference)
    assert_last_checkpoints_equal(path, reference)


def _preempt_rank_1(rank: int, world: int, path: Path, settings: dict[str, str]) -> Outcome:
    run = tiny_run(BASE | settings)
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    callbacks = [Preempted(5)] if rank == 1 else []
    return run_training(run, RunFolder(path), mesh, CPU, show=False, callbacks=callbacks)


@pytest.mark.slow
def test_all_ranks_save_locally_if_one_rank_has_too_little_time(tmp_path: Path) -> None:
    path = tmp_path / "run"
    settings = local_settings(path) | {
        "checkpoint.local.every": "100",
        "checkpoint.local.replication_factor": "1",
        "train.termination_grace_seconds": "0",
    }
    outcomes = run_ranks(_preempt_rank_1, 2, path, settings)
    assert [(each.kind, each.step, each.tier) for each in outcomes] == [("stopped", 6, "local")] * 2
    assert run_ranks(_train_on_ranks, 2, path, settings, 0) == ["done"] * 2
    assert f"resuming {path} at step 6 from its local checkpoint" in log_of(path)


class SlowSteps(Callback):
    """Leaves the writer time to save every step."""

    name = "slow"

    def before_step(self, step: int, batches: Any) -> None:
        time.sleep(0.1)


def test_run_resumes_from_an_asynchronous_local_checkpoint(tmp_path: Path, reference: Path) -> None:
    path = tmp_path / "run"
    settings = local_settings(path) | {"checkpoint.async_save": "true"}
    with pytest.raises(Killed):
        train(path, settings, SlowSteps(), KillAt(7))
    steps = [int(each.name[5:]) for each in rank_folder(path).iterdir() if each.name[5:].isdigit()]
    assert max(steps) > 4
    train(path, settings)
    assert f"resuming {path} at step {max(steps)} from its local checkpoint" in log_of(path)
    assert rows(path) == rows(reference)
    assert_last_checkpoints_equal(path, reference)


@pytest.mark.parametrize("damage", ["lost", "flipped", "both flipped"])
def test_damaged_local_checkpoint_falls_back(killed: Path, reference: Path, damage: str) -> None:
    """One rank has no copies: the local checkpoint before is read, then the persistent one."""
    folders = sorted(rank_folder(killed).iterdir(), reverse=True)
    for folder in folders[: 2 if damage == "both flipped" else 1]:
        file = folder / "__0_0.distcp"
        if damage == "lost":
            file.unlink()
            continue
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 16
        file.write_bytes(data)
    train(killed, local_settings(killed))
    text = log_of(killed)
    if damage == "both flipped":
        assert "skipping the local checkpoint of step 6: step 6: box " in text
        assert "Resuming from the local checkpoint of step_0000005." in text
        assert "skipping the local checkpoint of step 5: step 5: box " in text
        assert "Resuming from step_0000004." in text
        assert f"resuming {killed} at step 4\n" in text
    else:
        assert f"resuming {killed} at step 5 from its local checkpoint" in text
    if damage == "lost":
        assert (
            "the local checkpoint of step 6 is not complete: 0 of 1 ranks have no folder of it (-)"
        ) in text
        assert "using the local checkpoint of step 5" in text
    assert rows(killed) == rows(reference)
    assert_last_checkpoints_equal(killed, reference)


def _flip_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 16
    file.write_bytes(data)


@pytest.mark.parametrize("damage", ["manifest", "flipped"])
def test_local_checkpoint_is_used_if_all_persistent_ones_are_damaged(
    killed: Path, reference: Path, damage: str
) -> None:
    """The persistent one of step 4 is found damaged when it is opened, or when it is read because
    the newer local ones are damaged too."""
    settings = local_settings(killed) | {"checkpoint.local.keep": "3"}
    persistent = killed / "checkpoints" / "step_0000004"
    if damage == "manifest":
        (persistent / "manifest.json").write_text("{}")
        train(killed, settings)
        text = log_of(killed)
        assert "none of its 1 checkpoints can be used" in text
        assert "Using the local checkpoint of step 6." in text
        assert f"resuming {killed} at step 6 from its local checkpoint" in text
    else:
        _make_local_checkpoint_older(killed)
        _flip_bit(persistent / "__0_0.distcp")
        train(killed, settings)
        text = log_of(killed)
        assert "skipping checkpoint step_0000004: " in text
        assert "Resuming from the local checkpoint of step_0000003." in text
        assert f"resuming {killed} at step 3 from its local checkpoint" in text
        assert persistent.with_name("step_0000004.damaged").is_dir()
    assert rows(killed) == rows(reference)
    assert_last_checkpoints_equal(killed, reference)


def _make_local_checkpoint_older(path: Path) -> None:
    """Replace the run by one whose newest local checkpoint, of step 3, is older than its persistent
    one of step 4."""
    shutil.rmtree(path)
    shutil.rmtree(path.with_name(f"{path.name}.local"))
    with pytest.raises(Killed):
        train(path, local_settings(path) | {"checkpoint.local.every": "3"}, KillAt(6))
    assert _local_steps(path, 0) == [3]


def test_damaged_checkpoints_of_both_tiers_are_an_error(killed: Path) -> None:
    (killed / "checkpoints" / "step_0000004" / "manifest.json").write_text("{}")
    for step in (5, 6):
        _flip_bit(rank_folder(killed) / f"step_000000{step}" / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="none of its 1 checkpoints can be used"):
        train(killed, local_settings(killed))
    text = "skipping the local checkpoint of step 5: step 5: box "
    assert text in log_of(killed) and "Resuming from no checkpoint." in log_of(killed)


def test_batch_sizes_of_samples_that_a_local_checkpoint_has_read_cannot_change(
    killed: Path,
) -> None:
    """Steps 1 to 6 have read 72 samples, and the persistent checkpoint of step 4 48."""
    settings = local_settings(killed) | {"train.global_batch_size": "24"}
    schedule = "[{size: 12}, {samples: %s, size: 24}]"
    with pytest.raises(ConfigError, match="The batch size can change after sample 72") as caught:
        train(killed, settings | {"train.batch_size_schedule": schedule % 60})
    assert "train.global_batch_size: 12 before, 24 now" in str(caught.value)
    assert "train.batch_size_schedule: [] before, " in str(caught.value)
    train(killed, settings | {"train.batch_size_schedule": schedule % 72})
    assert f"resuming {killed} at step 6 from its local checkpoint" in log_of(killed)


def test_persistent_checkpoint_that_is_newer_is_used(killed: Path, reference: Path) -> None:
    shutil.rmtree(rank_folder(killed) / "step_0000006")
    with pytest.raises(Killed):
        train(killed, {"checkpoint.every": "1"}, KillAt(7))  # without local checkpoints
    train(killed, local_settings(killed))
    text = "the newest local checkpoint is of step 5, before step 6; using step_0000006"
    assert text in log_of(killed)
    assert f"resuming {killed} at step 6\n" in log_of(killed)
    assert rows(killed) == rows(reference)


def test_damaged_local_checkpoint_without_another_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "run"
    settings = local_settings(path) | {"checkpoint.local.keep": "1", "checkpoint.every": "0"}
    with pytest.raises(Killed):
        train(path, settings, KillAt(3))
    file = rank_folder(path) / "step_0000002" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match=r"^step 2: box .*: no copy is intact \(damag"):
        train(path, settings)


def test_rollback_discards_local_checkpoints_of_its_steps(killed: Path) -> None:
    """They have the old position in the data."""
    settings = local_settings(killed) | {"train.steps": "12"}
    with pytest.raises(Killed):
        train(killed, settings, KillAt(7, StepRequest.ROLLBACK), _KillAfterRollback())
    assert not list(rank_folder(killed).iterdir())
    train(killed, settings)
    assert f"resuming {killed} at step 4\n" in log_of(killed)


class _KillAfterRollback(Callback):
    """Ends the run after a rollback has been saved."""

    essential = True

    def __init__(self) -> None:
        self.has_rolled_back = False

    def after_rollback(self, step: int) -> None:
        self.has_rolled_back = True

    def before_step(self, step: int, batches: Any) -> None:
        if self.has_rolled_back:
            raise Killed


def test_failed_local_save_does_not_end_the_run(
    tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megalith.checkpoint.local import LocalTier

    def fail(*arguments: Any, **settings: Any) -> None:
        raise CheckpointError("the local checkpoint of step 1 was not saved.")

    monkeypatch.setattr(LocalTier, "save", fail)
    path = tmp_path / "run"
    train(path, local_settings(path))
    text = "the run continues without this local checkpoint: the local checkpoint of step 1 was"
    assert log_of(path).count(text) == 1
    assert rows(path) == rows(reference)


def test_run_id_is_stored_with_the_checkpoints(killed: Path) -> None:
    run = (killed / "checkpoints" / "run_id").read_text().strip()
    assert rank_folder(killed).parent.name == f"megalith-run-{run}"
    table = json.loads((rank_folder(killed) / "step_0000006" / "local.json").read_text())
    assert (table["run"], table["step"], table["rank"]) == (run, 6, 0)
    shutil.rmtree(killed / "checkpoints")
    train(killed, local_settings(killed))
    assert "starting from the beginning" in log_of(killed)


# --- several ranks

ZERO = {"parallel.dp": "2", "parallel.zero": "1", "precision.params": "bf16"}


def _train_on_ranks(
    rank: int, world: int, path: Path, settings: Mapping[str, str], kill_at: int
) -> str:
    run = tiny_run(BASE | settings)
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    callbacks = [KillAt(kill_at)] if kill_at else []
    try:
        run_training(run, RunFolder(path), mesh, CPU, show=False, callbacks=callbacks)
    except Killed:
        return "killed"
    finally:
        logging.getLogger().handlers.clear()
    return "done"


def _resume(path: Path, reference: Path, world: int, layout: Mapping[str, str], lost: int) -> None:
    """Lose the folder of one rank, continue, and compare with the uninterrupted run."""
    settings = local_settings(path) | layout
    assert run_ranks(_train_on_ranks, world, path, settings, 7) == ["killed"] * world
    shutil.rmtree(rank_folder(path, lost))
    assert run_ranks(_train_on_ranks, world, path, settings, 0) == ["done"] * world
    assert f"resuming {path} at step 6 from its local checkpoint" in log_of(path)
    assert rows(path) == rows(reference)
    assert_last_checkpoints_equal(path, reference)


def test_two_ranks_resume_after_one_has_lost_its_folder(tmp_path: Path) -> None:
    assert run_ranks(_train_on_ranks, 2, tmp_path / "reference", ZERO, 0) == ["done"] * 2
    _resume(tmp_path / "run", tmp_path / "reference", 2, ZERO, lost=1)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [(0,), (1,), (2,), (3,), (0, 2), (1, 3)])
def test_four_ranks_resume_after_some_have_lost_their_folders(
    tmp_path: Path, lost: tuple[int, ...]
) -> None:
    """The same layout continues bit for bit; the state that dp 2 and tp 2 load is the same too."""
    layout = {"parallel.dp": "2", "parallel.tp": "2", "parallel.zero": "1"}
    path, reference = tmp_path / "run", tmp_path / "reference"
    run_ranks(_train_on_ranks, 4, reference, layout, 0)
    run_ranks(_train_on_ranks, 4, path, local_settings(path) | layout, 7)
    for rank in lost:
        shutil.rmtree(rank_folder(path, rank))
    copies = {
        name: shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-{name}"))
        for name in ("dp", "tp")
    }
    run_ranks(_train_on_ranks, 4, path, local_settings(path) | layout, 0)
    assert f"resuming {path} at step 6 from its local checkpoint" in log_of(path)
    assert rows(path) == rows(reference)
    assert_last_checkpoints_equal(path, reference)
    for name, copy in copies.items():
        other = Path(copy) / "run"
        run_ranks(_train_on_ranks, 2, other, local_settings(other) | {f"parallel.{name}": "2"}, 0)
        assert f"resuming {other} at step 6 from its local checkpoint" in log_of(other)
        assert rows(other)[:6] == rows(reference)[:6]
        assert rows(other)[6]["loss"] == pytest.approx(rows(reference)[6]["loss"], rel=1e-5)


class _NanOnce(Callback):
    """Makes a gradient NaN once, as a damaged weight does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_start(self, run: RunView) -> None:
        self.run = run

    def after_backward(self, local_params: Sequence[ShardedParam]) -> None:
        if self.run.step + 1 == self.step:
            self.step = 0
            local_params[0].gradient.view(-1)[0] = float("nan")


def test_nan_after_a_local_checkpoint_reloads_the_persistent_one(
    killed: Path, reference: Path
) -> None:
    """The steps are repeated with the same samples, and no cause is sought."""
    train(killed, local_settings(killed), _NanOnce(7))
    log = log_of(killed)
    assert f"resuming {killed} at step 6 from its local checkpoint" in log
    assert "fault_detector.suspect_steps=20 steps after the local checkpoint of step 6" in log
    assert "rolled back to the checkpoint of step 4; continuing with sample 48" in log
    assert not (killed / "suspects.jsonl").exists()
    assert rows(killed) == rows(reference)


# --- other layouts, and asynchronous saves

LAYOUTS: dict[str, dict[str, str]] = {
    "dp": ZERO,
    "tp": {"parallel.tp": "2", "precision.params": "bf16"},
    "pp": {"parallel.pp": "2", "precision.params": "bf16"},
}


class WaitForLocalSave(Callback):
    """Waits before the last step until this rank has a complete local checkpoint."""

    name = "wait_for_local_save"

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = path, rank

    def before_step(self, step: int, batches: Any) -> None:
        deadline = time.monotonic() + 30
        while step == 7 and not _local_steps(self.path, self.rank):
            assert time.monotonic() < deadline, "no local checkpoint was completed"
            time.sleep(0.01)


def _local_steps(path: Path, rank: int) -> list[int]:
    """Steps of the complete local checkpoints of a rank."""
    folders = path.with_name(f"{path.name}.local").glob(f"megalith-*/rank_{rank:05d}/step_*")
    return [int(each.name[5:]) for each in folders if each.name[5:].isdigit()]


def _train_runs(
    rank: int, world: int, runs: list[tuple[Path, Mapping[str, str], int]]
) -> list[str]:
    """Train several runs, each with its settings and the step at which it is killed; 0: none."""
    outcomes = []
    for path, settings, kill_at in runs:
        run = tiny_run(BASE | settings)
        mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
        waits = kill_at and settings.get("checkpoint.async_save") == "true"
        callbacks: list[Callback] = [WaitForLocalSave(path, rank)] if waits else []
        callbacks += [KillAt(kill_at)] if kill_at else []
        try:
            run_training(run, RunFolder(path), mesh, CPU, show=False, callbacks=callbacks)
            outcomes.append("done")
        except Killed:
            outcomes.append("killed")
        finally:
            logging.getLogger().handlers.clear()
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_two_ranks_resume_bitwise_under_each_layout(
    tmp_path: Path, layout: Mapping[str, str]
) -> None:
    """A rank has lost its folder; saves are synchronous, and then asynchronous."""
    names = {"sync": "false", "async": "true"}
    settings = {
        name: local_settings(tmp_path / name)
        | layout
        # while a persistent checkpoint is saved, no local one is
        | {"checkpoint.async_save": value, "checkpoint.every": "7"}
        for name, value in names.items()
    }
    runs = [(tmp_path / name, settings[name], 7) for name in names]
    runs.insert(0, (tmp_path / "reference", layout, 0))
    outcomes = run_ranks(_train_runs, 2, runs, timeout=240)
    assert outcomes == [["done", "killed", "killed"]] * 2
    for name in names:
        shutil.rmtree(rank_folder(tmp_path / name, 1 if name == "sync" else 0))
    resumed = [(tmp_path / name, settings[name], 0) for name in names]
    assert run_ranks(_train_runs, 2, resumed, timeout=240) == [["done"] * 2] * 2
    for name in names:
        text = log_of(tmp_path / name)
        step = re.search(r"resuming .* at step (\d) from its local checkpoint", text)
        assert step is not None and (name == "async" or step[1] == "6"), text
        assert rows(tmp_path / name) == rows(tmp_path / "reference")
        assert_last_checkpoints_equal(tmp_path / name, tmp_path / "reference")


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "loaded"), [("dp", "tp"), ("tp", "pp"), ("pp", "dp")])
def test_other_layout_resumes_bitwise_as_from_a_persistent_checkpoint(
    tmp_path: Path, saved: str, loaded: str
) -> None:
    """The reference has a persistent checkpoint of step 6 and no local one."""
    path, reference = tmp_path / "run", tmp_path / "reference"
    local, persistent = local_settings(path), {"checkpoint.every": "1"}
    runs = [(path, local | LAYOUTS[saved], 7), (reference, persistent | LAYOUTS[saved], 7)]
    assert run_ranks(_train_runs, 2, runs) == [["killed", "killed"]] * 2
    shutil.rmtree(rank_folder(path, 0))
    runs = [(path, local | LAYOUTS[loaded], 0), (reference, persistent | LAYOUTS[loaded], 0)]
    assert run_ranks(_train_runs, 2, runs) == [["done", "done"]] * 2
    assert f"resuming {path} at step 6 from its local checkpoint" in log_of(path)
    assert f"resuming {reference} at step 6\n" in log_of(reference)
    assert rows(path) == rows(reference)
    assert_last_checkpoints_equal(path, reference)

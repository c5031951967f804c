"""Runs whose checkpoints are in an object store: two ranks save and resume bitwise, synchronously
and asynchronously."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.checkpoint.lease import acquire_lease
from megalith.checkpoint.load import open_checkpoint, verify_checkpoint
from megalith.checkpoint.manifest import list_complete_checkpoints
from megalith.cli.main import main
from megalith.errors import CheckpointError
from megalith.object_store import parse_url
from megalith.observe.metrics import read_metrics
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.storage import list_names
from megalith.testing.object_store import SimulatedStore, use_store
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.callbacks.base import Outcome
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder

CPU = torch.device("cpu")
BASE = {
    "train.eval_steps": "0",
    "train.steps": "4",
    "checkpoint.every": "2",
    "schedule.decay_steps": "4",
}


def train(path: Path, settings: Mapping[str, str]) -> Outcome:
    """Train the tiny run on one process."""
    run = tiny_run(BASE | settings)
    return run_training(run, RunFolder(path), build_single_rank_mesh(), CPU, show=False)


def train_all_as_rank(rank: int, world: int, base: Path) -> None:
    """Train the tiny run in a folder, and in two parts with its checkpoints in a store, saved
    synchronously and asynchronously, as one rank."""
    settings = BASE | {"parallel.zero": "1", "checkpoint.async_save": "false"}
    runs = [("plain", {})]
    for name in ("false", "true"):
        for steps in ("2", "4"):
            more = {"checkpoint.folder": f"local://{base}/store/{name}", "train.steps": steps}
            runs.append((name, more | {"checkpoint.async_save": name}))
    for name, more in runs:
        run = tiny_run(settings | more)
        mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
        run_training(run, RunFolder(base / name), mesh, CPU, show=False)


def boxes(folder: Any, step: int) -> dict[str, list[str]]:
    """SHA-256 of every box, by tensor."""
    manifest = open_checkpoint(list_complete_checkpoints(folder)[step]).manifest
    return {key: [box.sha256 for box in each.boxes] for key, each in manifest.tensors.items()}


def losses(path: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(path / "metrics.jsonl") if "loss" in row]


@pytest.mark.slow
def test_two_ranks_resume_from_a_store_as_from_a_folder(tmp_path: Path) -> None:
    run_ranks(train_all_as_rank, 2, tmp_path)
    for name in ("false", "true"):  # checkpoint.async_save
        folder = parse_url(f"local://{tmp_path}/store/{name}")
        assert not (tmp_path / name / "checkpoints").exists()
        assert list_names(folder) == ["latest", "step_0000002", "step_0000004"]
        assert losses(tmp_path / name) == losses(tmp_path / "plain")
        for step in (2, 4):
            assert boxes(folder, step) == boxes(tmp_path / "plain/checkpoints", step)
            assert verify_checkpoint(folder / f"step_{step:07d}") == []


def test_start_is_rejected_if_the_store_cannot_be_used(tmp_path: Path) -> None:
    with use_store(SimulatedStore(find_fault=lambda n, kind, key: "forbidden")):
        text = r"checkpoint.folder=sim://bucket/a: the bucket bucket cannot be used: writing .* 403"
        with pytest.raises(CheckpointError, match=text):
            train(tmp_path / "a", {"checkpoint.folder": "sim://bucket/a"})
    with use_store(SimulatedStore()):
        text = "the bucket other does not exist .* Create it, or set checkpoint.folder to"
        with pytest.raises(CheckpointError, match=text):
            train(tmp_path / "a", {"checkpoint.folder": "sim://other/a"})
    with use_store(SimulatedStore()) as store, acquire_lease(parse_url("sim://bucket/a"), None):
        with pytest.raises(CheckpointError, match="sim://bucket/a is being written by process"):
            train(tmp_path / "a", {"checkpoint.folder": "sim://bucket/a"})
        assert [*store.objects] == ["sim://bucket/a/lease.json"]
    assert not (tmp_path / "a").exists()  # nothing was started


def test_commands_and_new_runs_read_checkpoints_of_a_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with use_store(SimulatedStore()) as store:
        train(tmp_path / "a", {"checkpoint.folder": "sim://bucket/a"})
        first = boxes(parse_url("sim://bucket/a"), 4)
        # Another run begins with these weights, or continues at the step.
        train(tmp_path / "b", {"checkpoint.load": "sim://bucket/a", "train.steps": "2"})
        more = {"checkpoint.load_mode": "all", "train.steps": "6"}
        train(tmp_path / "c", {"checkpoint.load": "sim://bucket/a/step_0000002"} | more)
        assert boxes(tmp_path / "c/checkpoints", 4) == first

        assert main(["checkpoint", "info", "a"]) == 0  # follows checkpoint.folder of the run
        assert "sim://bucket/a/step_0000004: step 4, saved by 1 ranks" in capsys.readouterr().out
        assert main(["checkpoint", "verify", "sim://bucket/a", "--deep"]) == 0
        assert "sim://bucket/a/step_0000002: valid" in capsys.readouterr().out
        assert main(["checkpoint", "diff", "sim://bucket/a", "c/checkpoints/step_0000004"]) == 0
        assert main(["checkpoint", "copy", "a", "sim://bucket/copies/step_0000004"]) == 0
        assert main(["checkpoint", "copy", "sim://bucket/copies", "copied/step_0000004"]) == 0
        assert boxes(tmp_path / "copied", 4) == first
        assert main(["checkpoint", "prune", "sim://bucket/a", "--keep", "1"]) == 0
        assert main(["checkpoint", "list", "sim://bucket/a"]) == 0
        assert "1 complete checkpoints in sim://bucket/a" in capsys.readouterr().out
        assert main(["convert", "sim://bucket/a", "weights", "--to", "megalith"]) == 0
        assert not any("step_0000002" in key for key in store.objects if "/a/" in key)

"""A run that was saved before settings were renamed resumes, and new runs load its checkpoint.

The fixture is a run of version 0.1 (commit cc3656c; fp32, two processes, ep=2, ZeRO-1), saved at
step 2 of 4, with renamed settings and values in its config.yaml.
"""

import tarfile
from pathlib import Path

import pytest
import torch

from megalith.checkpoint.load import open_checkpoint
from megalith.config.train import TrainRun, load_run
from megalith.config.tree import apply_overrides
from megalith.observe.metrics import read_metrics
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks
from megalith.train.callbacks.base import Outcome
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder

CPU = torch.device("cpu")
ARCHIVE = Path(__file__).parent / "fixtures/run_before_renaming.tar.gz"
LOSSES = {3: 4.005304533859779, 4: 3.935597871479235}
"""Losses of the steps after the checkpoint, measured with the version that wrote it."""

FP32_RTOL = 1e-5


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    """Folder of the run that version 0.1 wrote."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "run"


def train_as_rank(rank: int, world: int, run: TrainRun, path: Path) -> Outcome:
    """Train `run` in the folder `path` as one rank."""
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    return run_training(run, RunFolder(path), mesh, CPU, show=False)


def test_a_run_with_renamed_settings_resumes_with_the_same_losses(old_run: Path) -> None:
    run_ranks(train_as_rank, 2, load_run(old_run / "config.yaml"), old_run)
    rows = {row["step"]: row for row in read_metrics(old_run / "metrics.jsonl") if "loss" in row}
    assert sorted(rows) == [1, 2, 3, 4]
    for step, loss in LOSSES.items():
        assert rows[step]["loss"] == pytest.approx(loss, rel=FP32_RTOL), step
    assert open_checkpoint(old_run / "checkpoints/step_0000004").step == 4


def test_a_new_run_loads_a_checkpoint_with_renamed_settings(old_run: Path, tmp_path: Path) -> None:
    source = old_run / "checkpoints/step_0000002"
    run = apply_overrides(
        load_run(old_run / "config.yaml"),
        {
            "checkpoint.load": str(source),
            "parallel.ep": "1",
            "parallel.zero": "0",
            "train.steps": "1",
        },
    )
    assert run.schedule.warmup_init == 0  # so the first step does not change trained parameters
    run_training(run, RunFolder(tmp_path / "new"), build_single_rank_mesh(), CPU, show=False)
    loaded = open_checkpoint(tmp_path / "new/checkpoints/step_0000001")
    saved = open_checkpoint(source)
    names = [name for name in saved.manifest.tensors if name.startswith("model.")]
    assert "model.layers.1.moe.router" in names
    for name in names:
        if not name.endswith("balancing_bias"):
            # the expert bias is updated without a learning rate
            assert torch.equal(loaded.read(name), saved.read(name)), name

"""Comparison of replicas during a run: a flipped bit is found, attributed to its rank and
repaired."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalith.config.train import TrainRun
from megalith.errors import UserError
from megalith.parallel.grad_sync import byte_checksum
from megalith.parallel.mesh import build_mesh
from megalith.plan.grid import model_grid
from megalith.plan.replicas import ReplicaKey
from megalith.testing.inject import patched
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.callbacks import replicas
from megalith.train.callbacks.base import Callback, FinishedStep, RunView, StepMetrics
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder
from megalith.train.step import Trainer

CPU = torch.device("cpu")
BASE = {
    "train.eval_steps": "0",
    "train.steps": "6",
    "checkpoint.every": "2",
    "checkpoint.keep": "none",
    "fault_detector.replica_check_every": "2",
}
REPAIR = {"fault_detector.repair_replicas": "true"}
BF16 = {"precision.params": "bf16"}


@dataclass(frozen=True)
class Flip:
    """A bit that is flipped on one rank before the comparison after a step."""

    role: str
    rank: int = 1
    step: int = 4
    bit: int = 30
    """Of the first element; 30: in the exponent of fp32."""


class Weights(Callback):
    """Records a checksum of all weights after the last step, and the comparisons."""

    def on_start(self, run: RunView) -> None:
        self.run = run

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        self.run.prepared.trainer.data.wait_params()
        tensors = replicas.list_replicas(self.run.prepared.trainer)
        self.checksum = byte_checksum([*tensors.values()])


def _train_rank(rank: int, world: int, run: TrainRun, path: Path, flip: Flip | None) -> int | str:
    """Train on one rank; return the checksum of its tensors, or the error."""
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    callback, list_replicas = Weights(), replicas.list_replicas
    steps: list[int] = []

    def plant(trainer: Trainer) -> dict[ReplicaKey, Tensor]:
        tensors, step = list_replicas(trainer), callback.run.step
        if flip is not None and step == flip.step and rank == flip.rank and step not in steps:
            steps.append(step)
            tensor = next(each for key, each in tensors.items() if key.role == flip.role)
            tensor.view(-1).view(torch.uint8)[flip.bit // 8] ^= 1 << flip.bit % 8
        return tensors

    try:
        with patched(replicas, "list_replicas", plant):
            run_training(run, RunFolder(path), mesh, CPU, show=False, callbacks=[callback])
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    return callback.checksum


def train(
    settings: Mapping[str, str], path: Path, flip: Flip | None = None, *, world: int = 2
) -> tuple[list[int | str], str]:
    """Train on some ranks; return what each reports, and the log."""
    run = tiny_run(BASE | {"parallel.dp": str(world)} | settings)
    return run_ranks(_train_rank, world, run, path, flip), (path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("settings", "role"),
    [
        ({}, "param"),
        pytest.param(BF16, "param", marks=pytest.mark.slow),
        pytest.param(BF16, "master", marks=pytest.mark.slow),
        pytest.param({}, "exp_avg", marks=pytest.mark.slow),
        pytest.param(BF16 | {"parallel.zero": "1"}, "weight", marks=pytest.mark.slow),
    ],
)
def test_majority_of_three_replicas_repairs_the_faulty_one_bitwise(
    tmp_path: Path, settings: dict[str, str], role: str
) -> None:
    settings = settings | REPAIR
    clean, _ = train(settings, tmp_path / "clean", world=3)
    repaired, log = train(settings, tmp_path / "repaired", Flip(role), world=3)
    assert repaired == clean
    assert "rank 1 (host " in log and "is faulty, by majority" in log
    assert "step 4: the replicas are repaired and equal" in log
    assert "rolled back" not in log


@pytest.mark.parametrize(
    ("settings", "role", "rank"),
    [
        ({}, "param", 1),
        pytest.param({}, "exp_avg_sq", 0, marks=pytest.mark.slow),
        pytest.param(BF16, "master", 1, marks=pytest.mark.slow),
        pytest.param({"parallel.zero": "1"}, "weight", 1, marks=pytest.mark.slow),
    ],
)
def test_two_replicas_are_attributed_by_repeating_the_steps(
    tmp_path: Path, settings: dict[str, str], role: str, rank: int
) -> None:
    clean, _ = train(settings, tmp_path / "clean")
    repeated, log = train(settings, tmp_path / "repeated", Flip(role, rank, bit=1))
    assert repeated == clean
    assert "repeating the steps will show which one is faulty" in log
    assert "rolled back to the checkpoint of step 2; continuing with sample 24" in log
    assert f"rank {rank} (host " in log and "is faulty, by repeating the steps" in log
    assert not (tmp_path / "repeated" / "skipped.jsonl").exists()
    assert log.index("rolled back") < log.index("saved step_0000004"), (
        "differing replicas are saved"
    )


@pytest.mark.slow
def test_two_replicas_of_a_rounded_weight_are_attributed_by_its_master_weights(
    tmp_path: Path,
) -> None:
    settings = BF16 | REPAIR
    clean, _ = train(settings, tmp_path / "clean")
    repaired, log = train(settings, tmp_path / "repaired", Flip("param", rank=0, bit=1))
    assert repaired == clean
    assert "rank 0 (host " in log and "by recomputation from the master weights" in log
    assert "rolled back" not in log


@pytest.mark.slow
def test_difference_after_the_last_step_is_not_saved(tmp_path: Path) -> None:
    results, _ = train({}, tmp_path, Flip("param", step=6))
    for result in results:
        assert "replicas differ after the last step, 6, which is not saved" in str(result)
    assert not (tmp_path / "checkpoints" / "step_0000006").exists()
    (first, second), log = train({}, tmp_path)
    assert first == second and "at step 4" in log


@pytest.mark.slow
def test_difference_without_a_verified_checkpoint_ends_the_run(tmp_path: Path) -> None:
    results, _ = train({}, tmp_path, Flip("param", step=2))
    for result in results:
        assert "no healthy checkpoint from before step 1. Run the same command again" in str(result)

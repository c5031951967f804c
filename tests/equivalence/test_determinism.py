"""The same layout gives the same bits twice, and what only changes when things happen changes no
bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.config.train import TrainRun
from megalith.observe.metrics import read_metrics
from megalith.parallel.mesh import build_mesh
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.testing.tolerance import CURVE64
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder

SHORT = {
    "train.steps": "3",
    "train.eval_every": "3",
    "checkpoint.every": "0",
    "train.micro_batch_size": "3",
}
LAYOUTS: dict[str, dict[str, str]] = {
    "dp2": {"parallel.dp": "2"},
    "tp2 sp": {"parallel.tp": "2", "parallel.sp": "true"},
    "pp2": {"parallel.pp": "2"},
    "cp2": {"parallel.cp": "2"},
    "dp2 zero 1": {"parallel.dp": "2", "parallel.zero": "1"},
}
DEFAULT = {"dp2", "tp2 sp"}  # the others train in `make test-all`
ALL = [pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.slow]) for name in LAYOUTS]


def _train(rank: int, world: int, runs: list[tuple[TrainRun, Path]]) -> None:
    for run, folder in runs:
        mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
        run_training(run, RunFolder(folder), mesh, torch.device("cpu"), show=False)


def trained(tmp_path: Path, *settings: dict[str, str], world: int = 2) -> list[dict[str, Any]]:
    """What each of these runs logged, and the hash of every tensor it saved."""
    runs = [
        (tiny_run(SHORT | each), tmp_path / str(number)) for number, each in enumerate(settings)
    ]
    run_ranks(_train, world, runs)
    return [outcome(folder) for _, folder in runs]


def outcome(folder: Path) -> dict[str, Any]:
    """Losses, norms and bits."""
    (manifest,) = (folder / "checkpoints").glob("step_*/manifest.json")
    tensors = json.loads(manifest.read_text())["tensors"]
    bits = {
        key: [(box["box"], box["sha256"]) for box in tensor["boxes"]]
        for key, tensor in tensors.items()
    }
    rows = [
        {name: row.get(name) for name in ("loss", "grad_norm", "eval_loss")}
        for row in read_metrics(folder / "metrics.jsonl")
    ]
    return {"rows": rows, "bits": bits}


@pytest.mark.parametrize("name", ALL)
def test_same_layout_is_bitwise_reproducible_with_and_without_overlap(
    tmp_path: Path, name: str
) -> None:
    layout = LAYOUTS[name]
    first, again, apart = trained(tmp_path, layout, layout, layout | {"parallel.overlap": "false"})
    assert len(first["bits"]) > 20
    assert len({row["loss"] for row in first["rows"] if row["loss"]}) == 3
    assert first == again
    assert first == apart


def test_another_seed_changes_bits(tmp_path: Path) -> None:
    first, other = trained(tmp_path, LAYOUTS["dp2"], LAYOUTS["dp2"] | {"seed": "8"})
    assert all(first["bits"][key] != other["bits"][key] for key in first["bits"])


EVALUATED = [
    {"parallel.dp": "2", "parallel.zero": "1", "parallel.bucket_numel": "300"},
    pytest.param({"parallel.pp": "2"}, marks=pytest.mark.slow),
    pytest.param({"parallel.dp": "2", "parallel.zero": "3"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("layout", EVALUATED)
def test_evaluating_after_every_step_changes_no_bit_of_training(
    tmp_path: Path, layout: dict[str, str]
) -> None:
    """Weights that are still arriving, or gathered, when evaluation begins are those of the next
    step."""
    never, always = trained(
        tmp_path, layout | {"train.eval_steps": "0"}, layout | {"train.eval_every": "1"}
    )
    results = [[row for row in each["rows"] if row["loss"] is not None] for each in (never, always)]
    assert results[0] == results[1] and len(results[0]) == 3
    assert never["bits"] == always["bits"]
    evaluated = [row["eval_loss"] for row in always["rows"] if row["eval_loss"] is not None]
    assert len(set(evaluated)) == 3 and not any(row["eval_loss"] for row in never["rows"])


FULL = {"recompute.granularity": "full"}
PARTS = {"recompute.granularity": "selective", "recompute.modules": "[norm, mlp_act]"}
ATTENTION = {"recompute.granularity": "selective"}
AWAY = {"offload.layers": "1", "offload.min_numel": "1"}
FOUR = {"model.num_layers": "4", "checkpoint.every": "0"}
KEEPING: dict[str, dict[str, str]] = {
    "alone": FOUR,
    "tp2 sp": FOUR | LAYOUTS["tp2 sp"],
    "pp2": FOUR | LAYOUTS["pp2"],
    "pp2 vpp2": LAYOUTS["pp2"] | {"model.num_layers": "8", "parallel.pipeline.vpp": "2"},
    "pp2, weights last": FOUR | LAYOUTS["pp2"] | {"parallel.pipeline.schedule": "zb-h1"},
    "cp2, ring": FOUR | LAYOUTS["cp2"],
    "dp2 zero 1": FOUR | LAYOUTS["dp2 zero 1"],
}
SAMPLE = {"pp2 vpp2"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in SAMPLE else [pytest.mark.slow]) for name in KEEPING],
)
def test_offload_and_recomputation_are_bitwise_equal(tmp_path: Path, name: str) -> None:
    layout = KEEPING[name]
    ways: list[dict[str, str]] = [FULL, PARTS, ATTENTION, AWAY, FULL | AWAY, PARTS | AWAY]
    world = 1 if name == "alone" else 2
    kept, *result = trained(tmp_path, layout, *(layout | way for way in ways), world=world)
    for way, other in zip(ways, result, strict=True):
        assert other == kept, way


def test_the_size_of_buckets_changes_no_bit_at_dp_2(tmp_path: Path) -> None:
    large, small = trained(
        tmp_path, LAYOUTS["dp2"], LAYOUTS["dp2"] | {"parallel.bucket_numel": "300"}
    )
    assert large == small


@pytest.mark.slow  # four processes
def test_the_size_of_buckets_changes_only_rounding_at_dp_4(tmp_path: Path) -> None:
    four = {
        "parallel.dp": "4",
        "precision.params": "fp64",
        "train.global_batch_size": "24",
        "optim.eps": "1e-3",
    }
    large, small = trained(tmp_path, four, four | {"parallel.bucket_numel": "300"}, world=4)
    for one, other in zip(large["rows"], small["rows"], strict=True):
        for name, value in one.items():
            if value is not None:
                assert other[name] == pytest.approx(value, rel=min(CURVE64.relative, 1e-12))

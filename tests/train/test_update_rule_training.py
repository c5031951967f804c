"""Update rules in training: layouts, skipped steps, norms by group, and checkpoints."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.config.optim import GroupConfig, OptimConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.train import TrainRun
from megalith.errors import CheckpointError
from megalith.observe.metrics import read_metrics
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.plan.param_groups import GRAD_NORM_GROUPS
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder
from megalith.verify.matrix import PLAIN
from megalith.verify.ranks import compare_with_one_process, layout_case
from tests.optim.test_optimizer import PLUGIN

CPU = torch.device("cpu")

RULES = {
    "plug-in": PLUGIN,
    "lion with groups": OptimConfig(
        kind="lion",
        scalar_optimizer="adamw",
        groups=(GroupConfig(name="down", match=("*.down",), kind="sgd", lr_scale=0.5),),
    ),
}


@pytest.mark.parametrize(
    ("rule", "parallel"),
    [
        ("plug-in", ParallelConfig(dp=2)),
        pytest.param("plug-in", ParallelConfig(dp=2, zero=1), marks=pytest.mark.slow),
        pytest.param("plug-in", ParallelConfig(dp=2, zero=3), marks=pytest.mark.slow),
        ("lion with groups", ParallelConfig(dp=2, zero=1)),
        pytest.param("lion with groups", ParallelConfig(tp=2, sp=True), marks=pytest.mark.slow),
    ],
)
def test_update_rules_match_one_process_and_resume(rule: str, parallel: ParallelConfig) -> None:
    case = layout_case(PLAIN, parallel, 2)
    case = replace(case, run=replace(case.run, optim=RULES[rule]))
    assert [each for each in compare_with_one_process(case) if not each.holds] == []


SETTINGS = {"train.steps": "3", "train.eval_every": "0", "train.log_every": "1"}


def train(folder: Path, settings: dict[str, str]) -> list[dict[str, Any]]:  # Any: JSON
    """Run the tiny run on one process; return its logged steps."""
    run_training(
        tiny_run(SETTINGS | settings), RunFolder(folder), build_single_rank_mesh(), CPU, show=False
    )
    return [row for row in read_metrics(folder / "metrics.jsonl") if "grad_norm" in row]


def test_step_with_large_gradient_norm_is_skipped_and_counted(tmp_path: Path) -> None:
    norms = [row["grad_norm"] for row in train(tmp_path / "all", {})]
    threshold = (norms[0] + min(norms[1:])) / 2
    assert norms[0] > threshold, norms
    rows = train(tmp_path / "skips", {"optim.grad_norm_skip_threshold": str(threshold)})
    # the weights do not change, so the norms stay above the threshold
    assert rows[0]["skipped"] == 1
    assert rows[0]["skipped_reason"] == "grad_norm" and rows[0]["grad_norm"] == norms[0]
    events = [json.loads(line) for line in (tmp_path / "skips/events.jsonl").open()]
    reasons = [event["reason"] for event in events if event["event"] == "skip"]
    assert reasons[0] == "the gradient norm is above optim.grad_norm_skip_threshold"
    large = train(tmp_path / "large", {"optim.grad_norm_skip_threshold": "1e6"})
    assert [row["grad_norm"] for row in large] == norms and "skipped_reason" not in large[0]


def test_norms_by_group_add_up_to_the_global_norm(tmp_path: Path) -> None:
    rows = train(tmp_path, {"observe.grad_norm_by_group": "true"})
    for row in rows:
        norms = [row[f"grad_norm_{name}"] for name in GRAD_NORM_GROUPS]
        assert sum(norm**2 for norm in norms) ** 0.5 == pytest.approx(row["grad_norm"], rel=1e-12)
        assert norms[GRAD_NORM_GROUPS.index("experts")] == 0.0 and min(norms[:3]) > 0


def _train_rank(rank: int, world: int, run: TrainRun, folder: Path) -> None:
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    run_training(run, RunFolder(folder), mesh, CPU, show=False)


@pytest.mark.parametrize(
    "layout",
    [
        {"parallel.tp": "2", "parallel.sp": "true"},
        pytest.param({"parallel.zero": "3"}, marks=pytest.mark.slow),
    ],
)
def test_norms_by_group_are_equal_under_layouts(layout: dict[str, str], tmp_path: Path) -> None:
    settings = {
        "observe.grad_norm_by_group": "true",
        "precision.params": "fp64",
        "optim.eps": "1e-3",
    }
    expected = train(tmp_path / "one", settings)
    run_ranks(_train_rank, 2, tiny_run(SETTINGS | settings | layout), tmp_path / "two")
    rows = read_metrics(tmp_path / "two" / "metrics.jsonl")
    for row, reference in zip([row for row in rows if "grad_norm" in row], expected, strict=True):
        for name in GRAD_NORM_GROUPS:
            key = f"grad_norm_{name}"
            assert row[key] == pytest.approx(reference[key], rel=1e-9), (row["step"], key)


def test_resume_with_another_update_rule_names_both(tmp_path: Path) -> None:
    train(tmp_path, {"checkpoint.every": "3"})
    with pytest.raises(CheckpointError) as caught:
        train(tmp_path, {"train.steps": "4", "optim.kind": "lion", "schedule.decay_steps": "8"})
    assert "the checkpoint holds exp_avg, exp_avg_sq of 'embed.weight'; optim.kind=lion needs" in (
        str(caught.value)
    )
    assert "Set checkpoint.load_mode=progress" in str(caught.value)
    assert str(caught.value).rstrip(".").endswith("or optim.kind=adamw")


def test_resume_with_another_rule_of_the_same_states_names_both(tmp_path: Path) -> None:
    # both have the role momentum: a sum of gradients with sgd, an average with muon
    train(tmp_path, {"checkpoint.every": "3", "optim.kind": "sgd"})
    muon = {"optim.kind": "muon", "optim.scalar_optimizer": "sgd", "schedule.decay_steps": "8"}
    with pytest.raises(CheckpointError) as caught:
        train(tmp_path, {"train.steps": "4"} | muon)
    text = "the checkpoint holds momentum, of the rule sgd, of 'layers.0.attention.kv'"
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"optim.kind": "muon", "optim.muon.second_moment": "adamuon"},
        pytest.param(
            {"optim.kind": "soap", "optim.soap.max_precondition_dim": "1"}, marks=pytest.mark.slow
        ),
        pytest.param({"optim.kind": "adafactor", "parallel.zero": "1"}, marks=pytest.mark.slow),
    ],
)
def test_states_of_whole_matrices_on_assigned_ranks_continue_a_run(
    settings: dict[str, str], tmp_path: Path
) -> None:
    # without ZeRO both ranks hold all matrices, and each stores the states of its own
    settings = SETTINGS | {"schedule.decay_steps": "8"} | settings
    run_ranks(_train_rank, 2, tiny_run(settings | {"train.steps": "4"}), tmp_path / "once")
    for steps in ("2", "4"):
        changed = {"train.steps": steps, "checkpoint.every": "2"}
        run_ranks(_train_rank, 2, tiny_run(settings | changed), tmp_path / "resumed")
    rows = [
        [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in row]
        for name in ("once", "resumed")
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 4


@pytest.mark.slow
def test_two_per_matrix_rules_run_in_one_order_on_all_ranks(tmp_path: Path) -> None:
    # the first slots of the ranks have different rules, and a slice ends inside a matrix of Muon
    settings = SETTINGS | {
        "parallel.zero": "1",
        "optim.kind": "muon",
        "optim.trained": "[layers.0.mlp.down,layers.1.attention.o,layers.1.mlp.*]",
        "optim.groups": "[{name: one, match: [layers.0.mlp.down], kind: adafactor}]",
    }
    expected = [row["loss"] for row in train(tmp_path / "one", settings | {"parallel.zero": "0"})]
    run_ranks(_train_rank, 2, tiny_run(settings), tmp_path / "two")
    rows = read_metrics(tmp_path / "two" / "metrics.jsonl")
    assert [row["loss"] for row in rows if "loss" in row] == pytest.approx(expected, rel=1e-5)

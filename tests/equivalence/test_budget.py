"""Documents packed by a budget of tokens are learned as one by one, in float64, whatever the budget
and the layout."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config.train import TrainRun
from megalith.data import loader as loader_file
from megalith.data.build import build_datasets
from megalith.data.loader import (
    Batch,
    BatchSettings,
    Loader,
    MaskSettings,
    StepBatches,
    build_batch,
)
from megalith.data.sample import Dataset, PackedSample, SampleSettings
from megalith.errors import DataError
from megalith.observe.metrics import read_metrics
from megalith.parallel.context import local_slicing
from megalith.parallel.mesh import Mesh, build_mesh, build_single_rank_mesh
from megalith.plan.batch_assignment import BatchAssignment, TokenBudget, build_token_budget
from megalith.plan.batch_schedule import constant_batch_size
from megalith.plan.grid import model_grid
from megalith.rules.run import check_run
from megalith.testing.inject import patched
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.testing.tolerance import FP64, compare
from megalith.train.loop import run_training
from megalith.train.objective import LossNormalizer
from megalith.train.run_folder import RunFolder
from megalith.train.step import Trainer, train_step
from megalith.train.trainer import build_trainer

CPU = torch.device("cpu")
BASE = {
    "precision.params": "fp64",
    "optim.clip_grad": "0",
    "train.global_batch_size": "13",
    "train.micro_batch_size": "1",
    "train.seq_len": "32",
    "train.tokens_per_microbatch": "64",
    "data.mock_max_tokens": "34",
    "data.mock_lengths.kind": "lognormal",
    "data.mock_lengths.mean": "12",
    "data.mock_lengths.sigma": "0.8",
    "model.max_seq_len": "32",
    "train.eval_steps": "0",
    "train.eval_every": "none",
}
"""Thirteen documents a step, of 1 to 32 tokens that are read."""
LAYOUTS: dict[str, dict[str, str]] = {
    "dp2": {"parallel.dp": "2"},
    "dp2, 128": {"parallel.dp": "2", "train.tokens_per_microbatch": "128"},
    "pp2": {"parallel.pp": "2"},
    "pp2 vpp2": {"parallel.pp": "2", "parallel.pipeline.vpp": "2", "model.num_layers": "4"},
    "pp2 vpp2 dp2, 128": {
        "parallel.pp": "2",
        "parallel.pipeline.vpp": "2",
        "model.num_layers": "4",
        "parallel.dp": "2",
        "train.tokens_per_microbatch": "128",
    },
    "cp2": {"parallel.cp": "2", "train.tokens_per_microbatch": "32"},
    "cp2 by document": {"parallel.cp": "2", "parallel.context.slicing": "document"},
    "tp2 cp2 sp by document": {
        "parallel.tp": "2",
        "parallel.cp": "2",
        "parallel.sp": "true",
        "parallel.context.slicing": "document",
    },
    "dp2 zero 3": {"parallel.dp": "2", "parallel.zero": "3"},
}
DEFAULT = {"dp2", "cp2 by document", "pp2 vpp2"}
ALL = [pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.slow]) for name in LAYOUTS]


def build(settings: Mapping[str, str], rank: int = 0, world: int = 1) -> Trainer:
    run = tiny_run({**BASE, **settings})
    check_run(run, world)
    return build_trainer(run, mesh_of(run, rank, world), CPU)


def mesh_of(run: TrainRun, rank: int, world: int) -> Mesh:
    return (
        build_single_rank_mesh()
        if world == 1
        else build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    )


def documents(run: TrainRun) -> Dataset:
    train = build_datasets(
        run.data,
        SampleSettings(
            seq_len=run.train.seq_len,
            seed=run.seed,
            vocab_size=run.model.vocab_size,
            eod=256,
            whole_documents=True,
        ),
        train_samples=26,
    ).train
    assert train is not None
    return train


def packed(trainer: Trainer, *, consumed: int = 0, steps: int = 1) -> Loader:
    run, mesh = trainer.run, trainer.mesh
    return Loader(
        documents(run),
        BatchSettings(
            batch_schedule=constant_batch_size(run.train.global_batch_size),
            micro_batch_size=1,
            budget=build_token_budget(run.train, run.parallel, run.model),
        ),
        mesh.dp,
        consumed=consumed,
        steps=steps,
        device=CPU,
        slicing=local_slicing(run.parallel, mesh),
        world_group=mesh.world,
    )


def apart(trainer: Trainer) -> StepBatches:
    """Every document in a microbatch of its own length, without any filler."""
    dataset = documents(trainer.run)
    batches = [build_batch([dataset.sample(k)], MaskSettings(), device=CPU) for k in range(13)]
    return StepBatches(batches, sum(batch.num_labels for batch in batches))


def gradients(trainer: Trainer, batches: StepBatches) -> tuple[float, float, dict[str, Tensor]]:
    result = train_step(trainer, batches, lr=0.0, weight_decay=0.0)
    trainer.data.wait_params()
    return (
        result.loss,
        result.grad_norm,
        {o.shard.name: o.gradient.clone() for o in trainer.data.local_params},
    )


def alone(layers: str = "2") -> tuple[float, float]:
    trainer = build({"model.num_layers": layers})
    return gradients(trainer, apart(trainer))[:2]


def _train_packed(
    rank: int, world: int, settings: Mapping[str, str]
) -> tuple[float, float, int, float]:
    trainer = build(settings, rank, world)
    step = packed(trainer).next()
    sizes = {batch.seq_params.whole.num_tokens for batch in step.microbatches}
    assert len(sizes) == 1, "the shapes of packs never change"
    loss, norm, _ = gradients(trainer, step)
    return loss, norm, len(step.microbatches), float(step.imbalance or 0.0)


def test_packed_documents_give_the_loss_and_gradients_of_separate_documents() -> None:
    trainer = build({})
    loss, norm, expected = gradients(trainer, apart(trainer))
    assert all(bool(gradient.abs().max() > 0) for gradient in expected.values())
    counts = []
    for budget in ("32", "64", "128"):
        other = build({"train.tokens_per_microbatch": budget})
        step = packed(other).next()
        counts.append(len(step.microbatches))
        result = gradients(other, step)
        difference = compare(result[2], expected)
        assert difference.error <= FP64.relative and not difference.unpaired, difference
        assert result[0] == pytest.approx(loss, rel=1e-12) and result[1] == pytest.approx(
            norm, rel=1e-12
        )
    assert counts[0] > counts[1] > counts[2]


@pytest.mark.parametrize("name", ALL)
def test_packing_matches_under_every_axis_with_equal_packs_per_rank(name: str) -> None:
    settings = LAYOUTS[name]
    world = 2 ** len([key for key in settings if key.endswith((".tp", ".cp", ".pp", ".dp"))])
    results = run_ranks(_train_packed, world, settings)
    expected = alone(settings.get("model.num_layers", "2"))
    assert all((loss, norm) == pytest.approx(expected, rel=1e-10) for loss, norm, *_ in results)
    assert len({count for _, _, count, _ in results}) == 1


# --- planted faults


def test_comparison_detects_a_mean_over_packs() -> None:
    """Each pack's own mean has the same weight, however few labels it has."""
    trainer = build({})
    step = packed(trainer).next()
    counts = iter(
        [max(1, batch.num_labels) * len(step.microbatches) for batch in step.microbatches]
    )
    scale_loss = LossNormalizer.scale_loss

    def mean_of_packs(self: LossNormalizer, losses: Mapping[str, Tensor]) -> Tensor:
        own = replace(self, totals={**self.totals, "labels": next(counts)})
        return scale_loss(own, losses)

    with patched(LossNormalizer, "scale_loss", mean_of_packs):
        _, norm, _ = gradients(trainer, step)
    assert norm != pytest.approx(alone()[1], rel=1e-3)


def _seeing_one_another(
    rows: Sequence[PackedSample], masks: MaskSettings, **others: Any
) -> Batch:  # Any: its own
    merged = [
        replace(row, lengths=(row.num_valid, *row.lengths[len(row.lengths_without_padding) :]))
        if row.num_valid
        else row
        for row in rows
    ]
    return build_batch(merged, masks, **others)


def test_comparison_detects_attention_across_documents() -> None:
    trainer = build({})
    with patched(loader_file, "build_batch", _seeing_one_another):
        result = gradients(trainer, packed(trainer).next())[0]
    assert result != pytest.approx(alone()[0], rel=1e-6)


def _assignment_error(rank: int, world: int, settings: Mapping[str, str]) -> str:
    """The last rank takes all documents to be as long as can be, as from other files, and has more
    packs."""
    trainer = build(settings, rank, world)
    longest = (
        patched(TokenBudget, "assign_batches", _of_longest) if rank == world - 1 else nullcontext()
    )
    with longest, pytest.raises(DataError) as caught:
        packed(trainer).next()
    return str(caught.value)


def _of_longest(
    self: TokenBudget, lengths: Sequence[int], dp: int, *, forward_only: bool = False
) -> BatchAssignment:
    return RIGHT_DEAL(self, [self.longest for _ in lengths], dp, forward_only=forward_only)


@pytest.mark.parametrize(
    "settings",
    [pytest.param({"parallel.dp": "2"}, marks=pytest.mark.slow), {"parallel.pp": "2"}],
    ids=["dp2", "pp2"],
)
def test_different_packing_is_reported_on_all_ranks_before_a_collective(
    settings: dict[str, str],
) -> None:
    texts = run_ranks(_assignment_error, 2, settings)
    assert len(set(texts)) == 1
    assert "ranks assigned the documents of a step differently (microbatches:" in texts[0]
    assert (
        "on rank 0" in texts[0]
        and "on rank 1" in texts[0]
        and "run the same command again" in texts[0]
    )


RIGHT_DEAL = TokenBudget.assign_batches


# --- a run


RUN = {
    "train.steps": "6",
    "train.global_batch_size": "7",
    "train.micro_batch_size": "1",
    "train.seq_len": "24",
    "train.tokens_per_microbatch": "40",
    "data.mock_max_tokens": "40",
    "data.mock_num_documents": "90",
    "data.mock_lengths.kind": "lognormal",
    "data.mock_lengths.mean": "12",
    "data.overlong": "truncate",
    "data.split": "1,1,1",
    "schedule.style": "constant",
    "train.eval_every": "2",
    "train.eval_steps": "1",
}
"""Thirty documents an epoch, of which six steps read 42."""


def _train(rank: int, world: int, folder: Path, settings: Mapping[str, str]) -> None:
    run = tiny_run({**RUN, **settings})
    run_training(run, RunFolder(folder), mesh_of(run, rank, world), CPU, show=False)


REPORTED_METRICS = (
    "step",
    "loss",
    "grad_norm",
    "fill",
    "imbalance",
    "microbatches",
    "tokens",
    "eval_loss",
)


def read_reported(folder: Path) -> list[list[object]]:
    return [
        [row.get(key) for key in REPORTED_METRICS] for row in read_metrics(folder / "metrics.jsonl")
    ]


def test_resume_in_the_middle_of_an_epoch_has_the_same_packs(
    tmp_path: Path,
) -> None:
    _train(0, 1, tmp_path / "whole", {})
    _train(0, 1, tmp_path / "parts", {"train.steps": "2"})
    _train(0, 1, tmp_path / "parts", {})
    assert read_reported(tmp_path / "whole") == read_reported(tmp_path / "parts")
    assert len({row[5] for row in read_reported(tmp_path / "whole") if row[1]}) > 1, (
        "a step has what it needs"
    )


@pytest.mark.slow
def test_documents_and_schedule_are_counted_before_they_are_packed(tmp_path: Path) -> None:
    """Another budget, and more ranks, change no step's documents: tokens, losses and rates are the
    same."""
    _train(0, 1, tmp_path / "one", {"train.steps": "2"})
    run_ranks(
        _train, 2, tmp_path / "two", {"train.steps": "2", "train.tokens_per_microbatch": "96"}
    )
    one, two = (read_reported(tmp_path / name) for name in ("one", "two"))
    assert [row[6] for row in one] == [row[6] for row in two]
    for place in (1, 2, 7):
        expected = [row[place] for row in one if row[place] is not None]
        assert [row[place] for row in two if row[place] is not None] == pytest.approx(
            expected, rel=1e-4
        )


TALKS = {
    "data.mock": "false",
    "data.sft.mock_conversations": "15",
    "data.sft.template": "identity",
    "train.seq_len": "80",
    "model.max_seq_len": "96",
    "data.sft.overlong": "drop",
    "train.tokens_per_microbatch": "160",
    "train.steps": "3",
    "data.mock_lengths.kind": "uniform",
    "data.mock_lengths.mean": "none",
    "data.overlong": "error",
    "data.split": "none",
    "train.eval_every": "none",
}


@pytest.mark.slow
def test_conversations_are_packed_step_by_step(tmp_path: Path) -> None:
    _train(0, 1, tmp_path / "whole", TALKS)
    _train(0, 1, tmp_path / "parts", TALKS | {"train.steps": "1"})
    run_ranks(_train, 2, tmp_path / "parts", TALKS)
    whole, parts = (read_reported(tmp_path / name) for name in ("whole", "parts"))
    whole, parts = ([row for row in rows if row[1]] for rows in (whole, parts))
    assert [row[6] for row in whole] == [row[6] for row in parts]
    assert [row[1] for row in parts] == pytest.approx([row[1] for row in whole], rel=1e-4)

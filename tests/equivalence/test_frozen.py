"""Frozen parameters: no gradient, no state, no traffic, no place in the norm, whoever divides the
rest."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from megalith.checkpoint.load import open_checkpoint
from megalith.checkpoint.save import save_checkpoint
from megalith.config.parallel import ParallelConfig, PipelineConfig
from megalith.models.decoder import iter_parameter_specs
from megalith.parallel.group import gather_objects
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.testing.inject import patched, slow_link
from megalith.testing.ranks import run_ranks
from megalith.testing.tolerance import FP64, assert_close
from megalith.train import trainer as build
from megalith.train.step import Trainer, train_step
from megalith.train.trainer import all_gather_loaded_params, build_trainer, checkpoint_entries
from megalith.verify import ranks as proof
from megalith.verify.matrix import TIED, tiny

Zero = Literal[0, 1, 2, 3]

TRAINED = (
    "layers.0.attention.q",
    "layers.1.attention.kv",
    "layers.1.mlp.down",
    "layers.0.mlp_norm.weight",
)
"""A part of one matmul, the other part of another, and a norm; the first stage of two has some, and
so has the last."""


def freeze(model: nn.Module, trained: Iterable[str]) -> None:
    for declared, module, name in iter_parameter_specs(model):
        getattr(module, name).requires_grad_(declared.shard.name in trained)


def frozen_trainer(
    case: proof.LayoutCase, rank: int, trained: Iterable[str], *, fill: bool = True
) -> Trainer:
    """A trainer whose model was frozen but for a few parameters before the engine was built."""
    grid = model_grid(case.run.parallel, case.run.model, case.world)
    mesh = build_single_rank_mesh() if case.world == 1 else build_mesh(grid, rank=rank)
    engine = build.build_grad_sync

    def freeze_first(run: Any, model: nn.ModuleList, *others: Any) -> Any:
        freeze(model, trained)
        return engine(run, model, *others)

    with patched(build, "build_grad_sync", freeze_first):
        return build_trainer(case.run, mesh, torch.device("cpu"), fill=fill)


def weights(trainer: Trainer) -> proof.Gathered:
    """What this rank holds, trained or not."""
    return proof._slices(
        [*((slot.shard, slot.weight) for slot in trainer.optimizer.slots), *trainer.data.frozen]
    )


def joined(trainer: Trainer) -> dict[str, Tensor]:
    """Return whole weights, from all ranks."""
    return proof._assemble(proof._join_slices(gather_objects(weights(trainer), trainer.mesh.world)))


def run_steps(
    rank: int, world: int, case: proof.LayoutCase, folder: str, trained: Iterable[str]
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], set[str]]:
    """Losses and norms; weights before and after, on rank 0; names of what the optimizer holds."""
    trainer = frozen_trainer(case, rank, trained)
    mesh, metrics = trainer.mesh, []
    before = joined(trainer)
    loader = proof._loader(case.run, mesh, consumed=0, steps=2)
    for _ in range(2):
        result = train_step(trainer, loader.next(), lr=1e-2, weight_decay=0.1)
        metrics += [result.loss, result.grad_norm]
    trainer.data.wait_params()
    save_checkpoint(Path(folder), 2, checkpoint_entries(trainer), {}, mesh.world, config_text="")
    again = frozen_trainer(case, rank, trained, fill=False)
    open_checkpoint(Path(folder) / "step_0000002").load_into(checkpoint_entries(again), mesh.world)
    all_gather_loaded_params(again)
    after = joined(again)
    assert_close(after, joined(trainer), FP64)
    held = {slot.shard.name for slot in trainer.optimizer.slots}
    assert held == {param.shard.name for param in trainer.data.local_params}
    assert not any(
        parameter.grad is not None for parameter in trainer.pipeline_model.modules.parameters()
    )
    return metrics, before, after, held


def one_process(case: proof.LayoutCase, folder: Path) -> Any:
    alone = proof.LayoutCase(replace(case.run, parallel=ParallelConfig(bucket_numel=2000)), 1)
    return run_steps(0, 1, alone, str(folder), TRAINED)


def check(parallel: ParallelConfig, world: int, folder: Path, *, tied: bool = False) -> None:
    case = proof.layout_case(TIED if tied else tiny(), parallel, world)
    results = run_ranks(run_steps, world, case, str(folder / "ranks"), TRAINED)
    metrics, before, after, _ = results[0]
    expected, first, last, held = one_process(case, folder / "alone")
    torch.testing.assert_close(metrics, expected, rtol=1e-10, atol=0.0)
    assert held == set(TRAINED) == set().union(*(result[3] for result in results))
    assert_close(before, first, FP64)
    assert_close(after, last, FP64)
    moved = {name for name in first if not torch.equal(before[name], after[name])}
    assert moved == set(TRAINED)
    stored = open_checkpoint(folder / "ranks" / "step_0000002")
    assert {f"model.{name}" for name in first} <= set(stored.keys())
    states = [key for key in stored.keys() if "exp_avg" in key]  # noqa: SIM118  # not a mapping
    assert len(states) == 2 * len(TRAINED)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_frozen_parameters_are_unchanged_and_the_others_match_one_process(
    zero: Zero, tmp_path: Path
) -> None:
    check(ParallelConfig(dp=2, zero=zero), 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(tp=2, dp=2, sp=True, zero=1),
        ParallelConfig(pp=2, dp=2, zero=2),
        ParallelConfig(pp=2, dp=2, pipeline=PipelineConfig(schedule="zb-h1")),
        ParallelConfig(dp=4, zero=3, dp_replicate=2),
    ],
)
def test_frozen_parameters_are_unchanged_under_every_axis(
    parallel: ParallelConfig, tmp_path: Path
) -> None:
    check(parallel, 4, tmp_path, tied=True)


def _traffic(rank: int, world: int, zero: Zero, trained: tuple[str, ...]) -> dict[str, int]:
    """Bytes of each kind of collective in a step after the first, and how large the gradients
    are."""
    case = proof.layout_case(tiny(), ParallelConfig(dp=2, zero=zero), world)
    trainer = frozen_trainer(case, rank, trained)
    loader = proof._loader(case.run, trainer.mesh, consumed=0, steps=2)
    train_step(trainer, loader.next(), lr=1e-2, weight_decay=0.1)
    with slow_link() as link:
        train_step(trainer, loader.next(), lr=1e-2, weight_decay=0.1)
        trainer.data.wait_params()
    kinds = {transfer.kind for transfer in link.transfers}
    results = {kind: sum(transfer.nbytes for transfer in link.select(kind)) for kind in kinds}
    return results | {
        "gradients": sum(param.gradient.numel() for param in trainer.data.local_params)
    }


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_frozen_parameters_are_only_all_gathered(zero: Zero) -> None:
    few = run_ranks(_traffic, 2, zero, ("layers.0.mlp_norm.weight",))
    assert sum(result["gradients"] for result in few) == 24 * (2 if zero == 0 else 1)
    sums = [
        result.get(kind, 0)
        for result in few
        for kind in ("all_reduce", "reduce_scatter", "isend", "irecv")
    ]
    # of one norm, padded, in up to six microbatches; all weights once are 60 kB
    assert max(sums) < 5000, few
    none = run_ranks(_traffic, 2, zero, ())
    assert [result["gradients"] for result in none] == [0, 0]

"""From a config to what a step needs: first weights, one memory for weights, and every tensor of a
checkpoint once."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from megalith.config.parallel import ParallelConfig
from megalith.models.decoder import Decoder, allocate, initialize, iter_parameter_specs
from megalith.nn.build import build_context
from megalith.parallel.mesh import build_meta_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.testing.tiny import tiny_run
from megalith.train.step import Trainer
from megalith.train.trainer import build_trainer, checkpoint_entries, weight_entries

CPU = torch.device("cpu")


def build(*, fill: bool = True, **settings: str) -> Trainer:
    """The tiny run's trainer, with settings written with __ for the dot."""
    run = tiny_run({name.replace("__", "."): value for name, value in settings.items()})
    return build_trainer(run, build_single_rank_mesh(), CPU, fill=fill)


def test_initial_weights_do_not_depend_on_the_memory_layout() -> None:
    trainer = build()
    alone = Decoder(build_context(trainer.run.model, build_single_rank_mesh()))
    allocate(alone, CPU)
    initialize(alone, seed=trainer.run.seed)
    weights = {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}
    for name, parameter in alone.named_parameters():
        assert torch.equal(weights[name], parameter) and bool(parameter.any()), name


def test_without_filling_weights_are_zero() -> None:
    assert not any(bool(parameter.any()) for parameter in build(fill=False).model.parameters())


def test_initial_weights_depend_on_the_seed() -> None:
    ours, other = build(), build(seed="7")
    assert not torch.equal(ours.model.embed.weight, other.model.embed.weight)


def test_model_grad_sync_and_optimizer_share_storage() -> None:
    trainer = build()
    for slot, param in zip(trainer.optimizer.slots, trainer.data.local_params, strict=True):
        slot.master.fill_(2.0)  # in fp32 the weights are their own masters
        assert param.weight.eq(2.0).all()
    assert all(bool(parameter.eq(2.0).all()) for parameter in trainer.model.parameters())


@pytest.mark.parametrize(
    ("params", "weights", "gradients", "master_weights"),
    [
        ("fp32", torch.float32, torch.float32, torch.float32),
        ("bf16", torch.bfloat16, torch.float32, torch.float32),
        ("fp64", torch.float64, torch.float64, torch.float64),
    ],
)
def test_each_precision_has_its_formats(
    params: str, weights: torch.dtype, gradients: torch.dtype, master_weights: torch.dtype
) -> None:
    trainer = build(precision__params=params)
    assert {param.weight.dtype for param in trainer.data.local_params} == {weights}
    assert {param.gradient.dtype for param in trainer.data.local_params} == {gradients}
    assert {slot.master.dtype for slot in trainer.optimizer.slots} == {master_weights}
    for slot in trainer.optimizer.slots:
        assert torch.equal(slot.master.to(weights), slot.weight)


def test_checkpoint_holds_weights_moments_and_separate_master_weights() -> None:
    names = {declared.shard.name for declared, _, _ in iter_parameter_specs(build().model)}
    for params, roles in (("fp32", 3), ("bf16", 4)):
        entries = checkpoint_entries(build(precision__params=params))
        assert Counter(entry.role for entry in entries).keys() >= {"param", "exp_avg", "exp_avg_sq"}
        assert len(entries) == len({entry.key for entry in entries}) == roles * len(names)
        assert all(entry.is_writer for entry in entries)


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(tp=4),
        ParallelConfig(tp=4, dp=2, sp=True),
        ParallelConfig(tp=2, dp=3),
        ParallelConfig(dp=3, zero=1),
        ParallelConfig(tp=4, dp=2, sp=True, zero=2),
        ParallelConfig(dp=4, zero=1, dp_replicate=2),
        ParallelConfig(cp=2, dp=2, zero=1),
    ],
)
def test_ranks_write_every_element_once(parallel: ParallelConfig) -> None:
    """tp 4 has two ranks for each of the two key/value heads."""
    run, world = (
        replace(tiny_run(), parallel=parallel),
        parallel.tp * parallel.cp * (parallel.dp or 1),
    )
    grid = model_grid(parallel, run.model, world)
    written: Counter[str] = Counter()
    shapes = {}
    for rank in range(world):
        trainer = build_trainer(run, build_meta_mesh(grid, rank=rank), CPU, fill=False)
        for entry in checkpoint_entries(trainer):
            shapes[entry.key] = entry.shard.shape
            written[entry.key] += entry.tensor.numel() * entry.is_writer
    assert written == Counter({key: torch.Size(shape).numel() for key, shape in shapes.items()})


def test_weights_alone_have_the_names_of_a_checkpoint() -> None:
    trainer = build()
    entries = weight_entries(
        [(param.shard, param.weight) for param in trainer.data.local_params], trainer.mesh
    )
    assert {entry.key for entry in entries} == {
        entry.key for entry in checkpoint_entries(trainer) if entry.role == "param"
    }

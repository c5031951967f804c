"""Choices of a whole step: the same whatever layout made them, and followed under any other."""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig, RecomputeConfig
from megalith.config.train import TrainRun
from megalith.data.loader import MaskSettings, build_batch
from megalith.data.sample import Sample
from megalith.errors import DataError
from megalith.kernels.layer_inputs import RoutingRecord
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks
from megalith.train.moe import (
    LayerExpertLoad,
    attach_routing,
    collect_expert_load,
    gather_routing,
    iter_routers,
    shard_routing,
)
from megalith.train.objective import build_loss_normalizer
from megalith.train.step import Trainer, train_step
from megalith.train.trainer import build_trainer
from megalith.verify.matrix import (
    BIASED_CHOICE,
    MIXTURES,
    MTP_EXPERTS,
    NARROW,
    NOISY,
    OFFSET,
    PADDED,
    PLANNED,
    PLANNED_PAIRS,
    WHOLE_LATENT,
    parse_parallel,
)
from megalith.verify.ranks import _loader, layout_case

CPU = torch.device("cpu")
Whole = dict[str, Tensor]


def push_experts(trainer: Trainer) -> None:
    """Biases and offsets of the choice as after some steps: they start at zero, and would move
    nothing."""
    for router in iter_routers(trainer.pipeline_model.modules):
        for moved in (router.expert_bias, router.offset):
            if moved is not None:
                moved.data.copy_(torch.linspace(-0.02, 0.02, len(moved)))


def step_of(
    rank: int,
    world: int,
    model: ModelConfig,
    parallel: ParallelConfig,
    documents: bool,
    given: Whole | None,
) -> tuple[Whole, list[float]]:
    """A step's choices, and its losses; it follows those that are given."""
    again = RecomputeConfig(granularity="full")
    case = layout_case(model, parallel, world, micro_batch_size=2, seq_len=16, documents=documents)
    run = replace(case.run, recompute=again)
    mesh = (
        build_single_rank_mesh()
        if world == 1
        else build_mesh(model_grid(parallel, model, world), rank=rank)
    )
    trainer = build_trainer(run, mesh, CPU)
    push_experts(trainer)
    step = _loader(run, mesh, consumed=0, steps=1).next()
    batches, routing = step.microbatches, RoutingRecord()
    if given is not None:
        routing = shard_routing(
            given, batches, trainer.pipeline_model.modules, mesh, sp=parallel.sp
        )
    trainer.data.begin_step(len(batches))
    normalizer = build_loss_normalizer(trainer.pipeline_model.objective, step, mesh)
    losses = trainer.pipeline_model.forward_backward(attach_routing(batches, routing), normalizer)
    trainer.data.finish()
    return gather_routing(routing, batches, mesh), losses.tolist()


FEW_SEATS, FILLED = (replace(model, init_std=0.1) for model in (NARROW, PADDED))
"""With larger weights, as what these experts say counts for little, and a choice of others hardly
shows."""

LAYOUTS: dict[str, tuple[ModelConfig, ParallelConfig, bool]] = {
    "dp2 ep2": (BIASED_CHOICE, ParallelConfig(dp=2, ep=2), False),
    "tp2 sp ep2": (BIASED_CHOICE, ParallelConfig(tp=2, sp=True, ep=2, etp=1), False),
    "cp2 ep2, documents": (BIASED_CHOICE, ParallelConfig(cp=2, ep=2), True),
    "pp2 vpp2": (BIASED_CHOICE, parse_parallel("pp2 vpp2"), False),
    "cp2 tp2 sp ep2, documents": (BIASED_CHOICE, ParallelConfig(cp=2, tp=2, sp=True, ep=2), True),
    "mtp, pp2 dp2 ep2": (MTP_EXPERTS, parse_parallel("pp2 dp2 ep2"), False),
    "few seats and latent, dp2 ep2": (FEW_SEATS, ParallelConfig(dp=2, ep=2), False),
    "few seats and latent, cp2 tp2 sp ep2, documents": (
        FEW_SEATS,
        ParallelConfig(cp=2, tp=2, sp=True, ep=2, etp=1),
        True,
    ),
    "padded, cp2 ep2": (FILLED, ParallelConfig(cp=2, ep=2), False),
    "the last refused, with noise, tp2 sp ep2": (
        NOISY,
        ParallelConfig(tp=2, sp=True, ep=2, etp=1),
        False,
    ),
    "planned, tp2 sp": (PLANNED, ParallelConfig(tp=2, sp=True), False),
    "planned pairs, cp2 dp2 ep2": (PLANNED_PAIRS, ParallelConfig(cp=2, dp=2, ep=2), False),
    "offset, cp2 pp2 ep2": (OFFSET, parse_parallel("cp2 pp2 ep2"), False),
    "whole latent, tp2 pp2 sp ep2, documents": (
        WHOLE_LATENT,
        parse_parallel("tp2 pp2 sp ep2 etp1"),
        True,
    ),
}
IN_EVERY_RUN = "tp2 sp ep2", "cp2 ep2, documents"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in IN_EVERY_RUN else [pytest.mark.slow])
        for name in LAYOUTS
    ],
)
def test_recorded_choices_are_equal_and_replayed_under_every_layout(name: str) -> None:
    model, parallel, documents = LAYOUTS[name]
    assert model.moe is not None
    world, count = (
        parallel.tp * parallel.cp * parallel.pp * (parallel.dp or 1),
        model.moe.num_experts,
    )
    alone, _ = step_of(0, 1, model, ParallelConfig(), documents, None)
    assert all(len(experts) == 12 * 16 for experts in alone.values())
    others = {layer: (experts + 1) % count for layer, experts in alone.items()}
    _, followed = step_of(0, 1, model, ParallelConfig(), documents, others)
    _, own = step_of(0, 1, model, ParallelConfig(), documents, alone)
    assert abs(followed[0] - own[0]) > 1e-6
    recorded = run_ranks(step_of, world, model, parallel, documents, None)
    for choices, _ in recorded:
        assert choices.keys() == alone.keys()
        assert all(torch.equal(choices[layer], alone[layer]) for layer in alone)
    results: list[Any] = run_ranks(step_of, world, model, parallel, documents, others)
    heads = 1 + model.mtp.num_layers
    # tp ranks tell all
    totals = [sum(losses[place] for _, losses in results) / parallel.tp for place in range(heads)]
    assert totals == pytest.approx(followed[:heads], rel=1e-12)
    for choices, _ in results:
        assert all(torch.equal(choices[layer], others[layer]) for layer in others)


Trained = tuple[list[float], list[Tensor], list[LayerExpertLoad]]


def trained(run: TrainRun, given: Whole | None) -> tuple[Whole, Trained]:
    """A step's choices, and of a step that makes them or follows those given: losses, gradients,
    use of experts."""
    mesh = build_single_rank_mesh()
    trainer = build_trainer(run, mesh, CPU)
    push_experts(trainer)
    step = _loader(run, mesh, consumed=0, steps=1).next()
    routing = (
        RoutingRecord()
        if given is None
        else shard_routing(given, step.microbatches, trainer.pipeline_model.modules, mesh, sp=False)
    )
    reported = train_step(
        trainer,
        replace(step, microbatches=attach_routing(step.microbatches, routing)),
        lr=1e-2,
        weight_decay=0.0,
    )
    gradients = [param.gradient.clone() for param in trainer.data.local_params]
    losses = [reported.loss, reported.grad_norm, *reported.other_losses.values()]
    return gather_routing(routing, step.microbatches, mesh), (
        losses,
        gradients,
        collect_expert_load(trainer.pipeline_model.modules, mesh),
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[] if name in ("narrow", "padded", "planned pairs") else [pytest.mark.slow]
        )
        for name in MIXTURES
    ],
)
@pytest.mark.parametrize("again", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_replaying_its_own_choices_is_bitwise_equal(
    name: str, again: Literal["none", "full"]
) -> None:
    """Experts that refuse refuse the same anew, plans and offsets are not asked, and noise stays
    where it was."""
    case = layout_case(MIXTURES[name], ParallelConfig(), 1, micro_batch_size=4, documents=True)
    run = replace(case.run, recompute=RecomputeConfig(granularity=again))
    choices, (losses, gradients, uses) = trained(run, None)
    _, (own, others, used) = trained(run, choices)
    assert own == losses and used == uses
    assert all(torch.equal(local, one) for local, one in zip(others, gradients, strict=True))
    drops_tokens = MIXTURES[name].moe.capacity.factor is not None  # type: ignore[union-attr]  # all have experts
    assert any(use.num_dropped > 0 for use in uses) == drops_tokens


def test_choices_of_other_steps_are_rejected() -> None:
    case = layout_case(BIASED_CHOICE, ParallelConfig(), 1, micro_batch_size=6)
    trainer = build_trainer(case.run, build_single_rank_mesh(), CPU)
    batches = _loader(case.run, trainer.mesh, consumed=0, steps=1).next().microbatches
    model, mesh = trainer.pipeline_model.modules, trainer.mesh
    some = {f"layers.{layer}": torch.zeros(12 * 12, 2, dtype=torch.int64) for layer in range(4)}
    assert len(shard_routing(some, batches, model, mesh, sp=False).choices) == 4 * 2
    few = some | {"layers.2": torch.zeros(5, 2, dtype=torch.int64)}
    with pytest.raises(
        DataError,
        match=r"layers\.2: expert choices of 5 tokens for a step that reads 144. Use choices",
    ):
        shard_routing(few, batches, model, mesh, sp=False)
    few.pop("layers.2")
    with pytest.raises(
        DataError,
        match=r"layers\.2: no expert choices to replay \(layers with choices: layers\.0, layers\.1",
    ):
        shard_routing(few, batches, model, mesh, sp=False)
    half = RoutingRecord({("layers.0", 0): torch.zeros(72, 2, dtype=torch.int64)})
    with pytest.raises(
        DataError,
        match=r"layers\.0: expert choices of 72 of the step's 144 tokens were not recorded. Record",
    ):
        gather_routing(half, batches, mesh)


def test_choices_of_microbatches_with_different_sizes_are_rejected() -> None:
    batches = [
        build_batch([Sample(np.arange(size), size)], MaskSettings(), device=CPU) for size in (5, 8)
    ]
    with pytest.raises(
        DataError, match=r"microbatches of \[4, 7\] tokens: .* Use train.seq_len without"
    ):
        gather_routing(RoutingRecord(), batches, build_single_rank_mesh())

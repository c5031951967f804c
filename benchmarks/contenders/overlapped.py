"""One rank of the comparison of exchanges with experts that hide behind computing with those that
do not."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from contenders.ours import LR, WEIGHT_DECAY, random_step
from paired import Turns, take_turns
from torch import Tensor

from megalith.config.train import TrainRun
from megalith.kernels.cpu_threads import keep_freed_memory
from megalith.kernels.layer_inputs import LayerInputs
from megalith.nn.moe import MoE
from megalith.parallel.group import barrier
from megalith.parallel.mesh import Mesh, build_mesh
from megalith.plan.grid import model_grid
from megalith.testing.inject import SlowLink, patched, slow_link
from megalith.train.step import train_step
from megalith.train.trainer import build_trainer

KINDS = ("in order", "shared", "pairs")
"""Nothing behind anything; shared experts while tokens are on their way; and another microbatch
besides."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank saw."""

    losses: Mapping[str, float]
    """Of the first step."""

    turns: Turns
    exposed: Mapping[str, float]
    """Seconds of a step in which the rank stood still for exchanges, where the link was slow."""


def in_order(self: MoE, x: Tensor, inputs: LayerInputs) -> Tensor:
    """A mixture that computes shared experts when tokens are back."""
    dispatch = (
        self.dispatch
        if inputs.router_inputs.aux_loss_scale is None
        else self.dispatch_within_capacity
    )
    sent, way = dispatch(self.narrow(x), self.router(x, inputs)).wait()
    y: Tensor = self.widen(way.combine(self.experts(sent)))
    for shared in self.shared:
        y = y + shared(x, inputs)
    return y


def run_rank(
    rank: int, world: int, run: TrainRun, rounds: int, warmup: int, latency_ms: float, gbps: float
) -> RankReport:
    """All kinds take turns in the same ranks, a training step each, from barrier to barrier."""
    torch.set_num_threads(1)
    keep_freed_memory()
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    steps = {kind: step_of(kind, run, mesh) for kind in KINDS}
    losses = {kind: step() for kind, step in steps.items()}
    slow = latency_ms > 0 or gbps > 0
    with over_a_link(slow, latency_ms, gbps) as link:
        exposed = dict.fromkeys(KINDS, 0.0)

        def turn(kind: str) -> None:
            before = 0.0 if link is None else link.exposed_seconds("all_to_all")
            barrier(mesh.world)
            steps[kind]()
            barrier(mesh.world)
            if link is not None:
                exposed[kind] += link.exposed_seconds("all_to_all") - before

        turns = take_turns(
            {kind: lambda kind=kind: turn(kind) for kind in KINDS}, rounds=rounds, warmup=warmup
        )
    return RankReport(
        losses, turns, {kind: seconds / (rounds + warmup) for kind, seconds in exposed.items()}
    )


def step_of(kind: str, run: TrainRun, mesh: Mesh) -> Callable[[], float]:
    """A training step of one kind; the loss before it."""
    run = replace(run, parallel=replace(run.parallel, overlap_experts=kind == "pairs"))
    trainer = build_trainer(run, mesh, torch.device("cpu"))
    local = replace(run.train, global_batch_size=run.train.global_batch_size // mesh.dp.size)
    batches = random_step(replace(run, train=local), torch.device("cpu"), seed=mesh.dp.rank)
    batches = replace(batches, num_labels=batches.num_labels * mesh.dp.size)

    def step() -> float:
        with patched(MoE, "forward", in_order) if kind == "in order" else nullcontext():
            return train_step(trainer, batches, lr=LR, weight_decay=WEIGHT_DECAY).loss

    return step


@contextmanager
def over_a_link(slow: bool, latency_ms: float, gbps: float) -> Iterator[SlowLink | None]:
    """Messages as the machine carries them, or with this latency and bandwidth on top."""
    if not slow:
        yield None
        return
    bandwidth = gbps * 1e9 if gbps > 0 else float("inf")
    with slow_link(latency_seconds=latency_ms / 1000, bytes_per_second=bandwidth) as link:
        yield link

"""One rank of a pipeline whose stages sleep instead of computing, so that a machine with few cores
can time many."""

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megalith.kernels.linear import PLAIN, GradAccumulator, MatmulOps
from megalith.parallel.group import barrier
from megalith.parallel.p2p import Spec, Tensors, create_pipeline_groups
from megalith.parallel.pipeline import Pipeline, WeightGradStore
from megalith.plan.schedule import Schedule
from megalith.testing.inject import slow_link
from megalith.testing.ranks import world_group

WIDTH = 64


@dataclass(frozen=True, slots=True)
class Naps:
    """Seconds that one stage takes for each part."""

    forward: float
    backward_input: float
    backward_weight: float


class SleepingGradAccumulator:
    """Takes its time to add a weight gradient."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def product(self, x: Tensor, dy: Tensor, matmul_ops: MatmulOps) -> None:
        """Sleep."""
        time.sleep(self.seconds)

    def gradient(self, dw: Tensor) -> None:
        """Sleep."""
        time.sleep(self.seconds)

    def rows(self, rows: Tensor, dy: Tensor) -> None:
        """Sleep."""
        time.sleep(self.seconds)


class Sleep(Function):
    """Sleeps forward, then backward towards the input; what the weights take is their sink's."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, stage: "SleepingStage"
    ) -> Tensor:  # Any: it takes any attribute
        """x -> a copy of it."""
        time.sleep(stage.naps.forward)
        ctx.stage = stage
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """dy -> dy."""
        time.sleep(ctx.stage.naps.backward_input)
        ctx.stage.grad_accumulator.product(dy, dy, PLAIN)
        return dy, None


class SleepingStage:
    """One chunk."""

    def __init__(self, stage: int, num_stages: int, naps: Naps) -> None:
        self.first, self.last, self.naps = stage == 0, stage == num_stages - 1, naps
        self.grad_accumulator: GradAccumulator = SleepingGradAccumulator(naps.backward_weight)

    def __call__(self, microbatch: int, received: Tensors) -> Tensors:
        """What the stage before sent -> the same, later."""
        x = torch.ones(WIDTH, requires_grad=True) if self.first else received[0]
        y: Tensor = Sleep.apply(x, self)  # type: ignore[no-untyped-call]  # torch's own
        return (y.sum(),) if self.last else (y,)


def run_rank(
    rank: int, world: int, schedule: Schedule, naps: Naps, rounds: int, latency: float = 0.0
) -> list[tuple[float, float]]:
    """When this rank began and ended each round, by a clock that all processes of a machine share.

    latency: seconds that every message takes; 0: whatever the machine takes.
    """
    torch.set_num_threads(1)
    group = world_group(rank, world, "pp")
    stages = [
        SleepingStage(schedule.stages[rank][chunk], schedule.num_stages, naps)
        for chunk in range(schedule.num_chunks)
    ]
    stores = [WeightGradStore() for _ in stages]
    for stage, store in zip(stages, stores, strict=True):
        stage.grad_accumulator = store.wrap(stage.grad_accumulator)
    pipeline = Pipeline(
        rank,
        create_pipeline_groups(group, tags=True),
        torch.device("cpu"),
        lambda *_: (Spec((WIDTH,), torch.float32),),
        weights=stores,
    )
    times = []
    for _ in range(rounds):
        barrier(group)
        with slow_link(latency_seconds=latency) if latency else nullcontext():
            began = time.monotonic()
            pipeline.run(schedule, stages)
            times.append((began, time.monotonic()))
    return times

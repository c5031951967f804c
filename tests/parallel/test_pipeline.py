"""The executor: under every schedule, the same losses and gradients as one process, bit for bit per
microbatch."""

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.errors import RankError
from megalith.kernels.linear import GradAccumulator, MatmulOps, linear, weight_grad
from megalith.parallel.p2p import Spec, Specs, Tensors, create_pipeline_groups
from megalith.parallel.pipeline import Boundary, Pipeline, WeightGradStore
from megalith.plan.schedule import Schedule, ScheduleName, build_schedule, with_transfers
from megalith.testing.inject import slow_link
from megalith.testing.ranks import run_ranks, world_group

CPU = torch.device("cpu")
WIDTH = 5
KNOWN: dict[str, tuple[ScheduleName, int, int, int | None]] = {
    "gpipe": ("gpipe", 1, 3, None),
    "1f1b": ("1f1b", 1, 5, None),
    "1f1b, fewer microbatches than ranks": ("1f1b", 1, 1, None),
    "interleaved": ("interleaved", 2, 6, None),
    "interleaved, larger groups and a remainder": ("interleaved", 2, 8, 5),
    "zb-h1": ("zb-h1", 1, 4, None),
    "zb-v": ("zb-v", 2, 4, None),
    "dualpipe-v": ("dualpipe-v", 2, 5, None),
}


class Adding:
    """A sink that adds into a tensor and counts."""

    def __init__(self, total: Tensor, log: list[int]) -> None:
        self.total, self.log = total, log

    def product(self, x: Tensor, dy: Tensor, matmul_ops: MatmulOps) -> None:
        self.log.append(len(x))
        self.total += weight_grad(dy, x)

    def gradient(self, dw: Tensor) -> None:
        raise NotImplementedError

    def rows(self, rows: Tensor, dy: Tensor) -> None:
        raise NotImplementedError


class Layer:
    """One stage: x [t, 5], a float that every stage passes on, and integers that it counts up ->
    the same."""

    def __init__(self, stage: int, stages: int) -> None:
        self.stage, self.last = stage, stage == stages - 1
        draw = torch.Generator().manual_seed(stage)
        self.weight = torch.randn(
            WIDTH, WIDTH, generator=draw, dtype=torch.float64
        ).requires_grad_()
        self.gradient = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
        self.added: list[int] = []
        self.grad_accumulator: GradAccumulator | None = Adding(self.gradient, self.added)
        self.losses: dict[int, float] = {}

    def __call__(self, microbatch: int, received: Tensors) -> Tensors:
        if self.stage == 0:
            x, gain, count = (
                rows_of(microbatch),
                torch.ones((), dtype=torch.float64),
                torch.zeros(2, dtype=torch.int64),
            )
        else:
            x, gain, count = received
        y = torch.tanh(linear(x, [self.weight], grad_accumulator=self.grad_accumulator)) * gain
        if not self.last:
            return y, gain * 1.5, count + 1
        assert int(count[0]) == self.stage, "integers cross a boundary unchanged"
        loss = y.square().sum()
        self.losses[microbatch] = loss.item()
        return (loss,) if torch.is_grad_enabled() else ()


def rows_of(microbatch: int) -> Tensor:
    """Microbatches of uneven lengths."""
    draw = torch.Generator().manual_seed(100 + microbatch)
    return torch.randn(2 + microbatch % 3, WIDTH, generator=draw, dtype=torch.float64)


def boundary(stage: int, microbatch: int) -> Specs:
    rows = Spec((2 + microbatch % 3, WIDTH), torch.float64)
    return rows, Spec((), torch.float64), Spec((2,), torch.int64, requires_grad=False)


def one_process(stages: int, microbatches: int) -> tuple[dict[int, float], dict[int, Tensor]]:
    layers = [Layer(stage, stages) for stage in range(stages)]
    for microbatch in range(microbatches):
        passed: Tensors = ()
        for layer in layers:
            passed = layer(microbatch, passed)
        passed[0].backward()
    return layers[-1].losses, {layer.stage: layer.gradient for layer in layers}


@dataclass(frozen=True)
class Case:
    name: ScheduleName
    chunks: int
    microbatches: int
    group: int | None
    announce: bool = False
    known: bool = True
    forward_only: bool = False
    overlap: bool = True
    separate: bool = False


def schedule_of(case: Case, world: int) -> Schedule:
    return with_transfers(
        build_schedule(
            case.name,
            num_ranks=world,
            num_chunks=case.chunks,
            num_microbatches=case.microbatches,
            group=case.group,
            forward_only=case.forward_only,
        ),
        overlap=case.overlap,
    )


def run_case(
    rank: int, world: int, case: Case
) -> tuple[dict[int, float], dict[int, Tensor], dict[int, list[int]]]:
    schedule = schedule_of(case, world)
    layers = [
        Layer(schedule.stages[rank][chunk], schedule.num_stages) for chunk in range(case.chunks)
    ]
    stores = [WeightGradStore() for _ in layers]
    for layer, store in zip(layers, stores, strict=True):
        if layer.grad_accumulator is not None:
            layer.grad_accumulator = store.wrap(layer.grad_accumulator)
    pipeline = Pipeline(
        rank,
        create_pipeline_groups(world_group(rank, world, "pp"), tags=not case.separate),
        CPU,
        boundary=boundary if case.known else None,
        announce=case.announce,
        weights=stores,
    )
    with torch.set_grad_enabled(not case.forward_only):
        pipeline.run(schedule, layers)
    losses = {microbatch: loss for layer in layers for microbatch, loss in layer.losses.items()}
    return (
        losses,
        {layer.stage: layer.gradient for layer in layers},
        {layer.stage: layer.added for layer in layers},
    )


def check(case: Case, world: int) -> None:
    stages = world * case.chunks
    losses, gradients = one_process(stages, case.microbatches)
    results = run_ranks(run_case, world, case)
    assert {m: loss for result, _, _ in results for m, loss in result.items()} == losses
    result = {stage: gradient for _, part, _ in results for stage, gradient in part.items()}
    assert result.keys() == gradients.keys()
    for stage, gradient in gradients.items():
        if case.forward_only:
            assert not result[stage].any()
        else:
            torch.testing.assert_close(result[stage], gradient, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", KNOWN)
def test_schedules_match_one_process(name: str, world: int) -> None:
    check(Case(*KNOWN[name]), world)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v"])
@pytest.mark.parametrize(
    "changes",
    [
        {"announce": True},
        {"known": False},
        {"forward_only": True},
        {"overlap": False},
        {"separate": True},
    ],
    ids=str,
)
def test_schedules_match_in_every_mode(name: str, changes: dict[str, bool]) -> None:
    check(Case(*KNOWN[name], **changes), 2)


def _over_a_poisoned_link(
    rank: int, world: int, case: Case
) -> tuple[dict[int, float], dict[int, Tensor], int]:
    """The same over a link whose buffers hold garbage until they are waited for; and the most waits
    of a message."""
    with slow_link(latency_seconds=0.002, poison=True) as link:
        losses, gradients, _ = run_case(rank, world, case)
    return losses, gradients, max(transfer.waits for transfer in link.select("isend", "irecv"))


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v"])
def test_messages_are_waited_for_once_before_they_are_read(
    name: str,
) -> None:
    case = Case(*KNOWN[name])
    losses, gradients = one_process(2 * case.chunks, case.microbatches)
    results = run_ranks(_over_a_poisoned_link, 2, case)
    assert {m: loss for result, _, _ in results for m, loss in result.items()} == losses
    for _, result, waits in results:
        assert waits == 1
        for stage, gradient in result.items():
            torch.testing.assert_close(gradient, gradients[stage], rtol=1e-13, atol=1e-13)


def test_weight_gradients_are_computed_once_and_deferred_by_the_schedule() -> None:
    for _, _, added in run_ranks(run_case, 3, Case(*KNOWN["zb-h1"])):
        for lengths in added.values():
            assert lengths == [2 + microbatch % 3 for microbatch in range(4)]


def _wrong_rows(rank: int, world: int) -> None:
    """Rank 1 expects other rows than rank 0 sends."""
    case = Case("1f1b", 1, 2, None, announce=True)
    schedule = schedule_of(case, world)
    pipeline = Pipeline(
        rank, create_pipeline_groups(world_group(rank, world, "pp"), tags=True), CPU, announce=True
    )
    specs: Boundary = boundary if rank == 0 else (lambda stage, m: boundary(stage, m + 1))
    pipeline.run(schedule, [Layer(rank, world)], specs)


def test_unexpected_message_shapes_are_rejected() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_wrong_rows, 2)
    text = str(caught.value)
    assert (
        "pipeline rank 0 sends float64 [2, 5], float64 [], int64 [2] forward to stage 1 for "
        "microbatch 0" in text
    )
    assert "but float64 [3, 5], float64 [], int64 [2] was expected" in text
    assert "Use the same data and settings on every rank." in text


class Wide:
    """A stage whose output is large and is not needed by its own backward."""

    def __init__(self, stage: int) -> None:
        self.stage, self.outputs = stage, list[Any]()

    def __call__(self, microbatch: int, received: Tensors) -> Tensors:
        if self.stage == 1:
            return (received[0].sum(),)
        y = torch.ones(1000, requires_grad=True) + 1.0
        self.outputs.append(torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage()))
        return (y,)


def _freed(rank: int, world: int) -> list[bool]:
    """On rank 0, in the middle of the step: whether the outputs that were sent have lost their
    memory."""
    schedule = with_transfers(build_schedule("gpipe", num_ranks=2, num_microbatches=2))
    stage = Wide(rank)
    pipeline = Pipeline(
        rank,
        create_pipeline_groups(world_group(rank, world, "pp"), tags=True),
        CPU,
        boundary=lambda *_: (Spec((1000,), torch.float32),),
    )
    results: list[bool] = []
    backward = torch.autograd.backward

    def look(*given: Any) -> None:
        if rank == 0 and not results:
            deadline = time.monotonic() + 10
            while (
                not all(reference.expired() for reference in stage.outputs)
                and time.monotonic() < deadline
            ):
                time.sleep(0.01)
            results.extend(reference.expired() for reference in stage.outputs)
        backward(*given)

    torch.autograd.backward = look
    try:
        pipeline.run(schedule, [stage])
    finally:
        torch.autograd.backward = backward
    return results


def test_outputs_are_freed_after_their_send() -> None:
    assert run_ranks(_freed, 2)[0] == [True, True]

"""Communication behind matmuls: the same bits as one after the other; rings the same but for the
order of sums."""

import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from megalith.kernels.linear import MatmulOps, register_recompute, weight_grad
from megalith.models.decoder import allocate
from megalith.parallel.group import Group
from megalith.parallel.tensor import (
    ColumnParallelLinear,
    Init,
    ParameterSpec,
    RowParallelLinear,
    SequenceParallelComm,
    TensorParallelComm,
    TPComm,
)
from megalith.parallel.tensor_overlap import FUSED, RING_EXCHANGE
from megalith.plan.shards import Shard, split_evenly
from megalith.testing.inject import fused_on_cpus, slow_link
from megalith.testing.ranks import run_ranks, world_group
from megalith.testing.tolerance import FP64, assert_equals
from tests.cases import least_of

TOKENS, INPUTS, OUTPUTS = 12, 6, 10


def seeded(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


class Notes:
    """A sink that notes when it is called."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.total: Tensor | None = None

    def product(self, x: Tensor, dy: Tensor, matmul_ops: MatmulOps) -> None:
        self.events.append("weights")
        self.total = weight_grad(dy, x)

    def gradient(self, dw: Tensor) -> None:
        raise AssertionError("a linear layer hands over products")

    def rows(self, rows: Tensor, dy: Tensor) -> None:
        raise AssertionError("a linear layer hands over products")


def build(
    kind: type[nn.Module], tp_comm: TPComm, group: Group, dtype: torch.dtype
) -> ColumnParallelLinear | RowParallelLinear:
    shard = Shard.full("x.w", (OUTPUTS, INPUTS))
    dim = 0 if kind is ColumnParallelLinear else 1
    sizes = split_evenly(shard.shape[dim], group.size)
    declared = ParameterSpec(shard.split_dim(dim, sizes, group.rank, group.axes), Init(1.0))
    layer = (
        ColumnParallelLinear([declared], [], tp_comm, dtype=dtype)
        if kind is ColumnParallelLinear
        else RowParallelLinear(declared, None, tp_comm, dtype=dtype)
    )
    allocate(layer, torch.device("cpu"))
    with torch.no_grad():
        box = seeded(OUTPUTS, INPUTS, seed=1, dtype=dtype).split(sizes, dim)[group.rank]
        getattr(layer, "w").copy_(box)  # noqa: B009  # a name that mypy does not know
    return layer


def run(
    kind: type[nn.Module], tp_comm: TPComm, group: Group, dtype: torch.dtype, grad_accumulator: bool
) -> Sequence[Tensor]:
    """Output, dx and dw of one layer."""
    layer = build(kind, tp_comm, group, dtype)
    notes = Notes([])
    layer.grad_accumulator = notes if grad_accumulator else None
    sp, column = isinstance(tp_comm, SequenceParallelComm), kind is ColumnParallelLinear
    tokens = TOKENS // group.size if sp and column else TOKENS
    inputs = INPUTS if column else split_evenly(INPUTS, group.size)[group.rank]
    x = seeded(
        tokens, inputs, seed=2 + (group.rank if sp or not column else 0), dtype=dtype
    ).requires_grad_()
    y = layer(x)
    (y * seeded(*y.shape, seed=7, dtype=dtype)).sum().backward()
    weight = getattr(layer, "w")  # noqa: B009
    result = notes.total if grad_accumulator else weight.grad
    assert x.grad is not None and result is not None
    assert (weight.grad is None) == grad_accumulator
    return y.detach(), x.grad, result


def compare(rank: int, world: int, dtype: torch.dtype) -> None:
    group = world_group(rank, world, "tp_kv", "tp_copy")
    for kind in (ColumnParallelLinear, RowParallelLinear):
        for grad_accumulator in (False, True):
            for split in (False, True):
                tp_comm = SequenceParallelComm if split else TensorParallelComm
                plain = run(kind, tp_comm(group, overlap=False), group, dtype, grad_accumulator)
                for actual, reference in zip(
                    run(kind, tp_comm(group), group, dtype, grad_accumulator), plain, strict=True
                ):
                    assert torch.equal(actual, reference), (kind, tp_comm, grad_accumulator)
            for collective_matmul in (RING_EXCHANGE, FUSED) if dtype == torch.float64 else ():
                with fused_on_cpus():
                    ring = run(
                        kind,
                        SequenceParallelComm(group, collective_matmul=collective_matmul),
                        group,
                        dtype,
                        grad_accumulator,
                    )
                for actual, reference in zip(ring, plain, strict=True):
                    assert_equals(f"{kind} in a ring", actual, reference, FP64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_overlap_is_bitwise_equal_and_collective_matmul_reorders_sums(dtype: torch.dtype) -> None:
    run_ranks(compare, 3, dtype)


def order(rank: int, world: int, sp: bool) -> None:
    group = world_group(rank, world, "tp_kv", "tp_copy")
    events: list[str] = []
    layer = build(
        ColumnParallelLinear,
        SequenceParallelComm(group) if sp else TensorParallelComm(group),
        group,
        torch.float32,
    )
    layer.grad_accumulator = Notes(events)
    x = seeded(
        TOKENS // world if sp else TOKENS, INPUTS, seed=2, dtype=torch.float32
    ).requires_grad_()
    y = layer(x)
    with slow_link(latency_seconds=0.02, poison=True) as link:
        y.sum().backward()
    kinds = [transfer.kind for transfer in link.transfers]
    assert kinds == (["all_gather", "reduce_scatter"] if sp else ["all_reduce"])
    assert [transfer.waits for transfer in link.transfers] == [1] * len(kinds)
    assert events == ["weights"]
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("sp", [False, True])
def test_each_message_is_read_only_after_its_wait(sp: bool) -> None:
    run_ranks(order, 2, sp)


def hidden(rank: int, world: int, sp: bool) -> float:
    """How long a backward stands still for a link, of what the link takes; the weights' product is
    a long sleep."""
    group = world_group(rank, world, "tp_kv", "tp_copy")
    layer = build(
        ColumnParallelLinear,
        SequenceParallelComm(group) if sp else TensorParallelComm(group),
        group,
        torch.float32,
    )
    layer.grad_accumulator = Sleeper()
    x = seeded(
        TOKENS // world if sp else TOKENS, INPUTS, seed=2, dtype=torch.float32
    ).requires_grad_()
    y = layer(x)
    with slow_link(latency_seconds=0.05) as link:
        y.sum().backward()
    sums = ("reduce_scatter", "all_reduce")
    return link.exposed_seconds(*sums) / link.added_seconds(*sums)


class Sleeper(Notes):
    """A sink whose product takes its time."""

    def __init__(self) -> None:
        super().__init__([])

    def product(self, x: Tensor, dy: Tensor, matmul_ops: MatmulOps) -> None:
        time.sleep(0.1)


@pytest.mark.parametrize("sp", [False, True])
def test_reduction_of_dx_overlaps_with_weight_gradients(sp: bool) -> None:
    assert least_of(lambda: max(run_ranks(hidden, 2, sp)), below=0.2) < 0.2


def recomputed_input(rank: int, world: int) -> None:
    group = world_group(rank, world, "tp_kv", "tp_copy")
    layer = build(ColumnParallelLinear, SequenceParallelComm(group), group, torch.float64)
    x = seeded(TOKENS // world, INPUTS, seed=2, dtype=torch.float64)
    layer(x).sum().backward()
    weight = getattr(layer, "w")  # noqa: B009
    reference, weight.grad = weight.grad, None
    half = x / 2
    layer(register_recompute(x, torch.add, (half, half))).sum().backward()
    assert torch.equal(weight.grad, reference)


def test_recomputed_input_gives_the_same_gradient() -> None:
    run_ranks(recomputed_input, 2)

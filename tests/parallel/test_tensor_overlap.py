"""MatmulOps around a ring are those of gathered tokens, and of sums that are scattered; and they
hide a slow link."""

import time
from functools import partial

import pytest
import torch
from torch import Tensor

from megalith.kernels.linear import forward, input_grad
from megalith.parallel.group import Group
from megalith.parallel.tensor_overlap import (
    ring_all_gather_matmul,
    ring_matmul_reduce_scatter,
    start_all_reduce,
    start_reduce_scatter,
    start_ring_exchange,
    start_token_gather,
)
from megalith.testing.inject import slow_link
from megalith.testing.ranks import run_ranks, world_group
from megalith.testing.tolerance import FP64, assert_equals
from tests.cases import least_of

TOKENS, INPUTS, OUTPUTS = 12, 5, 7


def seeded(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def group_of(rank: int, world: int) -> Group:
    return world_group(rank, world, "tp_kv", "tp_copy")


def products(rank: int, world: int) -> None:
    group = group_of(rank, world)
    x, weights = (
        seeded(TOKENS, INPUTS, seed=0),
        [seeded(OUTPUTS, INPUTS, seed=1 + r) for r in range(world)],
    )
    whole, y = ring_all_gather_matmul(x.chunk(world)[rank], weights[rank], group, forward)
    assert torch.equal(whole, x)
    assert_equals("gathered", y, x @ weights[rank].T, FP64)
    dys = [seeded(TOKENS, OUTPUTS, seed=9 + r) for r in range(world)]
    local = ring_matmul_reduce_scatter(dys[rank], weights[rank], group, input_grad)
    total = torch.stack([dy @ w for dy, w in zip(dys, weights, strict=True)]).sum(0)
    assert_equals("scattered", local, total.chunk(world)[rank], FP64)


def started(rank: int, world: int) -> None:
    group = group_of(rank, world)
    parts = [seeded(world * 2, 3, seed=r) for r in range(world)]
    total = torch.stack(parts).sum(0)
    with slow_link(latency_seconds=0.01, poison=True):
        on_their_way = [
            start(parts[rank], group)
            for start in (
                start_all_reduce,
                start_token_gather,
                start_reduce_scatter,
                start_ring_exchange,
            )
        ]
        assert all(each.x.isnan().all() for each in on_their_way)
        whole, gathered, scattered, passed = (each.wait() for each in on_their_way)
    assert_equals("sum", whole, total, FP64)
    assert torch.equal(gathered, torch.cat(parts))
    assert_equals("scatter", scattered, total.chunk(world)[rank], FP64)
    assert torch.equal(passed, parts[rank - 1])


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("what", [products, started], ids=lambda what: what.__name__)
def test_collective_matmuls_match_separate_operations_on_ranks(what: object, tp: int) -> None:
    assert callable(what)
    run_ranks(what, tp)


def slow_product(x: Tensor, w: Tensor, *, seconds: float) -> Tensor:
    time.sleep(seconds)
    return forward(x, w)


def hidden(rank: int, world: int) -> tuple[float, float]:
    """What a link that needs half the time of a product adds, and for how much of it a rank stands
    still."""
    group = group_of(rank, world)
    product = partial(slow_product, seconds=0.04)
    with slow_link(latency_seconds=0.02) as link:
        ring_all_gather_matmul(
            seeded(4, INPUTS, seed=0), seeded(OUTPUTS, INPUTS, seed=1), group, product
        )
        ring_matmul_reduce_scatter(
            seeded(4 * world, INPUTS, seed=0), seeded(OUTPUTS, INPUTS, seed=1), group, product
        )
        return link.added_seconds(), link.exposed_seconds()


def test_collective_matmul_overlaps_a_slow_link() -> None:
    def exposed_share() -> float:
        results = run_ranks(hidden, 2)
        assert all(added == pytest.approx(0.04) for added, _ in results)
        return max(exposed / added for added, exposed in results)

    assert least_of(exposed_share, below=0.2) < 0.2

"""Slices of sums and buckets of slices: the numbers, their order, and what may be read when."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megalith.parallel import grad_sync
from megalith.parallel.grad_sync import (
    PendingMessages,
    start_bucket_all_gather,
    start_bucket_reduce_scatter,
    sum_over_members_,
)
from megalith.parallel.group import Group, start_receive, start_send
from megalith.testing.ranks import run_ranks, world_group

N = 5
"""Elements of a slice."""


def bucket_of(rank: int, world: int, dtype: torch.dtype) -> torch.Tensor:
    """What one rank has before the sum: numbers whose sum depends on its order."""
    return torch.randn(
        world * N, generator=torch.Generator().manual_seed(rank), dtype=torch.float64
    ).to(dtype)


def _slice_of_sum(
    rank: int, world: int, dtype: torch.dtype, wire: torch.dtype | None
) -> torch.Tensor:
    group = world_group(rank, world, "dp_shard")
    return (
        start_bucket_reduce_scatter(bucket_of(rank, world, dtype), group, tag=3, dtype=wire)
        .wait()
        .clone()
    )


@pytest.mark.parametrize("world", [2, 3, 4])
def test_each_rank_gets_its_slice_of_the_sum_added_in_the_order_of_ranks(world: int) -> None:
    results = run_ranks(_slice_of_sum, world, torch.float32, None)
    expected = bucket_of(0, world, torch.float32)
    for rank in range(1, world):
        expected = expected + bucket_of(rank, world, torch.float32)
    assert torch.equal(torch.cat(results), expected)


def test_bf16_messages_are_accumulated_in_fp32() -> None:
    world = 3
    result = torch.cat(run_ranks(_slice_of_sum, world, torch.float32, torch.bfloat16))
    exact, rounded = (
        torch.stack(
            [bucket_of(rank, world, torch.float32).to(wire).float() for rank in range(world)]
        ).view(world, world, N)
        for wire in (torch.float32, torch.bfloat16)
    )
    for owner in range(world):  # a rank's own part of its slice does not travel
        parts = [(exact if rank == owner else rounded)[rank, owner] for rank in range(world)]
        assert torch.equal(result.view(world, N)[owner], parts[0] + parts[1] + parts[2])
    assert result.dtype == torch.float32
    assert not torch.equal(result, exact.sum(0).flatten())


def _gathered(rank: int, world: int) -> torch.Tensor:
    group = world_group(rank, world, "dp_shard")
    bucket = torch.full((world * N,), float("nan"))
    bucket.view(world, N)[rank] = rank
    start_bucket_all_gather(bucket, group, tag=0).wait()
    return bucket


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_rank_gets_every_slice(world: int) -> None:
    expected = torch.arange(world, dtype=torch.float32).repeat_interleave(N)
    assert all(torch.equal(result, expected) for result in run_ranks(_gathered, world))


def _many_at_once(rank: int, world: int) -> list[float]:
    group = world_group(rank, world, "dp_shard")
    started = [
        start_bucket_reduce_scatter(torch.full((world,), float(k)), group, tag=k) for k in range(6)
    ]
    gathers = [
        start_bucket_all_gather(torch.full((world,), 10.0 * rank + k), group, tag=100 + k)
        for k in range(3)
    ]
    for works in gathers:
        works.wait()
    return [float(each.wait()) for each in reversed(started)]


def test_sums_and_gathers_may_be_waited_for_in_any_order() -> None:
    assert run_ranks(_many_at_once, 3) == [[3.0 * k for k in reversed(range(6))]] * 3


def _over_members(rank: int, world: int, members: tuple[int, ...]) -> torch.Tensor:
    x = bucket_of(rank, world, torch.float32)
    return sum_over_members_(x, world_group(rank, world, "pp"), members) if rank in members else x


@pytest.mark.parametrize("members", [(0, 3), (0, 1, 3), (2,)])
def test_members_sum_in_one_order_with_bitwise_equal_results(members: tuple[int, ...]) -> None:
    world = 4
    results = run_ranks(_over_members, world, members)
    expected = bucket_of(members[0], world, torch.float32)
    for member in members[1:]:
        expected = expected + bucket_of(member, world, torch.float32)
    for rank in range(world):
        assert torch.equal(
            results[rank], expected if rank in members else bucket_of(rank, world, torch.float32)
        )


def test_single_member_sends_nothing() -> None:
    x = torch.ones(3)
    assert sum_over_members_(x, Group(("pp",), (0, 1), rank=1), (0,)) is x


def _order_of_messages(rank: int, world: int) -> list[tuple[str, int]]:
    seen: list[tuple[str, int]] = []

    def noting(name: str, start: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
        def started(x: torch.Tensor, group: Group, peer: int) -> dist.Work:
            seen.append((name, peer))
            return start(x, group, peer)

        return started

    with (
        patch.object(grad_sync, "start_send", noting("to", start_send)),
        patch.object(grad_sync, "start_receive", noting("from", start_receive)),
    ):
        sum_over_members_(torch.ones(3), world_group(rank, world, "pp"), range(world))
    return seen


def test_of_two_members_one_sends_while_the_other_receives() -> None:
    """NCCL takes the messages of a pair one after the other: two that both received first would
    wait for ever."""
    assert run_ranks(_order_of_messages, 3) == [
        [("to", 1), ("from", 1), ("to", 2), ("from", 2)],
        [("from", 0), ("to", 0), ("to", 2), ("from", 2)],
        [("from", 0), ("to", 0), ("from", 1), ("to", 1)],
    ]


def test_works_are_waited_for_once() -> None:
    class Work:
        waits = 0

        def wait(self) -> None:
            self.waits += 1

    works = [Work(), Work()]
    both = PendingMessages([*works])  # type: ignore[list-item]  # all it needs is `wait`
    both.wait()
    both.wait()
    assert [work.waits for work in works] == [1, 1]

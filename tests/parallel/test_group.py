"""In-place collectives give every rank of a group the same answer, and cost nothing for a group of
one."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megalith.observe.flight import FlightRecorder, message_lane, reverse_lane
from megalith.parallel.group import (
    Group,
    all_reduce_,
    all_reduce_max_,
    barrier,
    gather_objects,
    local_range,
    single_rank_group,
    start_all_gather,
    start_all_reduce_,
    start_receive,
    start_send,
)
from megalith.testing.ranks import run_ranks, world_group


def _sums(rank: int, world: int) -> list[list[float]]:
    group = world_group(rank, world, "dp")
    x, y = torch.tensor([rank, 1.0]), torch.tensor([rank * 2.0])
    assert all_reduce_(x, group) is x
    started = start_all_reduce_(y, group)
    assert started is not None
    started.wait()
    z = all_reduce_max_(torch.tensor([-rank, rank]), group)
    return [x.tolist(), y.tolist(), z.tolist()]


def test_all_reduce_sum_and_max_are_in_place_and_equal_on_ranks() -> None:
    assert run_ranks(_sums, 3) == [[[3.0, 3.0], [6.0], [0, 2]]] * 3


def _collect(rank: int, world: int) -> list[object]:
    group = world_group(rank, world, "dp")
    barrier(group)
    return gather_objects({"rank": rank, "odd": None if rank else [1.5]}, group)


def test_gather_objects_returns_all_values() -> None:
    values: list[object] = [{"rank": 0, "odd": [1.5]}, {"rank": 1, "odd": None}]
    assert run_ranks(_collect, 2) == [values] * 2


def _in_the_last_two(rank: int, world: int) -> tuple[list[float], list[object]] | None:
    handle = dist.new_group([1, 2])
    if rank == 0:
        return None
    group = Group(axes=("dp",), ranks=(1, 2), rank=rank - 1, handle=handle, name=handle.group_name)
    barrier(group)
    summed = all_reduce_(torch.tensor([float(rank)]), group)
    return summed.tolist(), gather_objects(rank, group)


def test_ranks_of_a_group_are_numbered_from_zero() -> None:
    assert run_ranks(_in_the_last_two, 3) == [None, ([3.0], [1, 2]), ([3.0], [1, 2])]


def _notes(rank: int, world: int) -> list[str]:
    group = replace(world_group(rank, world, "dp"), flight=FlightRecorder())
    assert group.flight is not None
    all_reduce_(torch.ones(2), group)
    got = torch.zeros(3)
    for tag in (7, 8):
        works = (
            start_send(torch.ones(3), group, 1 - rank, tag=tag),
            start_receive(got, group, 1 - rank, tag=tag),
        )
        for work in works:
            work.wait()
        del work, works
    assert got.tolist() == [1, 1, 1]
    barrier(group)
    assert group.flight.unfinished() == []
    last = group.flight.entries[-2]
    assert reverse_lane(last.lane, rank) == message_lane(f"{group.name}#8", rank, sends=True)
    return [f"{entry} {entry.peer}" for entry in group.flight.entries]


def test_collectives_and_message_peers_are_recorded() -> None:
    for rank, noted in enumerate(run_ranks(_notes, 2)):
        messages = [f"send 0 over dp {1 - rank}", f"receive 0 over dp {1 - rank}"]
        assert noted == [
            "all_reduce 0 over dp None",
            *messages,
            *messages,
            "barrier 1 over dp None",
        ]


def test_a_group_of_one_does_nothing_and_needs_no_processes() -> None:
    group, x = single_rank_group("tp_kv", "tp_copy"), torch.tensor([3.0])
    for result in (all_reduce_(x, group), all_reduce_max_(x, group)):
        assert result is x
    assert start_all_reduce_(x, group) is None
    assert gather_objects({"a": 1}, group) == [{"a": 1}]
    barrier(group)
    assert x.tolist() == [3.0]


def test_group_repr_has_its_axes_and_rank() -> None:
    assert repr(single_rank_group("tp")) == "tp(0 of 1)"
    group = Group(axes=("dp", "cp"), ranks=(4, 6, 8), rank=2, name="paper")
    assert repr(group) == "dp_cp(2 of 3)"
    assert group.size == 3


def test_parts_of_uneven_sizes_are_concatenated() -> None:
    sizes = [3, 0, 2, 1]
    assert [local_range(sizes, rank) for rank in range(4)] == [(0, 3), (3, 3), (3, 5), (5, 6)]


def gathered_by(rank: int, world: int) -> list[str]:
    group, seen = world_group(rank, world, "tp"), []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **kwargs or {})

    x = torch.full((2, 3), float(rank))
    with Names():
        whole = torch.ops._c10d_functional.wait_tensor(start_all_gather(x, group))
    assert whole[::2, 0].tolist() == list(map(float, range(world)))
    return [name for name in seen if "gather" in name]


def test_gloo_all_gather_uses_a_preallocated_output() -> None:
    """The operator that makes it by itself breaks the heap in torch 2.13, once in about 20,000
    gathers."""
    assert run_ranks(gathered_by, 2)[0] == ["_c10d_functional.all_gather_into_tensor_out.default"]

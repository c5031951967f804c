"""A slow link delays what it says, hides behind work, and shows who reads a result before it is
there."""

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megalith.errors import RankError
from megalith.parallel.collectives import all_gather, reduce_from_tp, reduce_scatter
from megalith.parallel.group import all_reduce_, start_all_reduce_
from megalith.testing.inject import die, on_call, skip, slow_link
from megalith.testing.ranks import run_ranks, world_group
from tests.cases import least_of


def _delays(rank: int, world: int) -> list[float]:
    group = world_group(rank, world, "dp")
    results = []
    with slow_link(latency_seconds=0.3, bytes_per_second=250e3) as link:
        began = time.perf_counter()
        x = all_reduce_(torch.ones(12500), group)  # 50 kB; a ring of two sends 50 kB: 0.2 s
        results.append(time.perf_counter() - began)
        started = start_all_reduce_(x, group)
        time.sleep(1.0)  # work; busy machines are late
        began = time.perf_counter()
        assert started is not None
        started.wait()
        results.append(time.perf_counter() - began)
    assert x[0] == 4
    hidden = link.transfers[1]
    return [*results, link.added_seconds(), hidden.exposed_seconds, hidden.waits, hidden.nbytes]


def test_a_delay_is_latency_plus_bytes_over_bandwidth_and_hides_behind_work() -> None:
    def hidden_wait() -> float:
        waits = []
        for shown, hidden, added, exposed, num_waits, nbytes in run_ranks(_delays, 2):
            assert shown >= 0.5
            assert added == pytest.approx(1.0)
            assert (num_waits, nbytes) == (1, 50000)
            waits.append(max(hidden, exposed))
        return max(waits)

    assert least_of(hidden_wait, below=0.25) < 0.25


def _one_after_the_other(rank: int, world: int) -> float:
    group = world_group(rank, world, "dp")
    with slow_link(latency_seconds=0.05) as link:
        works = [start_all_reduce_(torch.ones(3), group) for _ in range(3)]
        for work in works:
            assert work is not None
            work.wait()
    return link.transfers[2].arrived - link.transfers[0].started


def test_link_processes_transfers_in_order() -> None:
    assert all(0.15 <= seconds < 10 for seconds in run_ranks(_one_after_the_other, 2))


def _all_kinds(rank: int, world: int, poison: bool) -> dict[str, list[float]]:
    x = torch.arange(4.0, dtype=torch.float64) + 10 * rank
    whole, part, swapped = (
        torch.zeros(8, dtype=x.dtype),
        torch.zeros(2, dtype=x.dtype),
        torch.zeros(4, dtype=x.dtype),
    )
    got, inside = torch.zeros(4, dtype=x.dtype), torch.arange(4.0) + 10 * rank
    returned = x.clone()
    works = [
        dist.all_gather_into_tensor(whole, x, async_op=True),
        dist.reduce_scatter_tensor(part, x, async_op=True),
        dist.all_to_all_single(swapped, x, async_op=True),
        dist.broadcast(returned, 0, async_op=True),
        dist.isend(x, 1 - rank),
        dist.irecv(got, 1 - rank),
        dist.all_gather_into_tensor(
            inside, inside[2 * rank : 2 * rank + 2], async_op=True
        ),  # in place, as ZeRO does
    ]
    early = {
        "whole": whole,
        "part": part,
        "swapped": swapped,
        "got": got,
        "returned": returned,
        "inside": inside,
    }
    if poison:
        assert all(tensor.isnan().all() for tensor in early.values())
    for work in works:
        assert work is not None
        work.wait()
    return {name: tensor.tolist() for name, tensor in early.items()}


def _same_numbers(rank: int, world: int) -> bool:
    plain = _all_kinds(rank, world, False)
    group = world_group(rank, world, "dp")
    x = torch.arange(6.0, requires_grad=True)
    expected = reduce_from_tp(x, group), all_gather(x, group), reduce_scatter(x, group)
    for poison in (False, True):
        with slow_link(latency_seconds=0.001, poison=poison) as link:
            assert _all_kinds(rank, world, poison) == plain
            results = reduce_from_tp(x, group), all_gather(x, group), reduce_scatter(x, group)
            requests = [
                dist.P2POp(dist.isend, x.detach(), 1 - rank),
                dist.P2POp(dist.irecv, torch.zeros(6), 1 - rank),
            ]
            for request in dist.batch_isend_irecv(requests):
                request.wait()
        assert [transfer.kind for transfer in link.transfers[-5:]] == [
            "all_reduce",
            "all_gather",
            "reduce_scatter",
            "isend",
            "irecv",
        ]
        assert all(transfer.waits == 1 for transfer in link.transfers)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    return _all_kinds(rank, world, False) == plain


def test_slow_link_keeps_values_and_poisons_results_until_wait() -> None:
    assert run_ranks(_same_numbers, 2) == [True, True]


def test_only_the_selected_call_is_replaced() -> None:
    owner = SimpleNamespace(double=lambda x: 2 * x)
    with on_call(owner, "double", 1, skip):
        assert [owner.double(3), owner.double(3), owner.double(3)] == [6, None, 6]
    assert owner.double(3) == 6


def _dies(rank: int, world: int) -> None:
    owner = SimpleNamespace(step=lambda: None)
    with on_call(owner, "step", 0, die):
        if rank == 1:
            owner.step()


def test_selected_rank_is_killed_on_request() -> None:
    with pytest.raises(RankError, match="rank 1 was killed by signal 9"):
        run_ranks(_dies, 2)

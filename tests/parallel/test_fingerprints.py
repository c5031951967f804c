"""With fingerprints a mismatch between ranks is an error on all of them within seconds, and never a hang."""

import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from megalith.errors import CollectiveError
from megalith.observe.flight import Flight
from megalith.parallel.autograd import all_to_all, enter, gather, leave, reduce_scatter
from megalith.parallel.fingerprints import Fingerprints
from megalith.parallel.group import Group, all_reduce_, all_reduce_max_, barrier, gather_objects, note_message
from megalith.parallel.watch import name_rank
from megalith.plan.grid import dense_grid
from megalith.testing.ranks import everyone, run_ranks


def checked(rank: int, world: int, folder: Path, axis: str = "dp") -> Group:
    """A group whose ranks compare every collective."""
    flight, store = Flight(), FileStore(str(folder / "prints"), world)
    flight.compare = Fingerprints(store, rank, partial(name_rank, dense_grid(world=world))).compare
    return replace(everyone(rank, world, axis), flight=flight)


def _legal(rank: int, world: int, folder: Path) -> list[float]:
    group = checked(rank, world, folder)
    x = torch.arange(6.0, requires_grad=True)
    y = gather(reduce_scatter(leave(enter(x, group), group), group), group)
    z = all_to_all(y[: 2 + rank], group, send=[1, 1 + rank], receive=[1, 2] if rank else [1, 1])
    (y.sum() + z.sum()).backward()
    gather_objects({"odd": "x" * rank}, group)
    barrier(group)
    assert x.grad is not None
    assert group.flight is not None
    assert group.flight.counts[group.name] == 10  # four forward, four backward, the objects and the barrier
    return [all_reduce_max_(torch.tensor([float(rank)]), group).item(), x.grad.sum().item()]


def test_ranks_that_agree_notice_nothing_forward_and_backward(tmp_path: Path) -> None:
    first, second = run_ranks(_legal, 2, tmp_path)
    assert first[0] == second[0] == 1.0
    assert first[1] > 0


def _other_op(group: Group, rank: int) -> None:
    (all_reduce_ if rank == 0 else all_reduce_max_)(torch.ones(3), group)


def _other_shape(group: Group, rank: int) -> None:
    all_reduce_(torch.ones(3 + rank, 2), group)


def _other_dtype(group: Group, rank: int) -> None:
    leave(torch.ones(3, dtype=torch.float32 if rank == 0 else torch.float64), group)


def _other_place(group: Group, rank: int) -> None:
    if rank == 0:
        all_reduce_(torch.ones(3), group)
    else:
        all_reduce_(torch.ones(3), group)


def _rows_that_do_not_fit(group: Group, rank: int) -> None:
    all_to_all(torch.ones(4, 2), group, send=[2, 2], receive=[2, 2 + rank])


MISMATCHES: dict[Callable[[Group, int], None], tuple[str, str]] = {
    _other_op: ("all_reduce 1 over dp of float32 [3]", "all_reduce_max 1 over dp of float32 [3]"),
    _other_shape: ("all_reduce 1 over dp of float32 [3, 2]", "all_reduce 1 over dp of float32 [4, 2]"),
    _other_dtype: ("all_reduce 1 over dp of float32 [3]", "all_reduce 1 over dp of float64 [3]"),
    _other_place: ("all_reduce 1 over dp of float32 [3]", "all_reduce 1 over dp of float32 [3]"),
    _rows_that_do_not_fit: ("sending [2, 2] and receiving [2, 2] rows", "sending [2, 2] and receiving [2, 3] rows"),
}


def _mismatch(rank: int, world: int, folder: Path) -> list[tuple[float, str]]:
    found = []
    for act in MISMATCHES:
        (folder / act.__name__).mkdir(exist_ok=True)
        group = checked(rank, world, folder / act.__name__)
        barrier(group)
        began = time.monotonic()
        with pytest.raises(CollectiveError) as caught:
            act(group, rank)
        found.append((time.monotonic() - began, str(caught.value)))
    return found


def test_a_mismatch_is_an_error_that_names_both_sides_in_under_ten_seconds(tmp_path: Path) -> None:
    first, second = run_ranks(_mismatch, 2, tmp_path)
    for (seconds, text), (_, same), (mine, theirs) in zip(first, second, MISMATCHES.values(), strict=True):
        assert text == same
        assert seconds < 10
        assert text.startswith("ranks [0, 1] are about to do different things as number 1 over dp:\n")
        lines = text.splitlines()
        assert lines[1].startswith("  rank 0 (dp=0): ")
        assert mine in lines[1]
        assert lines[2].startswith("  rank 1 (dp=1): ")
        assert theirs in lines[2]
        assert re.search(r"test_fingerprints.py:\d+", lines[1])
    places = [re.findall(r"py:(\d+)", text) for _, text in first]
    assert places[3][0] != places[3][1], "the line tells equal calls apart"


def _circle(rank: int, world: int, folder: Path) -> tuple[float, str]:
    first, second = everyone(rank, world, "dp"), dist.new_group([0, 1, 2])
    assert second is not None
    dp = checked(rank, world, folder)
    tp = replace(dp, axes=("tp",), handle=second, name=second.group_name)
    assert first.name != tp.name
    began = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        all_reduce_(torch.ones(3), dp if rank else tp)
    return time.monotonic() - began, str(caught.value)


def test_ranks_that_wait_for_each_other_in_two_groups_are_found(tmp_path: Path) -> None:
    for seconds, text in run_ranks(_circle, 3, tmp_path):
        assert seconds < 10
        assert text.startswith("ranks wait for each other, each in another collective:\n")
        assert "rank 0 (dp=0): all_reduce 0 over tp of float32 [3], at " in text
        assert re.search(r"rank [12] \(dp=[12]\): all_reduce 0 over dp of float32 \[3\], at ", text)


def _slow(rank: int, world: int, folder: Path) -> float:
    group = checked(rank, world, folder)
    time.sleep(1.3 * rank)  # longer than a rank waits before it suspects others
    return all_reduce_(torch.ones(1), group).item()


def test_a_rank_that_is_only_slow_is_waited_for(tmp_path: Path) -> None:
    assert run_ranks(_slow, 2, tmp_path) == [2.0, 2.0]


def _message(rank: int, world: int, folder: Path) -> str:
    group = checked(rank, world, folder)
    note_message(group, torch.ones(2, 3), 1 - rank, sends=rank == 0)
    dist.barrier()
    try:
        note_message(group, torch.ones(2, 3 + rank), 1 - rank, sends=rank == 0)
    except CollectiveError as error:
        return str(error)
    return "nothing"


def test_the_second_end_of_a_message_finds_that_it_does_not_fit(tmp_path: Path) -> None:
    found = set(run_ranks(_message, 2, tmp_path, timeout=30)) - {"nothing"}
    assert found
    for text in found:
        assert "are about to do different things as message 1 between them:" in text
        assert "send 1 over dp of float32 [2, 3]" in text
        assert "receive 1 over dp of float32 [2, 4]" in text

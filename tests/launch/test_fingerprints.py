"""With fingerprints a mismatch between ranks is an error on all of them within seconds, and never a
hang."""

import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, Store

from megalith.errors import CollectiveError
from megalith.launch import watchdog
from megalith.launch.watchdog import Fingerprints, name_rank
from megalith.observe.flight import CollectiveRecord, FlightRecorder, message_lane
from megalith.parallel.collectives import (
    all_gather,
    all_to_all,
    copy_to_tp,
    reduce_from_tp,
    reduce_scatter,
)
from megalith.parallel.group import (
    Group,
    all_reduce_,
    all_reduce_max_,
    barrier,
    gather_objects,
    record_message,
)
from megalith.plan.grid import dense_grid
from megalith.testing.ranks import run_ranks, world_group


def checked(rank: int, world: int, folder: Path, axis: str = "dp") -> Group:
    """A group whose ranks compare every collective."""
    flight, store = FlightRecorder(), FileStore(str(folder / "prints"), world)
    flight.compare = Fingerprints(store, rank, partial(name_rank, dense_grid(world=world))).compare
    return replace(world_group(rank, world, axis), flight=flight)


def _legal(rank: int, world: int, folder: Path) -> list[float]:
    group = checked(rank, world, folder)
    x = torch.arange(6.0, requires_grad=True)
    y = all_gather(reduce_scatter(reduce_from_tp(copy_to_tp(x, group), group), group), group)
    z = all_to_all(y[: 2 + rank], group, send=[1, 1 + rank], receive=[1, 2] if rank else [1, 1])
    (y.sum() + z.sum()).backward()
    gather_objects({"odd": "x" * rank}, group)
    barrier(group)
    assert x.grad is not None
    assert group.flight is not None
    # four forward, four backward, the objects and the barrier
    assert group.flight.counts[group.name] == 10
    return [all_reduce_max_(torch.tensor([float(rank)]), group).item(), x.grad.sum().item()]


def test_equal_collectives_pass_forward_and_backward(tmp_path: Path) -> None:
    first, second = run_ranks(_legal, 2, tmp_path)
    assert first[0] == second[0] == 1.0
    assert first[1] > 0


def _other_op(group: Group, rank: int) -> None:
    (all_reduce_ if rank == 0 else all_reduce_max_)(torch.ones(3), group)


def _other_shape(group: Group, rank: int) -> None:
    all_reduce_(torch.ones(3 + rank, 2), group)


def _other_dtype(group: Group, rank: int) -> None:
    reduce_from_tp(torch.ones(3, dtype=torch.float32 if rank == 0 else torch.float64), group)


def _other_place(group: Group, rank: int) -> None:
    if rank == 0:
        all_reduce_(torch.ones(3), group)
    else:
        all_reduce_(torch.ones(3), group)


def _rows_that_do_not_fit(group: Group, rank: int) -> None:
    all_to_all(torch.ones(4, 2), group, send=[2, 2], receive=[2, 2 + rank])


MISMATCHES: dict[Callable[[Group, int], None], tuple[str, str]] = {
    _other_op: ("all_reduce 1 over dp of float32 [3]", "all_reduce_max 1 over dp of float32 [3]"),
    _other_shape: (
        "all_reduce 1 over dp of float32 [3, 2]",
        "all_reduce 1 over dp of float32 [4, 2]",
    ),
    _other_dtype: ("all_reduce 1 over dp of float32 [3]", "all_reduce 1 over dp of float64 [3]"),
    _other_place: ("all_reduce 1 over dp of float32 [3]", "all_reduce 1 over dp of float32 [3]"),
    _rows_that_do_not_fit: (
        "sending [2, 2] and receiving [2, 2] rows",
        "sending [2, 2] and receiving [2, 3] rows",
    ),
}


def _mismatch(rank: int, world: int, folder: Path) -> list[tuple[float, str]]:
    results = []
    for act in MISMATCHES:
        (folder / act.__name__).mkdir(exist_ok=True)
        group = checked(rank, world, folder / act.__name__)
        barrier(group)
        began = time.monotonic()
        with pytest.raises(CollectiveError) as caught:
            act(group, rank)
        results.append((time.monotonic() - began, str(caught.value)))
    return results


def test_a_mismatch_is_an_error_that_names_both_sides_in_under_ten_seconds(tmp_path: Path) -> None:
    first, second = run_ranks(_mismatch, 2, tmp_path)
    for (seconds, text), (_, same), (actual, reference) in zip(
        first, second, MISMATCHES.values(), strict=True
    ):
        assert text == same
        assert seconds < 10
        assert text.startswith(
            "ranks [0, 1] are about to start different operations as number 1 over dp:\n"
        )
        lines = text.splitlines()
        assert lines[1].startswith("  rank 0 (dp=0): ")
        assert actual in lines[1]
        assert lines[2].startswith("  rank 1 (dp=1): ")
        assert reference in lines[2]
        assert re.search(r"test_fingerprints.py:\d+", lines[1])
    places = [re.findall(r"py:(\d+)", text) for _, text in first]
    assert places[3][0] != places[3][1], "the line tells equal calls apart"


def _circle(rank: int, world: int, folder: Path) -> tuple[float, str]:
    first, second = world_group(rank, world, "dp"), dist.new_group([0, 1, 2])
    assert second is not None
    dp = checked(rank, world, folder)
    tp = replace(dp, axes=("tp",), handle=second, name=second.group_name)
    assert first.name != tp.name
    began = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        all_reduce_(torch.ones(3), dp if rank else tp)
    return time.monotonic() - began, str(caught.value)


def test_deadlock_across_two_groups_is_detected(tmp_path: Path) -> None:
    for seconds, text in run_ranks(_circle, 3, tmp_path):
        assert seconds < 10
        assert text.startswith("ranks wait for each other in different collectives:\n")
        assert "rank 0 (dp=0): all_reduce 0 over tp of float32 [3], at " in text
        assert re.search(r"rank [12] \(dp=[12]\): all_reduce 0 over dp of float32 \[3\], at ", text)


def _slow(rank: int, world: int, folder: Path) -> float:
    group = checked(rank, world, folder)
    time.sleep(1.3 * rank)  # longer than a rank waits before it suspects others
    return all_reduce_(torch.ones(1), group).item()


def test_slow_rank_is_not_an_error(tmp_path: Path) -> None:
    assert run_ranks(_slow, 2, tmp_path) == [2.0, 2.0]


def _message(rank: int, world: int, folder: Path) -> str:
    group = checked(rank, world, folder)
    record_message(group, torch.ones(2, 3), 1 - rank, sends=rank == 0)
    dist.barrier()
    try:
        record_message(group, torch.ones(2, 3 + rank), 1 - rank, sends=rank == 0)
    except CollectiveError as error:
        return str(error)
    return "nothing"


def test_second_end_of_a_message_detects_a_mismatch(tmp_path: Path) -> None:
    result = set(run_ranks(_message, 2, tmp_path, timeout=30)) - {"nothing"}
    assert result
    for text in result:
        assert "are about to start different operations as message 1 between them:" in text
        assert "send 1 over dp of float32 [2, 3]" in text
        assert "receive 1 over dp of float32 [2, 4]" in text


def _entry(number: int) -> CollectiveRecord:
    return CollectiveRecord(
        "all_reduce", ("dp",), (0, 1), "lane", number, (2,), "float32", ("x.py", 1)
    )


def _unequally_slow(rank: int, store: Store) -> None:
    """Rank 1 waits once for rank 0, which waits for rank 1 four collectives later."""
    fingerprints = Fingerprints(store, rank)
    for number in range(6):
        if (rank, number) in ((0, 1), (1, 5)):
            time.sleep(0.4)
        fingerprints.compare(_entry(number))


def test_finished_wait_is_not_part_of_a_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "PATIENCE_SECONDS", 0.1)
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(_unequally_slow, rank, store) for rank in (0, 1)]:
            done.result(timeout=20)


class Together:
    """A store on which both ends of a message have written before either looks, and one of them
    looks more slowly."""

    def __init__(self, store: Store, both: threading.Barrier, pause: float) -> None:
        self.store, self.both, self.pause = store, both, pause

    def set(self, key: str, value: str) -> None:
        self.store.set(key, value)
        self.both.wait(timeout=10)

    def check(self, keys: list[str]) -> bool:
        result = self.store.check(keys)
        time.sleep(self.pause)
        return result

    def add(self, key: str, amount: int) -> int:
        result = self.store.add(key, amount)
        time.sleep(self.pause)
        return result

    def get(self, key: str) -> bytes:
        return self.store.get(key)

    def delete_key(self, key: str) -> bool:
        return self.store.delete_key(key)


def _end_of_a_message(rank: int, store: Store, both: threading.Barrier, rows: int) -> None:
    lane, op = message_lane("pp", 1 - rank, sends=rank == 0), "receive" if rank else "send"
    entry = CollectiveRecord(
        op, ("pp",), (0, 1), lane, 0, (rows,), "float32", ("x.py", 1), peer=1 - rank
    )
    Fingerprints(Together(store, both, 0.02 + 0.1 * rank), rank).compare(entry)  # type: ignore[arg-type]  # what is used


@pytest.mark.parametrize("fits", [True, False])
def test_two_ends_of_a_message_that_arrive_together_are_compared_once(fits: bool) -> None:
    store, both = HashStore(), threading.Barrier(2)
    store.set_timeout(timedelta(seconds=0.5))
    with ThreadPoolExecutor(2) as threads:
        rows = 2, 2 if fits else 3
        ends = [threads.submit(_end_of_a_message, rank, store, both, rows[rank]) for rank in (0, 1)]
        problems = [problem for end in ends if (problem := end.exception(timeout=10)) is not None]
    assert len(problems) == (0 if fits else 1)
    for problem in problems:
        assert isinstance(problem, CollectiveError)
    assert store.num_keys() <= 1, "what was compared is forgotten (one key is the store's own)"

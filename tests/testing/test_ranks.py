"""Ranks give back what they computed; one that raises, hangs or dies ends the call with its own
story first."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith.errors import RankError
from megalith.testing import ranks
from megalith.testing.ranks import RankPool, run_ranks

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Point:
    """A type that only this test file knows."""

    x: int


def _sum(rank: int, world: int, offset: float) -> tuple[int, int, Tensor]:
    x = torch.full((2, 3), rank + offset, dtype=torch.float64)
    dist.all_reduce(x)
    return rank, world, x


def _moved(rank: int, world: int, point: Point) -> Point:
    return Point(point.x + rank)


def _my_pid(rank: int, world: int) -> int:
    return os.getpid()


def _describe_process(rank: int, world: int) -> tuple[int, int, list[str | None]]:
    import_path = [path for path in sys.path if path.endswith("modules")]
    described = [os.getcwd(), os.environ.get("MEGALITH_TEST_MESS"), *import_path]
    return os.getpid(), os.getpgrp(), described


def _draw(rank: int, world: int) -> Tensor:
    return torch.rand(2)


def _leave_a_mess(rank: int, world: int) -> None:
    os.environ["MEGALITH_TEST_MESS"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(7)
    dist.new_group([0])


def _delay_end_of_next_initialization(rank: int, world: int, marker: Path) -> None:
    """On rank 1 the next initialization takes half a second longer and then writes a file."""
    initialize = dist.init_process_group

    def initialize_slowly(*args: object, **settings: object) -> None:
        initialize(*args, **settings)  # type: ignore[arg-type]  # as given
        time.sleep(0.5)
        marker.touch()

    if rank == 1:
        dist.init_process_group = initialize_slowly


def _file_exists(rank: int, world: int, marker: Path) -> bool:
    return marker.exists()


def _fail_next_initialization(rank: int, world: int) -> None:
    """Let the next initialization of rank 1 fail after torch has counted its group."""
    build_group = dist.distributed_c10d._new_process_group_helper

    def build_group_and_fail(*args: Any, **settings: Any) -> None:  # Any: as torch gives them
        build_group(*args, **settings)
        raise OSError("the initialization failed")

    if rank == 1:
        dist.distributed_c10d._new_process_group_helper = build_group_and_fail  # type: ignore[assignment]


def _find_a_mess(rank: int, world: int) -> list[object]:
    settings = (
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
    )
    return [
        os.environ.get("MEGALITH_TEST_MESS"),
        torch.get_default_dtype(),
        *settings,
        dist.get_world_size(),
    ]


def _collective(rank: int, world: int) -> None:
    dist.all_reduce(torch.ones(1))


def _raise_on_one(rank: int, world: int) -> None:
    print(f"a word from rank {rank}")
    if rank == 1:
        raise KeyError("the real reason")
    _collective(rank, world)


def _raise_on_all(rank: int, world: int) -> None:
    time.sleep(0.3 * (world - rank))
    raise ValueError(f"from {rank}")


def _raise_while_others_work(rank: int, world: int) -> None:
    if rank == 0:
        raise ValueError("at once")
    time.sleep(60)


def _mismatch(rank: int, world: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(4))
    else:
        dist.all_gather_into_tensor(torch.empty(2 * world), torch.ones(2))


def _sleep_on_one(rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(60)
    _collective(rank, world)


def _end(rank: int, world: int, how: str) -> None:
    if rank == 1:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    _collective(rank, world)


def _return_something_odd(rank: int, world: int) -> object:
    return lambda: rank


def _exit_politely(rank: int, world: int) -> None:
    sys.exit("enough")


def gone(pid: int) -> bool:
    """Whether a process has ended, waiting a little for it."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if (
            sys.platform == "linux"
            and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        ):
            return True  # ended; whoever adopted it has not asked yet
        time.sleep(0.05)
    return False


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """A pool of our own, so that a planted death does not slow the other tests."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_rank_computes_with_the_others_and_returns_its_result(world: int) -> None:
    results = run_ranks(_sum, world, 0.5)
    total = torch.full((2, 3), sum(rank + 0.5 for rank in range(world)), dtype=torch.float64)
    assert [(rank, size) for rank, size, _ in results] == [(rank, world) for rank in range(world)]
    assert all(torch.equal(x, total) for _, _, x in results)


def test_types_of_the_test_file_can_be_sent_and_returned() -> None:
    assert run_ranks(_moved, 2, Point(3)) == [Point(3), Point(4)]


def test_workers_stay_alive_between_calls_of_any_size() -> None:
    three = run_ranks(_my_pid, 3)
    assert run_ranks(_my_pid, 2) == three[:2]
    assert run_ranks(_my_pid, 3) == three
    assert os.getpid() not in three


def test_call_is_isolated_from_changes_of_the_previous_call() -> None:
    run_ranks(_leave_a_mess, 2)
    assert run_ranks(_find_a_mess, 2) == [[None, torch.float32, True, False, 1, 2]] * 2
    first = run_ranks(_draw, 2)
    assert all(torch.equal(x, y) for x, y in zip(first, run_ranks(_draw, 2), strict=True))


def test_a_call_costs_tens_of_milliseconds() -> None:
    run_ranks(_collective, 2)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run_ranks(_collective, 2)
        times.append(time.perf_counter() - start)
    # 0.03 s on two idle cores; a busy machine is slower, a new process slower still
    assert min(times) < 1.0


def test_the_rank_that_raised_comes_first_with_its_traceback_and_output(pool: RankPool) -> None:
    pids = pool.run(_my_pid, 3, (), timeout=30)
    with pytest.raises(RankError) as caught:
        pool.run(_raise_on_one, 3, (), timeout=30)
    assert pool.run(_my_pid, 3, (), timeout=30) == pids, "an orderly failure costs no new processes"
    text = str(caught.value)
    assert text.startswith("rank 1 failed first:\nTraceback (most recent call last):\n")
    assert "in _raise_on_one" in text.split("then:")[0]
    assert "KeyError: 'the real reason'" in text.split("then:")[0]
    assert text.count("Traceback") == 1
    others = sorted(text.split("then:\n")[1].splitlines()[:2])
    assert [line[:24] for line in others] == [
        "  rank 0: RuntimeError: ",
        "  rank 2: RuntimeError: ",
    ]
    assert "output of rank 1:\na word from rank 1" in text


def test_of_several_failures_the_earliest_comes_first(pool: RankPool) -> None:
    with pytest.raises(
        RankError,
        match=r"^rank 1 failed first:[\s\S]*ValueError: from 1\nthen:\n  rank 0: ValueError",
    ):
        pool.run(_raise_on_all, 2, (), timeout=30)


def test_ranks_that_do_not_notice_a_failure_are_ended(pool: RankPool) -> None:
    pids = pool.run(_my_pid, 2, (), timeout=30)
    start = time.monotonic()
    with pytest.raises(
        RankError, match=r"ValueError: at once\nthen:\n  rank 1: was still running 2 s later"
    ):
        pool.run(_raise_while_others_work, 2, (), timeout=30)
    assert time.monotonic() - start < 10
    assert all(gone(pid) for pid in pids)


def test_no_rank_begins_while_a_peer_still_initializes(pool: RankPool, tmp_path: Path) -> None:
    """Else one that fails at once makes the initialization of the peer fail, too."""
    marker = tmp_path / "initialized"
    pool.run(_delay_end_of_next_initialization, 2, (marker,), timeout=60.0)
    assert pool.run(_file_exists, 2, (marker,), timeout=60.0) == [True, True]


def test_worker_whose_initialization_failed_is_replaced(pool: RankPool) -> None:
    """Two workers waited for each other under two group names until the next call timed out."""
    pool.run(_fail_next_initialization, 2, (), timeout=60.0)
    with pytest.raises(RankError, match="the initialization failed"):
        pool.run(_my_pid, 2, (), timeout=60.0)
    assert len(set(pool.run(_my_pid, 2, (), timeout=20.0))) == 2


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("exit", "rank 1 ended with exit code 7\n"),
        ("kill", r"rank 1 was killed by signal 9 \(SIGKILL\)\n"),
    ],
)
def test_a_rank_that_dies_is_reported_and_replaced(pool: RankPool, how: str, message: str) -> None:
    pids = pool.run(_my_pid, 2, (), timeout=30)
    start = time.monotonic()
    with pytest.raises(RankError, match=f"^{message}then:\n  rank 0: RuntimeError"):
        pool.run(_end, 2, (how,), timeout=30)
    assert time.monotonic() - start < 5
    assert all(gone(pid) for pid in pids)
    assert [rank for rank, _, _ in pool.run(_sum, 2, (1.0,), timeout=30)] == [0, 1]


def test_hang_is_ended_with_the_stack_of_every_rank(pool: RankPool) -> None:
    pids = pool.run(_my_pid, 2, (), timeout=30)
    with pytest.raises(RankError) as caught:
        pool.run(_sleep_on_one, 2, (), timeout=2.0)
    text = str(caught.value)
    assert text.startswith("2 of 2 ranks did not finish within 2 s")
    stacks = text.split("\nrank ")[1:]
    assert [stack[0] for stack in stacks] == ["0", "1"]
    assert all("in _sleep_on_one" in stack for stack in stacks)
    assert "in _collective" not in stacks[1]
    assert "in _collective" in stacks[0]
    assert all(gone(pid) for pid in pids)


def test_mismatched_collectives_end_instead_of_hanging(pool: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RankError):
        pool.run(_mismatch, 2, (), timeout=1.0)
    assert time.monotonic() - start < 10


def test_a_result_that_cannot_be_sent_is_that_ranks_failure(pool: RankPool) -> None:
    with pytest.raises(
        RankError, match=r"rank 0 failed first:[\s\S]*_return_something_odd.<locals>.<lambda>"
    ):
        pool.run(_return_something_odd, 1, (), timeout=30)


def test_an_exit_in_a_rank_does_not_end_the_run(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"SystemExit: enough"):
        pool.run(_exit_politely, 1, (), timeout=30)


def test_worker_that_cannot_start_reports_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = RankPool()
    monkeypatch.setattr("megalith.testing.ranks.PROGRAM", "raise SystemExit('no torch here')")
    with pytest.raises(
        RankError, match=r"a worker process ended with exit code 1. .* Its output:\nno torch here"
    ):
        pool.run(_my_pid, 1, (), timeout=30)
    monkeypatch.undo()
    assert len(pool.run(_my_pid, 1, (), timeout=30)) == 1
    pool.close()


def test_worker_starts_with_the_environment_of_its_parent_at_that_time(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pool.run(_my_pid, 1, (), timeout=60.0)
    monkeypatch.setenv("MEGALITH_TEST_MESS", "é")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    *_, newest = pool.run(_describe_process, len(pool.workers) + 1, (), timeout=60.0)
    pid, process_group, described = newest
    assert described == [str(tmp_path), "é", str(tmp_path / "modules")]
    assert process_group == pid, "Ctrl-C must not reach the workers"


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux are workers forked")
def test_fork_server_has_one_thread_and_is_replaced_after_its_death(pool: RankPool) -> None:
    pids = pool.run(_my_pid, 2, (), timeout=60.0)
    server = pool.fork_server
    assert server is not None
    assert len(os.listdir(f"/proc/{server.process.pid}/task")) == 1, "a fork copies one thread"
    server.process.send_signal(signal.SIGKILL)
    assert all(gone(pid) for pid in pids)
    assert set(pids).isdisjoint(pool.run(_my_pid, 2, (), timeout=60.0))


def test_only_functions_that_a_rank_can_find_are_accepted() -> None:
    with pytest.raises(
        TypeError,
        match=r"<lambda> cannot be sent to ranks by name. Pass a function defined at module",
    ):
        run_ranks(lambda rank, world: None, 2)


def test_closing_a_pool_leaves_no_process_and_no_file_and_it_may_be_used_again() -> None:
    pool = RankPool()
    pids = pool.run(_my_pid, 1, (), timeout=30)
    folder = pool.folder
    pool.close()
    assert all(gone(pid) for pid in pids)
    assert not folder.exists()


SCRIPT = """
import os, time
from megalith.testing.ranks import run_ranks
def my_pid(rank, world):
    return os.getpid()
if __name__ == "__main__":
    print(*run_ranks(my_pid, 1), flush=True)
    time.sleep({seconds})
"""


@pytest.mark.parametrize("how", ["killed", pytest.param("finished", marks=pytest.mark.slow)])
def test_workers_of_a_script_end_with_it(how: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(seconds=60 if how == "killed" else 0))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment
    )
    with parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        if how == "killed":
            parent.kill()
        parent.wait(timeout=30)
    assert len(pids) == 1
    assert all(gone(pid) for pid in pids)


class Noted(dict[str, str]):
    """An environment that remembers what was changed in it."""

    def __init__(self, **values: str) -> None:
        super().__init__(values)
        self.changed: list[str] = []

    def __setitem__(self, name: str, value: str) -> None:
        self.changed.append(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self.changed.append(name)
        super().__delitem__(name)


def test_of_the_environment_only_what_a_call_changed_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted = Noted(SAME="1", OTHER="x", NEW="y")
    monkeypatch.setattr(os, "environ", noted)
    ranks._restore({"SAME": "1", "OTHER": "2", "GONE": "3"})
    assert noted == {"SAME": "1", "OTHER": "2", "GONE": "3"}
    assert sorted(noted.changed) == ["GONE", "NEW", "OTHER"]

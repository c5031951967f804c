"""A collective that nobody finishes is reported with the ranks that are missing; one that is only
slow is not."""

import json
import threading
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

from megalith.launch import watchdog as watch_module
from megalith.launch.launcher import Failure
from megalith.launch.watchdog import HangWatch, backend_timeout, name_rank, watching
from megalith.observe import flight as flight_module
from megalith.observe.flight import FlightRecorder, RankSnapshot
from megalith.parallel.collectives import AsyncAllToAll, reduce_from_tp
from megalith.parallel.group import Group, all_reduce_, start_all_reduce_
from megalith.parallel.mesh import build_mesh
from megalith.plan.grid import dense_grid, expert_grid
from megalith.plan.shards import PARTS
from megalith.testing.ranks import run_ranks, world_group

TIMEOUT = 0.5


def make(
    rank: int, world: int, folder: Path
) -> tuple[Group, HangWatch, threading.Event, list[Failure]]:
    """A group that is watched, and what its watch would end the process with."""
    flight, ended, failures = FlightRecorder(), threading.Event(), list[Failure]()

    def end(failure: Failure, after_seconds: float) -> None:
        failures.append(failure)
        ended.set()

    store = PrefixStore("watch", FileStore(str(folder / "store"), world))
    watch = HangWatch(
        flight,
        store,
        rank,
        world,
        TIMEOUT,
        end,
        partial(name_rank, dense_grid(world=world)),
        folder,
    )
    return replace(world_group(rank, world, "dp"), flight=flight), watch, ended, failures


def _hangs(rank: int, world: int, folder: Path, how: str) -> tuple[float, Failure]:
    group, watch, ended, failures = make(rank, world, folder)
    x, began = torch.ones(3), time.monotonic()
    all_reduce_(x, group)  # ranks of a busy machine come late to their first one
    with watching(watch):
        if how == "exchange":
            async_all_to_all = AsyncAllToAll(group, [1] * 3, [1] * 3)
            started = async_all_to_all.start(x, back=False)
        if rank == 1:
            assert ended.wait(60), (
                "the watch of a rank outside any collective hears of the alarm, too"
            )
        if how == "exchange":
            async_all_to_all.wait(started)
        if how == "handle":
            work = start_all_reduce_(x, group)
            assert work is not None
            work.wait()
        elif how == "torch's own":
            dist.all_reduce(x)
        elif how == "functional":
            reduce_from_tp(x, group)
        else:
            all_reduce_(x, group)
        seconds = time.monotonic() - began
    assert ended.wait(60)
    watch.over.set()
    return seconds, failures[0]


def check_report(tmp_path: Path, how: str, *, number: int = 1) -> None:
    (first, report), (_, other), _ = run_ranks(_hangs, 3, tmp_path, how)
    if not report.is_report:  # rank 2 was first to raise the alarm
        report = run_report(tmp_path)
    assert TIMEOUT < first < 60
    assert report.text.startswith(
        f"rank 1 (dp=1) did not arrive at all_reduce {number} over dp of float32 [3], at "
    )
    assert "test_watch.py:" in report.text
    assert "_hangs\n" in report.text or "in _hangs" in report.text
    assert f"parallel.timeout_seconds={TIMEOUT:g}" in report.text
    assert other.summary.startswith("stopped in a hang that rank ")
    assert other.is_consequence
    for rank in range(3):
        text = (tmp_path / f"hang_rank_{rank}.txt").read_text()
        assert f"This is rank {rank} (dp={rank})." in text
        assert "in _hangs" in text, "the main thread's stack"
    assert "did not arrive" in (tmp_path / "log.txt").read_text()


def run_report(folder: Path) -> Failure:
    """The report as it was written down."""
    text = (folder / "log.txt").read_text().partition("watchdog: ")[2]
    return Failure(2, text.splitlines()[0], text, 0, is_report=True)


def test_a_rank_that_does_not_arrive_is_named_with_its_coordinates(tmp_path: Path) -> None:
    check_report(tmp_path, "in place")


def test_handle_that_never_completes_is_reported(tmp_path: Path) -> None:
    check_report(tmp_path, "handle")


def test_hang_in_a_differentiable_collective_is_reported(tmp_path: Path) -> None:
    check_report(tmp_path, "functional")


def test_hang_during_an_overlapped_all_to_all_is_not_reported_as_waiting(
    tmp_path: Path,
) -> None:
    check_report(tmp_path, "exchange", number=2)


def test_hang_in_a_collective_of_torch_is_reported_with_all_ranks(
    tmp_path: Path,
) -> None:
    reports = [failure for _, failure in run_ranks(_hangs, 3, tmp_path, "torch's own")]
    report = next((failure for failure in reports if failure.is_report), None) or run_report(
        tmp_path
    )
    assert report.text.startswith(
        "rank 1 (dp=1) did not arrive at torch's own collective 0 over all, at "
    )
    assert "test_watch.py:" in report.text.splitlines()[0]


def _only_slow(rank: int, world: int, folder: Path) -> int:
    group, watch, _, failures = make(rank, world, folder)
    watch.timeout_seconds = 2.0
    all_reduce_(torch.ones(3), group)
    with watching(watch):
        for _ in range(3):
            time.sleep(0.3 * rank)
            all_reduce_(torch.ones(3), group)
        time.sleep(2.2)  # computing alone for longer than the timeout is no hang
    return len(failures)


def test_slow_ranks_continue(tmp_path: Path) -> None:
    assert run_ranks(_only_slow, 2, tmp_path) == [0, 0]
    assert not list(tmp_path.glob("hang*"))


def _stopped(rank: int, world: int, folder: Path) -> str:
    group, watch, ended, failures = make(rank, world, folder)
    watch.timeout_seconds = 0.2
    if rank == 1:  # as if stopped: nobody answers for it
        ended.wait(3.0)
        all_reduce_(torch.ones(3), group)
        return ""
    with watching(watch):
        all_reduce_(torch.ones(3), group)
    assert ended.wait(60)
    return failures[0].text


def test_rank_that_does_not_answer_is_named(tmp_path: Path) -> None:
    text = run_ranks(_stopped, 2, tmp_path)[0]
    assert text.startswith("rank 1 (dp=1) did not arrive")
    assert "rank 1 (dp=1): does not answer: dead, stopped, or holding the GIL" in text


class GoneStore(FileStore):
    """A store whose server is gone."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Broken pipe")

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        raise RuntimeError("Broken pipe")


class StoppedStore(FileStore):
    """A store whose process was stopped: it does not even refuse."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        threading.Event().wait(60)
        return b"0"


@pytest.mark.parametrize(
    ("kind", "why"), [(GoneStore, "Broken pipe"), (StoppedStore, "no answer within")]
)
def test_rank_without_the_store_reports_its_pending_collective(
    tmp_path: Path, kind: type[FileStore], why: str
) -> None:
    flight, failures, ended = FlightRecorder(), list[Failure](), threading.Event()

    def end(failure: Failure, after_seconds: float) -> None:
        failures.append(failure)
        ended.set()

    flight.enter("barrier", ("pp",), (0, 1), "1")
    with watching(HangWatch(flight, kind(str(tmp_path / "s"), 1), 0, 2, 0.1, end, folder=tmp_path)):
        assert ended.wait(10)
    assert "barrier 0 over pp" in failures[0].text
    assert f"the store of the ranks does not answer ({why}" in failures[0].text


def _watch_alone(
    folder: Path, store: Store, flight: FlightRecorder, *, world: int = 2
) -> tuple[HangWatch, threading.Event, list[Failure]]:
    """The watch of rank 0, with the others not there."""
    ended, failures = threading.Event(), list[Failure]()

    def end(failure: Failure, after_seconds: float) -> None:
        failures.append(failure)
        ended.set()

    return HangWatch(flight, store, 0, world, 0.1, end, folder=folder), ended, failures


def test_rank_without_the_store_reports_that_it_is_inside_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FSDP2's own collectives: nothing is unfinished in the list, and the rank is late all the
    same."""
    flight = FlightRecorder()
    flight.enter("all_reduce", ("dp",), (0, 1), "1").done = True
    for module in (flight_module, watch_module):
        monkeypatch.setattr(module, "inside_torch", lambda: True)
    watch, ended, failures = _watch_alone(tmp_path, GoneStore(str(tmp_path / "s"), 1), flight)
    with watching(watch):
        assert ended.wait(10)
    assert "in torch's own collective 0 over all, at " in failures[0].text
    assert "the store of the ranks does not answer (Broken pipe" in failures[0].text


def test_rank_without_the_store_continues_if_the_collective_ended(tmp_path: Path) -> None:
    flight = FlightRecorder()
    watch, _, failures = _watch_alone(tmp_path, GoneStore(str(tmp_path / "s"), 1), flight)
    assert watch._report_alone(RuntimeError("Broken pipe")) == ""
    assert not failures


@pytest.mark.parametrize("kind", [HashStore, TCPStore])
def test_operation_that_ends_during_the_query_clears_the_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Store]
) -> None:
    flight = FlightRecorder()
    slow = flight.enter("all_reduce", ("dp",), (0,), "1")
    place = FlightRecorder.place

    def ends_first(self: FlightRecorder, rank: int) -> RankSnapshot:
        slow.done = True
        return place(self, rank)

    monkeypatch.setattr(FlightRecorder, "place", ends_first)
    store = HashStore() if kind is HashStore else TCPStore("localhost", 0, is_master=True)
    watch, ended, failures = _watch_alone(tmp_path, store, flight, world=1)
    with watching(watch):
        assert not ended.wait(0.5)
        assert watch.alarms == 1
        assert (
            "0 was in an operation for longer than parallel.timeout_seconds=0.1, and has left it: "
            "the ranks are slow, but not hanging" in (tmp_path / "log.txt").read_text()
        )
        flight.enter("barrier", ("dp",), (0,), "2")
        assert ended.wait(10), "the next alarm is as good as the first"
    assert "barrier 0 over dp" in failures[0].text


def _both_clear(rank: int, world: int, folder: Path) -> tuple[int, int]:
    _, watch, _, failures = make(rank, world, folder)
    entry = watch.flight.enter("all_reduce", ("dp",), (0, 1), "slow") if rank == 0 else None
    report = HangWatch._report

    def gone_on(self: HangWatch, patience: float) -> str:
        assert entry is not None
        entry.done = True
        self.store.set("place/0/0", json.dumps(asdict(self.flight.place(0))))
        return report(self, patience)

    with pytest.MonkeyPatch.context() as patch, watching(watch):
        patch.setattr(HangWatch, "_report", gone_on)
        deadline = time.monotonic() + 30
        while not watch.alarms and time.monotonic() < deadline:
            time.sleep(0.02)
        dist.barrier()
    return watch.alarms, len(failures)


def test_all_ranks_are_notified_that_the_alarm_is_cleared(tmp_path: Path) -> None:
    assert run_ranks(_both_clear, 2, tmp_path) == [(1, 0), (1, 0)]


class BrokenStore(HashStore):
    """A store that fails as nobody thought it would."""

    def check(self, keys: list[str]) -> bool:
        raise ValueError("what is this")

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        raise ValueError("what is this")


def test_exception_in_the_watch_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flight = FlightRecorder()
    watch, ended, failures = _watch_alone(tmp_path, BrokenStore(), flight)
    with watching(watch):
        while not watch.logged:
            time.sleep(0.01)
        assert not failures, "the rank itself is well"
        monkeypatch.setattr(HangWatch, "_write_stacks", lambda *_: 1 / 0)
        monkeypatch.setattr(threading, "excepthook", lambda _: None)
        flight.enter("barrier", ("pp",), (0, 1), "1")
        assert ended.wait(10)
    assert (
        "barrier 0 over pp" in failures[0].text
        and "asking them failed (what is this)" in failures[0].text
    )
    assert (tmp_path / "log.txt").read_text().count(
        "the watch of rank 0 failed: ValueError: what is this"
    ) == 1


def test_on_a_device_a_rank_is_late_when_it_still_works_long_after_its_newest_collective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flight, idle = FlightRecorder(), [True]
    stream = SimpleNamespace(query=lambda: idle[0])
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    watch = HangWatch(
        flight, HashStore(), 0, 2, 0.05, lambda *_: None, device=torch.device("cuda", 0)
    )
    entry = flight.enter("all_reduce", ("dp",), (0, 1), "1")
    entry.done = True  # the host is past it at once
    time.sleep(0.1)
    assert not watch.is_late(), "computing alone on the host, the device is done"
    idle[0] = False
    assert watch.is_late()
    assert flight.place(0).waiting is not None, "the report then names it"
    idle[0] = True
    assert not watch.is_late() and flight.place(0).waiting is None, "it was slow, and is done"


def test_device_rank_waits_in_its_newest_collective_without_a_handle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flight = FlightRecorder()
    monkeypatch.setattr(
        torch.accelerator, "current_stream", lambda device: SimpleNamespace(query=lambda: False)
    )
    watch = HangWatch(
        flight, HashStore(), 0, 2, 0.05, lambda *_: None, device=torch.device("cuda", 0)
    )
    flight.enter("all_reduce", ("dp",), (0, 1), "1").work = ref(set())
    time.sleep(0.1)
    assert watch.is_late()
    assert flight.place(0).waiting is not None


def test_full_disk_does_not_prevent_a_rank_from_exiting(tmp_path: Path) -> None:
    ended: list[Failure] = []
    (tmp_path / "file").write_text("")
    watch = HangWatch(
        FlightRecorder(),
        HashStore(),
        1,
        2,
        0.1,
        lambda failure, _: ended.append(failure),
        folder=tmp_path / "file",
    )
    watch._finish("rank 0 did not arrive", 1)
    assert ended[0].is_report


def _mesh_records(rank: int, world: int) -> list[str]:
    grid, flight = dense_grid(world=world, tp=2), FlightRecorder()
    for axis, (outer, inner) in PARTS.items():
        grid = grid.factor(axis=axis, outer=(outer, grid.size(axis)), inner=(inner, 1))
    mesh = build_mesh(grid, rank=rank, flight=flight)
    reduce_from_tp(torch.ones(2, 3), mesh.tp)
    assert name_rank(grid, 3) == "3 (tp=1 dp=1)"
    return [entry.describe().partition(", at")[0] for entry in flight.entries]


def test_all_groups_of_a_mesh_record_what_is_entered() -> None:
    assert run_ranks(_mesh_records, 4) == [["all_reduce 0 over tp of float32 [2, 3]"]] * 4


def test_backend_timeout_is_longer_than_the_watch() -> None:
    for seconds in (0.1, 600.0, 36000.0):
        pause = HangWatch(
            FlightRecorder(), HashStore(), 0, 1, seconds, lambda *_: None
        ).pause_seconds
        assert backend_timeout(seconds) > seconds + 3 * pause


def test_rank_names_include_expert_coordinates() -> None:
    grid = expert_grid(world=8, ep=2, etp=2, pp=2)
    assert (
        name_rank(replace(dense_grid(world=8, tp=2, pp=2), experts=grid), 5)
        == "5 (tp=1 dp=0 pp=1 etp=1 ep=0)"
    )
    assert name_rank(dense_grid(world=8, tp=2, pp=2), 5) == "5 (tp=1 dp=0 pp=1)"

"""Warnings of several ranks: those with the same text are printed once with the rank numbers."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore

from megalith.config.observe import ObserveConfig
from megalith.observe import rank_warnings
from megalith.observe.logs import log_to
from megalith.observe.rank_warnings import (
    RankWarning,
    WarningGroups,
    WarningMerger,
    WarningStore,
    describe_ranks,
    merge_warnings,
)


def make_record(text: str, level: int = logging.WARNING) -> logging.LogRecord:
    """A message of the data package."""
    fields = {"name": "megalith.data", "levelno": level, "msg": text}
    return logging.makeLogRecord(fields | {"levelname": logging.getLevelName(level)})


@contextmanager
def started_mergers(store: WarningStore, world: int) -> Iterator[list[WarningMerger]]:
    """The handlers of all ranks; rank 0 finishes last."""
    mergers = [WarningMerger(store, rank=rank, world=world) for rank in range(world)]
    for merger in mergers:
        merger.start()
    yield mergers
    for merger in mergers[::-1]:
        merger.finish(waits=True)


def print_merged(
    capsys: pytest.CaptureFixture[str], texts: Sequence[Sequence[str]], store: WarningStore
) -> list[str]:
    """Return what is printed of the warnings of each rank."""
    with started_mergers(store, len(texts)) as mergers:
        for merger, own in zip(mergers, texts, strict=True):
            for text in own:
                merger.emit(make_record(text))
    return capsys.readouterr().err.splitlines()


def test_equal_warnings_of_ranks_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [
        ["short split", "slow disk"],
        ["short split"],
        ["short split", "no cache"],
        ["no cache"],
    ]
    store = PrefixStore("warnings", HashStore())
    assert sorted(print_merged(capsys, texts, store)) == [
        "ranks 0-2: short split",
        "ranks 2-3: no cache",
        "slow disk",
    ]


def test_ranks_are_listed_as_ranges() -> None:
    assert describe_ranks([7]) == "rank 7"
    assert describe_ranks([0, 1]) == "ranks 0-1"
    assert describe_ranks([0, 2, 3, 4, 9, 11, 12]) == "ranks 0, 2-4, 9, 11-12"


def test_warnings_wait_for_those_of_other_ranks() -> None:
    groups = WarningGroups()
    split, disk = (RankWarning("megalith", 30, text) for text in ("split", "disk"))
    groups.add(split, 3, now=1.0)
    groups.add(disk, 0, now=1.5)
    groups.add(split, 1, now=1.9)
    assert groups.take(before=0.9) == []
    assert groups.take(before=1.0) == [(split, [1, 3])]
    groups.add(split, 2, now=2.5)  # too late for the line, and not lost
    assert groups.take(before=9.0) == [(disk, [0]), (split, [2])]
    assert groups.take(before=9.0) == []


def test_warnings_are_printed_while_the_run_continues(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_warnings, "GATHER_SECONDS", 0.05)
    monkeypatch.setattr(rank_warnings, "POLL_SECONDS", 0.01)
    printed, store = "", HashStore()
    for rank in (1, 2):  # before rank 0 receives the first one
        merger = WarningMerger(store, rank=rank, world=3)
        merger.start()
        merger.emit(make_record("slow disk"))
        merger.finish(waits=False)
    with merge_warnings(store, rank=0, world=3):
        deadline = time.monotonic() + 10
        while not printed and time.monotonic() < deadline:
            time.sleep(0.01)
            printed = capsys.readouterr().err
    assert printed == "ranks 1-2: slow disk\n"
    assert capsys.readouterr().err == ""


def test_warnings_of_other_ranks_are_in_the_log_of_rank_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_warnings, "GATHER_SECONDS", 0.01)
    store, log = HashStore(), tmp_path / "log.txt"
    other = WarningMerger(store, rank=1, world=2)
    other.start()
    with merge_warnings(store, rank=0, world=2), log_to(log, ObserveConfig()):
        logging.getLogger("megalith.train").warning("own")
        other.emit(make_record("of rank 1"))
        other.finish(waits=True)
        deadline = time.monotonic() + 10
        while "of rank 1" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert sorted(capsys.readouterr().err.splitlines()) == ["own", "rank 1: of rank 1"]
    lines = [line.split(" ", 2)[2] for line in log.read_text().splitlines()]
    assert lines == [
        "WARNING megalith.train: own",
        "WARNING megalith.data: rank 1: of rank 1",
    ]


class BrokenStore:
    """The store of a rank 0 that has ended."""

    def add(self, key: str, amount: int, /) -> int:
        """Fail as a connection that is closed."""
        raise RuntimeError("Connection reset by peer")

    def set(self, key: str, value: str, /) -> None:
        """Never called."""
        raise AssertionError

    def get(self, key: str, /) -> bytes:
        """Never called."""
        raise AssertionError

    def check(self, keys: list[str], /) -> bool:
        """Never called."""
        raise AssertionError

    def delete_key(self, key: str, /) -> bool:
        """Never called."""
        raise AssertionError


def test_warnings_are_not_lost_without_the_store(capsys: pytest.CaptureFixture[str]) -> None:
    printed = print_merged(capsys, [["short split"], ["short split"]], BrokenStore())
    assert sorted(printed) == ["rank 1: short split", "short split"]


def test_warning_of_a_rank_that_has_ended_before_it_was_sent_is_omitted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_warnings, "GATHER_SECONDS", 0.01)
    monkeypatch.setattr(rank_warnings, "POLL_SECONDS", 0.01)
    printed, store = "", HashStore()
    store.add("count", 1)
    other = WarningMerger(store, rank=2, world=3)
    other.start()
    other.emit(make_record("slow disk"))
    other.finish(waits=False)
    with merge_warnings(store, rank=0, world=3):
        deadline = time.monotonic() + 10
        while not printed and time.monotonic() < deadline:
            time.sleep(0.01)
            printed = capsys.readouterr().err
    assert printed == "rank 2: slow disk\n"


def test_store_holds_no_warnings_that_were_read(capsys: pytest.CaptureFixture[str]) -> None:
    store = HashStore()
    print_merged(capsys, [["own"], ["first", "second"]], store)
    assert store.num_keys() == 2  # the counters

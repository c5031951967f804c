"""Local checkpoints that writer processes save and copy to their peers while training continues."""

import errno
import mmap
import multiprocessing
import os
import shutil
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megalith.checkpoint import async_save
from megalith.checkpoint.async_save import AsyncSaver, WriterProcess
from megalith.checkpoint.copies import CopyServer, PeerAddress, send_copy
from megalith.checkpoint.local import LocalSaveError, LocalSaveReport, LocalTier
from megalith.checkpoint.manifest import StoredFile, WrittenPart
from megalith.checkpoint.save import dump_state
from megalith.checkpoint.staging import StagingRegion, plan_staging
from megalith.checkpoint.writer import (
    CheckpointWriter,
    Command,
    LocalJob,
    PartReport,
    ServeCopies,
    WritePlan,
)
from megalith.errors import CheckpointError
from megalith.parallel.group import Group, gather_objects
from megalith.testing.disk import SimulatedDisk, iter_crash_states, record_effects, write_contents
from megalith.testing.inject import patched
from megalith.testing.ranks import run_ranks, world_group

from .test_local import ALONE, CPU, build_entries, load, open_tier

SECRET = b"s" * 32
PART = WrittenPart("a" * 64, {}, {"__1_0.distcp": StoredFile(7)})


def _save(
    tier: LocalTier, saver: AsyncSaver, group: Group, step: int, *, kill_writer_of: int = -1
) -> LocalSaveReport | CheckpointError:
    """Save a step whose tensors change as soon as they may, as in training."""
    entries = build_entries(group.rank, group.size, step=step)
    saver.begin_local(step, entries, {"step": step})
    saver.wait_staged()
    for entry in entries:
        entry.tensor.fill_(9.0)
    if group.rank == kill_writer_of:
        assert saver._writer is not None
        saver._writer.kill()
    result = None
    while result is None:
        counts = (
            [saver.count_saves()] if group.size == 1 else gather_objects(saver.count_saves(), group)
        )
        written, failed = (sum(each) for each in zip(*counts, strict=True))  # type: ignore[call-overload]
        result = saver.advance(written, failed)
        time.sleep(0.05)  # writers have a low priority
    assert not isinstance(result, LocalSaveReport) or tier.folder.is_dir()
    return result  # type: ignore[return-value]


def _lose_each(rank: int, world: int, path: Path, lost: tuple[int, ...]) -> tuple[int, bool]:
    group = world_group(rank, world, "world")
    tier = open_tier(path, group)
    saver = AsyncSaver(build_entries(rank, world), group, CPU)
    saver.serve_local(tier)
    for step in (1, 2, 3):
        report = _save(tier, saver, group, step)
        assert isinstance(report, LocalSaveReport), report
    names = sorted(each.name for each in tier.folder.iterdir())
    assert names == ["step_0000002", "step_0000003"], names
    saver.close()
    if rank in lost:
        shutil.rmtree(tier.root)
    return load(tier, group)


def test_writer_that_starts_late_opens_one_port_for_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second server would have another port than the one that peers send to."""
    commands: list[object] = []

    class LateWriterProcess:
        """Writer process that starts after the local tier is served."""

        def __init__(self, *_: object) -> None:
            assert is_served.wait(30)

        send = staticmethod(commands.append)

    is_served = threading.Event()
    monkeypatch.setattr(async_save, "WriterProcess", LateWriterProcess)
    saver = AsyncSaver(build_entries(0, 1), ALONE, CPU)
    saver.serve_local(open_tier(tmp_path, ALONE))
    is_served.set()
    saver._thread.shutdown(wait=True)
    assert [type(each) for each in commands] == [WritePlan, ServeCopies]


class _EndedWriterProcess(WriterProcess):
    """Writer process that has ended before it reports the port for copies."""

    def send(self, command: Command) -> None:
        if isinstance(command, ServeCopies):
            self.kill()
        super().send(command)


def _reject_start(*_: object) -> None:
    raise OSError(errno.EAGAIN, "Resource temporarily unavailable")


@pytest.mark.parametrize(
    "start, reason",
    [
        (_EndedWriterProcess, "the writer process .* was ended by SIGKILL"),
        (_reject_start, "the writer process cannot be started: .*unavailable"),
    ],
)
def test_writer_that_ends_before_it_reports_its_port_fails_the_save_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Any, reason: str
) -> None:
    monkeypatch.setattr(async_save, "WriterProcess", start)
    tier, entries = open_tier(tmp_path, ALONE), build_entries(0, 1)
    saver = AsyncSaver(entries, ALONE, CPU)
    saver.serve_local(tier)
    began = time.monotonic()
    for step in (1, 2):  # the second save replaces the writer, which ends again
        text = rf"step {step} was not saved\. {reason}[^.]*\.$"
        with pytest.raises(LocalSaveError, match=text):
            saver.begin_local(step, entries, {"step": step})
    saver._thread.submit(int).result()  # the last start with the faulty process
    monkeypatch.setattr(async_save, "WriterProcess", WriterProcess)
    with pytest.raises(LocalSaveError):
        saver.begin_local(3, entries, {"step": 3})
    assert time.monotonic() - began < async_save._START_S / 2
    assert isinstance(_save(tier, saver, ALONE, 4), LocalSaveReport)
    saver.close()


@pytest.mark.parametrize(
    "world,lost",
    [
        pytest.param(1, (), marks=pytest.mark.slow),
        pytest.param(2, (1,), marks=pytest.mark.slow),
        (4, (0, 2)),
    ],
)
def test_copies_of_writers_replace_lost_folders(
    tmp_path: Path, world: int, lost: tuple[int, ...]
) -> None:
    assert run_ranks(_lose_each, world, tmp_path, lost, timeout=120) == [(3, True)] * world


def _fail_once(rank: int, world: int, path: Path) -> tuple[str, tuple[int, bool], str]:
    group = world_group(rank, world, "world")
    tier = open_tier(path, group)
    saver = AsyncSaver(build_entries(rank, world), group, CPU)
    saver.serve_local(tier)
    assert isinstance(_save(tier, saver, group, 1), LocalSaveReport)
    error = _save(tier, saver, group, 2, kill_writer_of=1)
    assert isinstance(error, LocalSaveError)
    loaded = load(tier, group)
    later = _save(tier, saver, group, 3)  # with new writers
    saver.close()
    return str(error), loaded, str(later)


def test_save_fails_on_all_ranks_if_one_writer_ends(tmp_path: Path) -> None:
    (first, *results), (second, *others) = run_ranks(_fail_once, 2, tmp_path, timeout=120)
    assert first == second
    assert first.startswith("the local checkpoint of step 2 was not saved. ")
    assert "rank 1: the writer process " in first and "was ended by SIGKILL" in first
    assert results[0] == others[0] == (1, True), "the older one is intact"
    assert str(results[1]).startswith("local checkpoint of step 3: ")


def _save_in_this_process(tier: LocalTier, step: int) -> None:
    """Run the writer of a single rank in this process, on its disk."""
    entries = build_entries(0, 1, step=step)
    plan = plan_staging(entries)
    region = StagingRegion(plan.nbytes, CPU)
    region.copy(plan, entries)
    local = tier.prepare(step, entries, lambda: None)
    job = LocalJob(local.staging, local.table, dump_state({"step": step}), (), ())
    rank_side, writer_side = multiprocessing.Pipe()
    memory = memoryview(mmap.mmap(region.fd, region.nbytes))
    writer = CheckpointWriter(writer_side, memory, os.getppid(), 1, 0.0)
    for command in (plan.write_plan, job):
        rank_side.send(command)
    rank_side.close()
    reports: list[object] = []
    with patched(writer, "_report", reports.append):
        writer.run()
    assert any(isinstance(report, PartReport) for report in reports), reports
    tier.report_saved(step, 0, 0.0)


def test_crash_in_a_save_leaves_the_older_or_the_newer_local_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    tier = open_tier(folder, ALONE, keep=1)
    _save_in_this_process(tier, 1)
    disk = SimulatedDisk(folder)
    with record_effects(folder) as effects:
        _save_in_this_process(tier, 2)
    results = set()
    for number, (label, contents) in enumerate(iter_crash_states(disk, effects)):
        copy = tmp_path / "disks" / str(number)
        write_contents(contents, copy)
        result = load(open_tier(copy, ALONE, keep=1), ALONE)
        assert result[1], (label, result)
        results.add(result[0])
    assert results == {1, 2}


def receive(tmp_path: Path, **change: object) -> tuple[str, Mapping[int, WrittenPart]]:
    """Send one copy to a server in this process; return the error of the sender, and what was
    stored."""
    arguments = {"secret": SECRET, "save": "one", "rank": 1, "chunks": [b"abc", b"", b"defg"]}
    arguments |= change
    server = CopyServer("127.0.0.1", SECRET, lambda: None)
    folder = tmp_path / "root" / "rank_00000" / "step_0000001.tmp-1"
    folder.mkdir(parents=True)
    later = threading.Timer(0.05, server.expect, ("one", folder, [1]))
    later.start()
    problem = ""
    try:
        peer = PeerAddress(0, "127.0.0.1", server.port)
        send_copy(peer, part=PART, **arguments)  # type: ignore[arg-type]
    except CheckpointError as error:
        problem = str(error)
    later.join()
    expected = server._expected
    assert expected is not None
    if not problem:
        assert (folder / "__1_0.distcp").read_bytes() == b"abcdefg"
        assert server.wait(lambda: True) == {1: PART}
    return problem, expected.parts


def test_copy_is_stored_when_the_sender_returns(tmp_path: Path) -> None:
    assert receive(tmp_path) == ("", {1: PART})


def test_connection_without_the_secret_is_rejected(tmp_path: Path) -> None:
    problem, parts = receive(tmp_path, secret=b"x" * 32)
    assert problem.startswith("The copy for rank 0 was not sent to 127.0.0.1:") and not parts


def test_copy_of_an_unexpected_rank_is_rejected(tmp_path: Path) -> None:
    problem, parts = receive(tmp_path, rank=3)
    assert problem == "rank 0: this rank does not expect a copy of this save" and not parts


def test_copy_with_too_many_bytes_is_rejected(tmp_path: Path) -> None:
    problem, parts = receive(tmp_path, chunks=[b"abc", b"defghijk"])
    assert problem and not parts


def test_waiting_for_copies_ends_with_the_rank(tmp_path: Path) -> None:
    server = CopyServer("127.0.0.1", SECRET, lambda: None)
    server.expect("one", tmp_path, [1])
    with pytest.raises(CheckpointError, match="ended before all copies were received"):
        server.wait(lambda: False)


def test_server_continues_after_connections_that_cannot_be_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, failures = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")] * 2

    def fail_first(self: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", fail_first)
    assert receive(tmp_path) == ("", {1: PART}) and not failures

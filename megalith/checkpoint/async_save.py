"""Asynchronous saves: a rank copies its tensors into host memory while the next step computes, and
its writer process writes them.

A save has two phases. In the first, every rank copies and its writer writes; in the second, the
writer of rank 0 commits. All ranks enter the second phase, and learn of the end or of a failure, by
the message that every step sends anyway, so no rank waits for another.
"""

import concurrent.futures
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch

import megalith
from megalith.checkpoint.commit import FolderTexts, Retention
from megalith.checkpoint.copies import PeerAddress
from megalith.checkpoint.format import CheckpointEntry, merge_tensors, show_bytes
from megalith.checkpoint.local import LocalSave, LocalSaveReport, LocalTier
from megalith.checkpoint.manifest import StoredTensor, WrittenPart
from megalith.checkpoint.save import (
    SaveReport,
    Snapshot,
    dump_metadata,
    dump_state,
    explain_failure,
    ignore_progress,
    take_snapshot,
    versions,
)
from megalith.checkpoint.staging import (
    MEMORY_FACTOR,
    StagingRegion,
    entries_identity,
    plan_staging,
)
from megalith.checkpoint.writer import (
    Command,
    Commit,
    CommitJob,
    CommitReport,
    CopyPort,
    JobFailure,
    LocalJob,
    LoggedLine,
    PartReport,
    Report,
    SaveJob,
    ServeCopies,
    count_files,
    plan_files,
)
from megalith.errors import CheckpointError
from megalith.object_store import StorePath
from megalith.observe.limits import free_memory
from megalith.parallel.group import Group, gather_objects, raise_on_all_ranks
from megalith.storage import StoragePath

MIN_NBYTES = 64 * 2**20
"""Bytes per rank below which `checkpoint.async_save=auto` saves synchronously. Heuristic: that
takes less than a tenth of a second, about as long as starting a writer process."""

_WAIT_S = 0.002
"""Seconds between checks of the writer while this rank waits for it (heuristic)."""

_AGREE_S = 5.0
"""Seconds that a rank waits for its writer before it asks the other ranks for failures: much less
than parallel.timeout_seconds, after which the ranks that wait for it would end the run
(heuristic)."""

_START_S = 20.0
"""Seconds for which the first local save waits for a writer process that starts (heuristic: it
imports no torch, which takes a tenth of a second on an idle machine)."""

_EXIT_S = 5.0
"""Seconds after which a process that does not end is given up (heuristic: the kernel ends a killed
process in milliseconds, unless it waits for a disk that does not respond)."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterSettings:
    """Settings of the writer process of each rank."""

    threads: int = 1
    max_file_nbytes: int = 0
    """Length after which another file is begun; 0: none."""

    timeout_seconds: float = 600.0
    drain_seconds: float = 120.0


@dataclass(frozen=True, slots=True)
class MemoryCheck:
    """Host memory that asynchronous saves need, on the machine where least is left."""

    needed: int
    """Of all ranks of the machine."""
    free: int
    largest_rank: int
    """Most bytes that one rank of the run saves."""

    @property
    def suffices(self) -> bool:
        """Whether the staging memory fits."""
        return self.needed <= self.free

    def describe(self) -> str:
        """Return both figures for a message."""
        return (
            f"asynchronous saves need {show_bytes(self.needed)} of host memory ({MEMORY_FACTOR} "
            f"times the tensors that the ranks of a machine save), and {show_bytes(self.free)} are "
            "free"
        )


def check_memory(entries: Sequence[CheckpointEntry], world: Group) -> MemoryCheck:
    """Compare the memory that asynchronous saves need with what each machine has. Collective."""
    nbytes = sum(entry.tensor.nbytes for entry in entries if entry.is_writer)
    gathered = gather_objects((socket.gethostname(), nbytes, free_memory()), world)
    ranks = [rank for rank in gathered if isinstance(rank, tuple)]
    checks = []
    for host in {host for host, _, _ in ranks}:
        needed = sum(each for name, each, _ in ranks if name == host)
        free = min(each for name, _, each in ranks if name == host)
        checks.append((int(needed * MEMORY_FACTOR), free))
    needed, free = min(checks, key=lambda check: check[1] - check[0])
    return MemoryCheck(needed, free, max(each for _, each, _ in ranks))


def list_module_folders() -> list[str]:
    """Return the folders from which this process imports modules, in its order, so that another
    process imports the same ones."""
    package = str(Path(megalith.__file__).resolve().parent.parent)
    return list(dict.fromkeys(os.path.abspath(folder) for folder in (*sys.path, package)))


class WriterProcess:
    """Writer process of this rank, and the socket to it."""

    def __init__(self, region: StagingRegion, settings: WriterSettings) -> None:
        rank_socket, writer_socket = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        arguments = [writer_socket.fileno(), region.fd, region.nbytes, os.getpid()]
        limits = [settings.threads, settings.max_file_nbytes, settings.drain_seconds]
        with writer_socket:
            self._process = subprocess.Popen(
                # -P: a file in the working folder, such as socket.py, hides no module
                [sys.executable, "-P", "-m", "megalith.checkpoint.writer"]
                + [str(each) for each in (*arguments, *limits)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=(writer_socket.fileno(), region.fd),
                env=os.environ | {"PYTHONPATH": os.pathsep.join(list_module_folders())},
                start_new_session=True,  # a signal to the group of the ranks does not end it
            )
        self._connection = Connection(rank_socket.detach())

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def send(self, command: Command) -> None:
        """Send a command.

        Raises:
            CheckpointError: the process has ended.
        """
        try:
            self._connection.send(command)
        except OSError as error:
            self._wait()
            raise CheckpointError(f"{self.describe_exit() or error}.") from error

    def receive(self) -> list[Report]:
        """Return the reports since the last call, without waiting."""
        reports: list[Report] = []
        try:
            while self._connection.poll(0):
                reports.append(self._connection.recv())
        except (EOFError, OSError):  # the process has ended: see `describe_exit`
            pass
        return reports

    def describe_exit(self) -> str | None:
        """Return how the process has ended; None if it has not."""
        code = self._process.poll()
        if code is None:
            return None
        if code < 0:
            return f"the writer process {self.pid} was ended by {signal.Signals(-code).name}"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        last = f": {lines[-1]}" if lines else ""
        return f"the writer process {self.pid} ended with exit code {code}{last}"

    def kill(self) -> bool:
        """End the process now; return whether it has ended. A thread that sends gets an error."""
        self._process.kill()
        return self._wait()

    def close(self, *, wait: bool) -> None:
        """Let the process finish its save and end; with `wait`, return after that. No thread uses
        the socket."""
        self._connection.close()
        if wait and not self._wait():
            self.kill()
        self._errors.close()

    def _wait(self) -> bool:
        try:
            self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            return False
        return True


@dataclass(slots=True)
class _PendingSave:
    """The save in flight on this rank."""

    snapshot: Snapshot
    check_lock: Callable[[], None]
    local: LocalSave | None = None
    """Set if the save is a local checkpoint, which needs no commit by rank 0."""
    copied: threading.Event = field(default_factory=threading.Event)
    """Set when the copies are complete, or on a device when they are launched."""
    device_event: torch.Event | None = None
    """Recorded after the copies on the device."""
    stage: "Future[None] | None" = None
    is_released: bool = False
    """Whether the tensors may be written."""
    staged_seconds: float = 0.0
    blocked_seconds: float = 0.0
    last_progress: float | None = None
    """Time of the last report of the writer, once it has the job."""
    written: PartReport | None = None
    is_committing: bool = False
    committed: CommitReport | None = None
    failure: Exception | None = None

    @property
    def is_finished(self) -> bool:
        """Whether this rank has nothing to wait for in the current phase."""
        if self.failure is not None:
            return True
        if self.is_committing:
            return self.committed is not None or self.snapshot.rank != 0
        return self.written is not None

    def describe_state(self) -> Literal["unfinished", "finished", "failed"]:
        """Return the state of this rank's part of the current phase."""
        is_finished = self.is_finished  # before `failure`, which the staging thread may set
        if self.failure is not None:
            return "failed"
        return "finished" if is_finished else "unfinished"


class AsyncSaver:
    """Asynchronous saves of one rank, one at a time.

    Methods that are called collective are called by all ranks in the same order.
    """

    def __init__(
        self,
        entries: Sequence[CheckpointEntry],
        world: Group,
        device: torch.device,
        settings: WriterSettings = WriterSettings(),
    ) -> None:
        """Plan the saves, allocate the staging memory and start the writer process. Collective.

        Raises:
            CheckpointError: on every rank: the memory cannot be allocated.
        """
        self._world, self._device, self._settings = world, device, settings
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-staging")
        self._pending: _PendingSave | None = None
        self._writer: WriterProcess | None = None
        self._metadata = b""
        self._total_nbytes = 0
        self._local_tier: LocalTier | None = None
        self._secret = b""
        """Of the connections between writers."""
        self._copy_port: int | None = None
        """Where the writer receives copies, once it has reported it."""
        self._copy_writer: WriterProcess | None = None
        """The writer that serves a port for copies."""
        self._start_error = ""
        """Why the last start of a writer process failed."""
        self._digests: tuple[str, ...] = ()
        """Plans of all ranks for which `_metadata` was computed."""
        self._plan = plan_staging(entries)
        regions: list[StagingRegion] = []
        raise_on_all_ranks(lambda: regions.append(self._allocate()), world)
        (self._region,) = regions
        self._share_plans(
            tuple(str(each) for each in gather_objects(self._plan.write_plan.digest, world))
        )

    @property
    def pending_step(self) -> int | None:
        """Step of the save in flight; None if there is none."""
        return None if self._pending is None else self._pending.snapshot.step

    @property
    def writer_pid(self) -> int | None:
        """Id of the writer process, once it has been started."""
        return None if self._writer is None else self._writer.pid

    # --- preparation

    def _allocate(self) -> StagingRegion:
        """Allocate the region; its pages are touched, and the writer is started, by a thread."""
        region = StagingRegion(self._plan.nbytes, self._device)
        self._thread.submit(region.populate)
        self._thread.submit(self._start_writer, region)
        return region

    def _start_writer(self, region: StagingRegion) -> None:
        """Start a writer process; an error is reported by the next save."""
        try:
            writer = WriterProcess(region, self._settings)
            self._writer, self._copy_port, self._start_error = writer, None, ""
            writer.send(self._plan.write_plan)
            self._send_copy_server()
        except (OSError, CheckpointError) as error:
            self._start_error = f"the writer process cannot be started: {error}"
            _log.warning("the writer process of asynchronous saves cannot be started: %s", error)

    def _share_plans(self, digests: tuple[str, ...]) -> None:
        """Collect what all ranks write, for `.metadata`. Collective; once per structure."""
        plan, settings = self._plan.write_plan, self._settings
        num_files = count_files(plan, settings.threads, settings.max_file_nbytes)
        part = plan_files(plan, self._world.rank, num_files, {})
        parts = [
            each for each in gather_objects(part, self._world) if isinstance(each, WrittenPart)
        ]
        self._digests = digests
        self._total_nbytes = sum(file.nbytes for each in parts for file in each.files.values())
        if self._world.rank == 0:
            # the tiling is checked at the commit, by the writer
            tensors = merge_tensors((each.tensors for each in parts), check_tiling=False)
            self._thread.submit(self._compute_metadata, tensors)

    def _compute_metadata(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._metadata = dump_metadata(tensors)

    # --- a save

    def begin(
        self,
        folder: StoragePath,
        step: int,
        entries: Sequence[CheckpointEntry],
        state: Mapping[str, Any],  # JSON
        *,
        config_text: str,
        auxiliary_files: Mapping[str, bytes] | None = None,
        retention: Retention,
        check_lock: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to save `folder/step_NNNNNNN`; no save is in flight. Collective.

        The tensors of `entries` must not be written before `wait_staged`. `state` and the texts are
        captured now. `check_lock`: raises an error if this process may no longer write to the
        folder; called again on rank 0 before the commit.

        Raises:
            CheckpointError: on every rank: there is too little space, or the state differs.
        """
        assert self._pending is None, "one save at a time"
        started = time.monotonic()
        self._update_plan(entries)
        snapshot = take_snapshot(
            folder,
            step,
            entries,
            state,
            self._world,
            plan_digest=self._plan.write_plan.digest,
        )
        if snapshot.plan_digests != self._digests:
            self._share_plans(snapshot.plan_digests)
        self._region.record_updates()
        pending = _PendingSave(snapshot, check_lock)
        texts = (dump_state(state), config_text.encode(), dict(auxiliary_files or {}))
        self._pending = pending
        build = partial(self._build_save_job, snapshot, texts, retention)
        pending.stage = self._thread.submit(self._stage, pending, build)
        pending.blocked_seconds = time.monotonic() - started

    def serve_local(self, tier: LocalTier) -> None:
        """Let the writers save local checkpoints of `tier` and receive their copies. Collective;
        called once."""
        secrets_of_ranks = gather_objects(secrets.token_bytes(32), self._world)
        self._secret = bytes(secrets_of_ranks[0])  # type: ignore[call-overload]  # rank 0's bytes
        self._local_tier = tier
        self._thread.submit(self._send_copy_server)

    def _send_copy_server(self) -> None:
        """Let the writer receive copies; in the staging thread. Once per writer: copies that are
        sent to the port of an earlier server would not be expected there."""
        if self._writer in (None, self._copy_writer) or self._local_tier is None:
            return
        assert self._writer is not None, "checked above"
        self._copy_writer = self._writer
        self._writer.send(ServeCopies(self._local_tier.copy_host, self._secret))

    def begin_local(
        self,
        step: int,
        entries: Sequence[CheckpointEntry],
        state: Mapping[str, Any],  # JSON
        *,
        lineage: Sequence[int] = (),
    ) -> None:
        """Begin to save a local checkpoint; no save is in flight. Collective.

        The tensors of `entries` must not be written before `wait_staged`. `state` is captured now.

        Raises:
            CheckpointError: on every rank: there is too little space, or a writer has ended or does
                not answer.
        """
        assert self._pending is None and self._local_tier is not None, "one save at a time"
        started = time.monotonic()
        self._update_plan(entries)
        local = self._local_tier.prepare(step, entries, self._find_copy_address, lineage=lineage)
        self._region.record_updates()
        snapshot = Snapshot(local.staging, step, self._world.rank, tuple(entries), state, started)
        pending = _PendingSave(snapshot, lambda: None, local)
        self._pending = pending
        job = LocalJob(local.staging, local.table, dump_state(state), local.peers, local.sources)
        pending.stage = self._thread.submit(self._stage, pending, lambda: job)
        pending.blocked_seconds = time.monotonic() - started

    def _find_copy_address(self) -> PeerAddress | None:
        """Return where this rank's writer receives copies, waiting for a writer that starts; None
        if it does not answer. If it has ended, the next save has another one.

        Raises:
            CheckpointError: the writer has ended, or cannot be started.
        """
        assert self._local_tier is not None, "the tier is served"
        deadline = time.monotonic() + _START_S
        while self._copy_port is None and time.monotonic() < deadline:
            writer, problem = self._writer, self._start_error
            if writer is not None:
                problem = writer.describe_exit() or ""
            self._read_reports(None)
            if self._copy_port is None and problem:
                self._stop_writer()
                self._start_error = ""
                self._thread.submit(self._start_writer, self._region)
                raise CheckpointError(f"{problem.removesuffix('.')}.")
            time.sleep(_WAIT_S)
        if self._copy_port is None:
            return None
        return PeerAddress(self._world.rank, self._local_tier.copy_host, self._copy_port)

    def _update_plan(self, entries: Sequence[CheckpointEntry]) -> None:
        """Plan again if names, shapes, dtypes or layout of the entries have changed."""
        if entries_identity(entries) == self._plan.identity:
            return
        self._plan = plan_staging(entries)
        if self._plan.nbytes > self._region.nbytes:
            self._stop_writer()
            self._region.close()
            self._region = self._allocate()
        else:
            self._thread.submit(self._send_plan)

    def _send_plan(self) -> None:
        if self._writer is not None:
            self._writer.send(self._plan.write_plan)

    def _build_save_job(
        self,
        snapshot: Snapshot,
        texts: tuple[bytes, bytes, dict[str, bytes]],
        retention: Retention,
    ) -> SaveJob:
        """Return the job of a persistent checkpoint; in the staging thread, after `.metadata` was
        computed there.

        Raises:
            CheckpointError: `.metadata` could not be computed.
        """
        commit = None
        if self._world.rank == 0:
            if not self._metadata:
                raise CheckpointError("The contents of .metadata could not be computed.")
            state, config, auxiliary_files = texts
            contents = FolderTexts(self._metadata, state, config, auxiliary_files, versions())
            commit = CommitJob(contents, retention, self._world.size)
        return SaveJob(snapshot.staging, snapshot.step, snapshot.rank, commit)

    def _stage(self, pending: _PendingSave, build_job: Callable[[], SaveJob | LocalJob]) -> None:
        """Copy the tensors and give the job to the writer; in the staging thread."""
        snapshot = pending.snapshot
        try:
            started = time.monotonic()
            pending.device_event = self._region.copy(self._plan, snapshot.entries)
            pending.copied.set()
            if pending.device_event is not None:
                pending.device_event.synchronize()
            pending.staged_seconds = time.monotonic() - started
            job = build_job()
            if self._writer is None:
                self._start_writer(self._region)
            if self._writer is None:
                raise CheckpointError("The writer process cannot be started.")
            pending.last_progress = time.monotonic()
            self._writer.send(job)
        except CheckpointError as error:
            pending.failure = pending.failure or CheckpointError(f"{self._where}{error}")
        except Exception as error:  # reported by `count_saves`
            pending.failure = pending.failure or error
        finally:
            pending.copied.set()

    def wait_staged(self) -> None:
        """Return when the saved tensors may be written; on a device, when the current stream will
        wait for the copies."""
        pending = self._pending
        if pending is None or pending.is_released:
            return
        started = time.monotonic()
        pending.copied.wait()
        if pending.device_event is not None:
            pending.device_event.wait(torch.accelerator.current_stream())
        pending.is_released = True
        pending.blocked_seconds += time.monotonic() - started

    def count_saves(self) -> tuple[int, int]:
        """Return whether this rank's part of the current phase is complete, and whether it has
        failed, as numbers to sum over ranks. In the second phase only rank 0 has a part."""
        pending = self._pending
        if pending is None:
            return 0, 0
        self._poll(pending)
        is_done = pending.committed if pending.is_committing else pending.written
        return int(is_done is not None), int(pending.failure is not None)

    def advance(
        self, written: int, failed: int
    ) -> SaveReport | LocalSaveReport | CheckpointError | None:
        """Continue the save in flight with the sums of `count_saves` over all ranks, and return its
        report, or its error. Collective, but communicates only after a failure."""
        pending = self._pending
        if pending is None:
            return None
        if failed:
            return self._fail(pending)
        if pending.is_committing:
            return self._finish(pending) if written else None
        if written == self._world.size:
            if pending.local is not None:
                return self._finish_local(pending)
            self._start_commit(pending)
        return None

    def drain(
        self, report_progress: Callable[[], None] = ignore_progress
    ) -> SaveReport | LocalSaveReport | CheckpointError | None:
        """Wait for the save in flight and return its report or error. Collective.

        `report_progress` is called often: the timeouts of the writer apply.
        """
        pending = self._pending
        if pending is None:
            return None
        self.wait_staged()
        started = time.monotonic()
        while True:
            deadline = time.monotonic() + _AGREE_S
            while not pending.is_finished and time.monotonic() < deadline:
                time.sleep(_WAIT_S)
                self._poll(pending)
                report_progress()
            states = gather_objects(pending.describe_state(), self._world)
            pending.blocked_seconds += time.monotonic() - started
            started = time.monotonic()
            if "failed" in states:
                return self._fail(pending)
            if "unfinished" in states:
                continue
            if pending.local is not None:
                return self._finish_local(pending)
            if pending.is_committing:
                return self._finish(pending)
            self._start_commit(pending)

    def close(self, *, failed: bool = False) -> None:
        """End the writer process. With `failed`, this rank ends with an error: a save in flight is
        finished by the writers, for which no rank waits."""
        pending = self._pending
        if pending is not None and pending.stage is not None:
            concurrent.futures.wait([pending.stage], _EXIT_S)
            if self._writer is not None and pending.copied.is_set() and not pending.stage.done():
                self._writer.kill()  # it does not receive the job
        self._region.stop()
        self._thread.shutdown(wait=not failed, cancel_futures=True)
        if self._writer is not None:
            if failed and pending is not None and isinstance(pending.snapshot.staging, StorePath):
                # this process may stay, and save the same step under the same prefix again
                self._writer.kill()
            self._writer.close(wait=not failed or pending is None)
        if not failed:
            self._region.close()
        self._pending = self._writer = None

    def _poll(self, pending: _PendingSave) -> None:
        """Read the reports of the writer, and check that it is alive and makes progress."""
        writer = self._writer
        if writer is None or pending.failure is not None:
            return
        exit_text = writer.describe_exit()
        now = time.monotonic()
        if self._read_reports(pending):
            pending.last_progress = now
        if pending.is_finished:
            return
        if exit_text is not None:
            pending.failure = CheckpointError(f"{self._where}{exit_text}.")
        elif (
            pending.last_progress is not None
            and now - pending.last_progress > self._settings.timeout_seconds
        ):
            pending.failure = CheckpointError(
                f"{self._where}the writer process {writer.pid} made no progress for "
                f"{now - pending.last_progress:.0f} s. Check the disk, or increase "
                f"checkpoint.writer_timeout_seconds ({self._settings.timeout_seconds:g} now)."
            )

    def _read_reports(self, pending: _PendingSave | None) -> bool:
        """Read the reports of the writer about the save in flight, if there is one; return whether
        there were any."""
        reports = [] if self._writer is None else self._writer.receive()
        for report in reports:
            match report:
                case CopyPort():
                    self._copy_port = report.port
                case LoggedLine():
                    logging.getLogger(report.logger).log(report.level, "%s", report.text)
                case PartReport() if pending is not None:
                    pending.written = report
                case CommitReport() if pending is not None:
                    pending.committed = report
                case JobFailure() if pending is not None:
                    pending.failure = report.error
        return bool(reports)

    @property
    def _where(self) -> str:
        rank = self._world.ranks[self._world.rank]
        return f"rank {rank}: " if self._world.size > 1 else ""

    def _start_commit(self, pending: _PendingSave) -> None:
        """Enter the second phase; rank 0 lets its writer commit."""
        pending.is_committing = True
        if self._world.rank != 0:
            return
        assert self._writer is not None, "it has written"
        try:
            pending.check_lock()
            pending.last_progress = time.monotonic()
            self._writer.send(Commit())
        except CheckpointError as error:
            pending.failure = error

    def _finish(self, pending: _PendingSave) -> SaveReport:
        """Return the report of a complete save."""
        self._pending = None
        snapshot, committed = pending.snapshot, pending.committed
        seconds = time.monotonic() - snapshot.started
        name = snapshot.staging.name.partition(".")[0]
        return SaveReport(
            snapshot.staging.with_name(name) if committed is None else committed.path,
            self._total_nbytes if committed is None else committed.nbytes,
            seconds,
            () if committed is None else committed.removed,
            pending.staged_seconds,
            pending.blocked_seconds,
        )

    def _finish_local(self, pending: _PendingSave) -> LocalSaveReport:
        """Return the report of a local checkpoint that is complete on all ranks."""
        assert pending.written is not None and self._local_tier is not None, "it has written"
        self._pending = None
        seconds = time.monotonic() - pending.snapshot.started
        return self._local_tier.report_saved(pending.snapshot.step, pending.written.nbytes, seconds)

    def _fail(self, pending: _PendingSave) -> CheckpointError:
        """Stop the writers that may still write, remove the temporary folder, and return the error,
        which is the same on every rank. Collective.

        Raises:
            RankError: the failure is a bug.
        """
        self.wait_staged()
        if pending.written is None or pending.failure is not None:
            self._stop_writer()
        assert pending.stage is not None, "it was started"
        concurrent.futures.wait([pending.stage])
        snapshot = pending.snapshot

        def raise_failure() -> None:
            if pending.failure is not None:
                raise pending.failure

        self._pending = None
        try:
            if pending.local is not None:
                raise_on_all_ranks(raise_failure, self._world)
            else:
                with explain_failure(snapshot.staging, snapshot.step, self._world):
                    raise_on_all_ranks(raise_failure, self._world)
        except CheckpointError as error:
            if self._writer is None:
                self._thread.submit(self._start_writer, self._region)
            if pending.local is not None and self._local_tier is not None:
                return self._local_tier.discard(pending.local.staging, snapshot.step, error)
            return error
        raise AssertionError("a rank has failed")

    def _stop_writer(self) -> None:
        """Kill the writer. If it does not end, its memory is left to it."""
        writer, self._writer, self._copy_port = self._writer, None, None
        if writer is None:
            return
        has_ended = writer.kill()
        self._thread.submit(int).result()  # no task of the thread uses the socket any more
        writer.close(wait=False)
        if not has_ended:
            _log.warning("writer process %d does not end; its memory is not reused", writer.pid)
            self._region = StagingRegion(self._plan.nbytes, self._device)
            self._thread.submit(self._region.populate)

"""Writer process of asynchronous saves: hashes and writes the boxes of one rank from shared memory,
and commits the checkpoint on rank 0. It is started once per rank and never imports torch.

The rank sends commands through a socket and reads reports from it. If the rank ends, the writer
first finishes the save whose tensors it has received, then it ends.
"""

import contextlib
import ctypes
import hashlib
import logging
import mmap
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path

from megalith import storage
from megalith.checkpoint.commit import FolderTexts, Retention, commit_folder
from megalith.checkpoint.copies import CopyServer, PeerAddress, send_copy
from megalith.checkpoint.local_table import LocalTable, commit_local_folder, explain_full
from megalith.checkpoint.manifest import (
    PARTS,
    StoredBox,
    StoredFile,
    StoredTensor,
    WrittenPart,
    dump_part,
    merge_tensors,
    parse_part,
    part_name,
)
from megalith.errors import CheckpointError
from megalith.object_store import StorePath
from megalith.plan.shards import Box
from megalith.storage import StoragePath

# --- commands of the rank


@dataclass(frozen=True, slots=True)
class PlannedBox:
    """One box in the shared memory, and the bytes around its values in `torch.save` format."""

    box: Box
    start: int
    """Offset of its values in the shared memory."""
    nbytes: int
    prefix: bytes
    suffix: bytes


@dataclass(frozen=True, slots=True)
class StagedTensor:
    """A tensor of the rank's entries, with the boxes that the rank writes, possibly none."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[PlannedBox, ...]


@dataclass(frozen=True, slots=True)
class WritePlan:
    """What a rank writes in each save; it depends only on names, shapes, dtypes and layout."""

    tensors: tuple[StagedTensor, ...]
    digest: str
    """Hash of all this."""


@dataclass(frozen=True, slots=True)
class CommitJob:
    """How rank 0 completes the checkpoint."""

    texts: FolderTexts
    retention: Retention
    world_size: int


@dataclass(frozen=True, slots=True)
class SaveJob:
    """A save whose values are complete in the shared memory."""

    staging: StoragePath
    step: int
    rank: int
    commit: CommitJob | None
    """Set on rank 0."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Command to complete the checkpoint of the last job, after all ranks have written it."""


@dataclass(frozen=True, slots=True)
class ServeCopies:
    """Command to receive the copies of other ranks."""

    host: str
    """Address of this machine at which the writers of the peers reach it."""
    secret: bytes
    """Of the run; proves that a connection is from one of its writers."""


@dataclass(frozen=True, slots=True)
class LocalJob:
    """A local checkpoint whose values are complete in the shared memory."""

    staging: Path
    table: LocalTable
    """Without boxes, which the writer adds."""

    state: bytes
    peers: tuple[PeerAddress, ...]
    """Ranks that store copies of this rank's boxes."""

    sources: tuple[int, ...]
    """Ranks of whose boxes this rank stores copies."""


Command = WritePlan | SaveJob | Commit | ServeCopies | LocalJob

# --- reports of the writer


@dataclass(frozen=True, slots=True)
class WriteProgress:
    """The writer has written more bytes."""


@dataclass(frozen=True, slots=True)
class PartReport:
    """This rank's part is on disk."""

    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CommitReport:
    """The checkpoint is complete."""

    path: StoragePath
    nbytes: int
    removed: tuple[StoragePath, ...]


@dataclass(frozen=True, slots=True)
class CopyPort:
    """The writer receives copies at this port."""

    port: int


@dataclass(frozen=True, slots=True)
class JobFailure:
    """The job failed; the process continues."""

    error: Exception


@dataclass(frozen=True, slots=True)
class LoggedLine:
    """A log record, which the rank logs."""

    logger: str
    level: int
    text: str


Report = WriteProgress | PartReport | CommitReport | CopyPort | JobFailure | LoggedLine

_CHUNK_NBYTES = 2**20
"""Bytes that are hashed and then written while they are in the processor's cache."""

_PROGRESS_S = 0.5
"""Seconds between reports of progress (heuristic: much less than a timeout)."""

_POLL_S = 0.2
"""Seconds between checks whether the rank, or a table of another rank, exists (heuristic)."""

_NICE = 10
"""Priority below that of training, as Megatron's --async-ckpt-cpu-priority."""

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_IDLE = 3 << 13
"""Number of the system call, and the idle class, from Linux' ioprio.h; the C library has no
function for it."""


def divide_boxes(plan: WritePlan, num_files: int) -> list[list[tuple[str, PlannedBox]]]:
    """Divide the boxes of a plan, in their order, into files of about equal size; no file is
    empty."""
    boxes = [(tensor.key, box) for tensor in plan.tensors for box in tensor.boxes]
    total = sum(box.nbytes for _, box in boxes)
    files: list[list[tuple[str, PlannedBox]]] = [[] for _ in range(num_files)]
    done = 0
    for key, box in boxes:
        files[min(num_files - 1, done * num_files // max(1, total))].append((key, box))
        done += box.nbytes
    return [file for file in files if file]


def count_files(plan: WritePlan, num_threads: int, max_file_nbytes: int) -> int:
    """Return into how many files a plan is divided: one per thread, or more of at most about
    `max_file_nbytes` bytes (0: no limit)."""
    total = sum(box.nbytes for tensor in plan.tensors for box in tensor.boxes)
    return max(num_threads, -(-total // max_file_nbytes) if max_file_nbytes else 0)


def box_file_name(rank: int, number: int) -> str:
    """Return the name of a file of boxes."""
    return f"__{rank}_{number}.distcp"


def plan_files(
    plan: WritePlan, rank: int, num_files: int, hashes: Mapping[tuple[str, Box], str]
) -> WrittenPart:
    """Return the table of what a rank writes; a box without a hash in `hashes` gets an empty
    one."""
    boxes: dict[str, list[StoredBox]] = {tensor.key: [] for tensor in plan.tensors}
    files = {}
    for number, contents in enumerate(divide_boxes(plan, num_files)):
        name, offset = box_file_name(rank, number), 0
        for key, box in contents:
            nbytes = len(box.prefix) + box.nbytes + len(box.suffix)
            boxes[key].append(
                StoredBox(box.box, name, offset, nbytes, hashes.get((key, box.box), ""))
            )
            offset += nbytes
        files[name] = StoredFile(offset)
    tensors = {
        tensor.key: StoredTensor(tensor.shape, tensor.dtype, tuple(boxes[tensor.key]))
        for tensor in plan.tensors
    }
    return WrittenPart(plan.digest, tensors, files)


@dataclass
class CheckpointWriter:
    """State of a writer process."""

    connection: Connection
    region: memoryview
    """Shared memory of the rank; only read here."""

    rank_pid: int
    num_threads: int
    """Number of threads, each of which writes one file at a time."""

    drain_seconds: float
    """Time to finish a save after the rank has ended."""

    max_file_nbytes: int = 0
    """Length after which another file is begun; 0: none."""

    _plan: WritePlan = field(default=WritePlan((), ""), init=False)
    _checked_plans: tuple[str, ...] = field(default=(), init=False)
    """Plans of all ranks whose boxes were checked to cover every tensor once."""

    _copies: CopyServer | None = field(default=None, init=False)
    _secret: bytes = field(default=b"", init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _reported: float = field(default=0.0, init=False)

    def run(self) -> None:
        """Execute commands until the rank ends."""
        job: SaveJob | None = None
        while (command := self._receive()) is not None:
            if isinstance(command, WritePlan):
                self._plan = command
                continue
            try:
                if isinstance(command, SaveJob):
                    job = command
                    self._write(job)
                elif isinstance(command, LocalJob):
                    self._write_local(command)
                elif isinstance(command, ServeCopies):
                    self._secret = command.secret
                    self._copies = CopyServer(command.host, command.secret, self._report_progress)
                    self._report(CopyPort(self._copies.port))
                else:
                    assert job is not None and job.commit is not None, "a job comes first"
                    self._commit(job, job.commit)
                    job = None
            except (OSError, CheckpointError) as error:
                job = None
                self._report(JobFailure(error))
        if job is None or job.commit is None or isinstance(job.staging, StorePath):
            # The next run may save the same step under the same prefix of a store.
            return
        if self._wait_for_parts(job, job.commit):
            # The next run may read older checkpoints by now, so none is deleted; it may also have
            # removed the folder.
            with contextlib.suppress(OSError, CheckpointError):
                self._commit(job, job.commit, apply_retention=False)

    def _receive(self) -> Command | None:
        """Wait for the next command; None if the rank has ended."""
        try:
            while not self.connection.poll(_POLL_S):
                if os.getppid() != self.rank_pid:
                    return None
            command: Command = self.connection.recv()
        except (EOFError, OSError):
            return None
        return command

    def _report(self, report: Report) -> None:
        with self._lock, contextlib.suppress(OSError):  # the rank may have ended
            self.connection.send(report)

    def _report_progress(self) -> None:
        now = time.monotonic()
        if now - self._reported > _PROGRESS_S:
            self._reported = now
            self._report(WriteProgress())

    def _write(self, job: SaveJob) -> None:
        """Write the boxes and the table of this rank; synced to disk on return."""
        started = time.monotonic()
        num_files = count_files(self._plan, self.num_threads, self.max_file_nbytes)
        contents = divide_boxes(self._plan, num_files)
        hashes: dict[tuple[str, Box], str] = {}
        paths = [job.staging / box_file_name(job.rank, number) for number in range(len(contents))]
        with ThreadPoolExecutor(self.num_threads) as pool:
            for file_hashes in pool.map(self._write_file, paths, contents):
                hashes |= file_hashes
        part = plan_files(self._plan, job.rank, num_files, hashes)
        storage.write_new(job.staging / PARTS / part_name(job.rank), dump_part(part))
        nbytes = sum(file.nbytes for file in part.files.values())
        self._report(PartReport(nbytes, time.monotonic() - started))

    def _write_local(self, job: LocalJob) -> None:
        """Write the boxes of a local checkpoint, send them to the peers, store the copies that this
        rank receives, and complete the folder."""
        started, table = time.monotonic(), job.table
        assert self._copies is not None or not job.sources, "ServeCopies comes first"
        if self._copies is not None:
            self._copies.expect(table.save, job.staging, job.sources)
        contents = divide_boxes(self._plan, 1)
        hashes: dict[tuple[str, Box], str] = {}
        with explain_full(job.staging.parent.parent):
            for boxes in contents:
                hashes |= self._write_file(job.staging / box_file_name(table.rank, 0), boxes)
        parts = {table.rank: plan_files(self._plan, table.rank, 1, hashes)}
        for peer in job.peers:
            chunks = (
                chunk for boxes in contents for _, box in boxes for chunk in self._iter_sent(box)
            )
            send_copy(peer, self._secret, table.save, table.rank, parts[table.rank], chunks)
        if self._copies is not None:
            parts |= self._copies.wait(self._is_rank_alive)
        if not self._is_rank_alive():  # the next run may continue from an older step by now
            raise CheckpointError("The rank has ended.")
        commit_local_folder(job.staging, replace(table, parts=parts), job.state)
        nbytes = sum(file.nbytes for part in parts.values() for file in part.files.values())
        self._report(PartReport(nbytes, time.monotonic() - started))

    def _is_rank_alive(self) -> bool:
        return os.getppid() == self.rank_pid

    def _iter_sent(self, box: PlannedBox) -> Iterator[bytes | memoryview]:
        for chunk in self._iter_chunks(box):
            yield chunk
            self._report_progress()

    def _write_file(
        self, path: StoragePath, contents: Sequence[tuple[str, PlannedBox]]
    ) -> dict[tuple[str, Box], str]:
        """Write one file of boxes and return their hashes."""
        hashes, offset = {}, 0
        with storage.open_new(path) as file:
            for key, box in contents:
                digest, nbytes = hashlib.sha256(), 0
                for chunk in self._iter_chunks(box):
                    digest.update(chunk)
                    file.write(chunk)
                    nbytes += len(chunk)
                    self._report_progress()
                hashes[key, box.box] = digest.hexdigest()
                storage.begin_sync(file, offset, nbytes)
                offset += nbytes
            if isinstance(path, StorePath) and os.getppid() != self.rank_pid:
                raise CheckpointError(f"The rank has ended, so {path} is not stored.")
            storage.sync_file(file)
        return hashes

    def _iter_chunks(self, box: PlannedBox) -> Iterator[bytes | memoryview]:
        yield box.prefix
        stop = box.start + box.nbytes
        for start in range(box.start, stop, _CHUNK_NBYTES):
            yield self.region[start : min(start + _CHUNK_NBYTES, stop)]
        yield box.suffix

    def _commit(self, job: SaveJob, commit: CommitJob, *, apply_retention: bool = True) -> None:
        """Merge the tables of all ranks, complete the folder, and delete older checkpoints."""
        folder = job.staging / PARTS
        parts = []
        for rank in range(commit.world_size):
            path = folder / part_name(rank)
            parts.append(parse_part(storage.read_bytes(path), path))
        plans = tuple(part.plan for part in parts)
        tensors = merge_tensors(
            (part.tensors for part in parts), check_tiling=plans != self._checked_plans
        )
        self._checked_plans = plans
        files = {name: file for part in parts for name, file in part.files.items()}
        storage.remove_tree(folder)
        path, manifest = commit_folder(
            job.staging, job.step, tensors, files, commit.texts, world_size=len(parts)
        )
        nbytes = sum(file.nbytes for file in manifest.files.values())
        self._report(WriteProgress())
        removed = commit.retention.delete_old(path.parent) if apply_retention else []
        self._report(CommitReport(path, nbytes, tuple(removed)))

    def _wait_for_parts(self, job: SaveJob, commit: CommitJob) -> bool:
        """Wait for the tables of all ranks after this rank has ended; return whether they
        exist."""
        deadline = time.monotonic() + self.drain_seconds
        names = {part_name(rank) for rank in range(commit.world_size)}
        while time.monotonic() < deadline:
            if names <= set(storage.list_names(job.staging / PARTS)):
                return True
            if not storage.is_folder(job.staging):  # the next run has removed it
                return False
            time.sleep(_POLL_S)
        return False


class _ReportHandler(logging.Handler):
    """Sends log records to the rank."""

    def __init__(self, writer: CheckpointWriter) -> None:
        super().__init__(logging.INFO)
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        self._writer._report(LoggedLine(record.name, record.levelno, record.getMessage()))


def lower_priority() -> None:
    """Set a low CPU priority and the idle I/O class, where the system supports them."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(_NICE)
    number = _IOPRIO_SET.get(platform.machine()) if sys.platform == "linux" else None
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _IOPRIO_IDLE)


def main(arguments: Sequence[str]) -> None:
    """Run a writer process with the file descriptors and numbers that the rank passes."""
    socket, region, nbytes, rank_pid, num_threads, max_file_nbytes = map(int, arguments[:6])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the rank finishes its save after such a signal
    lower_priority()
    memory = mmap.mmap(region, nbytes, access=mmap.ACCESS_READ)
    writer = CheckpointWriter(
        Connection(socket),
        memoryview(memory),
        rank_pid,
        num_threads,
        float(arguments[6]),
        max_file_nbytes,
    )
    logging.basicConfig(handlers=[_ReportHandler(writer)], level=logging.INFO)
    logging.captureWarnings(capture=True)  # such as a file system without fsync
    writer.run()


if __name__ == "__main__":
    # The classes of messages belong to the module, not to the script.
    from megalith.checkpoint import writer as module

    module.main(sys.argv[1:])

"""Saves checkpoints: every rank writes its boxes into a temporary folder, which one rename
completes; retention deletes old checkpoints."""

import hashlib
import json
import logging
import pickle
import platform
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TypeVar, cast

import torch
from torch import Tensor

from megalith import __version__, storage
from megalith.checkpoint import format as layout
from megalith.checkpoint.commit import (
    FolderTexts,
    Retention,
    choose_prefix,
    commit_folder,
    remove_checkpoint,
)
from megalith.checkpoint.format import (
    CheckpointEntry,
    Manifest,
    StoredBox,
    StoredFile,
    StoredTensor,
    TensorPiece,
    as_bytes,
    iter_pieces,
    lengths,
)
from megalith.checkpoint.manifest import PARTS
from megalith.errors import CheckpointError
from megalith.parallel.group import Group, raise_on_all_ranks
from megalith.plan.shards import Box
from megalith.storage import StoragePath

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


BOX_NBYTES = 64 * 2**20
"""Larger boxes are split: a reader holds one box in memory, and one that needs few rows reads few
(heuristic)."""

_CHUNK_NBYTES = 2**20
"""Bytes that are hashed and then written while they are in the processor's cache. Untouched pages
of a mapped file are slow to write: 0.48 s of system time per GB instead of 0.26 (measured, Linux
6.18)."""

_ENVELOPE_NBYTES = 4096
"""Upper bound of the bytes that torch.save adds to a tensor (measured with torch 2.13: 1.6 kB)."""

KEEP_ALL = Retention()
"""Retention that deletes no checkpoint."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """Tensors and files that one rank has written."""

    tensors: dict[str, StoredTensor]
    """Every tensor of the rank's entries, with the boxes that it wrote, possibly none."""

    files: dict[str, StoredFile]


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Path, size and duration of a successful save."""

    path: StoragePath
    nbytes: int
    seconds: float
    removed: tuple[StoragePath, ...]
    """Older checkpoints that retention deleted; of an asynchronous save known to rank 0 only."""

    staged_seconds: float | None = None
    """Duration of the copy into host memory, while training continued; None: the save was
    synchronous."""

    blocked_seconds: float = 0.0
    """Time for which an asynchronous save delayed training."""

    def __str__(self) -> str:
        rate = layout.show_bytes(self.nbytes / max(self.seconds, 1e-9))
        if self.staged_seconds is not None:
            return (
                f"{self.path.name}: {layout.show_bytes(self.nbytes)} staged in "
                f"{self.staged_seconds:.1f} s, blocked {self.blocked_seconds:.1f} s, committed "
                f"after {self.seconds:.1f} s ({rate}/s)"
            )
        return (
            f"{self.path.name}: {layout.show_bytes(self.nbytes)} in {self.seconds:.1f} s ({rate}/s)"
        )


def ignore_progress() -> None:
    """Ignore that a part of a checkpoint was written."""


def save_checkpoint(
    folder: StoragePath,
    step: int,
    entries: Sequence[CheckpointEntry],
    state: Mapping[str, Any],  # JSON
    world: Group,
    *,
    config_text: str,
    auxiliary_files: Mapping[str, bytes] | None = None,
    retention: Retention = KEEP_ALL,
    report_progress: Callable[[], None] = ignore_progress,
) -> SaveReport:
    """Save `folder/step_NNNNNNN` from all ranks of `world`, and delete older checkpoints that
    `retention` does not keep.

    `state` must be the same on every rank. It is stored as JSON: tuples become lists, keys become
    strings. `auxiliary_files` are files such as the tokenizer's; rank 0 writes them.
    `report_progress` is called after each part that this rank has written. A save that is
    killed leaves the earlier checkpoints, and all or nothing of the new one.

    Raises:
        CheckpointError: on every rank with the same text; earlier checkpoints are unchanged and
            temporary files are removed.
    """
    snapshot = take_snapshot(folder, step, entries, state, world, copy=False)
    return commit_snapshot(
        snapshot,
        partial(write_snapshot, snapshot, report_progress),
        world,
        config_text=config_text,
        auxiliary_files=auxiliary_files,
        apply_retention=partial(retention.delete_old, folder),
    )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A rank's part of a checkpoint that is being saved, and the folder into which it is
    written."""

    staging: StoragePath
    step: int
    rank: int
    entries: tuple[CheckpointEntry, ...]
    """Tensors with their `Shard`s. They must not change before they are written."""

    state: Mapping[str, Any]  # JSON
    started: float
    """Time at which the save began, by time.monotonic()."""
    plan_digests: tuple[str, ...] = ()
    """What each rank writes, if writer processes write it."""


def take_snapshot(
    folder: StoragePath,
    step: int,
    entries: Sequence[CheckpointEntry],
    state: Mapping[str, Any],  # JSON
    world: Group,
    *,
    copy: bool = False,
    plan_digest: str = "",
) -> Snapshot:
    """Create the temporary folder of a checkpoint and return what this rank writes into it.
    Collective.

    With `copy`, the snapshot holds copies in host memory of the tensors that this rank writes, so
    that training can continue while they are written; without, it refers to the tensors.
    `plan_digest`: identifies what this rank writes, if a writer process does; then a folder for the
    tables of the ranks is created, too.

    Raises:
        CheckpointError: on every rank: there is too little space, or the state differs.
    """
    started = time.monotonic()
    staging = _name_staging(folder, step, world)
    with explain_failure(staging, step, world):
        plans = raise_on_all_ranks(lambda: _plan(entries, state, plan_digest), world)
        prepared = raise_on_all_ranks(
            _only_on_rank_0(lambda: _prepare(staging, plans), world), world
        )
        staging = prepared[0] or staging  # all ranks use rank 0's name
    if copy:
        entries = [
            replace(
                entry,
                tensor=entry.decode().tensor.detach().to("cpu", copy=entry.encoded is None),
                encoded=None,
            )
            if entry.is_writer
            else entry
            for entry in entries
        ]
    digests = tuple(plan.plan_digest for plan in plans)
    return Snapshot(staging, step, world.rank, tuple(entries), state, started, digests)


def _name_staging(folder: StoragePath, step: int, world: Group) -> StoragePath:
    """Return the temporary folder of a save, or in a store its prefix. Collective for a store.

    Raises:
        CheckpointError: on every rank: the store cannot be listed.
    """
    if isinstance(folder, Path):
        return folder / f"{layout.folder_name(step)}.tmp-{secrets.token_hex(4)}"
    try:
        choose = _only_on_rank_0(lambda: choose_prefix(folder, step), world)
        prefix = raise_on_all_ranks(choose, world)[0]
    except CheckpointError as error:
        raise CheckpointError(f"step {step} was not saved to {folder}. {error}") from error
    assert prefix is not None
    return prefix


def write_snapshot(
    snapshot: Snapshot, report_progress: Callable[[], None] = ignore_progress
) -> WrittenFiles:
    """Write this rank's part of a checkpoint; synced to disk on return.

    It does not communicate, so that it may run in another thread.
    """
    return write_boxes(snapshot.staging, snapshot.rank, snapshot.entries, report_progress)


def commit_snapshot(
    snapshot: Snapshot,
    written: Callable[[], WrittenFiles],
    world: Group,
    *,
    config_text: str,
    auxiliary_files: Mapping[str, bytes] | None = None,
    apply_retention: Callable[[], list[StoragePath]] = list,
) -> SaveReport:
    """Turn the temporary folder into a checkpoint, after all ranks have written their parts.
    Collective.

    `written`: writes this rank's part, or waits for it, and returns the result of
    `write_snapshot`. `apply_retention`: deletes older checkpoints and returns them; on rank 0.

    Raises:
        CheckpointError: on every rank with the same text; earlier checkpoints are unchanged and
            temporary files are removed.
    """
    staging, step = snapshot.staging, snapshot.step

    def complete(parts: Sequence[WrittenFiles]) -> tuple[StoragePath, int, tuple[StoragePath, ...]]:
        path, manifest = commit(staging, step, parts, snapshot.state, config_text, auxiliary_files)
        nbytes = sum(file.nbytes for file in manifest.files.values())
        return path, nbytes, tuple(apply_retention())

    with explain_failure(staging, step, world):
        parts = raise_on_all_ranks(written, world)
        committed = raise_on_all_ranks(_only_on_rank_0(lambda: complete(parts), world), world)[0]
    assert committed is not None
    path, nbytes, removed = committed
    return SaveReport(path, nbytes, time.monotonic() - snapshot.started, removed)


@contextmanager
def explain_failure(staging: StoragePath, step: int, world: Group) -> Iterator[None]:
    """Remove the temporary folder after a failure, and name the newest checkpoint in the error."""
    try:
        yield
    except CheckpointError as error:
        if world.rank == 0:
            _discard(staging)
        folder = staging.parent
        raise CheckpointError(
            f"step {step} was not saved to {folder}. {error}\n{_last_good(folder)}"
        ) from error


def write_boxes(
    staging: StoragePath,
    rank: int,
    entries: Sequence[CheckpointEntry],
    report_progress: Callable[[], None] = ignore_progress,
) -> WrittenFiles:
    """Write and hash this rank's boxes into one file of `staging`, or in a store into several of
    limited size; synced to disk on return. `report_progress` is called after each box."""
    boxes: dict[str, list[StoredBox]] = {entry.key: [] for entry in entries}
    todo = (
        (entry.key, piece)
        for entry in entries
        if entry.is_writer and entry.tensor.numel()
        for piece in _cut_pieces(entry)
    )
    files: dict[str, StoredFile] = {}
    waiting = next(todo, None)
    while waiting is not None:
        name = f"__{rank}_{len(files)}.distcp"
        with BoxFile(staging / name) as file:
            while waiting is not None and file.nbytes < storage.max_file_nbytes(staging):
                key, piece = waiting
                boxes[key].append(file.add(piece.box, [piece.values]))
                report_progress()
                waiting = next(todo, None)
        files[name] = StoredFile(file.nbytes)
    tensors = {
        entry.key: StoredTensor(entry.shard.shape, dtype_name(entry.dtype), tuple(boxes[entry.key]))
        for entry in entries
    }
    return WrittenFiles(tensors, files)


def _cut_pieces(entry: CheckpointEntry) -> Iterator[TensorPiece]:
    assert entry.tensor.dtype == entry.dtype, (entry.key, entry.tensor.dtype)
    return iter_pieces(entry, max(1, BOX_NBYTES // entry.tensor.element_size()))


class BoxFile:
    """Context manager of a new file of boxes, each in `torch.save` format and hashed; synced to
    disk on exit."""

    def __init__(self, path: StoragePath, *, hashes: bool = True) -> None:
        """`hashes` false: boxes have empty hashes, for formats that store none."""
        self._hashes = hashes
        self.name = path.name
        self.nbytes = 0
        self._file = storage.open_new(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._file:
            if error is None:
                storage.sync_file(self._file)

    def add(self, box: Box, values: Sequence[Tensor]) -> StoredBox:
        """Append a box, whose values are the concatenation of tensors of one dtype on any device.

        Raises:
            OSError: writing failed.
        """
        stream = _write_values(self._file, box, values, hashes=self._hashes)
        digest = "" if stream.hash is None else stream.hash.hexdigest()
        stored = StoredBox(box, self.name, self.nbytes, stream.nbytes, digest)
        storage.begin_sync(self._file, self.nbytes, stream.nbytes)
        self.nbytes += stream.nbytes
        return stored


def commit(
    staging: StoragePath,
    step: int,
    parts: Sequence[WrittenFiles],
    state: Mapping[str, Any],
    config_text: str,
    auxiliary_files: Mapping[str, bytes] | None = None,
) -> tuple[StoragePath, Manifest]:
    """Turn a folder into which every rank has written its part into a checkpoint; run by one rank.

    `auxiliary_files` are written and listed in the manifest with their hashes.

    Raises:
        CheckpointError: the parts overlap or leave a hole.
        OSError: writing failed; the folder is not a checkpoint then.
    """
    tensors = layout.merge_tensors(part.tensors for part in parts)
    files = {name: file for part in parts for name, file in part.files.items()}
    texts = FolderTexts(
        dump_metadata(tensors),
        dump_state(state),
        config_text.encode(),
        dict(auxiliary_files or {}),
        versions(),
    )
    return commit_folder(staging, step, tensors, files, texts, world_size=len(parts))


def dump_state(state: Mapping[str, Any]) -> bytes:  # JSON
    """Return the text of `state.json`."""
    return json.dumps(state, indent=1).encode()


def dump_metadata(tensors: Mapping[str, StoredTensor]) -> bytes:
    """Return the content of `.metadata`."""
    return pickle.dumps(dcp_metadata(tensors))


@dataclass(frozen=True, slots=True)
class StoredObject:
    """Bytes of a value that is not a tensor, in `torch.save` format."""

    file: str
    offset: int
    nbytes: int


def dcp_metadata(
    tensors: Mapping[str, StoredTensor], objects: Mapping[str, StoredObject] | None = None
) -> "Metadata":
    """Describe the same boxes as torch.distributed.checkpoint metadata, so that `dcp.load` can open
    the folder. `objects`: values that are not tensors, by key."""
    # takes a second to import; only rank 0 needs it
    from torch.distributed.checkpoint import (
        filesystem,
        metadata,
    )

    described: dict[str, metadata.STORAGE_TYPES] = {}
    # torch has no public name for it
    places: dict[metadata.MetadataIndex, filesystem._StorageInfo] = {}
    for key, tensor in tensors.items():
        chunks = []
        for stored in tensor.boxes:
            corner = torch.Size(start for start, _ in stored.box)
            chunks.append(metadata.ChunkStorageMetadata(corner, torch.Size(lengths(stored.box))))
            index = metadata.MetadataIndex(key, corner)
            places[index] = filesystem._StorageInfo(stored.file, stored.offset, stored.nbytes)
        properties = metadata.TensorProperties(dtype=layout.DTYPES[tensor.dtype])
        described[key] = metadata.TensorStorageMetadata(
            properties, torch.Size(tensor.shape), chunks
        )
    for key, value in (objects or {}).items():
        described[key] = metadata.BytesStorageMetadata()
        place = filesystem._StorageInfo(value.file, value.offset, value.nbytes)
        places[metadata.MetadataIndex(key)] = place
    return metadata.Metadata(
        described,
        planner_data={key: (key,) for key in described},
        storage_data=places,
        version="1.0.0",
    )


class _BoxStream:
    """File object for torch.save that hashes and counts the bytes, and inserts the values where
    torch seeks over them."""

    def __init__(self, file: BinaryIO, values: Sequence[Tensor], *, hashes: bool) -> None:
        self.file = file
        self.values = values
        self.hash = hashlib.sha256() if hashes else None
        self.nbytes = 0
        self.error: OSError | None = None
        """The first write error."""

    def write(self, data: bytes | memoryview) -> int:
        self.nbytes += len(data)
        try:
            for start in range(0, len(data), _CHUNK_NBYTES):
                chunk = data[start : start + _CHUNK_NBYTES]
                if self.hash is not None:
                    self.hash.update(chunk)
                self.file.write(chunk)
        except OSError as error:
            self.error = self.error or error
            raise
        return len(data)

    def seek(self, nbytes: int, whence: int) -> int:
        """Write the values where torch seeks over their space."""
        start = self.nbytes
        for values in self.values:
            for data in as_bytes(values):
                self.write(data)
        assert self.nbytes - start == nbytes, (self.nbytes, start, nbytes, whence)
        return self.nbytes

    def flush(self) -> None:
        """Do nothing: torch.save flushes after each tensor, the file is flushed once at its end."""


def _write_values(
    file: BinaryIO, box: Box, values: Sequence[Tensor], *, hashes: bool
) -> _BoxStream:
    """Append a box in torch.save format.

    Torch writes the archive of a tensor without values, which saves its checksum: weaker than ours,
    it took as long as writing.

    Raises:
        OSError: writing failed; torch itself raises an unexpected-position error instead.
    """
    stream = _BoxStream(file, values, hashes=hashes)
    try:
        with torch.serialization.skip_data():
            torch.save(torch.empty(lengths(box), dtype=values[0].dtype), cast(BinaryIO, stream))
    except RuntimeError as error:
        if stream.error is not None:
            raise stream.error from error
        raise
    return stream


@dataclass(frozen=True, slots=True)
class _Plan:
    """Size and state digests of what a rank will write."""

    nbytes: int
    state_digests: dict[str, str]
    """SHA-256 by top-level key of the state."""
    plan_digest: str


def _plan(entries: Sequence[CheckpointEntry], state: Mapping[str, Any], plan_digest: str) -> _Plan:
    nbytes = sum(
        entry.tensor.nbytes + _ENVELOPE_NBYTES * (1 + 2 * len(entry.shard.shape))
        for entry in entries
        if entry.is_writer
    )
    digests = {name: layout.sha256(json.dumps(value).encode()) for name, value in state.items()}
    return _Plan(nbytes, digests, plan_digest)


def _prepare(staging: StoragePath, plans: Sequence[_Plan]) -> StoragePath:
    """Create the folder after checking free space and that the state is equal on all ranks."""
    for rank, plan in enumerate(plans):
        differ = sorted(
            name for name, _ in plan.state_digests.items() ^ plans[0].state_digests.items()
        )
        if differ:
            raise CheckpointError(
                f"state {', '.join(dict.fromkeys(differ))} differs between ranks 0 and {rank}; one "
                "copy is stored, so it must be the same on all ranks. Pass only what all ranks "
                "share."
            )
    storage.make_folder(staging / PARTS if plans[0].plan_digest else staging)
    need, free = sum(plan.nbytes for plan in plans) * 1.05, storage.free_nbytes(staging)
    if need > free:
        raise CheckpointError(
            f"Not enough space: the checkpoint needs {layout.show_bytes(need)}, and "
            f"{staging.parent} has {layout.show_bytes(free)} free. Free some space, or set "
            "checkpoint.keep to a lower number."
        )
    return staging


def _only_on_rank_0(work: Callable[[], T], world: Group) -> Callable[[], T | None]:
    return work if world.rank == 0 else lambda: None


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the manifest."""
    name = layout.show_dtype(dtype)
    assert name in layout.DTYPES, name
    return name


def _discard(staging: StoragePath) -> None:
    try:
        remove_checkpoint(staging)
    except OSError as error:
        _log.warning(
            "%s could not be removed (%s); it is not a checkpoint, and the next start tries again",
            staging,
            error,
        )


def _last_good(folder: StoragePath) -> str:
    """Describe the newest checkpoint after a failed save."""
    complete = [
        path
        for path in layout.step_folders(folder).values()
        if storage.exists(path / layout.MANIFEST)
    ]
    return (
        "Earlier checkpoints are untouched; the newest is "
        f"{complete[-1].name if complete else 'none yet'}."
    )


def versions() -> dict[str, str]:
    """Return the versions that a manifest records."""
    return {
        "megalith": __version__,
        "torch": str(torch.__version__),  # a subclass of str, which unpickling would import
        "python": platform.python_version(),
    }

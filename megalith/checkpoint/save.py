"""Writing a checkpoint: every rank its boxes into a folder aside, which becomes a checkpoint by one rename."""

import hashlib
import json
import logging
import pickle
import platform
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

import torch
from torch import Tensor

from megalith import __version__, storage
from megalith.checkpoint import format as layout
from megalith.checkpoint import retention
from megalith.checkpoint.agree import together
from megalith.checkpoint.boxes import Entry, lengths, pieces
from megalith.checkpoint.format import Manifest, StoredBox, StoredFile, StoredTensor
from megalith.errors import CheckpointError
from megalith.parallel.group import Group

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

BOX_NBYTES = 64 * 2**20
"""Larger boxes are divided: a reader holds one at a time, and one that needs few rows reads few of them (guess)."""

_ENVELOPE_NBYTES = 4096
"""More than torch.save adds to a tensor (measured with torch 2.13: 1.6 kB)."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Written:
    """What one rank put into the folder."""

    tensors: dict[str, StoredTensor]
    """Every tensor it knows, with the boxes it wrote, which may be none."""

    files: dict[str, StoredFile]


@dataclass(frozen=True, slots=True)
class SaveReport:
    """A save that succeeded."""

    path: Path
    nbytes: int
    seconds: float
    removed: tuple[Path, ...]
    """Older checkpoints that retention deleted."""

    def __str__(self) -> str:
        rate = layout.show_bytes(self.nbytes / max(self.seconds, 1e-9))
        return f"{self.path.name}: {layout.show_bytes(self.nbytes)} in {self.seconds:.1f} s ({rate}/s)"


def save_checkpoint(
    folder: Path,
    step: int,
    entries: Sequence[Entry],
    state: Mapping[str, Any],  # JSON
    world: Group,
    *,
    config_text: str,
    keep: int | None,
    keep_every: int | None = None,
) -> SaveReport:
    """Write `folder/step_NNNNNNN` from all ranks of `world` and thin out older ones.

    `state` must be the same on every rank. It comes back as JSON has it: lists for tuples, text for keys. Killed at any
    point, this leaves the earlier checkpoints and either all or nothing of the new one.

    Raises:
        CheckpointError: on every rank with the same text; earlier checkpoints are untouched and nothing is left behind.
    """
    start = time.monotonic()
    staging = folder / f"{layout.folder_name(step)}.tmp-{secrets.token_hex(4)}"  # rank 0's is the one that is used
    try:
        plans = together(lambda: _plan(entries, state), world)
        staging = together(_on_rank_0(lambda: _prepare(staging, plans), world), world)[0] or staging
        parts = together(lambda: write_boxes(staging, world.rank, entries), world)
        done = together(
            _on_rank_0(lambda: _commit_and_thin(staging, step, parts, state, config_text, (keep, keep_every)), world),
            world,
        )[0]
    except CheckpointError as error:
        if world.rank == 0:
            _discard(staging)
        raise CheckpointError(f"step {step} was not saved to {folder}. {error}\n{_last_good(folder)}") from error
    assert done is not None
    path, nbytes, removed = done
    return SaveReport(path, nbytes, time.monotonic() - start, removed)


def write_boxes(staging: Path, rank: int, entries: Sequence[Entry]) -> Written:
    """Write this rank's boxes into one file of `staging`, hashing on the way; on the disk when this returns."""
    name = f"__{rank}_0.distcp"
    boxes: dict[str, list[StoredBox]] = {entry.key: [] for entry in entries}
    nbytes = 0
    todo = [entry for entry in entries if entry.mine and entry.tensor.numel()]
    if todo:
        with storage.open_new(staging / name) as file:
            for entry in todo:
                for piece in pieces(entry, max_numel=max(1, BOX_NBYTES // entry.tensor.element_size())):
                    stream = _write_values(file, _own_storage(piece.values))
                    digest = stream.hash.hexdigest()
                    boxes[entry.key].append(StoredBox(piece.box, name, nbytes, stream.nbytes, digest))
                    nbytes += stream.nbytes
            storage.sync_file(file)
    tensors = {
        entry.key: StoredTensor(entry.shard.shape, _dtype_name(entry.tensor), tuple(boxes[entry.key]))
        for entry in entries
    }
    return Written(tensors, {name: StoredFile(nbytes)} if todo else {})


def commit(
    staging: Path, step: int, parts: Sequence[Written], state: Mapping[str, Any], config_text: str
) -> tuple[Path, Manifest]:
    """Make a checkpoint of a folder into which every rank has written its part; run by one rank.

    Raises:
        CheckpointError: the parts overlap or leave a hole.
        OSError: the disk refused something; the folder is not a checkpoint then.
    """
    tensors = layout.merge_tensors(part.tensors for part in parts)
    files = {name: file for part in parts for name, file in part.files.items()}
    texts = {
        layout.METADATA: pickle.dumps(dcp_metadata(tensors)),
        layout.STATE: json.dumps(state, indent=1).encode(),
        layout.CONFIG: config_text.encode(),
    }
    for name, data in texts.items():
        storage.write_new(staging / name, data)
        files[name] = StoredFile(len(data), layout.sha256(data))
    manifest = Manifest(step, len(parts), tensors, files)
    storage.write_new(staging / layout.MANIFEST, layout.dump_manifest(manifest, _versions()))
    storage.sync_folder(staging)
    return _publish(staging, step), manifest


def dcp_metadata(tensors: Mapping[str, StoredTensor]) -> "Metadata":
    """The same boxes as torch.distributed.checkpoint describes them, so that `dcp.load` opens the folder."""
    from torch.distributed.checkpoint import filesystem, metadata  # takes a second, and only rank 0 needs it

    described: dict[str, metadata.STORAGE_TYPES] = {}
    places: dict[metadata.MetadataIndex, filesystem._StorageInfo] = {}  # torch has no public name for it
    for key, tensor in tensors.items():
        chunks = []
        for stored in tensor.boxes:
            corner = torch.Size(start for start, _ in stored.box)
            chunks.append(metadata.ChunkStorageMetadata(corner, torch.Size(lengths(stored.box))))
            index = metadata.MetadataIndex(key, corner)
            places[index] = filesystem._StorageInfo(stored.file, stored.offset, stored.nbytes)
        properties = metadata.TensorProperties(dtype=layout.DTYPES[tensor.dtype])
        described[key] = metadata.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
    return metadata.Metadata(
        described, planner_data={key: (key,) for key in tensors}, storage_data=places, version="1.0.0"
    )


class _HashedStream:
    """A file that hashes and counts what passes through; torch.save writes front to back, never seeking."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.hash = hashlib.sha256()
        self.nbytes = 0
        self.error: OSError | None = None
        """Why the disk first refused."""

    def write(self, data: bytes | memoryview) -> int:
        self.hash.update(data)
        self.nbytes += len(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        """torch.save asks for it after each tensor; the file is flushed once, at its end."""


def _write_values(file: BinaryIO, values: Tensor) -> _HashedStream:
    """Append what torch.save makes of `values`; gives the length and hash of it.

    Raises:
        OSError: the disk refused. torch itself reports a position it did not expect in its place.
    """
    stream = _HashedStream(file)
    try:
        torch.save(values, cast(BinaryIO, stream))  # needs write and flush only
    except RuntimeError as error:
        if stream.error is not None:
            raise stream.error from error
        raise
    return stream


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a rank is about to write."""

    nbytes: int
    state_digests: dict[str, str]
    """Per top-level name of the state."""


def _plan(entries: Sequence[Entry], state: Mapping[str, Any]) -> _Plan:
    nbytes = sum(
        entry.tensor.nbytes + _ENVELOPE_NBYTES * (1 + 2 * len(entry.shard.shape)) for entry in entries if entry.mine
    )
    digests = {name: layout.sha256(json.dumps(value).encode()) for name, value in state.items()}
    return _Plan(nbytes, digests)


def _prepare(staging: Path, plans: Sequence[_Plan]) -> Path:
    """Check what can be checked before anything is written, and make the folder; returns it."""
    for rank, plan in enumerate(plans):
        differ = sorted(name for name, _ in plan.state_digests.items() ^ plans[0].state_digests.items())
        if differ:
            raise CheckpointError(
                f"state {', '.join(dict.fromkeys(differ))} differs between ranks 0 and {rank}; "
                f"one copy is stored, so it must be the same on all ranks. Pass only what all ranks share."
            )
    storage.make_folder(staging)
    need, free = sum(plan.nbytes for plan in plans) * 1.05, storage.free_nbytes(staging)
    if need > free:
        raise CheckpointError(
            f"Not enough space: the checkpoint needs {layout.show_bytes(need)}, and {staging.parent} has "
            f"{layout.show_bytes(free)} free. Free some space, or set checkpoint.keep to a lower number."
        )
    return staging


def _commit_and_thin(
    staging: Path,
    step: int,
    parts: Sequence[Written],
    state: Mapping[str, Any],
    config_text: str,
    keep: tuple[int | None, int | None],
) -> tuple[Path, int, tuple[Path, ...]]:
    path, manifest = commit(staging, step, parts, state, config_text)
    removed = retention.apply(staging.parent, keep=keep[0], keep_every=keep[1])
    return path, sum(file.nbytes for file in manifest.files.values()), tuple(removed)


def _publish(staging: Path, step: int) -> Path:
    """Rename the finished folder to its final name, and point to it. An older save of the step makes way first."""
    folder, name = staging.parent, layout.folder_name(step)
    target, old = folder / name, folder / f"{name}.old-{secrets.token_hex(4)}"
    if target.exists():
        storage.rename(target, old)
    try:
        storage.rename(staging, target)
    except OSError:
        if old.exists():
            storage.rename(old, target)
        raise
    storage.sync_folder(folder)
    try:
        storage.remove_tree(old)
        storage.replace_file(folder / layout.LATEST, f"{name}\n".encode())
    except OSError as error:  # the checkpoint is there; both are made good when the run next starts
        _log.warning("%s is saved, but tidying up after it failed: %s", target, error)
    return target


def _on_rank_0(work: Callable[[], T], world: Group) -> Callable[[], T | None]:
    return work if world.rank == 0 else lambda: None


def _own_storage(values: Tensor) -> Tensor:
    """On the host, in a storage of exactly its size: torch.save writes whole storages."""
    values = values.cpu()
    return values if values.untyped_storage().nbytes() == values.nbytes else values.clone()


def _dtype_name(tensor: Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    assert name in layout.DTYPES, name
    return name


def _discard(staging: Path) -> None:
    try:
        storage.remove_tree(staging)
    except OSError as error:
        _log.warning(
            "%s could not be removed (%s); it is not a checkpoint, and the next start tries again", staging, error
        )


def _last_good(folder: Path) -> str:
    """What is left after a failed save."""
    complete = [path for path in layout.step_folders(folder).values() if (path / layout.MANIFEST).exists()]
    return f"Earlier checkpoints are untouched; the newest is {complete[-1].name if complete else 'none yet'}."


def _versions() -> dict[str, str]:
    return {"megalith": __version__, "torch": torch.__version__, "python": platform.python_version()}

"""Copies a checkpoint: every byte is hashed on the way, and the manifest is written last."""

import contextlib
import hashlib
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from megalith import storage
from megalith.checkpoint import format as layout
from megalith.checkpoint.commit import remove_checkpoint
from megalith.checkpoint.format import StoredBox, StoredFile
from megalith.checkpoint.load import Checkpoint
from megalith.errors import CheckpointError
from megalith.object_store import StorePath
from megalith.storage import StoragePath

_CHUNK_NBYTES = 8 * 2**20
"""Bytes that are read at a time (heuristic)."""


def copy_checkpoint(
    source: Checkpoint,
    target: StoragePath,
    *,
    on_copied: Callable[[int], None] = lambda nbytes: None,
) -> int:
    """Copy a checkpoint to the new folder `target` and return its bytes. The folder appears
    complete or not at all; in a store, its manifest is written last.

    Raises:
        CheckpointError: the target exists or has the name of another step, the source is damaged,
            or writing failed.
    """
    _check_target(source, target)
    in_store = isinstance(target, StorePath)
    staging = target if in_store else target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    is_complete = False
    files = source.manifest.files
    try:
        storage.make_folder(staging)
        need, free = sum(file.nbytes for file in files.values()), storage.free_nbytes(staging)
        if need > free:
            raise CheckpointError(
                f"{target.parent} has {layout.show_bytes(free)} free, and the copy needs "
                f"{layout.show_bytes(need)}. Free some space, or choose another target."
            )
        boxes = _list_boxes(source)
        total = 0
        for name, file in sorted(files.items()):
            if name == layout.METADATA and not storage.exists(source.path / name):
                continue  # not read by Megalith: see `Checkpoint.warnings`
            _copy_file(source.path / name, staging / name, file, boxes.get(name, ()), on_copied)
            total += file.nbytes
        manifest = storage.read_bytes(source.path / layout.MANIFEST)
        layout.parse_manifest(manifest, source.path / layout.MANIFEST)  # checks its hash
        storage.write_new(staging / layout.MANIFEST, manifest)
        storage.sync_folder(staging)
        if isinstance(staging, Path) and isinstance(target, Path):
            _check_target(source, target)
            storage.rename(staging, target)
            storage.sync_folder(target.parent)
        is_complete = True
    except OSError as error:
        raise CheckpointError(
            f"{target}: not copied ({error}). Free some space, or choose another target."
        ) from error
    finally:
        if not (in_store and is_complete):
            with contextlib.suppress(OSError) if in_store else contextlib.nullcontext():
                remove_checkpoint(staging)
    return total + len(manifest)


def _check_target(source: Checkpoint, target: StoragePath) -> None:
    """Check that nothing is at the target, and that its name is not that of another step."""
    if storage.is_folder(target) or storage.exists(target) or storage.is_link(target):
        raise CheckpointError(
            f"{target} already exists and is not overwritten. Choose another target, such as "
            f"{target / source.path.name} if it is a folder of checkpoints, or remove it."
        )
    name = layout.folder_name(source.step)
    if target.name.startswith("step_") and target.name != name:
        raise CheckpointError(
            f"{target}: {source.path} is of step {source.step}, and a run would take the copy for "
            f"one of another step. Use {target.with_name(name)}."
        )


def _list_boxes(source: Checkpoint) -> dict[str, list[StoredBox]]:
    """Return the stored boxes of each file in file order."""
    boxes: dict[str, list[StoredBox]] = {}
    for tensor in source.manifest.tensors.values():
        for box in tensor.boxes:
            boxes.setdefault(box.file, []).append(box)
    return {name: sorted(part, key=lambda box: box.offset) for name, part in boxes.items()}


def _copy_file(
    source: StoragePath,
    target: StoragePath,
    file: StoredFile,
    boxes: Sequence[StoredBox],
    on_copied: Callable[[int], None],
) -> None:
    """Copy one file; its hash, or the hashes of the boxes in it, must be those of the manifest."""
    end = 0
    with storage.open_new(target) as output:
        for box in boxes:
            _copy_range(source, output, (end, box.offset), None, on_copied)
            end = box.offset + box.nbytes
            _copy_range(source, output, (box.offset, end), box.sha256, on_copied)
        _copy_range(source, output, (end, file.nbytes), file.sha256, on_copied)
        storage.sync_file(output)


def _copy_range(
    source: StoragePath,
    output: BinaryIO,
    span: tuple[int, int],
    sha256: str | None,
    on_copied: Callable[[int], None],
) -> None:
    """Append bytes [start, stop) of a file to `output`, and check their hash if it is known."""
    digest = hashlib.sha256()
    start, stop = span
    for first in range(start, stop, _CHUNK_NBYTES):
        data = storage.mapped(source, first, min(_CHUNK_NBYTES, stop - first))
        digest.update(data)
        output.write(data)
        on_copied(len(data))
    if sha256 is not None and digest.hexdigest() != sha256:
        raise CheckpointError(
            f"{source}: the {stop - start:,} bytes from {start:,} on are damaged. SHA-256 expected "
            f"{sha256}, found {digest.hexdigest()}. Copy another checkpoint; `megalith checkpoint "
            "verify` lists the damage."
        )

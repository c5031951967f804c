"""Commit of a checkpoint: the manifest and the rename that complete a folder; retention, which
deletes old checkpoints; removal of what interrupted saves have left. Without torch, for the writer
processes of asynchronous saves."""

import logging
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megalith import storage
from megalith.checkpoint.manifest import (
    CONFIG,
    LATEST,
    MANIFEST,
    METADATA,
    STATE,
    Manifest,
    StoredFile,
    StoredTensor,
    dump_manifest,
    folder_name,
    is_complete,
    list_complete_checkpoints,
    read_pointer,
    sha256,
    step_folders,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FolderTexts:
    """Contents of the files of a checkpoint that are not tensors."""

    metadata: bytes
    """Describes the boxes for torch.distributed.checkpoint."""

    state: bytes
    config: bytes
    auxiliary_files: Mapping[str, bytes]
    """Files such as the tokenizer's, by name."""

    versions: Mapping[str, str]
    """Versions of the programs that save it."""


def commit_folder(
    staging: Path,
    step: int,
    tensors: dict[str, StoredTensor],
    files: Mapping[str, StoredFile],
    texts: FolderTexts,
    *,
    world_size: int,
) -> tuple[Path, Manifest]:
    """Turn a folder into which every rank has written its part into a checkpoint; run by one
    process.

    `tensors`, `files`: those of all ranks.

    Raises:
        OSError: writing failed; the folder is not a checkpoint then.
    """
    contents = dict(texts.auxiliary_files) | {
        METADATA: texts.metadata,
        STATE: texts.state,
        CONFIG: texts.config,
    }
    all_files = dict(files)
    for name, data in contents.items():
        storage.write_new(staging / name, data)
        all_files[name] = StoredFile(len(data), sha256(data))
    manifest = Manifest(step, world_size, tensors, all_files)
    storage.write_new(staging / MANIFEST, dump_manifest(manifest, texts.versions))
    storage.sync_folder(staging)
    return _rename_to_final(staging, step), manifest


def _rename_to_final(staging: Path, step: int) -> Path:
    """Rename the finished folder to its final name and update the pointer; an older save of the
    step is moved aside first."""
    folder, name = staging.parent, folder_name(step)
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
        storage.replace_file(folder / LATEST, f"{name}\n".encode())
    except OSError as error:  # the checkpoint is complete; the next start repeats both
        _log.warning("%s is saved, but tidying up after it failed: %s", target, error)
    return target


# --- retention: old checkpoints and leftovers of interrupted saves are deleted

PIN = ".keep"
"""A checkpoint that contains a file of this name is never deleted."""

_LEFTOVER = re.compile(r"(step_\d{7,})\.(tmp|old|trash)-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class Retention:
    """Which complete checkpoints are not deleted: the newest `keep` (None: all), multiples of
    `keep_every`, pinned ones, links, and the newest before the run diverged."""

    keep: int | None = None
    keep_every: int | None = None
    last_update: int | None = None
    """The last step that updated the weights, if later steps were skipped. The newest checkpoint up
    to that step is kept, because later ones may be of a divergent run."""

    def delete_old(self, folder: Path) -> list[Path]:
        """Delete the other complete checkpoints of a folder and return them. A failed deletion is a
        warning, and the next call tries again."""
        return [path for path in self.select_old(folder) if _delete(path)]

    def select_old(self, folder: Path) -> list[Path]:
        """Return the complete checkpoints of a folder that `delete_old` deletes, oldest first."""
        assert self.keep is None or self.keep >= 1, self.keep
        if self.keep is None:
            return []
        complete, last = list_complete_checkpoints(folder), self.last_update
        last_good = max((step for step in complete if last is None or step <= last), default=None)
        return [
            complete[step]
            for step in _to_delete(complete, self.keep, self.keep_every)
            if step != last_good
            and not complete[step].is_symlink()
            and not (complete[step] / PIN).exists()
        ]


def set_aside_damaged(path: Path) -> Path:
    """Rename a damaged checkpoint to step_NNNNNNN.damaged and update `latest`; return the new path.

    The folder is kept for inspection and no longer counts as a checkpoint; otherwise retention
    would count it as one of the newest and delete a good one instead. The caller must hold the
    run's lock.

    Raises:
        OSError: the folder cannot be renamed.
    """
    aside, number = path.with_name(f"{path.name}.damaged"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{number}")
    storage.rename(path, aside)
    storage.sync_folder(path.parent)
    _correct_pointer(path.parent)
    return aside


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove what killed saves have left, and restore a checkpoint that an interrupted overwrite
    moved aside.

    Corrects the pointer file if it does not name the newest complete checkpoint. The caller must
    hold the run's lock and must not have saved yet, so that no save is in progress. Returns the
    changed folders.
    """
    names = storage.list_names(folder)
    for name in names:
        if name.startswith(f"{LATEST}.tmp-"):
            storage.remove_file(folder / name)
    leftovers = [(name, match) for name in names if (match := _LEFTOVER.fullmatch(name))]
    for name, match in leftovers:
        path, final = folder / name, folder / match[1]
        if match[2] == "old" and not final.exists():
            storage.rename(path, final)
            _log.warning("recovered %s from an interrupted overwrite", final)
            continue
        trash = folder / f"{match[1]}.trash-{secrets.token_hex(4)}"
        try:
            # A writer that has outlived its run may be about to rename it to its final name.
            storage.rename(path, trash)
        except FileNotFoundError:
            continue
        storage.remove_tree(trash)
        _log.warning("removed %s, left by an interrupted save", path)
    _correct_pointer(folder)
    return [folder / name for name, _ in leftovers]


def _correct_pointer(folder: Path) -> None:
    """Make `latest` name the newest complete checkpoint, if there is one; a failure is a
    warning."""
    steps = reversed(step_folders(folder).items())
    newest = next((folder_name(step) for step, path in steps if is_complete(path)), None)
    named = read_pointer(folder)
    if newest in (None, named):
        return
    pointer = folder / LATEST
    try:
        storage.replace_file(pointer, f"{newest}\n".encode())
    except OSError as error:
        _log.warning("%s could not be corrected (%s); loading does not use it", pointer, error)
        return
    _log.warning(
        "%s named %r; corrected to %s, the newest complete checkpoint", pointer, named, newest
    )


def _to_delete(complete: Mapping[int, Path], keep: int, keep_every: int | None) -> list[int]:
    steps = sorted(complete)
    return [step for step in steps[:-keep] if keep_every is None or step % keep_every]


def _delete(path: Path) -> bool:
    """Delete a folder after renaming it, so that no reader sees an incomplete checkpoint."""
    trash = path.with_name(f"{path.name.partition('.')[0]}.trash-{secrets.token_hex(4)}")
    try:
        storage.rename(path, trash)
        storage.remove_tree(trash)
    except OSError as error:
        _log.warning("could not delete the old checkpoint %s: %s", path, error)
        return False
    return True

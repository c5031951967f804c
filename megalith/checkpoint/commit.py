"""Commit of a checkpoint: the manifest and the rename that complete a folder; retention, which
deletes old checkpoints; removal of what interrupted saves have left. Without torch, for the writer
processes of asynchronous saves."""

import errno
import logging
import math
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalith import storage
from megalith.checkpoint.manifest import (
    CONFIG,
    DAMAGED_MANIFEST,
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
    parse_step_name,
    read_pointer,
    sha256,
    step_folders,
)
from megalith.checkpoint.readers import list_being_read, remove_stale_markers
from megalith.object_store import StorePath
from megalith.storage import StoragePath

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
    staging: StoragePath,
    step: int,
    tensors: dict[str, StoredTensor],
    files: Mapping[str, StoredFile],
    texts: FolderTexts,
    *,
    world_size: int,
) -> tuple[StoragePath, Manifest]:
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
    text = dump_manifest(manifest, texts.versions)
    storage.write_new(staging / MANIFEST, text)
    if isinstance(staging, StorePath):
        return _publish_prefix(staging, step, text), manifest
    storage.sync_folder(staging)
    return _rename_to_final(staging, step), manifest


def _publish_prefix(prefix: StorePath, step: int, manifest: bytes) -> StorePath:
    """Check that a store has the manifest of a new checkpoint, update the pointer, and delete
    older saves of the step.

    Raises:
        OSError: the store does not have the manifest.
    """
    if storage.read_bytes(prefix / MANIFEST) != manifest:
        raise OSError(errno.EIO, "the store has another manifest than the one written", str(prefix))
    try:
        storage.replace_file(prefix.parent / LATEST, f"{prefix.name}\n".encode())
        for older in _list_saves(prefix.parent, step):
            if older != prefix:
                remove_checkpoint(older)
    except OSError as error:  # the checkpoint is complete; the next start repeats both
        _log.warning("%s is saved, but tidying up after it failed: %s", prefix, error)
    return prefix


def choose_prefix(folder: StorePath, step: int) -> StorePath:
    """Return the prefix for a new save of a step: step_NNNNNNN, or if objects have that prefix
    already, one with a revision that no other save has."""
    names = [*storage.list_names(folder), read_pointer(folder) or ""]
    revisions = [
        parsed[1]
        for name in names
        if (parsed := parse_step_name(name)) is not None and parsed[0] == step
    ]
    if not revisions and not storage.exists(folder / folder_name(step) / MANIFEST):
        return folder / folder_name(step)
    # The time makes it unique even if the listing is old.
    revision = max([int(time.time()), *(each + 1 for each in revisions)])
    return folder / f"{folder_name(step)}.r{revision:08x}"


def _list_saves(folder: StorePath, step: int) -> list[StorePath]:
    """Return the prefixes of all saves of a step, complete or not."""
    parsed = ((name, parse_step_name(name)) for name in storage.list_names(folder))
    return [folder / name for name, match in parsed if match is not None and match[0] == step]


def remove_checkpoint(path: StoragePath) -> None:
    """Delete a checkpoint, or what a failed save has left. In a store the manifest is deleted
    first, so that no reader sees an incomplete checkpoint.

    Raises:
        OSError: it cannot be deleted.
    """
    if isinstance(path, StorePath):
        storage.remove_file(path / MANIFEST)
    storage.remove_tree(path)


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
    `keep_every`, `best_steps`, pinned ones, links, those that another process reads, and the newest
    before the run diverged."""

    keep: int | None = None
    keep_every: int | None = None
    last_update: int | None = None
    """The last step that updated the weights, if later steps were skipped. The newest checkpoint up
    to that step is kept, because later ones may be of a divergent run."""

    rollback_before: tuple[int, ...] = ()
    """A rollback may restore a checkpoint up to each of these steps: the newest such checkpoint is
    kept, and the oldest later one, which replaces it when these steps have grown."""

    best_steps: frozenset[int] = frozenset()
    """Steps with the best values of an evaluation metric."""

    def delete_old(self, folder: StoragePath) -> list[StoragePath]:
        """Delete the other complete checkpoints of a folder and return them. A failed deletion is a
        warning, and the next call tries again."""
        return [path for path in self.select_old(folder) if _delete(path)]

    def select_old(self, folder: StoragePath) -> list[StoragePath]:
        """Return the complete checkpoints of a folder that `delete_old` deletes, oldest first."""
        assert self.keep is None or self.keep >= 1, self.keep
        if self.keep is None:
            return []
        complete, last = list_complete_checkpoints(folder), self.last_update
        last_good = max((step for step in complete if last is None or step <= last), default=None)
        kept = {last_good, *self._select_for_rollback(complete)}
        old = [
            complete[step]
            for step in _to_delete(complete, self.keep, self.keep_every)
            if step not in kept
            and step not in self.best_steps
            and not storage.is_link(complete[step])
            and not storage.exists(complete[step] / PIN)
        ]
        being_read = list_being_read(folder) if old else set()
        return [path for path in old if path.name not in being_read]

    def _select_for_rollback(self, steps: Iterable[int]) -> set[int]:
        """Return the steps of the checkpoints that rollbacks may need, now or later."""
        selected: set[int] = set()
        for limit in self.rollback_before:
            older = [step for step in steps if step <= limit]
            later = [step for step in steps if step > limit]
            selected |= {*([max(older)] if older else []), *([min(later)] if later else [])}
        return selected


class BestCheckpoints:
    """Steps of the checkpoints with the best values of an evaluation metric, best first; of equal
    values the earlier step.

    >>> best = BestCheckpoints("eval_loss", 2)
    >>> for step, loss in ((1, 3.0), (2, 2.0), (3, 2.5), (4, float("nan"))):
    ...     best.add(step, loss)
    >>> best.values
    {2: 2.0, 3: 2.5}
    """

    def __init__(self, metric: str, num_kept: int) -> None:
        """`metric`: a name in metrics.jsonl, of which the highest values are the best if it is an
        accuracy, else the lowest; `num_kept`: number of steps."""
        self.metric, self.num_kept = metric, num_kept
        self.is_higher_better = "_acc" in metric
        self.values: dict[int, float] = {}

    def add(self, step: int, value: float) -> None:
        """Add the value of a step; NaN is never one of the best."""
        if math.isnan(value):
            return
        self.values[step] = value
        sign = -1 if self.is_higher_better else 1
        best = sorted(self.values, key=lambda each: (sign * self.values[each], each))
        self.values = {each: self.values[each] for each in best[: self.num_kept]}

    def remove_after(self, step: int) -> None:
        """Remove the steps after `step`, which were discarded."""
        self.values = {each: value for each, value in self.values.items() if each <= step}

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        """Return the metric and its best values by step."""
        values = {str(step): value for step, value in self.values.items()}
        return {"metric": self.metric, "values": values}

    def restore(self, saved: Mapping[str, Any]) -> None:  # Any: JSON
        """Continue with the values of `as_json`, unless they are of another metric."""
        if saved.get("metric") == self.metric:
            for step, value in saved["values"].items():
                self.add(int(step), float(value))


def set_aside_damaged(path: StoragePath) -> StoragePath:
    """Rename a damaged checkpoint to step_NNNNNNN.damaged and update `latest`; return the new path.

    The folder is kept for inspection and no longer counts as a checkpoint; otherwise retention
    would count it as one of the newest and delete a good one instead. The caller must hold the
    run's lock.

    Raises:
        OSError: the folder cannot be renamed.
    """
    return set_aside(path, "damaged")


def set_aside(path: StoragePath, label: str) -> StoragePath:
    """Rename a checkpoint to step_NNNNNNN.LABEL, so that it no longer counts as one, and update
    `latest`; return the new path. In a store, its manifest is renamed.

    Raises:
        OSError: it cannot be renamed.
    """
    if isinstance(path, StorePath):
        return _set_aside_prefix(path)
    aside, number = path.with_name(f"{path.name}.{label}"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.{label}-{number}")
    storage.rename(path, aside)
    storage.sync_folder(path.parent)
    _correct_pointer(path.parent)
    return aside


def _set_aside_prefix(path: StorePath) -> StorePath:
    """Rename the manifest of a damaged checkpoint in a store, and return its new path."""
    aside = path / DAMAGED_MANIFEST
    try:
        contents = storage.read_bytes(path / MANIFEST)
    except OSError as error:
        contents = f"The manifest could not be read: {error}\n".encode()
    storage.replace_file(aside, contents)
    storage.remove_file(path / MANIFEST)
    _correct_pointer(path.parent)
    return aside


def discard_later(folder: StoragePath, step: int) -> None:
    """Delete the complete checkpoints of later steps than `step`, to which a run is rolled back;
    those that are pinned or linked are renamed to step_NNNNNNN.rolled_back.

    Raises:
        OSError: one of them cannot be deleted or renamed.
    """
    complete = list_complete_checkpoints(folder)
    later = [path for each, path in complete.items() if each > step]
    if later:
        storage.replace_file(folder / LATEST, f"{complete[step].name}\n".encode())
    for path in reversed(later):
        if storage.is_link(path) or storage.exists(path / PIN):
            set_aside(path, "rolled_back")
        elif isinstance(path, StorePath):
            remove_checkpoint(path)
        else:
            trash = path.with_name(f"{path.name.partition('.')[0]}.trash-{secrets.token_hex(4)}")
            storage.rename(path, trash)
            storage.sync_folder(path.parent)
            remove_checkpoint(trash)


def _remove_leftover_prefixes(folder: StorePath) -> list[StoragePath]:
    """Delete what interrupted saves and deletions have left in a store, and older saves of steps
    that were saved again."""
    removed: list[StoragePath] = []
    for name in storage.list_names(folder):
        if name.startswith(".probe-"):
            storage.remove_file(folder / name)
    steps = step_folders(folder)
    for step, newest in steps.items():
        for path in _list_saves(folder, step):
            is_saved = storage.exists(path / MANIFEST)
            if (is_saved and path == newest) or storage.exists(path / DAMAGED_MANIFEST):
                continue
            remove_checkpoint(path)
            text = "an older save of the step" if is_saved else "left by an interrupted save"
            _log.warning("removed %s, %s", path, text)
            removed.append(path)
    _correct_pointer(folder)
    return removed


def remove_leftovers(folder: StoragePath) -> list[StoragePath]:
    """Remove what killed saves have left, and restore a checkpoint that an interrupted overwrite
    moved aside.

    Corrects the pointer file if it does not name the newest complete checkpoint. The caller must
    hold the run's lock and must not have saved yet, so that no save is in progress. Returns the
    changed folders.
    """
    remove_stale_markers(folder)
    if isinstance(folder, StorePath):
        return list(_remove_leftover_prefixes(folder))
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


def _correct_pointer(folder: StoragePath) -> None:
    """Make `latest` name the newest complete checkpoint, if there is one; a failure is a
    warning."""
    paths = reversed(step_folders(folder).values())
    newest = next((_final_name(path) for path in paths if is_complete(path)), None)
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


def _final_name(path: StoragePath) -> str:
    """Return the name of a checkpoint's folder, without what an interrupted overwrite appends."""
    return path.name.partition(".old-")[0]


def _to_delete(complete: Mapping[int, StoragePath], keep: int, keep_every: int | None) -> list[int]:
    steps = sorted(complete)
    return [step for step in steps[:-keep] if keep_every is None or step % keep_every]


def _delete(path: StoragePath) -> bool:
    """Delete a folder after renaming it, so that no reader sees an incomplete checkpoint."""
    try:
        if isinstance(path, StorePath):
            remove_checkpoint(path)
            return True
        trash = path.with_name(f"{path.name.partition('.')[0]}.trash-{secrets.token_hex(4)}")
        storage.rename(path, trash)
        storage.remove_tree(trash)
    except OSError as error:
        _log.warning("could not delete the old checkpoint %s: %s", path, error)
        return False
    return True

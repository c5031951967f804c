"""Retention: deletes old checkpoints and what interrupted saves have left."""

import logging
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from megalith import storage
from megalith.checkpoint import format as layout
from megalith.checkpoint.load import is_complete, list_complete_checkpoints

PIN = ".keep"
"""A checkpoint that contains a file of this name is never deleted."""

_LEFTOVER = re.compile(r"(step_\d{7,})\.(tmp|old|trash)-[0-9a-f]{8}")

_log = logging.getLogger(__name__)


def apply(
    folder: Path, *, keep: int | None, keep_every: int | None, last_update: int | None = None
) -> list[Path]:
    """Delete all complete checkpoints except the newest `keep` (None: all) and multiples of
    `keep_every`.

    `last_update`: the last step that updated the weights, if later steps were skipped. The newest
    checkpoint up to that step is kept too, because later ones may be of a divergent run.

    Pinned checkpoints, links and incomplete folders are kept. A failed deletion is a warning, and
    the next call tries again. Returns the deleted folders.
    """
    assert keep is None or keep >= 1, keep
    if keep is None:
        return []
    complete = list_complete_checkpoints(folder)
    last_good = max(
        (step for step in complete if last_update is None or step <= last_update), default=None
    )
    removed = []
    for step in _to_delete(complete, keep, keep_every):
        if step == last_good:
            continue
        path = complete[step]
        if not path.is_symlink() and not (path / PIN).exists() and _delete(path):
            removed.append(path)
    return removed


def set_aside_damaged(path: Path) -> Path:
    """Rename a damaged checkpoint to step_NNNNNNN.damaged and update `latest`; return the new path.

    The folder is kept for inspection and no longer counts as a checkpoint; otherwise `apply` would
    count it as one of the newest and delete a good one instead. The caller must hold the run's
    lock.

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
        if name.startswith(f"{layout.LATEST}.tmp-"):
            storage.remove_file(folder / name)
    leftovers = [(name, match) for name in names if (match := _LEFTOVER.fullmatch(name))]
    for name, match in leftovers:
        path, final = folder / name, folder / match[1]
        if match[2] == "old" and not final.exists():
            storage.rename(path, final)
            _log.warning("recovered %s from an interrupted overwrite", final)
        else:
            storage.remove_tree(path)
            _log.warning("removed %s, left by an interrupted save", path)
    _correct_pointer(folder)
    return [folder / name for name, _ in leftovers]


def _correct_pointer(folder: Path) -> None:
    """Make `latest` name the newest complete checkpoint, if there is one; a failure is a
    warning."""
    steps = reversed(layout.step_folders(folder).items())
    newest = next((layout.folder_name(step) for step, path in steps if is_complete(path)), None)
    named = layout.read_pointer(folder)
    if newest in (None, named):
        return
    pointer = folder / layout.LATEST
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

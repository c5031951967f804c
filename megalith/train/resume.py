"""Resuming a run: opens its newest complete checkpoint, or an older one if its tensors are
damaged."""

import logging
from pathlib import Path

from megalith.checkpoint.consistency import raise_on_all_ranks
from megalith.checkpoint.load import (
    Checkpoint,
    find_latest,
    list_other_checkpoints,
    open_checkpoint,
)
from megalith.checkpoint.retention import set_aside_damaged
from megalith.errors import DamagedCheckpointError
from megalith.parallel.group import Group
from megalith.train.checkpoint_source import PROGRESS

_log = logging.getLogger(__name__)


def open_newest_checkpoint(folder: Path, world: Group) -> Checkpoint | None:
    """Open the newest complete checkpoint in `folder`; None if there is none. Collective over
    `world`.

    Raises:
        CheckpointError: there are checkpoints, but none is complete; or the newest has no training
            state.
    """
    path = raise_on_all_ranks(lambda: find_latest(folder) if world.rank == 0 else None, world)[0]
    if path is None:
        return None
    checkpoint = open_checkpoint(path)
    checkpoint.require_state(*PROGRESS)
    return checkpoint


def fall_back(damage: DamagedCheckpointError, world: Group) -> Checkpoint:
    """Rename a run's damaged checkpoint and open the next newest one. Collective over `world`.

    `damage`: the error that `Checkpoint.load_into` raised on every rank.

    Raises:
        DamagedCheckpointError: there is no other complete checkpoint; the damaged one is not
            renamed.
    """
    path = damage.path
    assert path is not None, "raised by Checkpoint.load_into"
    aside = raise_on_all_ranks(
        lambda: _set_aside_if_others(path) if world.rank == 0 else None, world
    )[0]
    if aside is None:
        raise damage
    older = open_newest_checkpoint(path.parent, world)
    assert older is not None, "list_other_checkpoints returned one"
    if world.rank == 0:
        text = "skipping checkpoint %s: %s It was renamed to %s. Resuming from %s."
        _log.warning(text, path.name, damage.reason, aside, older.path.name)
    return older


def _set_aside_if_others(path: Path) -> Path | None:
    return set_aside_damaged(path) if list_other_checkpoints(path) else None

"""Resuming a run: opens its newest complete checkpoint, or an older one if its tensors are
damaged; the training state besides tensors."""

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megalith.checkpoint.format import MANIFEST
from megalith.checkpoint.load import (
    Checkpoint,
    find_latest,
    list_other_checkpoints,
    open_checkpoint,
)
from megalith.checkpoint.save import set_aside_damaged
from megalith.config.checkpoint import CheckpointConfig
from megalith.config.train import TrainRun
from megalith.errors import CheckpointError, ConfigError, DamagedCheckpointError
from megalith.hf.peft import RECORD
from megalith.hf.pretrained import locate_source
from megalith.optim.schedule import learning_rate, schedule_lengths
from megalith.parallel.consistency import raise_on_all_ranks
from megalith.parallel.group import Group

# The training state besides tensors: counters. There are no random states, because random numbers
# are keyed.


@dataclass(slots=True)
class TrainState:
    """Counters of one run, saved with every checkpoint."""

    step: int = 0
    """Number of finished steps."""

    consumed_samples: int = 0
    """Number of rows read: the position in the data."""

    scheduled_samples: int = 0
    """Number of rows of steps that updated the weights: the position in the schedules."""

    tokens: int = 0
    """Number of tokens read."""

    skipped: int = 0
    """Number of steps without an update, because a gradient was not finite or there were no
    labels."""

    skipped_in_a_row: int = 0
    """Number of skipped steps since the last update."""

    def as_json(self) -> dict[str, int]:
        """Return the counters as JSON: this object's state_dict."""
        return asdict(self)

    @staticmethod
    def from_json(saved: dict[str, Any]) -> "TrainState":  # Any: whatever JSON holds
        """Return the counters of `as_json`; checkpoints before 2026-11-21 have no
        `skipped_in_a_row`."""
        counters = {"skipped_in_a_row": 0} | saved
        return TrainState(**{name: int(counters[name]) for name in TrainState.__slots__})


# `checkpoint.load` with `load_mode` progress or all: a run that continues at the step of another
# run's checkpoint.

PROGRESS = ("train", "optimizer_updates", "data", "order_samples", "tokenizer")
"""Keys that the state of a checkpoint must have for a run to continue at its step."""


def open_checkpoint_source(rules: CheckpointConfig, world: Group) -> Checkpoint | None:
    """Return the checkpoint at whose step a run starts; None: step 0. Collective over `world`.

    Raises:
        CheckpointError: on every rank: there is no such checkpoint, or it is not one of a run.
    """
    source = rules.load
    if rules.load_mode == "weights" or source is None:
        return None
    path = raise_on_all_ranks(lambda: locate_source(source) if world.rank == 0 else None, world)[0]
    assert path is not None
    settings = f"checkpoint.load_mode={rules.load_mode} with checkpoint.load={source}"
    if not (path / MANIFEST).exists():
        raise CheckpointError(
            f"{settings}: {path} holds weights only, so there is no step to continue from. Set "
            "checkpoint.load_mode=weights."
        )
    checkpoint = open_checkpoint(path)
    if RECORD in checkpoint.state:
        raise CheckpointError(
            f"{settings}: {path} holds LoRA adapters, and this run trains a full model. Set "
            "checkpoint.load_mode=weights to start from the merged model, or continue in the run's "
            "own folder."
        )
    if missing_keys := [name for name in PROGRESS if name not in checkpoint.state]:
        raise CheckpointError(
            f"{settings}: {path} holds weights only, so there is no step to continue from (its "
            f"state lacks {', '.join(missing_keys)}). Set checkpoint.load_mode=weights."
        )
    return checkpoint


def check_steps_left(run: TrainRun, checkpoint_source: Checkpoint, state: TrainState) -> None:
    """Check that the run has steps left after the checkpoint's step.

    Raises:
        ConfigError: train.steps is not larger than the checkpoint's step.
    """
    if state.step >= run.train.steps:
        raise ConfigError(
            f"train.steps={run.train.steps}: {checkpoint_source.path} is of step {state.step}, "
            f"where a run with checkpoint.load_mode={run.checkpoint.load_mode} continues. Set "
            f"train.steps to more than {state.step}, or checkpoint.load_mode=weights."
        )


def describe_checkpoint_source(
    run: TrainRun, checkpoint_source: Checkpoint, state: TrainState, *, fresh: bool
) -> str:
    """Describe where a run starts: checkpoint, step, optimizer state (`fresh`: none) and learning
    rate.

    If the global batch size has changed, also describe where the schedule will end.
    """
    lengths = schedule_lengths(
        run.schedule, global_batch_size=run.train.global_batch_size, total_steps=run.train.steps
    )
    rate = learning_rate(run.schedule, state.scheduled_samples, lengths)
    optimizer = "with a new optimizer state" if fresh else "with its optimizer state"
    rows = run.train.global_batch_size
    last = state.scheduled_samples + (run.train.steps - state.step) * rows
    schedule_end = (
        ""
        if state.consumed_samples == state.step * rows
        else (
            f"; with the changed train.global_batch_size={rows}, train.steps={run.train.steps} "
            f"ends at sample {last} of the schedule's {run.train.steps * rows}"
        )
    )
    return (
        f"continuing from {checkpoint_source.path} at step {state.step} {optimizer}: "
        f"{state.consumed_samples} samples consumed, schedule at sample {state.scheduled_samples}, "
        f"learning rate {rate:.3g}{schedule_end}"
    )


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

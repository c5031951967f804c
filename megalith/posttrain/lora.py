"""A run that trains adapters: its base, and where the adapters start."""

import logging
from collections.abc import Sequence
from pathlib import Path

from megalith.checkpoint.agree import raise_on_all_ranks
from megalith.checkpoint.boxes import CheckpointEntry, pieces
from megalith.checkpoint.format import MANIFEST
from megalith.checkpoint.load import Checkpoint, open_checkpoint
from megalith.config.checkpoint import CheckpointConfig
from megalith.config.lora import LoraConfig
from megalith.config.model import ModelConfig
from megalith.errors import CheckpointError
from megalith.models.adapters import RECORD, Adapters, check_names, same_adapters
from megalith.models.pretrained import (
    adapters_in,
    base_of_adapters,
    base_record,
    load_pretrained,
    locate,
    open_pretrained,
    require_base,
    trained_with_forced_balancing,
)
from megalith.parallel.group import Group

_log = logging.getLogger(__name__)


def load_base(
    entries: Sequence[CheckpointEntry],
    rules: CheckpointConfig,
    world: Group,
    *,
    model: ModelConfig,
    saved: Checkpoint | None,
) -> tuple[dict[str, str], list[str]]:
    """Fill frozen weights from `rules.load`: which they are, for checkpoints, and how the models
    differ, as lines.

    Collective over `world`. `saved`: adapters that were trained beside such weights before.

    Raises:
        CheckpointError: on every rank: they are of another model, or not those that `saved` was
        trained beside.
    """
    assert rules.load is not None, "a rule asks for it"
    source = rules.load
    raise_on_all_ranks(lambda: _is_there(source) if world.rank == 0 else None, world)
    notes = load_pretrained(entries, source, world, model=model, rules=rules)
    record = raise_on_all_ranks(lambda: _record(source, saved) if world.rank == 0 else None, world)[
        0
    ]
    assert record is not None
    return record, notes


def _is_there(source: str) -> None:
    try:
        locate(source)
    except CheckpointError as error:
        raise CheckpointError(
            f"checkpoint.load={source}: {error} Adapters are trained beside weights: train a run "
            "of that name first, "
            f"or set checkpoint.load to others."
        ) from error


def _record(source: str, saved: Checkpoint | None) -> dict[str, str]:
    base = open_pretrained(locate(source))
    if saved is not None:
        require_base(saved.state[RECORD], base, saved.path)
    return base_record(base)


def load_adapters(
    entries: Sequence[CheckpointEntry],
    lora: LoraConfig,
    world: Group,
    *,
    model: ModelConfig,
    record: dict[str, str],
) -> tuple[str, ...]:
    """Fill adapters (roles `param` and `master`) from `lora.load`. Collective over `world`.

    `record`: which weights they are to be trained beside, as `load_base` says. Returns the settings
    under which chance chose experts while they were trained.

    Raises:
        CheckpointError: on every rank: they are of another rank, scale, targets, model or base.
    """
    source = lora.load
    assert source is not None
    path = raise_on_all_ranks(lambda: locate(source) if world.rank == 0 else None, world)[0]
    assert path is not None
    raise_on_all_ranks(lambda: _same_base(path, record) if world.rank == 0 else None, world)
    raise_on_all_ranks(
        lambda: _fill(entries, adapters_in(path, base=record["base"]), lora, model), world
    )
    return trained_with_forced_balancing(
        open_checkpoint(path) if (path / MANIFEST).exists() else None, model
    )


def _same_base(path: Path, record: dict[str, str]) -> None:
    """Refuse adapters that were trained beside other weights, as far as they say beside which."""
    theirs = base_of_adapters(path)
    if theirs is None:
        _log.warning(
            "lora.load=%s names no base that is here: its matrices are compared by name and shape "
            "alone",
            path,
        )
    elif theirs["fingerprint"] != record["fingerprint"]:
        raise CheckpointError(
            f"lora.load={path} holds adapters of another base: they were trained beside "
            f"{theirs['base']}, and "
            f"checkpoint.load is {record['base']}. Set checkpoint.load to the weights that they "
            "were trained with."
        )


def _fill(
    entries: Sequence[CheckpointEntry], found: Adapters, lora: LoraConfig, model: ModelConfig
) -> None:
    if differences := same_adapters(found, lora, model):
        raise CheckpointError(
            f"lora.load={lora.load}: other adapters than this run's: {'; '.join(differences)}. Set "
            "these to what is "
            f"there."
        )
    check_names(found, lora, model)
    for entry in entries:
        values = found.read(entry.shard.name)
        if tuple(values.shape) != entry.shard.shape:
            raise CheckpointError(
                f"lora.load={lora.load}: {entry.shard.name} is {list(values.shape)} there, "
                f"expected {list(entry.shard.shape)}. Use adapters of this model."
            )
        for piece in pieces(entry):
            piece.values.copy_(values[tuple(slice(start, stop) for start, stop in piece.box)])

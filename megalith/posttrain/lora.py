"""Loading of base weights and initial adapters for runs that train LoRA adapters."""

import logging
from collections.abc import Sequence
from pathlib import Path

from megalith.checkpoint.format import MANIFEST, CheckpointEntry, decode_for_loading, pieces
from megalith.checkpoint.load import Checkpoint, open_checkpoint
from megalith.config.checkpoint import CheckpointConfig
from megalith.config.lora import LoraConfig
from megalith.config.model import ModelConfig
from megalith.errors import CheckpointError
from megalith.hf.peft import RECORD, Adapters, check_adapter_names, describe_adapter_differences
from megalith.hf.pretrained import (
    build_base_record,
    check_base_weights,
    load_pretrained,
    locate_local_source,
    locate_source,
    open_adapters,
    open_pretrained,
    read_base_record,
    trained_with_forced_balancing,
)
from megalith.parallel.group import Group, raise_on_all_ranks

_log = logging.getLogger(__name__)


def load_base(
    entries: Sequence[CheckpointEntry],
    rules: CheckpointConfig,
    world: Group,
    *,
    model: ModelConfig,
    saved: Checkpoint | None,
) -> tuple[dict[str, str], list[str]]:
    """Load frozen weights from `rules.load`; returns their `build_base_record`, and
    notes on how the models differ.

    Collective over `world`. `saved`: a checkpoint of adapters that were trained with such weights.

    Raises:
        CheckpointError: on every rank: the weights are of another model, or are not the base of
            `saved`.
    """
    assert rules.load is not None, "a rule requires it"
    source = rules.load
    raise_on_all_ranks(lambda: _check_source_exists(source) if world.rank == 0 else None, world)
    notes = load_pretrained(entries, source, world, model=model, rules=rules)
    record = raise_on_all_ranks(lambda: _record(source, saved) if world.rank == 0 else None, world)[
        0
    ]
    assert record is not None
    return record, notes


def _check_source_exists(source: str) -> None:
    try:
        locate_source(source)
    except CheckpointError as error:
        raise CheckpointError(
            f"checkpoint.load={source}: {error} Adapters need base weights: train a run "
            "of that name first, or set checkpoint.load to an existing model."
        ) from error


def _record(source: str, saved: Checkpoint | None) -> dict[str, str]:
    base = open_pretrained(locate_source(source))
    if saved is not None:
        check_base_weights(saved.state[RECORD], base, saved.path)
    return build_base_record(base)


def load_adapters(
    entries: Sequence[CheckpointEntry],
    lora: LoraConfig,
    world: Group,
    *,
    model: ModelConfig,
    record: dict[str, str],
) -> tuple[str, ...]:
    """Load adapters (roles `param` and `master`) from `lora.load`. Collective over `world`.

    `record`: their base weights, as returned by `load_base`. Returns the settings that selected
    experts at random during their training.

    Raises:
        CheckpointError: on every rank: they have another rank, scale, targets, model or base.
    """
    source = lora.load
    assert source is not None
    locate = locate_local_source
    path = raise_on_all_ranks(lambda: locate(source) if world.rank == 0 else None, world)[0]
    assert path is not None
    raise_on_all_ranks(lambda: _check_same_base(path, record) if world.rank == 0 else None, world)
    raise_on_all_ranks(
        lambda: _load_entries(entries, open_adapters(path, base=record["base"]), lora, model), world
    )
    return trained_with_forced_balancing(
        open_checkpoint(path) if (path / MANIFEST).exists() else None, model
    )


def _check_same_base(path: Path, record: dict[str, str]) -> None:
    """Check that adapters were trained with these base weights, if they record them."""
    base = read_base_record(path)
    if base is None:
        _log.warning(
            "lora.load=%s names no local base: only names and shapes of its matrices are checked",
            path,
        )
    elif base["fingerprint"] != record["fingerprint"]:
        raise CheckpointError(
            f"lora.load={path} holds adapters of another base: they were trained with "
            f"{base['base']}, but "
            f"checkpoint.load is {record['base']}. Set checkpoint.load to the weights that they "
            "were trained with."
        )


def _load_entries(
    entries: Sequence[CheckpointEntry], adapters: Adapters, lora: LoraConfig, model: ModelConfig
) -> None:
    if differences := describe_adapter_differences(adapters, lora, model):
        raise CheckpointError(
            f"lora.load={lora.load}: the adapters differ from those of this run: "
            f"{'; '.join(differences)}. Set these to the values of the adapters."
        )
    check_adapter_names(adapters, lora, model)
    for entry in entries:
        values = adapters.read(entry.shard.name)
        if tuple(values.shape) != entry.shard.shape:
            raise CheckpointError(
                f"lora.load={lora.load}: {entry.shard.name} is {list(values.shape)}, "
                f"expected {list(entry.shard.shape)}. Use adapters of this model."
            )
        with decode_for_loading([entry]) as decoded:
            for piece in pieces(decoded[0]):
                piece.values.copy_(values[tuple(slice(start, stop) for start, stop in piece.box)])

"""Rules of cross-layer attention: which layers attend to the source layer, and unsupported
combinations."""

from collections.abc import Iterator

from megalith.config.cross import CrossConfig
from megalith.config.model import ModelConfig
from megalith.plan.unread import shown


def cross_problems(model: ModelConfig) -> list[str]:
    """Return one error text for each broken rule of cross-layer attention."""
    if model.cross is None:
        return []
    return [*_pattern_problems(model.cross, model.num_layers)] or [
        *_kind_problems(model, model.cross)
    ]


def _pattern_problems(own: CrossConfig, num_layers: int) -> Iterator[str]:
    if not 0 <= own.memory < num_layers:
        yield (
            f"model.cross.memory={own.memory} must be from 0 to {num_layers - 1}: later layers "
            f"attend to it, and model.num_layers={num_layers}. Set model.cross.memory to "
            f"{num_layers // 2}."
        )
        return
    later = num_layers - own.memory
    if len(own.layers) > later:
        yield (
            f"model.cross.layers has {len(own.layers)} values for the {later} layers from "
            "model.cross.memory="
            f"{own.memory} on: the rest would have no effect. Use {later} values or fewer."
        )
    elif own.layers and not any(own.layers):
        yield (
            f"model.cross.layers={shown(own.layers)}: no layer attends to the source layer. Remove "
            "model.cross, or set "
            f"model.cross.layers to [true, false] for every other layer."
        )


def _kind_problems(model: ModelConfig, own: CrossConfig) -> Iterator[str]:
    given = f"model.cross.memory={own.memory}"
    if model.block != "sequential":
        yield (
            f"{given} with model.block={model.block}: a layer attends to the source layer after "
            "its "
            "attention and before its "
            f"MLP. Set model.block=sequential, or remove model.cross."
        )
    if model.mla is not None:
        yield (
            f"{given} with model.mla.kv_rank={model.mla.kv_rank}: cross attention has keys and "
            "values per head. Remove "
            f"model.mla, or model.cross."
        )
    if model.mtp.num_layers > 0:
        yield (
            f"{given} with model.mtp.num_layers={model.mtp.num_layers}: MTP layers "
            "read other tokens "
            "than the source layer. Set model.mtp.num_layers=0, or remove model.cross."
        )
    incomplete_layers = [
        layer
        for layer in range(own.memory, model.num_layers)
        if model.uses_cross_layer_source(layer)
        and "none" in (model.attention_part(layer), model.mlp_part(layer))
    ]
    if incomplete_layers:
        yield (
            f"{given} with model.layers.attention={shown(model.layers.attention)} and "
            "model.layers.mlp="
            f"{shown(model.layers.mlp)}: layer {incomplete_layers[0]} attends to the source "
            "layer and has no "
            "attention or MLP. Set both "
            f"to full or linear there, or set its value in model.cross.layers to false."
        )

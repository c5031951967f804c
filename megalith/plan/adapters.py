"""Parameters and FLOPs of LoRA training with frozen base weights; no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megalith.config.lora import STACKED, LoraConfig, has_adapters, lora_layers, lora_targets
from megalith.config.model import ModelConfig
from megalith.config.optim import TRAIN_ALL, OptimConfig
from megalith.plan.costs import attention_flops, layer_flops, met, step_flops
from megalith.plan.frozen import TokenCounts, frozen_layer_flops, frozen_step_flops
from megalith.plan.parameters import HeldParameter, layer_parameters

FROM_X = ("q", "kv", "gate", "q_down", "kv_down")
"""Matrices of attention that read the layer's input."""


def with_adapters(
    held: Sequence[HeldParameter], model: ModelConfig, lora: LoraConfig | None
) -> list[HeldParameter]:
    """Return the parameters of a rank, frozen, and those of their adapters; unchanged without
    `lora`.

    If a matrix is split along outputs, B is split the same way; if along inputs, A is. The other
    one is replicated.
    """
    if lora is None:
        return list(held)
    parameters: list[HeldParameter] = []
    for one in held:
        if has_adapters(one.name, lora, model):
            parameters += _adapter_pair(one, lora.rank)
        parameters.append(replace(one, frozen=True))
    return parameters


def trained(parameters: Sequence[HeldParameter]) -> list[HeldParameter]:
    """Return the parameters that have gradients and optimizer state."""
    return [one for one in parameters if not one.frozen]


def _adapter_pair(one: HeldParameter, rank: int) -> Iterator[HeldParameter]:
    word = one.name.rsplit(".", 1)[1]
    a = HeldParameter(f"{one.name}.lora_a", STACKED.get(word, 1) * rank, one.columns)
    b = HeldParameter(f"{one.name}.lora_b", one.rows, rank)
    if word in ("o", "down"):
        yield replace(a, cut=one.cut)
        yield b
    else:
        yield a
        yield replace(b, cut=one.cut, summed=one.summed)


# --- operations


def trained_step_flops(
    config: ModelConfig,
    lora: LoraConfig | None,
    optim: OptimConfig = TRAIN_ALL,
    *,
    tokens: int,
    squared_lengths: int,
    windowed: int | None = None,
) -> int:
    """Return `step_flops` if only adapters, or the parameters that `optim` selects, are trained.

    Of the six FLOPs per matrix element and token, two are forward, two the input gradient and two
    the weight gradient. Frozen weights have no weight gradient. Input gradients are needed if an
    adapter comes before: everywhere above the first layer with adapters, nowhere below it, and
    inside it after an adapter. A and B cost all six; the input gradient of A in that layer is
    computed by backward although it is not used.
    """
    seen = TokenCounts(tokens, squared_lengths, windowed)
    all_flops = step_flops(
        config, tokens=tokens, squared_lengths=squared_lengths, windowed=windowed
    )
    if lora is None:
        return all_flops if optim.trains_all() else frozen_step_flops(config, optim, seen)
    numbers = range(config.num_layers)
    rest = all_flops - sum(
        _full_layer_flops(config, layer, seen) for layer in numbers
    )  # head, and multi-token predictions
    core = config.mtp.num_layers * _core_attention_flops(config, config.num_layers - 1, seen)
    return (
        sum(_trained_layer(config, lora, layer, seen) for layer in numbers)
        + (rest - core) * 2 // 3
        + core
    )


def trained_layer_flops(
    config: ModelConfig,
    lora: LoraConfig | None,
    layer: int,
    optim: OptimConfig = TRAIN_ALL,
    *,
    tokens: int,
    squared_lengths: int,
) -> int:
    """Return the FLOPs of one layer, by its global number."""
    seen = TokenCounts(tokens, squared_lengths, None)
    if lora is not None:
        return _trained_layer(config, lora, layer, seen)
    return (
        _full_layer_flops(config, layer, seen)
        if optim.trains_all()
        else frozen_layer_flops(config, optim, layer, seen)
    )


def _full_layer_flops(config: ModelConfig, layer: int, seen: TokenCounts) -> int:
    return layer_flops(
        config,
        layer,
        tokens=seen.tokens,
        squared_lengths=seen.squared_lengths,
        windowed=seen.windowed,
    )


def _core_attention_flops(config: ModelConfig, layer: int, seen: TokenCounts) -> int:
    return attention_flops(
        config,
        layer,
        tokens=seen.tokens,
        squared_lengths=seen.squared_lengths,
        windowed=seen.windowed,
    )


def _trained_layer(config: ModelConfig, lora: LoraConfig, layer: int, seen: TokenCounts) -> int:
    whole, core, first = (
        _full_layer_flops(config, layer, seen),
        _core_attention_flops(config, layer, seen),
        lora_layers(lora, config)[0],
    )
    if layer < first:
        return whole // 3
    added = 6 * seen.tokens * sum(one.numel for one in _adapters(config, lora, layer))
    spared = (
        _unneeded_flops(config, lora, layer, tokens=seen.tokens, core=core) if layer == first else 0
    )
    return core + (whole - core) * 2 // 3 + added - spared


def _unneeded_flops(
    config: ModelConfig, lora: LoraConfig, layer: int, *, tokens: int, core: int
) -> int:
    """Return the unneeded input gradients in the first layer with adapters, and of core attention
    if unneeded."""
    unneeded = {word for word, wanted in _needs_input_gradient(config, lora).items() if not wanted}
    held = layer_parameters(config, layer)
    readers = [one for one in held if one.matrix] + [
        one for one in _adapters(config, lora, layer) if _is_a(one)
    ]
    readers = [
        one for one in readers if ".cross." not in one.name
    ]  # attention and its adapters come before cross-layer attention
    spared = sum(2 * tokens * met(config, one) for one in readers if _word(one) in unneeded)
    return spared + (core * 2 // 3 if "core" in unneeded else 0)


def _needs_input_gradient(config: ModelConfig, lora: LoraConfig) -> dict[str, bool]:
    """Return, by matrix and for core attention, whether an adapter of the same layer comes before
    it."""
    targets = set(lora_targets(lora, config))
    reading = targets & {*FROM_X, "q_up", "kv_up"}
    up = config.block == "sequential" and bool(reading or "o" in targets)
    return {
        **dict.fromkeys(FROM_X, False),
        "q_up": "q_down" in targets,
        "kv_up": "kv_down" in targets,
        "core": bool(reading - {"gate"}),
        "o": bool(reading),
        "gate_up": up,
        "up": up,
        "down": up or bool(targets & {"gate_up", "up"}),
    }


def _adapters(config: ModelConfig, lora: LoraConfig, layer: int) -> list[HeldParameter]:
    """Return A and B of a layer, unsharded."""
    held = layer_parameters(config, layer)
    return trained(with_adapters(held, config, lora))


def _is_a(one: HeldParameter) -> bool:
    return one.name.endswith(".lora_a")


def _word(one: HeldParameter) -> str:
    """Return the last part of the name of a matrix, or of the matrix of an adapter."""
    return one.name.removesuffix(".lora_a").rsplit(".", 1)[1]

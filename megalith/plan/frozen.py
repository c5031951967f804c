"""Work of a training step with frozen parameters, and parameters and FLOPs of LoRA; no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from megalith.config.lora import STACKED, LoraConfig, has_adapters, lora_layers, lora_targets
from megalith.config.model import ModelConfig
from megalith.config.optim import TRAIN_ALL, OptimConfig
from megalith.plan.costs import attention_flops, head_flops, layer_flops, met, step_flops
from megalith.plan.parameters import HeldParameter, held_parameters, layer_parameters

BEFORE_LAYERS = ("embed.weight", "positions.weight", "relative.weight")
"""Lookup tables that all layers read."""

READ_BY_ATTENTION, READ_BY_MLP = 1, 8
"""Positions in a layer, in the order of `_position_in_layer`, of the matrices that read the
norms' outputs."""

CORE = 3
"""Position of core attention."""


def with_frozen(held: Sequence[HeldParameter], optim: OptimConfig) -> list[HeldParameter]:
    """Return the parameters of a rank, with `frozen` set for those that are not trained.

    A matrix stacked under a frozen one has a separate gradient buffer.
    """
    if optim.trains_all():
        return list(held)
    parameters: list[HeldParameter] = []
    for one in held:
        frozen = one.frozen or not optim.trains(one.name)
        previous_is_frozen = bool(parameters) and parameters[-1].frozen
        parameters.append(
            replace(one, frozen=frozen, stacked=one.stacked and not previous_is_frozen)
        )
    return parameters


@lru_cache(maxsize=8)  # called once per step
def trained_names(model: ModelConfig, optim: OptimConfig) -> frozenset[str]:
    """Return the names of the trained parameters of a model."""
    held = held_parameters(
        model, tp=1, tp_rank=0, layers=range(model.num_layers), embedding=True, loss=True
    )
    return frozenset(one.name for one in held if one.counts and optim.trains(one.name))


def first_trained_layer(model: ModelConfig, optim: OptimConfig) -> int:
    """Return the first layer that backward has to reach; num_layers if it reaches none."""
    return min(
        (_last_layer_of_backward(name, model) for name in trained_names(model, optim)),
        default=model.num_layers,
    )


def first_layer_of_backward(
    model: ModelConfig, optim: OptimConfig, lora: LoraConfig | None
) -> int | None:
    """Return the first layer that backward has to reach, in a run with adapters or frozen
    parameters; None if backward passes through all layers, to the embedding."""
    if lora is not None:
        return lora_layers(lora, model)[0]
    if optim.trains_all() or tables_trained(model, optim):
        return None
    return first_trained_layer(model, optim)


def tables_trained(model: ModelConfig, optim: OptimConfig) -> bool:
    """Return whether backward passes through all layers, to a trained lookup table."""
    return not trained_names(model, optim).isdisjoint(BEFORE_LAYERS)


def _last_layer_of_backward(name: str, model: ModelConfig) -> int:
    """Return the layer that the gradient of a parameter passes through last."""
    words = name.split(".")
    if words[0] == "layers":
        return int(words[1])
    if name in BEFORE_LAYERS:
        return 0
    if words[0] == "memory_norm" and model.cross is not None:
        return min(model.cross.memory, model.num_layers)
    return model.num_layers


# --- operations


class TokenCounts(NamedTuple):
    """Token counts of some documents, as arguments of `step_flops`."""

    tokens: int
    squared_lengths: int
    windowed: int | None


def frozen_step_flops(config: ModelConfig, optim: OptimConfig, seen: TokenCounts) -> int:
    """Return `step_flops` with frozen parameters.

    Of the six FLOPs per matrix element and token, two are forward, two are the input gradient, if a
    parameter before the matrix is trained, and two are the weight gradient, if the matrix is
    trained. The backward of core attention is computed completely or not at all, as in the kernels.
    """
    layers = sum(
        frozen_layer_flops(config, optim, layer, seen) for layer in range(config.num_layers)
    )
    table = "embed.weight" if config.tied_embeddings else "head.weight"
    trains_below_head = bool(trained_names(config, optim) - {"head.weight"})
    head = head_flops(config, seen.tokens) // 3
    heads = head * (1 + trains_below_head + optim.trains(table))
    return (
        layers
        + heads
        + sum(
            _mtp_flops(config, optim, depth, seen, heads) for depth in range(config.mtp.num_layers)
        )
    )


def frozen_layer_flops(
    config: ModelConfig, optim: OptimConfig, layer: int, seen: TokenCounts
) -> int:
    """Return the FLOPs of one layer, by its global number."""
    first = first_trained_layer(config, optim)
    if first < layer or tables_trained(config, optim):
        trained = [-1]  # something below it
    else:
        trained = [
            _position_in_layer(one.name)
            for one in layer_parameters(config, layer)
            if optim.trains(one.name)
        ]
    total = (
        _core_flops(config, layer, seen)
        // 3
        * (1 + 2 * _needs_input_gradient(CORE, trained, config))
    )
    for one in layer_parameters(config, layer):
        if one.matrix:
            parts = (
                1
                + _needs_input_gradient(_position_in_layer(one.name), trained, config)
                + optim.trains(one.name)
            )
            total += 2 * seen.tokens * met(config, one) * parts
    return total


def _mtp_flops(
    config: ModelConfig, optim: OptimConfig, depth: int, seen: TokenCounts, head: int
) -> int:
    """Return the FLOPs of one MTP layer: a layer like the last one, a projection of 2·h·h, and the
    head. Its inputs always have gradients."""
    last = config.num_layers - 1
    total = _core_flops(config, last, seen) + head
    for one in layer_parameters(config, last):
        if one.matrix:
            name = f"mtp.{depth}.layer.{one.name.split('.', 2)[2]}"
            total += 2 * seen.tokens * met(config, one) * (2 + optim.trains(name))
    return total + 4 * seen.tokens * config.hidden_size**2 * (
        2 + optim.trains(f"mtp.{depth}.project")
    )


def _core_flops(config: ModelConfig, layer: int, seen: TokenCounts) -> int:
    return attention_flops(
        config,
        layer,
        tokens=seen.tokens,
        squared_lengths=seen.squared_lengths,
        windowed=seen.windowed,
    )


def _needs_input_gradient(place: int, trained: Sequence[int], config: ModelConfig) -> bool:
    """Return whether a trained parameter comes before a position of its layer; attention and MLP
    may be parallel."""
    is_parallel_mlp = config.block != "sequential" and place >= READ_BY_MLP - 1
    return any(
        one < place and (one < 0 or not is_parallel_mlp or one >= READ_BY_MLP - 1)
        for one in trained
    )


def _position_in_layer(name: str) -> int:
    """Return the position of a parameter in its layer: 0 the first norm ... 9 the last matrix of an
    MLP."""
    part, _, word = name.split(".", 2)[2].partition(".")
    if part == "attention":
        if word.startswith(("o", "linear")):
            return 4
        return (
            2
            if word.startswith(("q_down_norm", "kv_down_norm", "q_up", "kv_up", "q_norm", "k_norm"))
            else 1
        )
    if part in ("mlp", "moe"):
        return 9 if word.rsplit(".", 1)[-1].startswith(("down", "latent_out")) else READ_BY_MLP
    fixed = {
        "attention_norm": 0,
        "attention_post_norm": 5,
        "cross_norm": 5,
        "cross": 6,
        "cross_post_norm": 6,
    }
    return fixed.get(part, 7 if part == "mlp_norm" else 10)


# Parameters and FLOPs of LoRA training with frozen base weights; no torch.

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
    unneeded = {word for word, wanted in _lora_input_gradients(config, lora).items() if not wanted}
    held = layer_parameters(config, layer)
    readers = [one for one in held if one.matrix] + [
        one for one in _adapters(config, lora, layer) if _is_a(one)
    ]
    readers = [
        one for one in readers if ".cross." not in one.name
    ]  # attention and its adapters come before cross-layer attention
    spared = sum(2 * tokens * met(config, one) for one in readers if _word(one) in unneeded)
    return spared + (core * 2 // 3 if "core" in unneeded else 0)


def _lora_input_gradients(config: ModelConfig, lora: LoraConfig) -> dict[str, bool]:
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

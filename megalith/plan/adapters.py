"""What a rank holds when adapters are trained beside frozen weights, and what a step then costs; no
torch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megalith.config.lora import STACKED, LoraConfig, has_adapters, lora_layers, lora_targets
from megalith.config.model import ModelConfig
from megalith.config.optim import TRAIN_ALL, OptimConfig
from megalith.plan.costs import attention_flops, layer_flops, met, step_flops
from megalith.plan.frozen import TokenCounts, frozen_layer_flops, frozen_step_flops
from megalith.plan.parameters import HeldParameter, layer_parameters

FROM_X = ("q", "kv", "gate", "q_down", "kv_down")
"""Matrices of attention that read what the layer was given."""


def with_adapters(
    held: Sequence[HeldParameter], model: ModelConfig, lora: LoraConfig | None
) -> list[HeldParameter]:
    """The parameters of a rank, frozen, and those of their adapters; without `lora` as they are.

    Of a matrix cut by outputs, B is cut as it is; of one cut by inputs, A is. The other half is
    whole on every rank.
    """
    if lora is None:
        return list(held)
    found: list[HeldParameter] = []
    for one in held:
        if has_adapters(one.name, lora, model):
            found += _pair(one, lora.rank)
        found.append(replace(one, frozen=True))
    return found


def trained(parameters: Sequence[HeldParameter]) -> list[HeldParameter]:
    """Those that have gradients and optimizer state."""
    return [one for one in parameters if not one.frozen]


def _pair(one: HeldParameter, rank: int) -> Iterator[HeldParameter]:
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
    """`step_flops` where adapters alone are trained, or what `optim` names; of all weights the
    same.

    Of the six operations for each element of a matrix and token, forward is two, the input's
    gradient two and the weight's two. Frozen weights have no gradient. Inputs need one where an
    adapter comes before them: all above the first layer with adapters, none below it, and inside it
    what follows an adapter. A and B cost all six, but for the gradient of what A reads in that
    layer, which backward computes all the same and nobody uses.
    """
    seen = TokenCounts(tokens, squared_lengths, windowed)
    whole = step_flops(config, tokens=tokens, squared_lengths=squared_lengths, windowed=windowed)
    if lora is None:
        return whole if optim.trains_all() else frozen_step_flops(config, optim, seen)
    numbers = range(config.num_layers)
    rest = whole - sum(
        _layer(config, layer, seen) for layer in numbers
    )  # head, and multi-token predictions
    core = config.mtp.num_layers * _core(config, config.num_layers - 1, seen)
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
    """The same of one layer, numbered over all stages."""
    seen = TokenCounts(tokens, squared_lengths, None)
    if lora is not None:
        return _trained_layer(config, lora, layer, seen)
    return (
        _layer(config, layer, seen)
        if optim.trains_all()
        else frozen_layer_flops(config, optim, layer, seen)
    )


def _layer(config: ModelConfig, layer: int, seen: TokenCounts) -> int:
    return layer_flops(
        config,
        layer,
        tokens=seen.tokens,
        squared_lengths=seen.squared_lengths,
        windowed=seen.windowed,
    )


def _core(config: ModelConfig, layer: int, seen: TokenCounts) -> int:
    return attention_flops(
        config,
        layer,
        tokens=seen.tokens,
        squared_lengths=seen.squared_lengths,
        windowed=seen.windowed,
    )


def _trained_layer(config: ModelConfig, lora: LoraConfig, layer: int, seen: TokenCounts) -> int:
    whole, core, first = (
        _layer(config, layer, seen),
        _core(config, layer, seen),
        lora_layers(lora, config)[0],
    )
    if layer < first:
        return whole // 3
    added = 6 * seen.tokens * sum(one.numel for one in _adapters(config, lora, layer))
    spared = _spared(config, lora, layer, tokens=seen.tokens, core=core) if layer == first else 0
    return core + (whole - core) * 2 // 3 + added - spared


def _spared(config: ModelConfig, lora: LoraConfig, layer: int, *, tokens: int, core: int) -> int:
    """Gradients of inputs that nobody needs in the first layer with adapters, and of attention, if
    nobody needs it."""
    needless = {word for word, wanted in _wanted(config, lora).items() if not wanted}
    held = layer_parameters(config, layer)
    readers = [one for one in held if one.matrix] + [
        one for one in _adapters(config, lora, layer) if _is_a(one)
    ]
    readers = [
        one for one in readers if ".cross." not in one.name
    ]  # attention, with its adapters, comes before a look
    spared = sum(2 * tokens * met(config, one) for one in readers if _word(one) in needless)
    return spared + (core * 2 // 3 if "core" in needless else 0)


def _wanted(config: ModelConfig, lora: LoraConfig) -> dict[str, bool]:
    """Of each matrix, and of attention's core, whether an adapter of the same layer comes before
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
    """A and B of a layer, whole."""
    held = layer_parameters(config, layer)
    return trained(with_adapters(held, config, lora))


def _is_a(one: HeldParameter) -> bool:
    return one.name.endswith(".lora_a")


def _word(one: HeldParameter) -> str:
    """Of a matrix, or of the one that an adapter is beside."""
    return one.name.removesuffix(".lora_a").rsplit(".", 1)[1]

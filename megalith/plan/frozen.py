"""FLOPs of a training step with frozen parameters, and parameters and FLOPs of LoRA; no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from megalith.config.lora import STACKED, LoraConfig, has_adapters, lora_layers, lora_targets
from megalith.config.model import ModelConfig
from megalith.config.optim import TRAIN_ALL, OptimConfig
from megalith.plan.costs import active_numel, core_flops, layer_flops, step_flops
from megalith.plan.layers import branch_parameters, branches
from megalith.plan.layers.base import CORE_POSITION, DocumentCounts, HeldParameter, LayerRank
from megalith.plan.layers.embedding import head_flops, mtp_projection_flops
from megalith.plan.parameters import held_parameters, layer_parameters

# --- LoRA: two matrices A and B beside a frozen matrix of attention or of an MLP

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
    for parameter in held:
        if has_adapters(parameter.name, lora, model):
            parameters += _adapter_pair(parameter, lora.rank)
        parameters.append(replace(parameter, frozen=True))
    return parameters


def _adapter_pair(parameter: HeldParameter, rank: int) -> Iterator[HeldParameter]:
    word = parameter.name.rsplit(".", 1)[1]
    a = HeldParameter(f"{parameter.name}.lora_a", STACKED.get(word, 1) * rank, parameter.columns)
    b = HeldParameter(f"{parameter.name}.lora_b", parameter.rows, rank)
    if word in ("o", "down"):
        yield replace(a, cut=parameter.cut)
        yield b
    else:
        yield a
        yield replace(b, cut=parameter.cut, summed=parameter.summed)


def is_lora_a(parameter: HeldParameter) -> bool:
    """Return whether a parameter is the matrix A of an adapter, which reads the adapted matrix's
    input."""
    return parameter.name.endswith(".lora_a")


def adapted_matrix(parameter: HeldParameter) -> str:
    """Return the last part of the name of a matrix, or of the matrix of an adapter."""
    return parameter.name.removesuffix(".lora_a").rsplit(".", 1)[1]


def lora_input_gradients(config: ModelConfig, lora: LoraConfig) -> dict[str, bool]:
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


BEFORE_LAYERS = "embed.weight", "positions.weight", "relative.weight"
"""Lookup tables that all layers read."""


def with_frozen(held: Sequence[HeldParameter], optim: OptimConfig) -> list[HeldParameter]:
    """Return the parameters of a rank, with `frozen` set for those that are not trained.

    A matrix stacked under a frozen one has a separate gradient buffer.
    """
    if optim.trains_all():
        return list(held)
    parameters: list[HeldParameter] = []
    for parameter in held:
        frozen = parameter.frozen or not optim.trains(parameter.name)
        previous_is_frozen = bool(parameters) and parameters[-1].frozen
        parameters.append(
            replace(parameter, frozen=frozen, stacked=parameter.stacked and not previous_is_frozen)
        )
    return parameters


@lru_cache(maxsize=8)  # called once per step
def trained_names(model: ModelConfig, optim: OptimConfig) -> frozenset[str]:
    """Return the names of the trained parameters of a model."""
    held = held_parameters(model)
    return frozenset(
        parameter.name for parameter in held if parameter.counts and optim.trains(parameter.name)
    )


def first_trained_layer(model: ModelConfig, optim: OptimConfig) -> int:
    """Return the first layer that backward has to reach; num_layers if it reaches none."""
    return min(
        (_last_backward_layer(name, model) for name in trained_names(model, optim)),
        default=model.num_layers,
    )


def first_backward_layer(
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


def _last_backward_layer(name: str, model: ModelConfig) -> int:
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


def frozen_step_flops(config: ModelConfig, optim: OptimConfig, counts: DocumentCounts) -> int:
    """Return `step_flops` with frozen parameters.

    Of the six FLOPs per matrix element and token, two are forward, two are the input gradient, if a
    parameter before the matrix is trained, and two are the weight gradient, if the matrix is
    trained. The backward of core attention is computed completely or not at all, as in the kernels.
    """
    layers = sum(
        frozen_layer_flops(config, optim, layer, counts) for layer in range(config.num_layers)
    )
    table = "embed.weight" if config.tied_embeddings else "head.weight"
    trains_below_head = bool(trained_names(config, optim) - {"head.weight"})
    head = head_flops(config, counts.tokens) // 3
    heads = head * (1 + trains_below_head + optim.trains(table))
    return (
        layers
        + heads
        + sum(
            _mtp_flops(config, optim, depth, counts, heads)
            for depth in range(config.mtp.num_layers)
        )
    )


class _Position(NamedTuple):
    """Place of a parameter in the order of computation of a layer."""

    branch: int
    """0 attention, 1 cross-layer attention, 2 MLP; -1: before the layer."""

    step: int
    """0 the norm before, then `LayerKind.position`, and last the norm after."""


BRANCHES = "attention", "cross", "mlp"
"""Branches in the order of computation."""

LAST_STEP = 1 << 10
"""Step of the norm after a layer, which is above those of all parameters of the layer."""

BEFORE_LAYER, CORE = _Position(-1, 0), _Position(0, CORE_POSITION)


def _positions(config: ModelConfig, layer: int) -> dict[str, _Position]:
    """Return the positions of the parameters of a layer, by canonical name."""
    positions: dict[str, _Position] = {}
    for branch in branches(config, layer):
        number = BRANCHES.index(branch.name)
        for parameter in branch_parameters(branch, LayerRank()):
            part, _, word = parameter.name.partition(".")
            fixed = {f"{branch.name}_norm": 0, f"{branch.name}_post_norm": LAST_STEP}
            step = fixed[part] if part in fixed else branch.kind.position(word)
            positions[f"layers.{layer}.{parameter.name}"] = _Position(number, step)
    return positions


def _needs_input_gradient(
    place: _Position, trained: Sequence[_Position], config: ModelConfig
) -> bool:
    """Return whether a trained parameter comes before a position of its layer; attention and MLP
    may be parallel."""
    mlp = BRANCHES.index("mlp")
    is_parallel_mlp = config.block != "sequential" and place.branch == mlp
    return any(
        position < place
        and (position == BEFORE_LAYER or not is_parallel_mlp or position.branch == mlp)
        for position in trained
    )


def frozen_layer_flops(
    config: ModelConfig, optim: OptimConfig, layer: int, counts: DocumentCounts
) -> int:
    """Return the FLOPs of one layer, by its global number."""
    held = layer_parameters(config, layer)
    positions = _positions(config, layer)
    below = first_trained_layer(config, optim) < layer or tables_trained(config, optim)
    trained = [positions[parameter.name] for parameter in held if optim.trains(parameter.name)]
    trained = [BEFORE_LAYER] if below else trained
    core = core_flops(config, layer, counts) // 3
    total = core * (1 + 2 * _needs_input_gradient(CORE, trained, config))
    for parameter in held:
        if parameter.matrix:
            needs_gradient = _needs_input_gradient(positions[parameter.name], trained, config)
            passes = 1 + needs_gradient + optim.trains(parameter.name)
            total += 2 * counts.tokens * active_numel(config, parameter) * passes
    return total


def _mtp_flops(
    config: ModelConfig, optim: OptimConfig, depth: int, counts: DocumentCounts, head: int
) -> int:
    """Return the FLOPs of one MTP layer: a layer like the last one, a projection of 2·h·h, and the
    head. Its inputs always have gradients."""
    last = config.num_layers - 1
    total = core_flops(config, last, counts) + head
    for parameter in layer_parameters(config, last):
        if parameter.matrix:
            name = f"mtp.{depth}.layer.{parameter.name.split('.', 2)[2]}"
            total += 2 * counts.tokens * active_numel(config, parameter) * (2 + optim.trains(name))
    passes = 2 + optim.trains(f"mtp.{depth}.project")
    return total + mtp_projection_flops(config, counts.tokens) // 3 * passes


# --- FLOPs of LoRA training with frozen base weights


def trained(parameters: Sequence[HeldParameter]) -> list[HeldParameter]:
    """Return the parameters that have gradients and optimizer state."""
    return [parameter for parameter in parameters if not parameter.frozen]


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
    counts = DocumentCounts(tokens, squared_lengths, windowed)
    all_flops = step_flops(
        config, tokens=tokens, squared_lengths=squared_lengths, windowed=windowed
    )
    if lora is None:
        return all_flops if optim.trains_all() else frozen_step_flops(config, optim, counts)
    numbers = range(config.num_layers)
    # The output head and the MTP layers.
    rest = all_flops - sum(layer_flops(config, layer, **counts._asdict()) for layer in numbers)
    core = config.mtp.num_layers * core_flops(config, config.num_layers - 1, counts)
    return (
        sum(_trained_layer(config, lora, layer, counts) for layer in numbers)
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
    counts = DocumentCounts(tokens, squared_lengths, None)
    if lora is not None:
        return _trained_layer(config, lora, layer, counts)
    return (
        layer_flops(config, layer, **counts._asdict())
        if optim.trains_all()
        else frozen_layer_flops(config, optim, layer, counts)
    )


def _trained_layer(
    config: ModelConfig, lora: LoraConfig, layer: int, counts: DocumentCounts
) -> int:
    whole, core, first = (
        layer_flops(config, layer, **counts._asdict()),
        core_flops(config, layer, counts),
        lora_layers(lora, config)[0],
    )
    if layer < first:
        return whole // 3
    added = 6 * counts.tokens * sum(parameter.numel for parameter in _adapters(config, lora, layer))
    spared = (
        _unneeded_flops(config, lora, layer, tokens=counts.tokens, core=core)
        if layer == first
        else 0
    )
    return core + (whole - core) * 2 // 3 + added - spared


def _unneeded_flops(
    config: ModelConfig, lora: LoraConfig, layer: int, *, tokens: int, core: int
) -> int:
    """Return the unneeded input gradients in the first layer with adapters, and of core attention
    if unneeded."""
    unneeded = {word for word, wanted in lora_input_gradients(config, lora).items() if not wanted}
    held = layer_parameters(config, layer)
    readers = [parameter for parameter in held if parameter.matrix] + [
        parameter for parameter in _adapters(config, lora, layer) if is_lora_a(parameter)
    ]
    # Cross-layer attention follows attention and its adapters, so it needs input gradients.
    readers = [parameter for parameter in readers if ".cross." not in parameter.name]
    spared = sum(
        2 * tokens * active_numel(config, parameter)
        for parameter in readers
        if adapted_matrix(parameter) in unneeded
    )
    return spared + (core * 2 // 3 if "core" in unneeded else 0)


def _adapters(config: ModelConfig, lora: LoraConfig, layer: int) -> list[HeldParameter]:
    """Return A and B of a layer, unsharded."""
    held = layer_parameters(config, layer)
    return trained(with_adapters(held, config, lora))

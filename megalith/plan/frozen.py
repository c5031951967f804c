"""Work of a training step with frozen parameters; no torch."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from megalith.config.model import ModelConfig
from megalith.config.optim import OptimConfig
from megalith.plan.costs import attention_flops, head_flops, met
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

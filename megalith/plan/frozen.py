"""What is left to do in a step when some parameters are not trained; no torch."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from megalith.config.model import ModelConfig
from megalith.config.optim import OptimConfig
from megalith.plan.costs import attention_flops, head_flops, met
from megalith.plan.parameters import HeldParameter, held_parameters, layer_parameters

BEFORE_LAYERS = ("embed.weight", "positions.weight", "relative.weight")
"""Tables that all layers read."""

READ_BY_ATTENTION, READ_BY_MLP = 1, 8
"""Places in a layer, in the order of `_place`, that read what its norms give."""

CORE = 3
"""The place of scores and their products with values."""


def with_frozen(held: Sequence[HeldParameter], optim: OptimConfig) -> list[HeldParameter]:
    """The parameters of a rank, frozen where they are not trained.

    Of a matrix under a frozen one, the gradient lies by itself.
    """
    if optim.trains_all():
        return list(held)
    found: list[HeldParameter] = []
    for one in held:
        frozen = one.frozen or not optim.trains(one.name)
        above = bool(found) and found[-1].frozen
        found.append(replace(one, frozen=frozen, stacked=one.stacked and not above))
    return found


@lru_cache(maxsize=8)  # asked for once a step
def trained_names(model: ModelConfig, optim: OptimConfig) -> frozenset[str]:
    """Names of the parameters of a model that are trained."""
    held = held_parameters(
        model, tp=1, tp_rank=0, layers=range(model.num_layers), embedding=True, loss=True
    )
    return frozenset(one.name for one in held if one.counts and optim.trains(one.name))


def first_trained_layer(model: ModelConfig, optim: OptimConfig) -> int:
    """The number of the first layer that backward has to reach; as many as there are layers where
    it reaches none."""
    return min(
        (_reaches(name, model) for name in trained_names(model, optim)), default=model.num_layers
    )


def tables_trained(model: ModelConfig, optim: OptimConfig) -> bool:
    """Whether backward goes through all layers, to a table that they read."""
    return not trained_names(model, optim).isdisjoint(BEFORE_LAYERS)


def _reaches(name: str, model: ModelConfig) -> int:
    """The layer that the gradient of a parameter comes through last."""
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
    """Some documents, as `step_flops` is told of them."""

    tokens: int
    squared_lengths: int
    windowed: int | None


def frozen_step_flops(config: ModelConfig, optim: OptimConfig, seen: TokenCounts) -> int:
    """`step_flops` where some parameters are not trained.

    Of the six operations for each element of a matrix and token, forward is two; the input's
    gradient, where something before the matrix is trained, two; and the weight's, where it is
    trained itself, two. Attention's backward is all done or not at all, as kernels do it.
    """
    layers = sum(
        frozen_layer_flops(config, optim, layer, seen) for layer in range(config.num_layers)
    )
    table = "embed.weight" if config.tied_embeddings else "head.weight"
    below = bool(trained_names(config, optim) - {"head.weight"})
    head = head_flops(config, seen.tokens) // 3
    heads = head * (1 + below + optim.trains(table))
    return (
        layers
        + heads
        + sum(_mtp(config, optim, depth, seen, heads) for depth in range(config.mtp.num_layers))
    )


def frozen_layer_flops(
    config: ModelConfig, optim: OptimConfig, layer: int, seen: TokenCounts
) -> int:
    """The same of one layer, numbered over all stages."""
    first = first_trained_layer(config, optim)
    if first < layer or tables_trained(config, optim):
        trained = [-1]  # something below it
    else:
        trained = [
            _place(one.name) for one in layer_parameters(config, layer) if optim.trains(one.name)
        ]
    total = _core(config, layer, seen) // 3 * (1 + 2 * _wanted(CORE, trained, config))
    for one in layer_parameters(config, layer):
        if one.matrix:
            parts = 1 + _wanted(_place(one.name), trained, config) + optim.trains(one.name)
            total += 2 * seen.tokens * met(config, one) * parts
    return total


def _mtp(config: ModelConfig, optim: OptimConfig, depth: int, seen: TokenCounts, head: int) -> int:
    """Of one MTP depths: a layer as the last one, 2·h·h and the head. Its
    inputs have gradients: whoever trains nothing before it or in it has no use for it."""
    last = config.num_layers - 1
    total = _core(config, last, seen) + head
    for one in layer_parameters(config, last):
        if one.matrix:
            name = f"mtp.{depth}.layer.{one.name.split('.', 2)[2]}"
            total += 2 * seen.tokens * met(config, one) * (2 + optim.trains(name))
    return total + 4 * seen.tokens * config.hidden_size**2 * (
        2 + optim.trains(f"mtp.{depth}.project")
    )


def _core(config: ModelConfig, layer: int, seen: TokenCounts) -> int:
    return attention_flops(
        config,
        layer,
        tokens=seen.tokens,
        squared_lengths=seen.squared_lengths,
        windowed=seen.windowed,
    )


def _wanted(place: int, trained: Sequence[int], config: ModelConfig) -> bool:
    """Whether something trained comes before a place of its layer; attention and MLP may lie side
    by side."""
    beside = config.block != "sequential" and place >= READ_BY_MLP - 1
    return any(one < place and (one < 0 or not beside or one >= READ_BY_MLP - 1) for one in trained)


def _place(name: str) -> int:
    """Where in a layer a parameter is read: 0 the first norm ... 9 the last matrix of an MLP."""
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

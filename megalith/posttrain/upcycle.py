"""Upcycling: the weights of a dense model as those of a mixture of experts that begins where the
dense model ended.

Source: Komatsuzaki et al. 2022, arXiv:2212.05055; experts that are a part of an MLP each: He et al.
2024, arXiv:2410.07524.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megalith.config.model import ModelConfig
from megalith.config.moe import MoEConfig
from megalith.errors import raise_all
from megalith.models.convert import Move, added
from megalith.models.decoder import Decoder, declared_parameters
from megalith.models.hf import Weights
from megalith.models.pretrained import Pretrained
from megalith.nn.init import init_param_
from megalith.parallel.mesh import mesh_of_one
from megalith.parallel.tensor import ParameterSpec
from megalith.plan.experts import moe_problems
from megalith.plan.grid import divisors
from megalith.plan.shards import Box
from megalith.plan.unread import reads_mlp_bias, unread_problems

Scale = Literal["spread", "down"]
"""Where the factor goes that makes up for the weights of a token's experts: into both matrices
of an expert, as the paper has it, so that they stay alike in size, or into the last, which
changes nothing of what the first computes."""

CUT = {"gate_up": 1, "up": 0, "down": 1, "gate_up_bias": 1, "up_bias": 0, "down_bias": None}
"""Of an MLP's parameters: the dim with the inner features, of which each expert has a part; None:
there is none."""


class Factors(NamedTuple):
    """What an expert's parameters are multiplied by."""

    up: float
    down: float
    bias: float
    """Of the last matrix."""


# --- rules


def upcycle_problems(dense: ModelConfig, moe: MoEConfig) -> list[str]:
    """Every reason why a dense model cannot become this mixture, as texts."""
    if dense.moe is not None:
        return [
            f"model.moe.num_experts={dense.moe.num_experts} in the source: it is a mixture of "
            "experts "
            "already. Use a dense "
            f"model, or remove --upcycle."
        ]
    model = _mixture(dense, moe)
    problems = moe_problems(model) + unread_problems(model)
    if problems:
        return problems
    checks = (
        _same_features(moe),
        _same_biases(dense, moe),
        _weighed_answers(moe),
        *_parts_are_whole(model, moe),
    )
    return [text for text in checks if text is not None]


def _mixture(dense: ModelConfig, moe: MoEConfig) -> ModelConfig:
    """The model with these experts, and with biases of MLPs where it still has any."""
    model = replace(dense, moe=moe)
    return replace(model, mlp_bias=dense.mlp_bias and reads_mlp_bias(model))


def _same_features(moe: MoEConfig) -> str | None:
    if moe.latent_size is None:
        return None
    return (
        f"model.moe.latent_size={moe.latent_size}: a dense MLP works on all of a token's features, "
        "and so must experts "
        f"made of it. Set model.moe.latent_size=null."
    )


def _same_biases(dense: ModelConfig, moe: MoEConfig) -> str | None:
    if moe.biases == dense.mlp_bias:
        return None
    ours, theirs = str(moe.biases).lower(), str(dense.mlp_bias).lower()
    return (
        f"model.moe.biases={ours} with model.mlp_bias={theirs} in the source. Set "
        f"model.moe.biases={theirs}."
    )


def _weighed_answers(moe: MoEConfig) -> str | None:
    if not moe.apply_router_weight_on_input:
        return None
    return (
        "model.moe.apply_router_weight_on_input=true: an expert that reads a token times its "
        "weight answers "
        "something else than the "
        "dense MLP. Set model.moe.apply_router_weight_on_input=false."
    )


def _parts_are_whole(model: ModelConfig, moe: MoEConfig) -> list[str | None]:
    """Experts are equal parts of an MLP, and a token goes to whole MLPs."""
    widths = _widths(model)
    if len(widths) != 1:
        return [
            f"model.layers.ffn_hidden_size={list(model.layers.ffn_hidden_size)}: the layers that "
            "are to have experts "
            f"have MLPs of {widths or 'no'} features, and experts are alike. Set model.moe.layers "
            "to layers with equal "
            f"MLPs."
        ]
    width = widths[0]
    if width % moe.ffn_hidden_size:
        return [
            f"model.moe.ffn_hidden_size={moe.ffn_hidden_size} does not divide the {width} features "
            "of the dense MLP: "
            "an expert is an equal part of it. Set model.moe.ffn_hidden_size to one of "
            f"{divisors(width)}."
        ]
    parts = width // moe.ffn_hidden_size
    made = f"model.moe.ffn_hidden_size={moe.ffn_hidden_size} makes {parts} experts of each MLP"
    counts = {"experts": moe.num_experts, "top_k": moe.top_k}
    found: list[str | None] = [
        f"model.moe.{name}={count} is no multiple of {parts}: {made}, and a token goes to all of "
        f"one. Set model.moe.{name} to {-(-count // parts) * parts}, or "
        f"model.moe.ffn_hidden_size={width}."
        for name, count in counts.items()
        if count % parts
    ]
    groups = moe.router.num_groups
    if groups is not None and not found and (moe.num_experts // groups) % parts:
        fits = [n for n in divisors(moe.num_experts // parts) if n > 1] or "null"
        found.append(
            f"model.moe.router.num_groups={groups} has {moe.num_experts // groups} experts in a "
            "group: "
            f"{made}, which must not "
            f"be torn apart. Set model.moe.router.num_groups to one of {fits}."
        )
    return found


def _widths(model: ModelConfig) -> list[int]:
    """Inner features of the MLPs that experts are made of."""
    layers = range(model.num_layers)
    return sorted({model.at(layer).ffn_hidden_size for layer in layers if model.has_experts(layer)})


# --- numbers


def expected_weight(moe: MoEConfig) -> float:
    """What the weights of a token's experts add up to, on average, while the router has learned
    nothing."""
    if moe.router.norm_topk_prob:
        return moe.router.routed_scaling_factor
    each = {
        "softmax": 1 / moe.num_experts,
        "sigmoid": 0.5,
        "sqrt_softplus": math.sqrt(math.log(2)),
    }[moe.router.score]
    return moe.top_k * each * moe.router.routed_scaling_factor


def factors_of(model: ModelConfig, moe: MoEConfig, parts: int, scale: Scale) -> Factors:
    """The factors that make the sum of a token's experts the answer of the dense MLP of `parts`
    parts.

    Of each part a token's weights are the `parts`th of their sum s, so that answers must grow by m
    = parts / s. With both matrices multiplied by c they grow by c², once more by c for a gate and
    for a square: c is that root of m. For ReLU and its square, gated or not, this is exact; SiLU
    and GELU are not scaled as their input is. `down` is exact for all.
    """
    total = expected_weight(moe)
    m = parts / total
    if scale == "down":
        return Factors(1.0, m, 1 / total)
    powers = 2 + model.gated + (model.activation == "squared_relu")
    c = m ** (1 / powers)
    return Factors(c, c, 1 / total)


def part_of(word: str, box: Box, *, part: int, width: int) -> Box:
    """Where the values of one expert lie in the dense MLP's parameter `word`.

    `box`: what is wanted of the expert, without the dim of experts; the expert has the `width`
    inner features that follow the first `part` times `width`.

    >>> part_of("gate_up", ((0, 2), (1, 3), (0, 8)), part=1, width=4)
    ((0, 2), (5, 7), (0, 8))
    """
    shifted = list(box)
    dim = CUT[word]
    if dim is not None:
        start, stop = box[dim]
        shifted[dim] = (start + part * width, stop + part * width)
    return tuple(shifted)


# --- tensors


@dataclass(frozen=True, slots=True)
class UpcycledWeights:
    """The weights of a mixture, read from those of a dense model; a router's, and shared experts',
    are new.

    Of `parts` experts that follow one another each has another part of the dense MLP, and after
    them they repeat. Their rows of the router are equal, so that a token goes to all or none of
    them. Shared experts begin by adding 0.
    """

    dense: Weights
    width: int
    parts: int
    factors: Factors

    fresh: Mapping[str, ParameterSpec]
    """Parameters that no dense model has."""

    seed: int

    def dtype(self, parameter: str) -> torch.dtype:
        """That of the dense model; what is new has that of the MLP in whose place it is."""
        layer, _, rest = parameter.partition(".moe.")
        if not rest:
            return self.dense.dtype(parameter)
        return self.dense.dtype(self.source_parameter(parameter) or f"{layer}.mlp.down")

    def source_parameter(self, parameter: str) -> str | None:
        """The dense parameter that it is made of; None: it is new."""
        if parameter in self.fresh:
            return None
        return parameter.replace(".moe.experts.", ".mlp.")

    def read(self, parameter: str, box: Box, dtype: torch.dtype) -> Tensor:
        """A box of it, on the host."""
        source = self.source_parameter(parameter)
        if source is None:
            return self._first_values(parameter, box).to(dtype)
        if source == parameter:
            return self.dense.read(parameter, box, dtype)
        word, experts = parameter.rsplit(".", 1)[1], range(*box[0])
        boxes = [part_of(word, box[1:], part=e % self.parts, width=self.width) for e in experts]
        wide = torch.promote_types(dtype, torch.float32)
        return (
            torch.stack([self.dense.read(source, one, wide) for one in boxes])
            .mul_(self._factor(word))
            .to(dtype)
        )

    def _factor(self, word: str) -> float:
        if word == "down":
            return self.factors.down
        return self.factors.bias if word == "down_bias" else self.factors.up

    def _first_values(self, parameter: str, box: Box) -> Tensor:
        """What is new, in fp32."""
        declared, word = self.fresh[parameter], parameter.rsplit(".", 1)[1]
        if parameter.endswith(".shared.down"):
            return torch.zeros([stop - start for start, stop in box])
        if word in ("router", "router_bias"):
            rows = torch.arange(*box[0]) // self.parts
            all_rows = ((0, int(rows[-1]) + 1), *box[1:])
            return _drawn(declared, all_rows, self.seed)[rows]
        return _drawn(declared, box, self.seed)


def _drawn(declared: ParameterSpec, box: Box, seed: int) -> Tensor:
    """Random first values in a box of a parameter."""
    values = torch.empty([stop - start for start, stop in box])
    init_param_(values, replace(declared.shard, box=box), declared.init, seed=seed)
    return values


def upcycle(
    source: Pretrained, moe: MoEConfig, *, scale: Scale = "spread", seed: int = 0
) -> Pretrained:
    """A dense model as a mixture, of which nothing has been read yet; `seed` decides what is new.

    Raises:
        ConfigError: the model cannot become this mixture; all reasons together.
    """
    raise_all(upcycle_problems(source.model, moe))
    model = _mixture(source.model, moe)
    (width,) = _widths(model)
    parts = width // moe.ffn_hidden_size
    fresh = {
        one.shard.name: one
        for one, _, _ in declared_parameters(Decoder(model, mesh_of_one()))
        if ".moe." in one.shard.name and ".moe.experts." not in one.shard.name
    }
    weights = UpcycledWeights(
        source.weights,
        moe.ffn_hidden_size,
        parts,
        factors_of(model, moe, parts, scale),
        fresh,
        seed,
    )
    return replace(
        source, model=model, weights=weights, hf_source=None
    )  # the dense model's family has no experts


def describe_upcycled_sources(source: Pretrained, moves: Sequence[Move]) -> list[Move]:
    """The moves of an upcycled model, each with the dense parameter that it reads."""
    weights = source.weights
    if not isinstance(weights, UpcycledWeights):
        return list(moves)
    return [replace(move, source=_origin(move.source, weights)) for move in moves]


def _origin(parameter: str, weights: UpcycledWeights) -> str:
    """The dense parameter, and what adapters add to it."""
    source = weights.source_parameter(parameter)
    return "new" if source is None else source + added(source, weights.dense)


def read_from(source: Pretrained) -> Weights:
    """The weights that are read: of an upcycled model the dense one's."""
    return source.weights.dense if isinstance(source.weights, UpcycledWeights) else source.weights

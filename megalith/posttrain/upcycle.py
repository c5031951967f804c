"""Upcycling: initialize a mixture of experts from the weights of a dense model.

Source: Komatsuzaki et al. 2022, arXiv:2212.05055; experts that are each a part of an MLP: He et al.
2024, arXiv:2410.07524.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megalith.config.fields import range_problems
from megalith.config.model import ModelConfig
from megalith.config.moe import MoEConfig
from megalith.errors import raise_all
from megalith.hf.convert import Move, describe_added_adapters
from megalith.hf.folder import Weights
from megalith.hf.pretrained import Pretrained
from megalith.models.decoder import Decoder, iter_parameter_specs
from megalith.nn.build import build_context, init_param_
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.parallel.tensor import ParameterSpec
from megalith.plan.grid import divisors
from megalith.plan.shards import Box
from megalith.rules.moe import moe_problems
from megalith.rules.no_effect import reads_mlp_bias, unread_problems

Scale = Literal["spread", "down"]
"""Where the factor that compensates for the router weights is applied: "spread" over both matrices
of an expert, as in the paper, or only to the last, "down"."""

CUT = {"gate_up": 1, "up": 0, "down": 1, "gate_up_bias": 1, "up_bias": 0, "down_bias": None}
"""MLP parameter -> its dim of inner features, which is divided among experts; None: no such dim."""


class Factors(NamedTuple):
    """Factors of an expert's parameters."""

    up: float
    down: float
    bias: float
    """Factor of the bias of the last matrix."""


# --- rules


def upcycle_problems(dense: ModelConfig, moe: MoEConfig) -> list[str]:
    """Return the reasons why a dense model cannot be upcycled to this mixture, as messages."""
    if dense.moe is not None:
        return [
            f"model.moe.num_experts={dense.moe.num_experts} in the source: it is already a "
            "mixture of experts. Use a dense model, or remove --upcycle."
        ]
    model = _mixture(dense, moe)
    problems = range_problems(model, "model") or moe_problems(model) + unread_problems(model)
    if problems:
        return problems
    checks = (
        _check_latent_size(moe),
        _check_biases(dense, moe),
        _check_router_weight(moe),
        *_check_parts(model, moe),
    )
    return [text for text in checks if text is not None]


def _mixture(dense: ModelConfig, moe: MoEConfig) -> ModelConfig:
    """Return the config with these experts, and without MLP biases that no layer uses."""
    model = replace(dense, moe=moe)
    return replace(model, mlp_bias=dense.mlp_bias and reads_mlp_bias(model))


def _check_latent_size(moe: MoEConfig) -> str | None:
    if moe.latent_size is None:
        return None
    return (
        f"model.moe.latent_size={moe.latent_size}: experts made of a dense MLP need all features "
        "of a token. "
        f"Set model.moe.latent_size=null."
    )


def _check_biases(dense: ModelConfig, moe: MoEConfig) -> str | None:
    if moe.biases == dense.mlp_bias:
        return None
    moe_biases, dense_biases = str(moe.biases).lower(), str(dense.mlp_bias).lower()
    return (
        f"model.moe.biases={moe_biases} with model.mlp_bias={dense_biases} in the source. Set "
        f"model.moe.biases={dense_biases}."
    )


def _check_router_weight(moe: MoEConfig) -> str | None:
    if not moe.apply_router_weight_on_input:
        return None
    return (
        "model.moe.apply_router_weight_on_input=true: the output of an expert for a "
        "weighted input differs from that of the dense MLP. Set "
        "model.moe.apply_router_weight_on_input=false."
    )


def _check_parts(model: ModelConfig, moe: MoEConfig) -> list[str | None]:
    """Check that experts are equal parts of an MLP, and that a token is routed to all parts of
    MLPs."""
    widths = _widths(model)
    if len(widths) != 1:
        return [
            f"model.layers.ffn_hidden_size={list(model.layers.ffn_hidden_size)}: the layers with "
            f"experts have MLPs of {widths or 'no'} features, but all experts have one size. "
            "Set model.moe.layers to layers with equal MLPs."
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
    explanation = (
        f"model.moe.ffn_hidden_size={moe.ffn_hidden_size} makes {parts} experts of each MLP"
    )
    counts = {"num_experts": moe.num_experts, "top_k": moe.top_k}
    problems: list[str | None] = [
        f"model.moe.{name}={count} is no multiple of {parts}: {explanation}, and a token must be "
        f"routed to all of them. Set model.moe.{name} to {-(-count // parts) * parts}, or "
        f"model.moe.ffn_hidden_size={width}."
        for name, count in counts.items()
        if count % parts
    ]
    groups = moe.router.num_groups
    if groups is not None and not problems and (moe.num_experts // groups) % parts:
        fits = [n for n in divisors(moe.num_experts // parts) if n > 1] or "null"
        problems.append(
            f"model.moe.router.num_groups={groups} has {moe.num_experts // groups} experts in a "
            f"group: {explanation}, which must be in one group. "
            f"Set model.moe.router.num_groups to one of {fits}."
        )
    return problems


def _widths(model: ModelConfig) -> list[int]:
    """Return the inner sizes of the MLPs that are replaced by experts."""
    layers = range(model.num_layers)
    return sorted({model.at(layer).ffn_hidden_size for layer in layers if model.has_experts(layer)})


# --- scale factors


def expected_weight(moe: MoEConfig) -> float:
    """Return the expected sum of a token's router weights with an untrained router."""
    if moe.router.norm_topk_prob:
        return moe.router.routed_scaling_factor
    mean_score = {
        "softmax": 1 / moe.num_experts,
        "sigmoid": 0.5,
        "sqrt_softplus": math.sqrt(math.log(2)),
    }[moe.router.score]
    return moe.top_k * mean_score * moe.router.routed_scaling_factor


def compute_factors(model: ModelConfig, moe: MoEConfig, parts: int, scale: Scale) -> Factors:
    """Return the factors with which a token's experts sum to the output of the dense MLP of `parts`
    parts.

    A token's weights of each part are the `parts`th of their sum s, so outputs are scaled by m =
    parts / s. Scaling both matrices by c scales outputs by c², times c for a gate and for a square:
    c is that root of m. This is exact for ReLU and its square, gated or not; SiLU and GELU are not
    homogeneous. `down` is exact for all.
    """
    total = expected_weight(moe)
    m = parts / total
    if scale == "down":
        return Factors(1.0, m, 1 / total)
    powers = 2 + model.gated + (model.activation == "squared_relu")
    c = m ** (1 / powers)
    return Factors(c, c, 1 / total)


def locate_in_dense(word: str, box: Box, *, part: int, width: int) -> Box:
    """Return the location of an expert's values in the dense MLP's parameter `word`.

    `box`: a box of the expert's parameter, without the dim of experts; the expert has the `width`
    inner features from index `part` times `width`.

    >>> locate_in_dense("gate_up", ((0, 2), (1, 3), (0, 8)), part=1, width=4)
    ((0, 2), (5, 7), (0, 8))
    """
    shifted = list(box)
    dim = CUT[word]
    if dim is not None:
        start, stop = box[dim]
        shifted[dim] = start + part * width, stop + part * width
    return tuple(shifted)


# --- tensors


@dataclass(frozen=True, slots=True)
class UpcycledWeights:
    """Weights of a mixture of experts, read from those of a dense model; router and shared experts
    are new.

    Each of `parts` consecutive experts has another part of the dense MLP, and then the parts
    repeat. Their router rows are equal, so that a token is routed to all or none of them. Shared
    experts initially output 0.
    """

    dense: Weights
    width: int
    parts: int
    factors: Factors

    fresh: Mapping[str, ParameterSpec]
    """Specifications of the parameters that the dense model does not have."""

    seed: int

    def dtype(self, parameter: str) -> torch.dtype:
        """Return the dtype in the dense model; new parameters have that of the MLP they replace."""
        layer, _, rest = parameter.partition(".moe.")
        if not rest:
            return self.dense.dtype(parameter)
        return self.dense.dtype(self.source_parameter(parameter) or f"{layer}.mlp.down")

    def source_parameter(self, parameter: str) -> str | None:
        """Return the dense parameter that it is initialized from; None: it is new."""
        if parameter in self.fresh:
            return None
        return parameter.replace(".moe.experts.", ".mlp.")

    def read(self, parameter: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Return a box of a parameter, on the host."""
        source = self.source_parameter(parameter)
        if source is None:
            return self._first_values(parameter, box).to(dtype)
        if source == parameter:
            return self.dense.read(parameter, box, dtype)
        word, experts = parameter.rsplit(".", 1)[1], range(*box[0])
        boxes = [
            locate_in_dense(word, box[1:], part=e % self.parts, width=self.width) for e in experts
        ]
        compute_dtype = torch.promote_types(dtype, torch.float32)
        return (
            torch.stack([self.dense.read(source, dense_box, compute_dtype) for dense_box in boxes])
            .mul_(self._factor(word))
            .to(dtype)
        )

    def _factor(self, word: str) -> float:
        if word == "down":
            return self.factors.down
        return self.factors.bias if word == "down_bias" else self.factors.up

    def _first_values(self, parameter: str, box: Box) -> Tensor:
        """Return initial values of a new parameter, in fp32."""
        spec, word = self.fresh[parameter], parameter.rsplit(".", 1)[1]
        if parameter.endswith(".shared.down"):
            return torch.zeros([stop - start for start, stop in box])
        if word in ("router", "router_bias"):
            rows = torch.arange(*box[0]) // self.parts
            all_rows = (0, int(rows[-1]) + 1), *box[1:]
            return _draw_initial_values(spec, all_rows, self.seed)[rows]
        return _draw_initial_values(spec, box, self.seed)


def _draw_initial_values(spec: ParameterSpec, box: Box, seed: int) -> Tensor:
    """Return random initial values of a box of a parameter."""
    values = torch.empty([stop - start for start, stop in box])
    init_param_(values, replace(spec.shard, box=box), spec.init, seed=seed)
    return values


def upcycle(
    source: Pretrained, moe: MoEConfig, *, scale: Scale = "spread", seed: int = 0
) -> Pretrained:
    """Return a dense model as a mixture of experts, whose weights are read on demand; `seed`
    determines new weights.

    Raises:
        ConfigError: the model cannot be upcycled to this mixture; all reasons are reported
            together.
    """
    raise_all(upcycle_problems(source.model, moe))
    model = _mixture(source.model, moe)
    (width,) = _widths(model)
    parts = width // moe.ffn_hidden_size
    fresh = {
        spec.shard.name: spec
        for spec, _, _ in iter_parameter_specs(
            Decoder(build_context(model, build_single_rank_mesh()))
        )
        if ".moe." in spec.shard.name and ".moe.experts." not in spec.shard.name
    }
    weights = UpcycledWeights(
        source.weights,
        moe.ffn_hidden_size,
        parts,
        compute_factors(model, moe, parts, scale),
        fresh,
        seed,
    )
    # the family of the dense model has no experts
    return replace(source, model=model, weights=weights, hf_source=None)


def describe_upcycled_sources(source: Pretrained, moves: Sequence[Move]) -> list[Move]:
    """Return the moves of an upcycled model with the dense parameters that they read."""
    weights = source.weights
    if not isinstance(weights, UpcycledWeights):
        return list(moves)
    return [replace(move, source=_describe_source(move.source, weights)) for move in moves]


def _describe_source(parameter: str, weights: UpcycledWeights) -> str:
    """Return the dense parameter, and the adapters added to it."""
    source = weights.source_parameter(parameter)
    return "new" if source is None else source + describe_added_adapters(source, weights.dense)


def stored_weights(source: Pretrained) -> Weights:
    """Return the stored weights: those of the dense model if the model is upcycled."""
    return source.weights.dense if isinstance(source.weights, UpcycledWeights) else source.weights

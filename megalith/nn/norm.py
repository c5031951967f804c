"""RMSNorm, LayerNorm and QK norm modules."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.config.plugins import load_plugin
from megalith.kernels.linear import RegisterRecompute
from megalith.kernels.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from megalith.nn.build import BuildContext
from megalith.parallel.collectives import all_reduce, mark_partial
from megalith.parallel.group import Group
from megalith.parallel.tensor import ONES, ZEROS
from megalith.plan.shards import HeadSplit, Shard


class Norm(nn.Module):
    """Base of norms: x [t, h] -> x [t, h], alone or fused with the residual addition before it."""

    norm: Callable[..., Tensor]
    """(x, *affine) -> normalized x."""

    add_norm: Callable[..., tuple[Tensor, Tensor]]
    """(x, residual, *affine) -> their sum, and the normalized sum."""

    weight: nn.Parameter

    def __init__(
        self,
        name: str,
        size: int,
        config: ModelConfig,
        context: BuildContext,
        *,
        invariant: frozenset[str],
        register: RegisterRecompute | None = None,
    ) -> None:
        """`invariant`: axes over which the gradient is complete on every rank; `again`: the output
        is recomputed in backward instead of saved by the next layer."""
        super().__init__()
        self.register = register
        shard = Shard.full(f"{name}.weight", (size,), invariant=invariant, inputs=0)
        start = ZEROS if config.zero_centered_gamma else ONES
        context.register_param(self, "weight", shard, start)

    def affine(self) -> tuple[Tensor, ...]:
        """Return the parameters: scale, and shift if there is one."""
        return (self.weight,)

    def forward(self, x: Tensor) -> Tensor:
        """x [t, h] -> [t, h]."""
        return self._result(self.norm(x, *self.affine()), x)

    def add_and_normalize(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x, residual [t, h] -> their sum, and the normalized sum; fused, which saves one pass in
        backward."""
        total, normed = self.add_norm(x, residual, *self.affine())
        return total, self._result(normed, total)

    def _result(self, normed: Tensor, x: Tensor) -> Tensor:
        if self.register is None:
            return normed
        return self.register(normed, self.norm, (x, *self.affine()))


class RMSNorm(Norm):
    """RMSNorm: divide each token by its root mean square, then scale its features: x [t, h] -> x
    [t, h].

    With `zero_centered_gamma` the scale is 1 + weight, which starts at 0. Source: Zhang and
    Sennrich 2019, arXiv:1910.07467.
    """

    def __init__(
        self,
        name: str,
        size: int,
        config: ModelConfig,
        context: BuildContext,
        *,
        eps: float,
        invariant: frozenset[str],
        register: RegisterRecompute | None = None,
    ) -> None:
        super().__init__(name, size, config, context, invariant=invariant, register=register)
        self.norm, self.add_norm = _norm_functions(rms_norm, add_rms_norm, config, context, eps)


class LayerNorm(Norm):
    """LayerNorm: subtract each token's mean, divide by its standard deviation, then scale and
    shift: x [t, h] -> x [t, h].

    With `zero_centered_gamma` the scale is 1 + weight, which starts at 0. Source: Ba et al. 2016,
    arXiv:1607.06450.
    """

    bias: nn.Parameter

    def __init__(
        self,
        name: str,
        size: int,
        config: ModelConfig,
        context: BuildContext,
        *,
        eps: float,
        invariant: frozenset[str],
        register: RegisterRecompute | None = None,
    ) -> None:
        super().__init__(name, size, config, context, invariant=invariant, register=register)
        shard = Shard.full(f"{name}.bias", (size,), invariant=invariant, inputs=0)
        context.register_param(self, "bias", shard, ZEROS)
        self.norm, self.add_norm = _norm_functions(layer_norm, add_layer_norm, config, context, eps)

    def affine(self) -> tuple[Tensor, ...]:
        """Return scale and shift."""
        return self.weight, self.bias


NORMS: Mapping[str, type[RMSNorm | LayerNorm]] = {"rms": RMSNorm, "layer": LayerNorm}
"""Norm of each name of model.norm."""


def build_norm(
    name: str,
    size: int,
    config: ModelConfig,
    context: BuildContext,
    *,
    invariant: frozenset[str] | None = None,
    register: RegisterRecompute | None = None,
    eps: float | None = None,
) -> Norm:
    """Build the model's norm over `size` features; `eps`: default that of the model; `invariant`:
    default that of `tp_comm`. `again`: see `Norm`."""
    plugin = config.plugins.norm
    kind = NORMS[config.norm] if plugin is None else load_plugin("norm", plugin)
    norm: Norm = kind(
        name,
        size,
        config,
        context,
        eps=config.norm_eps if eps is None else eps,
        invariant=context.tp_comm.invariant if invariant is None else invariant,
        register=register,
    )
    return norm


def _norm_functions(
    norm: Callable[..., Tensor],
    add_norm: Callable[..., tuple[Tensor, Tensor]],
    config: ModelConfig,
    context: BuildContext,
    eps: float,
) -> tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]]:
    """Return a norm and its fusion with the residual addition, by the model's backend and with its
    options."""
    options = {"eps": eps, "zero_centered": config.zero_centered_gamma}
    alone = partial(context.backends.bind("norm", norm), **options)
    fused = partial(context.backends.bind("norm", add_norm), **options)
    if config.fp32_residual:
        return NormWithCast(alone, context.dtype), AddNormWithCast(fused, context.dtype)
    return alone, fused


def stream_dtype(config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the residual stream between layers that compute in `dtype`."""
    return torch.promote_types(dtype, torch.float32) if config.fp32_residual else dtype


@dataclass(frozen=True, slots=True)
class NormWithCast:
    """A norm that converts its output from the residual stream's dtype to that of the layer."""

    norm: Callable[..., Tensor]
    dtype: torch.dtype

    def __call__(self, x: Tensor, *affine: Tensor) -> Tensor:
        """x [t, h] -> [t, h] in `dtype`."""
        return self.norm(x, *affine).to(self.dtype)


@dataclass(frozen=True, slots=True)
class AddNormWithCast:
    """A norm with fused residual addition that converts its output, but not the sum, to the layer's
    dtype."""

    add_norm: Callable[..., tuple[Tensor, Tensor]]
    dtype: torch.dtype

    def __call__(self, x: Tensor, residual: Tensor, *affine: Tensor) -> tuple[Tensor, Tensor]:
        """x, residual [t, h] -> their sum, and its norm in `dtype`."""
        total, normed = self.add_norm(x, residual, *affine)
        return total, normed.to(self.dtype)


# QK norm: normalization of queries and keys before attention, which bounds the scores.
#
# Source: Henry et al. 2020, arXiv:2010.04245; over all heads: Dehghani et al. 2023,
# arXiv:2302.05442.

QKNorms = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""q [t, n, d], k [t, g, d] -> normalized q and k."""


def build_qk_norms(
    name: str, config: ModelConfig, context: BuildContext, heads: HeadSplit
) -> QKNorms:
    """Build the QK norm of a layer, applied before RoPE."""
    match config.attention.qk_norm:
        case "none":
            return no_qk_norms
        case "l2":
            return partial(l2_normalize, eps=config.qk_norm_eps())
        case "head":
            return HeadNorms(name, config, context)
        case "whole":
            return AllHeadsNorms(name, config, context, heads)


def no_qk_norms(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys unchanged."""
    return q, k


def l2_normalize(q: Tensor, k: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """Divide each head by its root mean square, without a weight."""

    def normed(x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)

    return normed(q), normed(k)


class HeadNorms(nn.Module):
    """QK norm per head, with one weight [d] for all heads.

    Ranks normalize different heads with the same weight, so its gradient is summed over them.
    """

    def __init__(self, name: str, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        self.q_norm, self.k_norm = (
            build_norm(
                f"{name}.{word}",
                config.head_size(),
                config,
                context,
                invariant=frozenset(),
                eps=config.qk_norm_eps(),
            )
            for word in ("q_norm", "k_norm")
        )

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [t, n, d], k [t, g, d] -> normalized q and k."""
        normed = (norm(x.flatten(0, 1)) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        q, k = (y.view(x.shape) for y, x in zip(normed, (q, k), strict=True))
        return q, k


class AllHeadsNorms(nn.Module):
    """QK norm over all heads of a token, by one mean square over the heads of all tensor-parallel
    ranks (RMSNorm).

    Weights are [n, d] and [g, d]; a rank has those of its heads.
    """

    def __init__(
        self, name: str, config: ModelConfig, context: BuildContext, heads: HeadSplit
    ) -> None:
        super().__init__()
        self.q_norm = AllHeadsNorm(
            f"{name}.q_norm", heads.queries, config, context, context.mesh.tp
        )
        kv_group = context.mesh.over("tp_kv")
        self.k_norm = AllHeadsNorm(f"{name}.k_norm", heads.keys, config, context, kv_group)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [t, n, d], k [t, g, d] -> normalized q and k."""
        return self.q_norm(q), self.k_norm(k)


class AllHeadsNorm(nn.Module):
    """RMSNorm over all heads of a token, which are sharded over `group`: x [t, n_tp, d] -> [t,
    n_tp, d]."""

    weight: nn.Parameter

    def __init__(
        self,
        name: str,
        sizes: list[int],
        config: ModelConfig,
        context: BuildContext,
        group: Group,
    ) -> None:
        """`sizes`: heads of each rank of `group`."""
        super().__init__()
        num_heads = sum(sizes)
        self.group, self.eps, self.features = (
            group,
            config.qk_norm_eps(),
            num_heads * config.head_size(),
        )
        self.zero_centered = config.zero_centered_gamma
        shard = Shard.full(f"{name}.weight", (num_heads, config.head_size()), inputs=0)
        shard = shard.split_dim(0, sizes, group.rank, group.axes)
        context.register_param(self, "weight", shard, ZEROS if self.zero_centered else ONES)

    def forward(self, x: Tensor) -> Tensor:
        """x [t, n_tp, d] -> [t, n_tp, d]."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = all_reduce(
            mark_partial(wide.square().sum((1, 2), keepdim=True), self.group), self.group
        )
        normed = wide * torch.rsqrt(squares / self.features + self.eps)
        weight = self.weight.view(x.shape[1:])
        if self.zero_centered:  # in fp32, because 1 + weight loses digits of the weight
            return (normed * (1.0 + weight.to(wide.dtype))).to(x.dtype)
        return normed.to(x.dtype) * weight

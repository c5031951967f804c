"""QK norm: normalization of queries and keys before attention, which bounds the scores.

Source: Henry et al. 2020, arXiv:2010.04245; over all heads: Dehghani et al. 2023, arXiv:2302.05442.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.kernels.recomputed import output_tensor
from megalith.nn.norm import build_norm
from megalith.parallel.autograd import all_reduce, mark_partial
from megalith.parallel.group import Group
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import ONES, ZEROS, ParameterSpec, register_param
from megalith.plan.shards import HeadSplit, Shard

QKNorms = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""q [t, n, d], k [t, g, d] -> normalized q and k."""


def build_qk_norms(
    name: str, config: ModelConfig, mesh: Mesh, heads: HeadSplit, *, dtype: torch.dtype
) -> QKNorms:
    """Build the QK norm of a layer, applied before RoPE."""
    match config.attention.qk_norm:
        case "none":
            return no_qk_norms
        case "l2":
            return partial(l2_normalize, eps=config.qk_norm_eps())
        case "head":
            return HeadNorms(name, config, dtype=dtype)
        case "whole":
            return AllHeadsNorms(name, config, mesh, heads, dtype=dtype)


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

    def __init__(self, name: str, config: ModelConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        size, different, eps = config.head_size(), frozenset[str](), config.qk_norm_eps()
        self.q_norm = build_norm(
            f"{name}.q_norm", size, config, invariant=different, dtype=dtype, eps=eps
        )
        self.k_norm = build_norm(
            f"{name}.k_norm", size, config, invariant=different, dtype=dtype, eps=eps
        )

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [t, n, d], k [t, g, d] -> normalized q and k."""
        normed = (
            output_tensor(norm(x.flatten(0, 1))) for norm, x in ((self.q_norm, q), (self.k_norm, k))
        )
        q, k = (y.view(x.shape) for y, x in zip(normed, (q, k), strict=True))
        return q, k


class AllHeadsNorms(nn.Module):
    """QK norm over all heads of a token, by one mean square over the heads of all tensor-parallel
    ranks (RMSNorm).

    Weights are [n, d] and [g, d]; a rank has those of its heads.
    """

    def __init__(
        self, name: str, config: ModelConfig, mesh: Mesh, heads: HeadSplit, *, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.q_norm = AllHeadsNorm(
            f"{name}.q_norm", config.num_heads, heads.queries, config, mesh.tp, dtype=dtype
        )
        self.k_norm = AllHeadsNorm(
            f"{name}.k_norm",
            config.num_kv_heads,
            heads.keys,
            config,
            mesh.over("tp_kv"),
            dtype=dtype,
        )

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
        num_heads: int,
        sizes: list[int],
        config: ModelConfig,
        group: Group,
        *,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.group, self.eps, self.features = (
            group,
            config.qk_norm_eps(),
            num_heads * config.head_size(),
        )
        self.zero_centered = config.zero_centered_gamma
        shard = Shard.full(f"{name}.weight", (num_heads, config.head_size()), inputs=0)
        shard = shard.split_dim(0, sizes, group.rank, group.axes)
        register_param(
            self,
            "weight",
            ParameterSpec(shard, ZEROS if config.zero_centered_gamma else ONES),
            dtype=dtype,
        )

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

"""Grouped-query attention with rotary positions, its heads split over the tensor-parallel ranks."""

import math
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.kernels.attention import attention
from megalith.kernels.rebuilt import Input
from megalith.kernels.rope import apply_rope
from megalith.kernels.tokens import Tokens
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import ZEROS, ColumnLinear, Declared, Init, Region, RowLinear
from megalith.plan.shards import HeadSplit, Shard, cut_dim, split_heads, whole


class LayerCache(Protocol):
    """Keys and values of earlier tokens, for one layer, while text is generated."""

    def extend(self, k: Tensor, v: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Keep k, v [t, g, d] of the tokens read now; give back those of all tokens of each document [t_kv, g, d]."""


class Core(Protocol):
    """The part without weights: here, or shared with other ranks (parallel/context.py)."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens) -> Tensor:
        """q [t, n, d], k and v [t, g, d] -> [t, n, d]."""


class Attention(nn.Module):
    """Each token looks at the earlier tokens of its document: x [t, h] -> [t, h].

    Source: Vaswani et al. 2017, arXiv:1706.03762; grouped queries: Ainslie et al. 2023, arXiv:2305.13245.
    """

    def __init__(
        self, name: str, config: ModelConfig, mesh: Mesh, region: Region, *, dtype: torch.dtype, core: Core = attention
    ) -> None:
        super().__init__()
        self.core = core
        self.head_dim = config.head_size()
        heads = split_heads(config.num_heads, config.num_kv_heads, mesh.tp.size)
        self.num_heads = heads.queries[mesh.tp.rank]
        self.num_kv_heads = heads.keys[mesh.over("tp_kv").rank]
        start = Init(config.init_std)
        q, kv = _query_shards(name, config, mesh, heads, columns=config.hidden_size)
        biases = _query_shards(name, config, mesh, heads, columns=None) if config.qkv_bias else ()
        self.qkv = ColumnLinear(
            [Declared(q, start), Declared(kv, start)], [Declared(bias, ZEROS) for bias in biases], region, dtype=dtype
        )
        o = whole(f"{name}.o", (config.hidden_size, config.num_heads, self.head_dim), inputs=2)
        o = cut_dim(o, 1, heads.queries, mesh.tp.rank, mesh.tp.axes)
        bias = whole(f"{name}.o_bias", (config.hidden_size,), invariant=region.invariant, inputs=0)
        self.out = RowLinear(
            Declared(o, Init(config.init_std / math.sqrt(2 * config.num_layers))),
            Declared(bias, ZEROS) if config.output_bias else None, region, dtype=dtype,
        )  # fmt: skip

    def forward(self, x: Input, tokens: Tokens, cache: LayerCache | None = None) -> Tensor:
        """x [t, h] -> [t, h]."""
        n, g, d = self.num_heads, self.num_kv_heads, self.head_dim
        q, k, v = self.qkv(x).split([n * d, g * d, g * d], dim=-1)
        assert tokens.rotary is not None
        q = apply_rope(q.unflatten(-1, (n, d)), *tokens.rotary)
        k = apply_rope(k.unflatten(-1, (g, d)), *tokens.rotary)
        v = v.unflatten(-1, (g, d))
        if cache is not None:
            k, v = cache.extend(k, v, tokens)
        return self.out(self.core(q, k, v, tokens).flatten(1))


def _query_shards(
    name: str, config: ModelConfig, mesh: Mesh, heads: HeadSplit, *, columns: int | None
) -> tuple[Shard, Shard]:
    """My slices of q [n, d, h] and kv [2, g, d, h], or of their biases [n, d] and [2, g, d] when there are no columns.

    Key/value heads that several ranks share are whole along tp_copy, so their gradients are summed over it.
    """
    d = config.head_size()
    inputs, suffix = ((columns,), "") if columns is not None else ((), "_bias")
    q = whole(f"{name}.q{suffix}", (config.num_heads, d, *inputs), inputs=len(inputs))
    kv = whole(f"{name}.kv{suffix}", (2, config.num_kv_heads, d, *inputs), inputs=len(inputs))
    holders = mesh.over("tp_kv")
    return (
        cut_dim(q, 0, heads.queries, mesh.tp.rank, mesh.tp.axes),
        cut_dim(kv, 1, heads.keys, holders.rank, holders.axes),
    )


def with_rotary(tokens: Tokens, cos: Tensor, sin: Tensor) -> Tokens:
    """`tokens` with the rotation of each position, which every layer shares."""
    return replace(tokens, rotary=(cos, sin))

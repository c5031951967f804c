"""Multi-head latent attention: keys and values of all heads come from one short vector per token.

Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1; absorbed projections: the same, section
2.1.2.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalith.config.mla import MLAConfig
from megalith.config.model import ModelConfig
from megalith.kernels.attention import attention
from megalith.kernels.matmul import einsum
from megalith.kernels.rebuilt import LayerInput, output_tensor
from megalith.kernels.scores import Scores
from megalith.kernels.tokens import PackedSeqParams
from megalith.nn.attention import LayerCache, output_linear, scores_of_layer
from megalith.nn.norm import build_norm
from megalith.nn.rope import build_apply_rope
from megalith.parallel.context import Attend
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import ColumnLinear, Init, ParameterSpec, TPComm, WholeLinear
from megalith.plan.shards import Shard, split_evenly


class Parts(NamedTuple):
    """What latent attention compares: t tokens that look, t_kv that are seen."""

    q_plain: Tensor
    """[t, n, nope_dim]: of queries, what knows no position."""

    q_turned: Tensor
    """[t, n, rope_dim]."""

    latent: Tensor
    """[t_kv, r]: the short vectors; in training in the layout of `tp_comm`."""

    k_turned: Tensor
    """[t_kv, 1, rope_dim]: the key that all heads share."""


Form = Callable[["LatentAttention", Parts, PackedSeqParams], Tensor]
"""A way to compute what each head finds: [t, n, value_dim]. They give the same numbers."""


def expanded(layer: "LatentAttention", parts: Parts, tokens: PackedSeqParams) -> Tensor:
    """Every head has keys and values of its own, made from the short vectors."""
    kv = layer.kv_up(parts.latent).unflatten(-1, (layer.num_heads, -1))
    k_plain, v = kv.split([layer.sizes.nope_dim, layer.sizes.value_dim], dim=-1)
    q = torch.cat([parts.q_plain, parts.q_turned], dim=-1)
    k = torch.cat([k_plain, parts.k_turned.expand(-1, layer.num_heads, -1)], dim=-1)
    return layer.core(q, k, v, tokens, scores=layer.scores)


def absorbed(layer: "LatentAttention", parts: Parts, tokens: PackedSeqParams) -> Tensor:
    """The short vectors serve all heads as keys and as values.

    The projection up to keys is applied to the queries, that up to values to what attention finds.
    """
    (weight,) = layer.kv_up.accumulated_parameters()
    up = weight.unflatten(0, (layer.num_heads, -1))
    up_keys, up_values = up.split([layer.sizes.nope_dim, layer.sizes.value_dim], dim=1)
    q = torch.cat([einsum("tnd,ndr->tnr", parts.q_plain, up_keys), parts.q_turned], dim=-1)
    both = torch.cat([parts.latent.unsqueeze(1), parts.k_turned], dim=-1)
    # The few turned features go along as values, unused: torch's fused kernel wants values as wide
    # as keys.
    found = layer.core(q, both, both, tokens, scores=layer.scores)[..., : layer.sizes.kv_rank]
    return einsum("tnr,nvr->tnv", found, up_values)


def cheaper_form(sizes: MLAConfig, lengths: Sequence[tuple[int, int]]) -> Form:
    """The form with fewer products for documents of which (queries, keys) are read and seen.

    Expanding costs r·(d_nope + d_v) for each key, absorbing the same for each query; a pair of the
    two then costs d_nope + d_rope + d_v or 2·r + d_rope. Prompts are expanded, single tokens after
    many absorbed.
    """
    queries, keys = (sum(count) for count in zip(*lengths, strict=True))
    pairs = sum(q * k - q * (q - 1) // 2 for q, k in lengths)
    up = sizes.nope_dim + sizes.value_dim
    return (
        absorbed
        if (keys - queries) * sizes.kv_rank * up > pairs * (2 * sizes.kv_rank - up)
        else expanded
    )


Reading = Callable[[MLAConfig, Sequence[tuple[int, int]]], Form]
"""Chooses the form for documents of which (queries, keys) are read and seen."""


Find = Callable[..., Tensor]
"""(short vectors of queries, those of keys and values, the shared key, tokens) -> what heads find
[t, n, value_dim]."""


def kept(find: Find) -> Find:
    """The function itself, whose inner tensors are kept for backward."""
    return find


class LatentAttention(nn.Module):
    """Each token looks at the earlier tokens of its document: x [t, h] -> [t, h].

    A token's short vector c [r] gives keys and values of every head, and one more key of a few
    features, which all heads share, knows its position. The vectors are computed where tokens are
    whole features; heads divide over tp.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        mesh: Mesh,
        tp_comm: TPComm,
        *,
        dtype: torch.dtype,
        index: int = 0,
        core: Attend = attention,
        reading: Reading = cheaper_form,
        around: Callable[[Find], Find] = kept,
    ) -> None:
        """`index`: its number over all stages; `reading`: how it goes on from what a cache has;
        `around`: what becomes of everything between the short vectors and what heads find."""
        super().__init__()
        assert config.mla is not None
        self.core, self.tp_comm, self.apply_rope, self.sizes = (
            core,
            tp_comm,
            build_apply_rope(config, index),
            config.mla,
        )
        self.scores, self.reading, self.around = latent_scores(config, index), reading, around
        h, n, sizes = config.hidden_size, config.num_heads, config.mla
        heads = split_evenly(n, mesh.tp.size)
        self.num_heads = heads[mesh.tp.rank]
        start = Init(config.init_std)

        def of_heads(word: str, features: int, columns: int) -> ColumnLinear:
            shard = Shard.full(f"{name}.{word}", (n, features, columns)).split_dim(
                0,
                heads,
                mesh.tp.rank,
                mesh.tp.axes,
            )
            return ColumnLinear([ParameterSpec(shard, start)], [], tp_comm, dtype=dtype)

        def short(word: str, rank: int, extra: int = 0) -> tuple[WholeLinear, nn.Module]:
            shard = Shard.full(f"{name}.{word}", (rank + extra, h), invariant=tp_comm.invariant)
            down = WholeLinear(ParameterSpec(shard, start), dtype=dtype)
            if not sizes.norms:
                return down, nn.Identity()
            return down, build_norm(
                f"{name}.{word}_norm",
                rank,
                config,
                eps=sizes.norm_eps,
                invariant=tp_comm.invariant,
                dtype=dtype,
            )

        if sizes.q_rank is None:
            self.queries = nn.Sequential(of_heads("q", sizes.nope_dim + sizes.rope_dim, h))
        else:
            down, norm = short("q_down", sizes.q_rank)
            self.queries = nn.Sequential(
                down, norm, of_heads("q_up", sizes.nope_dim + sizes.rope_dim, sizes.q_rank)
            )
        self.kv_down, self.kv_norm = short("kv_down", sizes.kv_rank, sizes.rope_dim)
        self.kv_up = of_heads("kv_up", sizes.nope_dim + sizes.value_dim, sizes.kv_rank)
        self.out = output_linear(name, config, heads, mesh, tp_comm, dtype=dtype)

    def forward(
        self, x: LayerInput, tokens: PackedSeqParams, cache: LayerCache | None = None
    ) -> Tensor:
        """x [t, h] -> [t, h]."""
        short: LayerInput = x
        for step in list(self.queries)[:-1]:  # down to short vectors, where queries have some
            short = step(short)
        latent, k_turned = self.kv_down(x).split([self.sizes.kv_rank, self.sizes.rope_dim], dim=-1)
        latent = output_tensor(self.kv_norm(latent.contiguous()))
        if cache is None:
            return self.out(self.around(self.find)(short, latent, k_turned, tokens).flatten(1))
        return self.out(self.find(short, latent, k_turned, tokens, cache).flatten(1))

    def find(
        self,
        short: LayerInput,
        latent: Tensor,
        k_turned: Tensor,
        tokens: PackedSeqParams,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """What heads find: short vectors of queries, or x, [t, rq], those of keys and values [t,
        r] and the shared key [t, rope_dim], all in the layout of `tp_comm` -> [t, n, value_dim] of
        all tokens."""
        form: Form = expanded
        q = self.queries[-1](short).unflatten(-1, (self.num_heads, -1))
        q_plain, q_turned = q.split([self.sizes.nope_dim, self.sizes.rope_dim], dim=-1)
        k_turned = self.apply_rope(
            output_tensor(self.tp_comm.prepare_input(k_turned.contiguous())).unsqueeze(1), tokens
        )
        if cache is not None:
            k_turned, cached = cache.extend(k_turned, latent.unsqueeze(1), tokens)
            latent, form = cached.squeeze(1), self.reading(self.sizes, tokens.lengths)
        return form(
            self, Parts(q_plain, self.apply_rope(q_turned, tokens), latent, k_turned), tokens
        )


def latent_scores(config: ModelConfig, index: int) -> Scores:
    """What becomes of the scores: by default divided by the root of both parts' features, and
    scaled by the temperature under yarn."""
    scores, sizes = scores_of_layer(config, index), config.mla
    assert sizes is not None
    if config.attention.scale is not None:
        return scores
    scale = 1 / math.sqrt(config.key_size()) if scores.scale is None else scores.scale
    sharper = 1.0
    if sizes.yarn_mscale is not None and config.rope.scaling == "yarn" and config.rope.factor > 1:
        sharper = 0.1 * sizes.yarn_mscale * math.log(config.rope.factor) + 1.0
    return replace(scores, scale=sharper**2 * scale)

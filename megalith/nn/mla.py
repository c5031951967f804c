"""Multi-head latent attention: keys and values of all heads come from one short vector per token.

Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1; absorbed projections: the same, section 2.1.2.
"""

import math

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.kernels.attention import attention
from megalith.kernels.rebuilt import Input, value_of
from megalith.kernels.scores import Scores
from megalith.kernels.tokens import Tokens
from megalith.nn.attention import LayerCache, output_linear, scores_of_layer
from megalith.nn.norm import Norm, build_norm
from megalith.nn.rope import turn_of_layer
from megalith.parallel.context import Attend
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import ColumnLinear, Declared, Init, Region, WholeLinear
from megalith.plan.shards import cut_dim, split_evenly, whole


class LatentAttention(nn.Module):
    """Each token looks at the earlier tokens of its document: x [t, h] -> [t, h].

    A token's short vector c [r] gives keys and values of every head, and one more key of a few features, which all
    heads share, knows its position. The vectors are computed where tokens are whole features; heads divide over tp.
    """

    def __init__(
        self, name: str, config: ModelConfig, mesh: Mesh, region: Region, *, dtype: torch.dtype, index: int = 0,
        core: Attend = attention,
    ) -> None:  # fmt: skip
        """`index`: its number over all stages."""
        super().__init__()
        assert config.mla is not None
        self.core, self.region, self.turn, self.sizes = core, region, turn_of_layer(config, index), config.mla
        self.scores = latent_scores(config, index)
        h, n, sizes = config.hidden_size, config.num_heads, config.mla
        heads = split_evenly(n, mesh.tp.size)
        self.num_heads = heads[mesh.tp.rank]
        start = Init(config.init_std)

        def of_heads(word: str, features: int, columns: int) -> ColumnLinear:
            shard = cut_dim(whole(f"{name}.{word}", (n, features, columns)), 0, heads, mesh.tp.rank, mesh.tp.axes)
            return ColumnLinear([Declared(shard, start)], [], region, dtype=dtype)

        def short(word: str, rank: int, extra: int = 0) -> tuple[WholeLinear, Norm]:
            shard = whole(f"{name}.{word}", (rank + extra, h), invariant=region.invariant)
            norm = build_norm(
                f"{name}.{word}_norm", rank, config, eps=sizes.norm_eps, invariant=region.invariant, dtype=dtype
            )
            return WholeLinear(Declared(shard, start), dtype=dtype), norm

        if sizes.q_rank is None:
            self.queries: nn.Module = of_heads("q", sizes.nope_dim + sizes.rope_dim, h)
        else:
            down, norm = short("q_down", sizes.q_rank)
            self.queries = nn.Sequential(down, norm, of_heads("q_up", sizes.nope_dim + sizes.rope_dim, sizes.q_rank))
        self.kv_down, self.kv_norm = short("kv_down", sizes.kv_rank, sizes.rope_dim)
        self.kv_up = of_heads("kv_up", sizes.nope_dim + sizes.value_dim, sizes.kv_rank)
        self.out = output_linear(name, config, heads, mesh, region, dtype=dtype)

    def forward(self, x: Input, tokens: Tokens, cache: LayerCache | None = None) -> Tensor:
        """x [t, h] -> [t, h]."""
        sizes = self.sizes
        q = self.queries(x).unflatten(-1, (self.num_heads, -1))
        q_plain, q_turned = q.split([sizes.nope_dim, sizes.rope_dim], dim=-1)
        q_turned = self.turn(q_turned, tokens)
        latent, k_turned = self.kv_down(x).split([sizes.kv_rank, sizes.rope_dim], dim=-1)
        k_turned = value_of(self.region.enter(k_turned.contiguous())).unsqueeze(1)
        k_turned, latent = self.turn(k_turned, tokens), value_of(self.kv_norm(latent.contiguous()))
        if cache is None:
            heads = self._expanded(q_plain, q_turned, latent, k_turned, tokens)
        else:
            k_turned, kept = cache.extend(k_turned, latent.unsqueeze(1), tokens)
            heads = self._absorbed(q_plain, q_turned, kept, k_turned, tokens)
        return self.out(heads.flatten(1))

    def _expanded(self, q_plain: Tensor, q_turned: Tensor, latent: Tensor, k_turned: Tensor, tokens: Tokens) -> Tensor:
        """Keys and values of every head: q_* [t, n, ...], latent [t, r] as the region has it -> [t, n, value_dim]."""
        kv = self.kv_up(latent).unflatten(-1, (self.num_heads, -1))
        k_plain, v = kv.split([self.sizes.nope_dim, self.sizes.value_dim], dim=-1)
        q = torch.cat([q_plain, q_turned], dim=-1)
        k = torch.cat([k_plain, k_turned.expand(-1, self.num_heads, -1)], dim=-1)
        return self.core(q, k, v, tokens, scores=self.scores)

    def _absorbed(self, q_plain: Tensor, q_turned: Tensor, latent: Tensor, k_turned: Tensor, tokens: Tokens) -> Tensor:
        """The same without keys and values of single heads: latent and k_turned [t_kv, 1, ...] serve all of them.

        The projection up to keys is applied to the queries, that up to values to what attention finds.
        """
        (weight,) = self.kv_up.sunk()
        up = weight.unflatten(0, (self.num_heads, -1))
        up_keys, up_values = up.split([self.sizes.nope_dim, self.sizes.value_dim], dim=1)
        q = torch.cat([torch.einsum("tnd,ndr->tnr", q_plain, up_keys), q_turned], dim=-1)
        k = torch.cat([latent, k_turned], dim=-1)
        found = self.core(q, k, latent, tokens, scores=self.scores)
        return torch.einsum("tnr,nvr->tnv", found, up_values)


def latent_scores(config: ModelConfig, index: int) -> Scores:
    """What becomes of the scores: by default divided by the root of both parts' features, and sharpened under yarn."""
    scores, sizes = scores_of_layer(config, index), config.mla
    assert sizes is not None
    if scores.scale is not None:
        return scores
    sharper = 1.0
    if sizes.yarn_mscale is not None and config.rope.scaling == "yarn" and config.rope.factor > 1:
        sharper = 0.1 * sizes.yarn_mscale * math.log(config.rope.factor) + 1.0
    return Scores(sharper**2 / math.sqrt(sizes.nope_dim + sizes.rope_dim), scores.window, scores.softcap)

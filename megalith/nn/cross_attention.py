"""Cross attention: tokens look at other features than their own: an encoder's, a picture's, or of
an earlier layer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.kernels.attention import attention
from megalith.kernels.masks import with_masks
from megalith.kernels.rebuilt import LayerInput
from megalith.kernels.scores import Scores
from megalith.kernels.tokens import PackedSeqParams
from megalith.kernels.visible import Visible
from megalith.nn.attention import LayerCache, output_linear
from megalith.parallel.context import Attend
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import ZEROS, ColumnLinear, Init, ParameterSpec, TPComm
from megalith.plan.shards import Shard, split_heads


class EncodedKeys(NamedTuple):
    """Keys and values of what is looked at: computed once, however many tokens look at them while a
    text is written."""

    k: Tensor
    """[t_kv, g, d], of this rank's heads."""

    v: Tensor
    tokens: PackedSeqParams
    """Its documents, the n-th for the n-th of those that look; of any lengths, also empty."""


class CrossLayerState(nn.Module):
    """Queries come from x, keys and values from a memory; neither knows positions.

    Both are in the layout of `tp_comm`: under sequence parallelism each rank's part of either.
    Scores are scaled and capped as in the model's other attention; queries and keys are not normed.
    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.3.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        mesh: Mesh,
        tp_comm: TPComm,
        *,
        dtype: torch.dtype,
        memory_size: int | None = None,
        causal: bool = False,
        core: Attend = attention,
    ) -> None:
        """`memory_size`: features of the memory (m); unset: as many as of x. `causal`: the
        memory is of the tokens that look, and none sees that of later ones."""
        super().__init__()
        self.core = core
        self.scores = Scores(config.score_scale(), softcap=config.attention.softcap, causal=causal)
        heads = split_heads(config.num_heads, config.num_kv_heads, mesh.tp.size)
        self.num_heads, self.num_kv_heads = (
            heads.queries[mesh.tp.rank],
            heads.keys[mesh.over("tp_kv").rank],
        )
        n, g, d, replica_ranks = (
            config.num_heads,
            config.num_kv_heads,
            config.head_size(),
            mesh.over("tp_kv"),
        )

        def queries(suffix: str, *inputs: int) -> Shard:
            shard = Shard.full(f"{name}.q{suffix}", (n, d, *inputs), inputs=len(inputs))
            return shard.split_dim(0, heads.queries, mesh.tp.rank, mesh.tp.axes)

        def keys(suffix: str, *inputs: int) -> Shard:
            shard = Shard.full(f"{name}.kv{suffix}", (2, g, d, *inputs), inputs=len(inputs))
            return shard.split_dim(1, heads.keys, replica_ranks.rank, replica_ranks.axes)

        def column(weight: Shard, bias: Shard) -> ColumnLinear:
            biases = [ParameterSpec(bias, ZEROS)] if config.qkv_bias else []
            return ColumnLinear(
                [ParameterSpec(weight, Init(config.init_std))], biases, tp_comm, dtype=dtype
            )

        self.queries = column(queries("", config.hidden_size), queries("_bias"))
        self.keys = column(keys("", memory_size or config.hidden_size), keys("_bias"))
        self.out = output_linear(name, config, heads.queries, mesh, tp_comm, dtype=dtype)

    def remember(self, memory: LayerInput, tokens: PackedSeqParams) -> EncodedKeys:
        """Keys and values of memory [t_kv, m], to look at as often as need be."""
        k, v = self.keys(memory).chunk(2, dim=-1)
        g = self.num_kv_heads
        return EncodedKeys(k.unflatten(-1, (g, -1)), v.unflatten(-1, (g, -1)), tokens)

    def attend(self, x: LayerInput, k: Tensor, v: Tensor, tokens: PackedSeqParams) -> Tensor:
        """x [t, h], k and v [t_kv, g, d]; tokens: of both -> [t, h]."""
        q = self.queries(x).unflatten(-1, (self.num_heads, -1))
        return self.out(self.core(q, k, v, tokens, scores=self.scores).flatten(1))


class CrossAttention(CrossLayerState):
    """Each token looks at a whole document of a memory of other tokens: x [t, h], memory [t_kv, m]
    -> [t, h].

    Nobody sees what is padding in the memory; `masks` may hide more, for each document bool
    [queries, its keys].
    """

    def forward(
        self,
        x: LayerInput,
        tokens: PackedSeqParams,
        memory: Tensor,
        memory_tokens: PackedSeqParams,
        masks: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """x [t, h], memory [t_kv, m] -> [t, h]."""
        return self.look(x, tokens, self.remember(memory, memory_tokens), masks)

    def look(
        self,
        x: LayerInput,
        tokens: PackedSeqParams,
        memory: EncodedKeys,
        masks: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """x [t, h] -> [t, h].

        Raises:
            DataError: masks that do not fit the documents.
        """
        both = across(tokens, memory.tokens)
        return self.attend(
            x, memory.k, memory.v, both if masks is None else with_masks(both, masks)
        )


class CrossLayerAttention(CrossLayerState):
    """Each token looks at what an earlier layer made of itself and of earlier tokens: x [t, h] ->
    [t, h].

    The memory [t, h] comes with the tokens. It has their documents, and their cuts wherever ranks
    share them; so it is seen as the tokens are in self-attention, over cp, too.
    """

    def forward(
        self, x: LayerInput, tokens: PackedSeqParams, cache: LayerCache | None = None
    ) -> Tensor:
        """x [t, h] -> [t, h]; cache: keys and values of the memory of earlier tokens."""
        assert tokens.memory is not None, "the model gives its memory to the tokens"
        k, v, _ = self.remember(tokens.memory, tokens)
        if cache is not None:
            k, v = cache.extend(k, v, tokens)
        return self.attend(x, k, v, tokens)


def across(tokens: PackedSeqParams, memory: PackedSeqParams) -> PackedSeqParams:
    """Queries of some tokens with keys of others, document by document; of masks only the others'
    padding counts."""
    assert len(tokens.lengths) == len(memory.lengths), (
        "one document of the memory for each that looks at it"
    )
    assert tokens.context is None is memory.context, (
        "a memory of other tokens is not shared over cp"
    )
    lengths = tuple(
        (own, other) for (own, _), (other, _) in zip(tokens.lengths, memory.lengths, strict=True)
    )
    dropout = None
    if tokens.dropout is not None and memory.dropout is not None:
        dropout = tokens.dropout._replace(keys=memory.dropout.numbers)
    padding = None if memory.visible is None else memory.visible.keys
    return replace(
        tokens,
        lengths=lengths,
        cu_seqlens_kv=memory.cu_seqlens_q,
        max_seqlen_kv=memory.max_seqlen_q,
        uniform=None,
        biases=None,
        dropout=dropout,
        visible=None if padding is None else Visible(padding),
    )

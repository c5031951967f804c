"""Cross-attention to encoder states or image features, and to hidden states of an earlier layer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.kernels.attention.mask import AttentionMask
from megalith.kernels.attention.scores import Scores
from megalith.kernels.packed import PackedSeqParams, with_masks
from megalith.nn.attention import LayerCache, output_linear
from megalith.nn.build import BuildContext
from megalith.nn.dropout import build_core_attention
from megalith.nn.lora import ColumnLora
from megalith.parallel.tensor import ZEROS, ColumnParallelLinear, Init
from megalith.plan.shards import Shard, split_heads


class EncodedKeys(NamedTuple):
    """Cached keys and values of cross-attention, computed once per generated text."""

    k: Tensor
    """[t_kv, g, d], of the local heads."""

    v: Tensor
    tokens: PackedSeqParams
    """Documents of the keys, the n-th for the n-th document of queries; of any lengths, also
    empty."""


class CrossAttentionBase(nn.Module):
    """Base of cross-attention: queries from x, keys and values from `encoder_hidden`, without
    position embedding.

    Both are in the layout of `tp_comm`: under sequence parallelism each rank's part. Scores are
    scaled and capped as in the model's self-attention; queries and keys are not normalized. Source:
    Vaswani et al. 2017, arXiv:1706.03762, section 3.2.3.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        context: BuildContext,
        *,
        memory_size: int | None = None,
        causal: bool = False,
    ) -> None:
        """`memory_size`: features of the encoder states (m); unset: as many as of x. `causal`: the
        encoder states are those of the same tokens, and no token attends to later ones."""
        super().__init__()
        mesh = context.mesh
        self.core = build_core_attention(config, context, place="cross weights")
        self.scores = Scores(
            config.softmax_scale(), softcap=config.attention.softcap, causal=causal
        )
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

        def column(weight: Shard, bias: Shard) -> ColumnParallelLinear | ColumnLora:
            biases = [(bias, ZEROS)] if config.qkv_bias else []
            return context.column_linear([(weight, Init(config.init_std))], biases)

        self.queries = column(queries("", config.hidden_size), queries("_bias"))
        self.keys = column(keys("", memory_size or config.hidden_size), keys("_bias"))
        self.out = output_linear(name, config, context, heads.queries)

    def encode_keys(self, encoder_hidden: Tensor, tokens: PackedSeqParams) -> EncodedKeys:
        """Return keys and values of encoder_hidden [t_kv, m], which can be used repeatedly."""
        k, v = self.keys(encoder_hidden).chunk(2, dim=-1)
        g = self.num_kv_heads
        return EncodedKeys(k.unflatten(-1, (g, -1)), v.unflatten(-1, (g, -1)), tokens)

    def attend(self, x: Tensor, k: Tensor, v: Tensor, tokens: PackedSeqParams) -> Tensor:
        """x [t, h], k and v [t_kv, g, d]; tokens: of both -> [t, h]."""
        q = self.queries(x).unflatten(-1, (self.num_heads, -1))
        return self.out(self.core(q, k, v, tokens, scores=self.scores).flatten(1))


class CrossAttention(CrossAttentionBase):
    """Cross-attention of each token to a document of other tokens: x [t, h], encoder_hidden [t_kv,
    m] -> [t, h].

    Padding among the keys is hidden; `masks` may hide more, for each document bool [queries, its
    keys].
    """

    def forward(
        self,
        x: Tensor,
        tokens: PackedSeqParams,
        encoder_hidden: Tensor,
        encoder_tokens: PackedSeqParams,
        masks: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """x [t, h], encoder_hidden [t_kv, m] -> [t, h]."""
        return self.attend_encoded(
            x, tokens, self.encode_keys(encoder_hidden, encoder_tokens), masks
        )

    def attend_encoded(
        self,
        x: Tensor,
        tokens: PackedSeqParams,
        encoded_keys: EncodedKeys,
        masks: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """x [t, h] -> [t, h], with precomputed keys and values.

        Raises:
            DataError: the masks do not fit the documents.
        """
        both = across(tokens, encoded_keys.tokens)
        return self.attend(
            x, encoded_keys.k, encoded_keys.v, both if masks is None else with_masks(both, masks)
        )


class CrossLayerAttention(CrossAttentionBase):
    """Attention of each token to an earlier layer's hidden states of itself and of earlier tokens:
    x [t, h] -> [t, h].

    The source hidden states [t, h] are part of the tokens, with the same documents and the same
    sharding under context parallelism, so attention works as self-attention does.
    """

    def forward(
        self, x: Tensor, tokens: PackedSeqParams, cache: LayerCache | None = None
    ) -> Tensor:
        """x [t, h] -> [t, h]; cache: keys and values of the source hidden states of earlier
        tokens."""
        assert tokens.memory is not None, (
            "the model must set the cross-layer source in tokens.memory"
        )
        k, v, _ = self.encode_keys(tokens.memory, tokens)
        if cache is not None:
            k, v = cache.extend(k, v, tokens)
        return self.attend(x, k, v, tokens)


def across(tokens: PackedSeqParams, encoder_tokens: PackedSeqParams) -> PackedSeqParams:
    """Return queries of some tokens with keys of others, document by document; of the attention
    masks only the keys' padding applies."""
    assert len(tokens.lengths) == len(encoder_tokens.lengths), (
        "cross-attention requires one document of keys for each document of queries"
    )
    assert tokens.context is None is encoder_tokens.context, (
        "cross-attention to other tokens does not support context parallelism"
    )
    lengths = tuple(
        (num_queries, num_keys)
        for (num_queries, _), (num_keys, _) in zip(
            tokens.lengths, encoder_tokens.lengths, strict=True
        )
    )
    dropout = None
    if tokens.dropout is not None and encoder_tokens.dropout is not None:
        dropout = tokens.dropout._replace(keys=encoder_tokens.dropout.numbers)
    padding = None if encoder_tokens.visible is None else encoder_tokens.visible.keys
    return replace(
        tokens,
        lengths=lengths,
        cu_seqlens_kv=encoder_tokens.cu_seqlens_q,
        max_seqlen_kv=encoder_tokens.max_seqlen_q,
        uniform=None,
        biases=None,
        dropout=dropout,
        visible=None if padding is None else AttentionMask(padding),
    )

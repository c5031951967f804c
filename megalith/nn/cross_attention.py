"""Cross-attention to encoder states or image features, and to hidden states of an earlier layer."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.kernels.attention.mask import AttentionMask
from megalith.kernels.attention.scores import Scores
from megalith.kernels.layer_inputs import LayerCache, LayerInputs
from megalith.kernels.packed import with_masks
from megalith.nn.attention import output_linear
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
    inputs: LayerInputs
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

    def encode_keys(self, encoder_hidden: Tensor, inputs: LayerInputs) -> EncodedKeys:
        """Return keys and values of encoder_hidden [t_kv, m], which can be used repeatedly."""
        k, v = self.keys(encoder_hidden).chunk(2, dim=-1)
        g = self.num_kv_heads
        return EncodedKeys(k.unflatten(-1, (g, -1)), v.unflatten(-1, (g, -1)), inputs)

    def attend(
        self,
        x: Tensor,
        k: Tensor,
        v: Tensor,
        inputs: LayerInputs,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """x [t, h], k and v [t_kv, g, d]; inputs: of both -> [t, h]."""
        q = self.queries(x).unflatten(-1, (self.num_heads, -1))
        attend = self.core if cache is None else partial(cache.attend, self.core)
        heads = attend(
            q, k, v, inputs.seq_params, scores=self.scores, dropout_key=inputs.dropout_key
        )
        return self.out(heads.flatten(1))


class CrossAttention(CrossAttentionBase):
    """Cross-attention of each token to a document of other tokens: x [t, h], encoder_hidden [t_kv,
    m] -> [t, h].

    Padding among the keys is hidden; `masks` may hide more, for each document bool [queries, its
    keys].
    """

    def forward(
        self,
        x: Tensor,
        inputs: LayerInputs,
        encoder_hidden: Tensor,
        encoder_inputs: LayerInputs,
        masks: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """x [t, h], encoder_hidden [t_kv, m] -> [t, h]."""
        return self.attend_encoded(
            x, inputs, self.encode_keys(encoder_hidden, encoder_inputs), masks
        )

    def attend_encoded(
        self,
        x: Tensor,
        inputs: LayerInputs,
        encoded_keys: EncodedKeys,
        masks: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """x [t, h] -> [t, h], with precomputed keys and values.

        Raises:
            DataError: the masks do not fit the documents.
        """
        both = across(inputs, encoded_keys.inputs)
        if masks is not None:
            both = replace(both, seq_params=with_masks(both.seq_params, masks))
        return self.attend(x, encoded_keys.k, encoded_keys.v, both)


class CrossLayerAttention(CrossAttentionBase):
    """Attention of each token to an earlier layer's hidden states of itself and of earlier tokens:
    x [t, h] -> [t, h].

    The source hidden states [t, h] are `inputs.encoder_hidden`, with the same documents and the
    same sharding under context parallelism, so attention works as self-attention does.
    """

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h] -> [t, h]; `inputs.cross_cache`: keys and values of the source hidden states of
        earlier tokens."""
        assert inputs.encoder_hidden is not None, (
            "the model must set the cross-layer source in inputs.encoder_hidden"
        )
        k, v, _ = self.encode_keys(inputs.encoder_hidden, inputs)
        return self.attend(x, k, v, inputs, inputs.cross_cache)


def across(inputs: LayerInputs, encoder_inputs: LayerInputs) -> LayerInputs:
    """Return queries of some tokens with keys of others, document by document; of the attention
    masks only the keys' padding applies."""
    queries, keys = inputs.seq_params, encoder_inputs.seq_params
    assert len(queries.lengths) == len(keys.lengths), (
        "cross-attention requires one document of keys for each document of queries"
    )
    assert queries.context is None is keys.context, (
        "cross-attention to other tokens does not support context parallelism"
    )
    lengths = tuple(
        (num_queries, num_keys)
        for (num_queries, _), (num_keys, _) in zip(queries.lengths, keys.lengths, strict=True)
    )
    dropout_key = None
    if inputs.dropout_key is not None and encoder_inputs.dropout_key is not None:
        dropout_key = inputs.dropout_key._replace(keys=encoder_inputs.dropout_key.numbers)
    padding = None if keys.visible is None else keys.visible.keys
    seq_params = replace(
        queries,
        lengths=lengths,
        cu_seqlens_kv=keys.cu_seqlens_q,
        max_seqlen_kv=keys.max_seqlen_q,
        uniform=None,
        visible=None if padding is None else AttentionMask(padding),
    )
    return LayerInputs(seq_params, dropout_key=dropout_key)

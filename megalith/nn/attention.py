"""Self-attention, cross-attention to encoder states, and attention to the hidden states of an
earlier layer."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.kernels.attention.scores import AttentionMask, Scores, record_scores
from megalith.kernels.layer_inputs import LayerCache, LayerInputs
from megalith.kernels.packed import with_masks
from megalith.nn.build import BuildContext, ColumnLinear, RowLinear
from megalith.nn.dropout import build_core_attention
from megalith.nn.norm import build_qk_norms
from megalith.nn.rope import build_apply_rope, build_attention_temperature
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import ZEROS, Init
from megalith.plan.shards import HeadSplit, Shard, split_heads


class Attention(nn.Module):
    """Self-attention of each token to earlier tokens of its document, or to all: x [t, h] -> [t,
    h].

    Source: Vaswani et al. 2017, arXiv:1706.03762; grouped queries: Ainslie et al. 2023,
    arXiv:2305.13245.
    """

    def __init__(self, name: str, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        mesh = context.mesh
        self.core = build_core_attention(config, context)
        self.scores = build_layer_scores(config, context.layer)
        self.apply_rope = build_apply_rope(config, context)
        self.attention_temperature = build_attention_temperature(config, context.layer)
        self.head_dim = config.head_size()
        heads = split_heads(config.num_heads, config.num_kv_heads, mesh.tp.size)
        self.name, self.first_head = name, sum(heads.queries[: mesh.tp.rank])
        self.num_heads = heads.queries[mesh.tp.rank]
        self.num_kv_heads = heads.keys[mesh.over("tp_kv").rank]
        start = Init(config.init_std)
        weights = _input_shards(name, config, mesh, heads, columns=config.hidden_size)
        biases = _input_shards(name, config, mesh, heads, columns=None) if config.qkv_bias else []
        self.qkv = context.column_linear(
            [(weight, start) for weight in weights], [(bias, ZEROS) for bias in biases]
        )
        self.norms = build_qk_norms(name, config, context, heads)
        self.sinks = Sinks(name, config, context, heads) if config.attention.sinks else no_sinks
        self.gate = sigmoid_gate if config.attention.gated else no_gate
        self.out = output_linear(name, config, context, heads.queries)

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h] -> [t, h]."""
        n, g, d = self.num_heads, self.num_kv_heads, self.head_dim
        projected = self.qkv(x)
        q, k, v, gate = projected.split(
            [n * d, g * d, g * d, projected.shape[-1] - (n + 2 * g) * d], dim=-1
        )
        q, k = self.norms(q.unflatten(-1, (n, d)), k.unflatten(-1, (g, d)))
        q, k, v = (
            self.attention_temperature(self.apply_rope(q, inputs), inputs),
            self.apply_rope(k, inputs),
            v.unflatten(-1, (g, d)),
        )
        attend = self.core if inputs.cache is None else partial(inputs.cache.attend, self.core)
        heads = attend(
            q,
            k,
            v,
            inputs.seq_params,
            scores=self.scores,
            sinks=self.sinks(),
            attention_bias=inputs.attention_bias,
            dropout_key=inputs.dropout_key,
            max_scores=record_scores(inputs.score_record, self.name, self.first_head, q),
        )
        return self.out(self.gate(heads.flatten(1), gate))


def output_linear(
    name: str, config: ModelConfig, context: BuildContext, heads: list[int]
) -> RowLinear:
    """Build the output projection from the local heads to the residual stream: o [h, n, d_v],
    sharded into `heads` per tp rank."""
    o = Shard.full(
        f"{name}.o", (config.hidden_size, config.num_heads, config.value_size()), inputs=2
    )
    tp = context.mesh.tp
    o = o.split_dim(1, heads, tp.rank, tp.axes)
    bias = Shard.full(
        f"{name}.o_bias", (config.hidden_size,), invariant=context.tp_comm.invariant, inputs=0
    )
    return context.row_linear(
        (o, Init(config.init_std / math.sqrt(2 * config.num_layers))),
        (bias, ZEROS) if config.output_bias else None,
    )


def build_layer_scores(config: ModelConfig, layer: int) -> Scores:
    """Return the score settings of a layer, numbered over all stages."""
    kind = config.attention
    window = kind.window if config.has_window(layer) else None
    relative = config.relative.max_distance if config.positions == "relative" else None
    return Scores(
        config.softmax_scale(),
        window,
        window is not None and kind.chunked,
        kind.softcap,
        causal=kind.causal,
        right=kind.window_right,
        off_by_one=kind.off_by_one,
        relative=relative,
    )


class Sinks(nn.Module):
    """Learned attention sinks: a score per head that takes part in softmax without a key: ->
    [n_tp], of the local heads.

    Source: Xiao et al. 2023, arXiv:2309.17453.
    """

    weight: nn.Parameter

    def __init__(
        self, name: str, config: ModelConfig, context: BuildContext, heads: HeadSplit
    ) -> None:
        super().__init__()
        tp = context.mesh.tp
        shard = Shard.full(f"{name}.sinks", (config.num_heads,), inputs=0)
        shard = shard.split_dim(0, heads.queries, tp.rank, tp.axes)
        context.register_param(self, "weight", shard, Init(config.init_std))

    def forward(self) -> Tensor:
        """Return the sinks [n_tp]."""
        return self.weight


def no_sinks() -> None:
    """Return no sinks."""


def sigmoid_gate(heads: Tensor, gate: Tensor) -> Tensor:
    """Gate the heads' outputs: heads, gate [t, n d] -> [t, n d]. Source: Qiu et al. 2025,
    arXiv:2505.06708."""
    wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
    return heads * wide.sigmoid().to(heads.dtype)


def no_gate(heads: Tensor, gate: Tensor) -> Tensor:
    """Return the heads' outputs unchanged."""
    return heads


def _input_shards(
    name: str, config: ModelConfig, mesh: Mesh, heads: HeadSplit, *, columns: int | None
) -> list[Shard]:
    """Return the local shards of q [n, d, h], kv [2, g, d, h] and, with a gate, gate [n, d, h];
    without columns those of the biases [n, d] and [2, g, d].

    Key/value heads that several ranks share are replicated along tp_copy, so their gradients are
    summed over it.
    """
    d = config.head_size()
    inputs, suffix = ((columns,), "") if columns is not None else ((), "_bias")
    replica_ranks = mesh.over("tp_kv")

    def of_queries(word: str) -> Shard:
        shard = Shard.full(
            f"{name}.{word}{suffix}", (config.num_heads, d, *inputs), inputs=len(inputs)
        )
        return shard.split_dim(0, heads.queries, mesh.tp.rank, mesh.tp.axes)

    kv = Shard.full(f"{name}.kv{suffix}", (2, config.num_kv_heads, d, *inputs), inputs=len(inputs))
    kv = kv.split_dim(1, heads.keys, replica_ranks.rank, replica_ranks.axes)
    return [of_queries("q"), kv, *([of_queries("gate")] if config.attention.gated else [])]


# --- cross-attention to encoder states or image features, and to hidden states of an earlier layer


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
        self.name, self.first_head = name, sum(heads.queries[: mesh.tp.rank])
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
            q,
            k,
            v,
            inputs.seq_params,
            scores=self.scores,
            dropout_key=inputs.dropout_key,
            max_scores=record_scores(inputs.score_record, self.name, self.first_head, q),
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

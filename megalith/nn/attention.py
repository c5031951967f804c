"""Grouped-query attention with rotary position embedding; heads are sharded over the
tensor-parallel group."""

import math
from functools import partial

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.kernels.attention.scores import Scores
from megalith.kernels.layer_inputs import LayerInputs
from megalith.nn.build import BuildContext
from megalith.nn.dropout import build_core_attention
from megalith.nn.lora import RowLora
from megalith.nn.norm import build_qk_norms
from megalith.nn.rope import build_apply_rope, build_attention_temperature
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import ZEROS, Init, RowParallelLinear
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
        )
        return self.out(self.gate(heads.flatten(1), gate))


def output_linear(
    name: str, config: ModelConfig, context: BuildContext, heads: list[int]
) -> RowParallelLinear | RowLora:
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

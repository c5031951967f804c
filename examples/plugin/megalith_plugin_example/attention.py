"""Attention with a value residual: each head adds its own value vector, times a learned weight."""

from functools import partial

from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.kernels.layer_inputs import LayerInputs
from megalith.nn.attention import output_linear, scores_of_layer
from megalith.nn.build import BuildContext
from megalith.nn.dropout import build_core_attention
from megalith.nn.rope import build_apply_rope
from megalith.parallel.tensor import ZEROS, Init
from megalith.plan.shards import Shard, split_evenly

from .attention_kind import VALUE_RESIDUAL


class ValueResidualAttention(nn.Module):
    """Multi-head attention plus `weight * v` of the same token: x [t, h] -> [t, h].

    Heads are sharded over the tensor-parallel group; each head has one weight, initially 0.
    """

    layer_kind = VALUE_RESIDUAL
    weight: nn.Parameter

    def __init__(self, name: str, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        n, d, tp = config.num_heads, config.head_size(), context.mesh.tp
        heads = split_evenly(n, tp.size)
        self.num_heads, self.head_dim = heads[tp.rank], d
        self.core = build_core_attention(config, context)
        self.scores = scores_of_layer(config, context.layer)
        self.apply_rope = build_apply_rope(config, context)
        shards = [
            Shard.full(f"{name}.{part}", (n, d, config.hidden_size)).split_dim(
                0, heads, tp.rank, tp.axes
            )
            for part in ("q", "k", "v")
        ]
        self.qkv = context.column_linear([(shard, Init(config.init_std)) for shard in shards])
        self.out = output_linear(name, config, context, heads)
        weight = Shard.full(f"{name}.value_residual", (n,), inputs=0)
        weight = weight.split_dim(0, heads, tp.rank, tp.axes)
        context.register_param(self, "weight", weight, ZEROS)

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h] -> [t, h]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(1)
        q, k = self.apply_rope(q, inputs), self.apply_rope(k, inputs)
        attend = self.core if inputs.cache is None else partial(inputs.cache.attend, self.core)
        heads = attend(
            q, k, v, inputs.seq_params, scores=self.scores, dropout_key=inputs.dropout_key
        )
        y: Tensor = self.out((heads + self.weight[:, None] * v).flatten(1))
        return y

"""Transformer layers: attention and an MLP with norms and residual connections; a single linear
layer in place of either (DeciLM); the additional layers of multi-token prediction (MTP).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.config.parallel import OffloadConfig, RecomputeConfig
from megalith.config.plugins import load_plugin
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.linear import register_checked_recompute, register_recompute
from megalith.nn.attention import Attention, CrossLayerAttention
from megalith.nn.build import BuildContext
from megalith.nn.dropout import Step, build_dropout
from megalith.nn.embedding import InputEmbedding
from megalith.nn.lora import connect_adapter_dropout
from megalith.nn.mla import LatentAttention
from megalith.nn.mlp import MLP, GatedMLP, build_mlp
from megalith.nn.moe import MoE
from megalith.nn.norm import Norm, build_norm, stream_dtype
from megalith.parallel.recompute import LayerRunner, Recomputed, RecomputedInChunks
from megalith.parallel.tensor import (
    ZEROS,
    Init,
    ParameterSpec,
    VocabParallelEmbedding,
)
from megalith.plan.recompute import recomputed_modules
from megalith.plan.shards import Shard

# --- a single linear layer in place of attention or an MLP (Puzzle, DeciLM)


class LinearReplacement(nn.Module):
    """Linear layer in place of attention or an MLP: `y = x @ W.T`, or with a bias `y = x @ W.T +
    b`: x [t, h] -> [t, h], in the layout of `tp_comm`.

    W [h, h] is replicated: it is small, and tokens need no communication. Source: Bercovich et al.
    2024, arXiv:2411.19146, section 3.1.
    """

    def __init__(
        self, name: str, config: ModelConfig, context: BuildContext, *, bias: bool
    ) -> None:
        super().__init__()
        h, start = config.hidden_size, Init(config.init_std / math.sqrt(2 * config.num_layers))
        weight = Shard.full(f"{name}.linear", (h, h), invariant=context.tp_comm.invariant)
        self.linear = context.replicated_linear(weight, start)
        self.shift = AddBias(f"{name}.linear_bias", h, context) if bias else nn.Identity()

    def forward(self, x: Tensor, inputs: LayerInputs | None = None) -> Tensor:
        """x [t, h] -> [t, h]; `inputs` are ignored."""
        y: Tensor = self.shift(self.linear(x))
        return y


class AddBias(nn.Module):
    """Adds a learned bias [h]: x [t, h] -> [t, h]."""

    weight: nn.Parameter

    def __init__(self, name: str, size: int, context: BuildContext) -> None:
        super().__init__()
        shard = Shard.full(name, (size,), invariant=context.tp_comm.invariant, inputs=0)
        context.register_param(self, "weight", shard, ZEROS)

    def forward(self, x: Tensor) -> Tensor:
        """x [t, h] -> [t, h]."""
        return x + self.weight


class IdentityNorm(nn.Module):
    """Placeholder of an absent norm: returns x in the dtype of the layer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """x [t, h] -> [t, h]."""
        return x.to(self.dtype)

    def add_and_normalize(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual sum in the stream's dtype and in the layer's dtype."""
        total = residual + x
        return total, total.to(self.dtype)


class ResidualBranch(nn.Module):
    """Output of attention or MLP before the residual addition: optional post-norm, scale and
    dropout."""

    def __init__(self, norm: Norm | None, scale: float, dropped: Sequence[Step]) -> None:
        super().__init__()
        self.norm = norm or nn.Identity()
        self.scale = (ScaleBy(scale),) if scale != 1.0 else ()
        self.dropped = tuple(dropped)

    def forward(self, y: Tensor, inputs: LayerInputs) -> Tensor:
        """y [t, h] -> [t, h]."""
        y = self.norm(y)
        for step in (*self.scale, *self.dropped):
            y = step(y, inputs)
        return y


@dataclass(frozen=True, slots=True)
class ScaleBy:
    """Multiplies by a constant."""

    factor: float

    def __call__(self, y: Tensor, inputs: LayerInputs) -> Tensor:
        """y [t, h] -> [t, h]."""
        return y * self.factor


class Layer(nn.Module):
    """Base of all kinds of layers: builds the modules; subclasses define `forward`."""

    attentions = 1
    """Number of attention modules with a KV cache."""

    def __init__(self, name: str, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        index, config = context.layer, config.at(context.layer)
        if config.attention_part(index) != "none":
            self.attention_norm = _input_norm(f"{name}.attention_norm", config, context)
            self.attention = connect_adapter_dropout(
                _build_attention(f"{name}.attention", config, context)
            )
            self.attention_out = _build_branch(name, "attention", config, context)
        if config.uses_cross_layer_source(index):
            self.cross_norm = _input_norm(f"{name}.cross_norm", config, context)
            self.cross = connect_adapter_dropout(
                CrossLayerAttention(
                    f"{name}.cross", config, context, causal=config.attention.causal
                )
            )
            self.cross_out = _build_branch(name, "cross", config, context)
        if config.mlp_part(index) != "none":
            self.mlp_norm = (
                IdentityNorm(context.dtype)
                if config.block == "parallel_one_norm"
                else _input_norm(f"{name}.mlp_norm", config, context)
            )
            mlp = connect_adapter_dropout(_build_mlp(name, config, context))
            self.mlp = _recompute_mlp(mlp, context.recompute)
            self.mlp_out = _build_branch(name, "mlp", config, context)


def _input_norm(name: str, config: ModelConfig, context: BuildContext) -> Norm | IdentityNorm:
    """Build the norm of a part's input; it is recomputed in backward if the run asks for it."""
    if config.norm_placement == "after":
        return IdentityNorm(context.dtype)
    recompute, register = context.recompute, None
    if "norm" in recomputed_modules(recompute):
        register = register_checked_recompute if recompute.check else register_recompute
    return build_norm(name, config.hidden_size, config, context, register=register)


def _build_branch(
    name: str, word: str, config: ModelConfig, context: BuildContext
) -> ResidualBranch:
    """Build what follows a part before the residual addition."""
    has_norm = config.norm_placement != "before"
    norm_name = f"{name}.{word}_post_norm"
    return ResidualBranch(
        build_norm(norm_name, config.hidden_size, config, context) if has_norm else None,
        config.residual_scale,
        build_dropout(word, context.dropout_layer, config.dropout.residual, context),
    )


def _build_attention(name: str, config: ModelConfig, context: BuildContext) -> nn.Module:
    """Build a layer's attention or its linear replacement."""
    if config.attention_part(context.layer) == "linear":
        return LinearReplacement(name, config, context, bias=config.output_bias)
    if config.plugins.attention is not None:
        attention: nn.Module = load_plugin("attention", config.plugins.attention)(
            name, config, context
        )
        return attention
    if config.mla is None:
        return Attention(name, config, context)
    return LatentAttention(name, config, context)


def _build_mlp(name: str, config: ModelConfig, context: BuildContext) -> nn.Module:
    """Build a layer's MLP, its experts, or its linear replacement."""
    if config.moe is not None and config.has_experts(context.layer):
        return MoE(f"{name}.moe", config, config.moe, context)
    if config.mlp_part(context.layer) == "linear":
        return LinearReplacement(f"{name}.mlp", config, context, bias=config.mlp_bias)
    if config.plugins.mlp is not None:
        mlp: nn.Module = load_plugin("mlp", config.plugins.mlp)(f"{name}.mlp", config, context)
        return mlp
    return build_mlp(f"{name}.mlp", config, context)


def _recompute_mlp(mlp: nn.Module, recompute: RecomputeConfig) -> nn.Module:
    """Wrap the MLP of a layer for recomputation in backward if the run asks for it, in chunks if
    set; MoE layers are not chunked."""
    if "mlp" not in recomputed_modules(recompute):
        return mlp
    if recompute.mlp_chunks > 1 and isinstance(mlp, GatedMLP | MLP):
        return RecomputedInChunks(mlp, recompute.mlp_chunks, check=recompute.check)
    return Recomputed(mlp, check=recompute.check)


class SequentialBlock(Layer):
    """Layer with attention and then an MLP, each added to the residual stream: x [t, h] -> x [t,
    h]."""

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h] -> [t, h]."""
        attended = self.attention_out(self.attention(self.attention_norm(x), inputs), inputs)
        x, normed = self.mlp_norm.add_and_normalize(attended, x)
        return x + self.mlp_out(self.mlp(normed, inputs), inputs)


class CrossBlock(Layer):
    """Layer with cross-layer attention between attention and MLP: x [t, h] -> x [t, h].

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.1 (with post-norm).
    """

    attentions = 2

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h] -> [t, h]; `inputs.encoder_hidden`: the cross-layer source."""
        attended = self.attention_out(self.attention(self.attention_norm(x), inputs), inputs)
        x, normed = self.cross_norm.add_and_normalize(attended, x)
        cross_attended = self.cross_out(self.cross(normed, inputs), inputs)
        x, normed = self.mlp_norm.add_and_normalize(cross_attended, x)
        return x + self.mlp_out(self.mlp(normed, inputs), inputs)


class ParallelBlock(Layer):
    """Layer whose attention and MLP read the same x and are both added to it: x [t, h] -> x [t, h].

    Source: Chowdhery et al. 2022, arXiv:2204.02311, section 2; Black et al. 2022, arXiv:2204.06745,
    section 2.
    """

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h] -> [t, h]."""
        attended = self.attention_out(self.attention(self.attention_norm(x), inputs), inputs)
        return x + attended + self.mlp_out(self.mlp(self.mlp_norm(x), inputs), inputs)


class OneNormBlock(Layer):
    """Parallel layer with one norm for attention and MLP: x [t, h] -> x [t, h]."""

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h] -> [t, h]."""
        normed = self.attention_norm(x)
        attended = self.attention_out(self.attention(normed, inputs), inputs)
        return x + attended + self.mlp_out(self.mlp(normed, inputs), inputs)


class AttentionBlock(Layer):
    """A layer without an MLP: x [t, h] -> x [t, h]."""

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h] -> [t, h]."""
        return x + self.attention_out(self.attention(self.attention_norm(x), inputs), inputs)


class MLPBlock(Layer):
    """A layer without attention: x [t, h] -> x [t, h]."""

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h] -> [t, h]."""
        return x + self.mlp_out(self.mlp(self.mlp_norm(x), inputs), inputs)


BLOCKS: dict[str, type[Layer]] = {
    "sequential": SequentialBlock,
    "parallel": ParallelBlock,
    "parallel_one_norm": OneNormBlock,
}
"""Layer class by model.block, for layers with attention and MLP."""


def select_block_class(config: ModelConfig, layer: int) -> type[Layer]:
    """Return the class of a layer, numbered over all stages; every layer has attention or an
    MLP."""
    if config.attention_part(layer) == "none":
        return MLPBlock
    if config.mlp_part(layer) == "none":
        return AttentionBlock
    if config.plugins.block is not None:
        plugin: type[Layer] = load_plugin("block", config.plugins.block)
        return plugin
    return CrossBlock if config.uses_cross_layer_source(layer) else BLOCKS[config.block]


# --- multi-token prediction (MTP): additional layers after the last that predict tokens beyond the
# next one
#
# Depth 1 takes the hidden states from which the next token is predicted and the embedding of that
# token, and predicts the token after it; each later depth takes the output of the previous one and
# the embedding one token later. Embedding table and output head are shared with the model. RoPE and
# relative biases use the position of the predicting token, a learned position embedding that of the
# embedded token. Source: DeepSeek-AI 2024, arXiv:2412.19437, section 2.2; the projection's input
# has the embedding first, as in the published weights, while equation 21 of the paper has it last.
#
# Under pipeline parallelism all depths are on one stage, which has a copy of the embedding table.
# Their losses are computed on the stage of the model's output head; if that is another stage, it
# receives the hidden states of every depth.

MTPInputs = Sequence[tuple[Tensor, Tensor]]
"""(ids, labels), each [t], of every depth; empty if only the next token is predicted."""


class MTPLayer(nn.Module):
    """One MTP depth: hidden states x [t, h] and the ids [t] of the tokens `depth + 1` positions
    later -> hidden states that predict the token after these.

    x and the normalized result [t, h] are in the layout of `tp_comm`; ids are those of all tokens.
    """

    def __init__(
        self,
        depth: int,
        config: ModelConfig,
        context: BuildContext,
        *,
        table: ParameterSpec,
        shared: nn.Parameter | None,
        places: nn.Parameter | None = None,
    ) -> None:
        """`depth`: from 0; `table`: spec of the embedding table; `shared`: its parameter, if this
        rank has it already, and `places` that of learned positions."""
        super().__init__()
        name, h, last = f"mtp.{depth}", config.hidden_size, config.num_layers - 1
        self.embed = VocabParallelEmbedding(
            table, context.tp_comm, dtype=context.dtype, tied=shared
        )
        self.input_embedding = InputEmbedding(config, context, number=depth + 1, places=places)
        self.embed_norm, self.hidden_norm, self.norm = (
            build_norm(f"{name}.{word}", h, config, context)
            for word in ("embed_norm", "hidden_norm", "norm")
        )
        project = Shard.full(f"{name}.project", (h, 2 * h), invariant=context.tp_comm.invariant)
        self.project = context.replicated_linear(project, Init(config.init_std))
        self.layer = select_block_class(config, last)(
            f"{name}.layer", config, context.at_layer(last, config.num_layers + depth)
        )
        self.run_layers = LayerRunner(context.recompute, OffloadConfig(), context.mesh.tp)
        self.stream = stream_dtype(config, context.dtype)

    def forward(self, x: Tensor, ids: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h], ids [t] -> [t, h]."""
        embedded = self.input_embedding(self.embed(ids), inputs)
        both = torch.cat([self.embed_norm(embedded), self.hidden_norm(x)], dim=-1)
        x, _ = self.run_layers([self.layer], self.project(both).to(self.stream), inputs)
        return self.norm(x)


class MTPBlock(nn.Module):
    """All MTP depths in sequence; empty on other stages.

    A separate module instead of a list in the model, so that FSDP and activation checkpointing
    treat it as one unit.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: BuildContext,
        *,
        depths: int,
        table: ParameterSpec,
        shared: nn.Parameter | None,
        places: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for depth in range(depths):
            layer = MTPLayer(depth, config, context, table=table, shared=shared, places=places)
            self.layers.append(layer)
            shared, places = layer.embed.weight, layer.input_embedding.position_table()

    def forward(self, x: Tensor, mtp_inputs: MTPInputs, inputs: LayerInputs) -> tuple[Tensor, ...]:
        """Return the hidden states of every depth, each [t, h]; x: those of the model."""
        hidden_states = []
        for layer, (ids, _) in zip(self.layers if mtp_inputs else (), mtp_inputs, strict=True):
            x = layer(x, ids, inputs)
            hidden_states.append(x)
        return tuple(hidden_states)

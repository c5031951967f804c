"""Transformer layers: attention and an MLP with norms and residual connections; a single linear
layer in place of either (DeciLM)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.config.parallel import RecomputeConfig
from megalith.config.plugins import load_plugin
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.linear import register_checked_recompute, register_recompute
from megalith.nn.attention import Attention, CrossLayerAttention
from megalith.nn.build import BuildContext
from megalith.nn.dropout import Step, build_dropout
from megalith.nn.lora import connect_adapter_dropout
from megalith.nn.mla import LatentAttention
from megalith.nn.mlp import MLP, GatedMLP, build_mlp
from megalith.nn.moe import MoE
from megalith.nn.norm import Norm, build_norm
from megalith.parallel.recompute import Recomputed, RecomputedInChunks
from megalith.parallel.tensor import (
    ZEROS,
    Init,
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

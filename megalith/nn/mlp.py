"""MLPs, gated or not; inner features are sharded over the tensor-parallel group."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.config.plugins import load_plugin
from megalith.kernels.activation import GatedActivation, activate, gated, swiglu
from megalith.kernels.backend import AUTO, Backends
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.linear import (
    RegisterRecompute,
    register_checked_recompute,
    register_recompute,
    split_rows,
)
from megalith.nn.build import BuildContext, ColumnLinear, RowLinear
from megalith.parallel.tensor import ZEROS, Init
from megalith.plan.recompute import recomputed_modules
from megalith.plan.shards import Shard, split_evenly

Inner = Callable[[Tensor], Tensor]
"""Activation between the two matmuls: [t, f] -> [t, f], or gated [t, 2 f] -> [t, f]."""


class GatedMLP(nn.Module):
    """`down(activation(gate(x)) * up(x))`: x [t, h] -> [t, h]. Source: Shazeer 2020,
    arXiv:2002.05202."""

    def __init__(self, name: str, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        self.activation = build_activation(config, context)
        """Gated activation of the concatenated gate and up."""
        self.gate_up = _up(f"{name}.gate_up", (2,), config, context)
        self.down = _build_down_projection(f"{name}.down", config, context)

    def forward(self, x: Tensor, inputs: LayerInputs | None = None) -> Tensor:
        """x [t, h] -> [t, h]. `inputs` are used by hooks of LoRA dropout."""
        return self.down(self.activation(self.gate_up(x)))


class MLP(nn.Module):
    """`down(activation(up(x)))`: x [t, h] -> [t, h]. Source: Vaswani et al. 2017, arXiv:1706.03762,
    section 3.3."""

    def __init__(self, name: str, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        self.activation = build_activation(config, context)
        self.up = _up(f"{name}.up", (), config, context)
        self.down = _build_down_projection(f"{name}.down", config, context)

    def forward(self, x: Tensor, inputs: LayerInputs | None = None) -> Tensor:
        """x [t, h] -> [t, h]. `inputs` are used by hooks of LoRA dropout."""
        return self.down(self.activation(self.up(x)))


class ChunkedPrefillMLP(nn.Module):
    """MLP that processes prompts in chunks, so that inner features [t, f] never exist for all
    tokens.

    x [t, h] -> [t, h]. Decoding steps are not divided. For inference, without gradients.
    """

    def __init__(self, mlp: GatedMLP | MLP, chunks: int) -> None:
        super().__init__()
        self.mlp, self.chunks = mlp, chunks

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h] -> [t, h]; fewer chunks if there are fewer tokens."""
        count = min(self.chunks, x.shape[0]) if inputs.seq_params.max_seqlen_q > 1 else 1
        return torch.cat([self.mlp(part, inputs) for part in split_rows(x, count)])


def build_mlp(
    name: str, config: ModelConfig, context: BuildContext
) -> GatedMLP | MLP | ChunkedPrefillMLP:
    """Build the MLP that the config describes; in an inference model it may process prompts in
    chunks."""
    mlp = (GatedMLP if config.gated else MLP)(name, config, context)
    chunks = context.prefill_mlp_chunks
    return mlp if chunks == 1 else ChunkedPrefillMLP(mlp, chunks)


def build_activation(config: ModelConfig, context: BuildContext) -> Inner:
    """Return the activation between the matmuls; it is recomputed in backward if the run asks for
    it."""
    activation = choose_activation(config, context.backends)
    recompute = context.recompute
    if "mlp_act" not in recomputed_modules(recompute):
        return activation
    register = register_checked_recompute if recompute.check else register_recompute
    return partial(recompute_activation, register, activation)


def choose_activation(config: ModelConfig, backends: Backends = AUTO) -> Callable[[Tensor], Tensor]:
    """Return the activation between the matmuls that the config describes."""
    if config.plugins.activation is not None:
        plugin: Callable[[Tensor], Tensor] = load_plugin("activation", config.plugins.activation)
        return plugin
    if not config.gated:
        return partial(backends.bind("activation", activate), activation=config.activation)
    gate = GatedActivation(config.activation, config.activation_clamp, config.up_offset)
    if gate == GatedActivation("silu"):
        return backends.bind("activation", swiglu)
    return partial(backends.bind("activation", gated), gate=gate)


def recompute_activation(
    register: RegisterRecompute, activation: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    """Return `activation(x)`, which backward recomputes; it saves x only."""
    return register(activation(x), activation, (x,))


def _up(
    name: str, stack: tuple[int, ...], config: ModelConfig, context: BuildContext
) -> ColumnLinear:
    """Build the up projection to the local inner features: one matrix [f, h], or several, [*stack,
    f, h]."""
    h, f = config.hidden_size, config.ffn_hidden_size
    tp = context.mesh.tp
    cut = split_evenly(f, tp.size), tp.rank, tp.axes
    weight = Shard.full(name, (*stack, f, h)).split_dim(len(stack), *cut)
    bias = Shard.full(f"{name}_bias", (*stack, f), inputs=0).split_dim(len(stack), *cut)
    biases = [(bias, ZEROS)] if config.mlp_bias else []
    return context.column_linear([(weight, Init(config.init_std))], biases)


def _build_down_projection(name: str, config: ModelConfig, context: BuildContext) -> RowLinear:
    """Build the down projection [h, f] from the local inner features."""
    h, f = config.hidden_size, config.ffn_hidden_size
    tp = context.mesh.tp
    weight = Shard.full(name, (h, f)).split_dim(1, split_evenly(f, tp.size), tp.rank, tp.axes)
    bias = Shard.full(f"{name}_bias", (h,), invariant=context.tp_comm.invariant, inputs=0)
    start = Init(config.init_std / math.sqrt(2 * config.num_layers))
    return context.row_linear((weight, start), (bias, ZEROS) if config.mlp_bias else None)

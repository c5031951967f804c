"""MLPs, gated or not; inner features are sharded over the tensor-parallel group."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.kernels.activation import GatedActivation, activate, gated, swiglu
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.recomputed import RegisterRecompute, split_rows
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import (
    ZEROS,
    ColumnParallelLinear,
    Init,
    ParameterSpec,
    RowParallelLinear,
    TPComm,
)
from megalith.plan.shards import Shard, split_evenly

Inner = Callable[[Tensor], Tensor]
"""Activation between the two matmuls: [t, f] -> [t, f], or gated [t, 2 f] -> [t, f]."""


class GatedMLP(nn.Module):
    """`down(activation(gate(x)) * up(x))`: x [t, h] -> [t, h]. Source: Shazeer 2020,
    arXiv:2002.05202."""

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        mesh: Mesh,
        tp_comm: TPComm,
        *,
        dtype: torch.dtype,
        activation: Inner = swiglu,
    ) -> None:
        """`activation`: gated activation of the concatenated gate and up."""
        super().__init__()
        self.activation = activation
        self.gate_up = _up(f"{name}.gate_up", (2,), config, mesh, tp_comm, dtype)
        self.down = _down(f"{name}.down", config, mesh, tp_comm, dtype)

    def forward(self, x: Tensor, inputs: LayerInputs | None = None) -> Tensor:
        """x [t, h] -> [t, h]. `inputs` are used by hooks of LoRA dropout."""
        return self.down(self.activation(self.gate_up(x)))


class MLP(nn.Module):
    """`down(activation(up(x)))`: x [t, h] -> [t, h]. Source: Vaswani et al. 2017, arXiv:1706.03762,
    section 3.3."""

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        mesh: Mesh,
        tp_comm: TPComm,
        *,
        dtype: torch.dtype,
        activation: Inner,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up = _up(f"{name}.up", (), config, mesh, tp_comm, dtype)
        self.down = _down(f"{name}.down", config, mesh, tp_comm, dtype)

    def forward(self, x: Tensor, inputs: LayerInputs | None = None) -> Tensor:
        """x [t, h] -> [t, h]. `inputs` are used by hooks of LoRA dropout."""
        return self.down(self.activation(self.up(x)))


def build_mlp(
    name: str,
    config: ModelConfig,
    mesh: Mesh,
    tp_comm: TPComm,
    *,
    dtype: torch.dtype,
    act_again: RegisterRecompute | None = None,
) -> GatedMLP | MLP:
    """Build the MLP that the config describes. `act_again`: the activation is recomputed in
    backward instead of saved."""
    plain = choose_activation(config)
    kind = GatedMLP if config.gated else MLP
    inner: Inner = plain if act_again is None else partial(recompute_activation, act_again, plain)
    return kind(name, config, mesh, tp_comm, dtype=dtype, activation=inner)


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


def chunk_prefill_mlps(model: nn.Module, chunks: int) -> int:
    """Let every MLP of an inference model, shared experts included, process prompts in chunks;
    returns the number of MLPs."""
    held = [
        (module, name, part)
        for module in model.modules()
        for name, part in module.named_children()
        if isinstance(part, GatedMLP | MLP)
    ]
    for module, name, part in held:
        setattr(module, name, ChunkedPrefillMLP(part, chunks))
    return len(held)


def choose_activation(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """Return the activation between the matmuls that the config describes, by its fastest
    kernel."""
    if not config.gated:
        return partial(activate, activation=config.activation)
    gate = GatedActivation(config.activation, config.activation_clamp, config.up_offset)
    return swiglu if gate == GatedActivation("silu") else partial(gated, gate=gate)


def recompute_activation(
    again: RegisterRecompute, activation: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    """Return `activation(x)`, which backward recomputes; it saves x only."""
    return again(activation(x), activation, (x,))


def _up(
    name: str,
    stack: tuple[int, ...],
    config: ModelConfig,
    mesh: Mesh,
    tp_comm: TPComm,
    dtype: torch.dtype,
) -> ColumnParallelLinear:
    """Build the up projection to the local inner features: one matrix [f, h], or several, [*stack,
    f, h]."""
    h, f = config.hidden_size, config.ffn_hidden_size
    cut = split_evenly(f, mesh.tp.size), mesh.tp.rank, mesh.tp.axes
    weight = Shard.full(name, (*stack, f, h)).split_dim(len(stack), *cut)
    bias = Shard.full(f"{name}_bias", (*stack, f), inputs=0).split_dim(len(stack), *cut)
    biases = [ParameterSpec(bias, ZEROS)] if config.mlp_bias else []
    return ColumnParallelLinear(
        [ParameterSpec(weight, Init(config.init_std))], biases, tp_comm, dtype=dtype
    )


def _down(
    name: str, config: ModelConfig, mesh: Mesh, tp_comm: TPComm, dtype: torch.dtype
) -> RowParallelLinear:
    """Build the down projection [h, f] from the local inner features."""
    h, f = config.hidden_size, config.ffn_hidden_size
    weight = Shard.full(name, (h, f)).split_dim(
        1, split_evenly(f, mesh.tp.size), mesh.tp.rank, mesh.tp.axes
    )
    bias = Shard.full(f"{name}_bias", (h,), invariant=tp_comm.invariant, inputs=0)
    start = Init(config.init_std / math.sqrt(2 * config.num_layers))
    return RowParallelLinear(
        ParameterSpec(weight, start),
        ParameterSpec(bias, ZEROS) if config.mlp_bias else None,
        tp_comm,
        dtype=dtype,
    )

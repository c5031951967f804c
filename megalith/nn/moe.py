"""Mixture-of-experts layer: route, dispatch, apply the experts, combine."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.config.moe import MoEConfig
from megalith.kernels.activation import GatedActivation, weighted_activate, weighted_gated
from megalith.kernels.backend import AUTO, Backends
from megalith.kernels.grouped_linear import experts
from megalith.kernels.layer_inputs import LayerInputs
from megalith.nn.build import BuildContext
from megalith.nn.mlp import build_mlp
from megalith.nn.router import Router
from megalith.parallel.expert import DispatchedTokens, ExpertCapacity, build_transport
from megalith.parallel.mesh import Mesh
from megalith.parallel.recompute import Recomputed
from megalith.parallel.tensor import ZEROS, ExpertMatrix, Init
from megalith.plan.recompute import recomputed_modules
from megalith.plan.shards import Shard, split_evenly

# The experts of an MoE layer: MLPs of equal shape, sharded over expert parallelism and expert
# tensor parallelism.


class Experts(nn.Module):
    """Apply each expert to its rows: [r, d] -> [r, d], a partial sum over etp.

    The router weight of a row multiplies its expert's output. Source: Shazeer et al. 2017,
    arXiv:1701.06538.
    """

    def __init__(
        self, name: str, config: ModelConfig, moe: MoEConfig, context: BuildContext
    ) -> None:
        super().__init__()
        self.inner = weighted_activation(config, context.backends)
        self.compute = context.backends.bind("experts", experts)
        self.apply_router_weight_on_input = moe.apply_router_weight_on_input
        features = moe.latent_size or config.hidden_size
        halves, word = ((2,), "gate_up") if config.gated else ((), "up")
        inside = moe.num_experts, *halves, moe.ffn_hidden_size
        cut = partial(_cut, moe=moe, mesh=context.mesh)
        up = cut(f"{name}.{word}", (*inside, features), inner=1 + len(halves))
        down = cut(f"{name}.down", (moe.num_experts, features, moe.ffn_hidden_size), inner=2)
        up_bias = cut(f"{name}.{word}_bias", inside, inner=1 + len(halves), inputs=0)
        down_bias = cut(f"{name}.down_bias", (moe.num_experts, features), inner=None, inputs=0)
        std = config.init_std
        self.up = ExpertMatrix(
            context.spec(up, Init(std)),
            context.spec(up_bias, ZEROS) if moe.biases else None,
            dtype=context.dtype,
            matmul_ops=context.build_grouped_matmul_ops(up.name),
        )
        self.down = ExpertMatrix(
            context.spec(down, Init(std / math.sqrt(2 * config.num_layers))),
            context.spec(down_bias, ZEROS) if moe.biases else None,
            dtype=context.dtype,
            matmul_ops=context.build_grouped_matmul_ops(down.name),
        )

    def forward(self, sent: DispatchedTokens) -> Tensor:
        """Rows [r, d], sorted by expert -> [r, d]."""
        rows, weights, groups = sent
        if self.apply_router_weight_on_input:
            rows = rows * weights.unsqueeze(1).to(rows.dtype)
            weights = torch.ones_like(weights)
        return self.compute(rows, weights, groups, self.up(), self.down(), self.inner)


def weighted_activation(
    config: ModelConfig, backends: Backends = AUTO
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the activation between an expert's matmuls: that of the model's MLP, times the router
    weight of each row."""
    if not config.gated:
        weighted = backends.bind("activation", weighted_activate)
        return partial(weighted, activation=config.activation)
    return partial(
        backends.bind("activation", weighted_gated),
        gate=GatedActivation(config.activation, config.activation_clamp, config.up_offset),
    )


def _cut(
    name: str,
    shape: tuple[int, ...],
    *,
    moe: MoEConfig,
    mesh: Mesh,
    inner: int | None,
    inputs: int = 1,
) -> Shard:
    """Return the local experts' shard of a parameter [E, ...]: whole, or sharded along dim `inner`
    over etp."""
    ep, etp = mesh.over("ep"), mesh.over("etp")
    shard = Shard.full(name, shape, inputs=inputs).split_dim(
        0,
        split_evenly(moe.num_experts, ep.size),
        ep.rank,
        ep.axes,
    )
    if inner is not None:
        shard = shard.split_dim(
            inner, split_evenly(moe.ffn_hidden_size, etp.size), etp.rank, etp.axes
        )
    return Shard(shard.name, shard.shape, shard.box, shard.cut, grid="expert", inputs=inputs)


class MoE(nn.Module):
    """Mixture of experts: the weighted sum of the outputs of each token's experts: x [t, h] -> [t,
    h], of the local tokens.

    Source: Shazeer et al. 2017, arXiv:1701.06538; Fedus et al. 2021, arXiv:2101.03961.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        moe: MoEConfig,
        context: BuildContext,
    ) -> None:
        super().__init__()
        mesh, recompute = context.mesh, context.recompute
        self.router = Router(name, config, moe, context)
        build = partial(
            build_transport,
            context.parallel.dispatcher,
            mesh,
            moe.num_experts,
            overlap_fn=context.overlap_fn,
        )
        self.dispatch = build()
        self.dispatch_within_capacity = build(
            drops_tokens=moe.capacity.factor is not None, room=fixed_expert_capacity(moe, mesh)
        )
        self.experts = Experts(f"{name}.experts", config, moe, context)
        self.narrow, self.widen = latent_matrices(name, config, moe, context)
        self.shared = nn.ModuleList()
        if moe.shared_ffn_hidden_size is not None:
            shared = SharedExperts(name, config, moe, context)
            is_recomputed = "shared_experts" in recomputed_modules(recompute)
            self.shared.append(
                Recomputed(shared, check=recompute.check) if is_recomputed else shared
            )

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h] -> [t, h]."""
        # in training
        dispatch = (
            self.dispatch
            if inputs.router_inputs.aux_loss_scale is None
            else self.dispatch_within_capacity
        )
        dispatched = dispatch(self.narrow(x), self.router(x, inputs))
        # overlaps the dispatch, and that of gradients in backward
        shared_outputs = [shared(x, inputs) for shared in self.shared]
        expert_input, return_path = dispatched.wait()
        y: Tensor = self.widen(return_path.combine(self.experts(expert_input)))
        for shared_output in shared_outputs:
            y = y + shared_output
        return y


def fixed_expert_capacity(moe: MoEConfig, mesh: Mesh) -> ExpertCapacity | None:
    """Return the fixed number of rows of every expert; None: as many as are routed to it."""
    capacity = moe.capacity
    if capacity.factor is None or not capacity.pad:
        return None
    return ExpertCapacity(capacity.factor, moe.top_k, moe.num_experts, mesh.over("cp", "tp").size)


class SharedExperts(nn.Module):
    """Shared experts, an MLP for all tokens, optionally with a scalar gate per token: x [t, h] ->
    [t, h].

    Source: Dai et al. 2024, arXiv:2401.06066, section 3.2; the gate: Qwen Team 2024,
    arXiv:2407.10671.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        moe: MoEConfig,
        context: BuildContext,
    ) -> None:
        super().__init__()
        assert moe.shared_ffn_hidden_size is not None
        sized = replace(config, ffn_hidden_size=moe.shared_ffn_hidden_size)
        self.mlp = build_mlp(f"{name}.shared", sized, context)
        self.weigh = nn.ModuleList()
        if moe.shared_gate:
            self.weigh.append(
                _matrix(f"{name}.shared_gate", 1, config.hidden_size, config.init_std, context)
            )

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h] -> [t, h]."""
        y: Tensor = self.mlp(x, inputs)
        for weigh in self.weigh:
            y = y * weigh(x).sigmoid()
        return y


def latent_matrices(
    name: str, config: ModelConfig, moe: MoEConfig, context: BuildContext
) -> tuple[nn.Module, nn.Module]:
    """Build the projections to the experts' features and back; identities if these are equal to the
    hidden size."""
    h, latent = config.hidden_size, moe.latent_size
    if latent is None:
        return nn.Identity(), nn.Identity()
    return (
        _matrix(f"{name}.latent_in", latent, h, config.init_std, context),
        _matrix(f"{name}.latent_out", h, latent, config.init_std, context),
    )


def _matrix(name: str, outputs: int, inputs: int, std: float, context: BuildContext) -> nn.Module:
    """Build a replicated matrix for the local tokens."""
    shard = Shard.full(name, (outputs, inputs), invariant=context.tp_comm.invariant)
    return context.replicated_linear(shard, Init(std))

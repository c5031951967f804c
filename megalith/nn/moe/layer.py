"""Mixture-of-experts layer: route, dispatch, apply experts, combine."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.config.moe import MoEConfig
from megalith.config.parallel import DispatcherName
from megalith.kernels.recomputed import LayerInput, RecomputedOutputFactory
from megalith.kernels.tokens import PackedSeqParams
from megalith.nn.mlp import build_mlp
from megalith.nn.moe.experts import Experts
from megalith.nn.moe.router import Router
from megalith.parallel.autograd import OverlapFn
from megalith.parallel.expert import ExpertCapacity, with_overlap_fn
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import Init, ParameterSpec, ReplicatedLinear, TPComm
from megalith.parallel.transports import build_transport
from megalith.plan.shards import Shard


def no_wrapper(module: nn.Module) -> nn.Module:
    """Return the module without a wrapper."""
    return module


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
        mesh: Mesh,
        tp_comm: TPComm,
        *,
        dtype: torch.dtype,
        dispatcher: DispatcherName = "alltoall",
        act_again: RecomputedOutputFactory | None = None,
        number: int = 0,
        around_shared: Callable[[nn.Module], nn.Module] = no_wrapper,
    ) -> None:
        """`number`: the layer's index over all stages; `act_again`: recomputation of the shared
        experts' activation (that of the routed experts is never saved); `around_shared`: wraps the
        shared experts."""
        super().__init__()
        self.router = Router(name, config, moe, mesh, tp_comm, dtype=dtype, number=number)
        build = partial(build_transport, dispatcher, mesh, moe.num_experts)
        self.dispatch = build()
        self.dispatch_within_capacity = build(
            drops_tokens=moe.capacity.factor is not None, room=fixed_expert_capacity(moe, mesh)
        )
        self.experts = Experts(f"{name}.experts", config, moe, mesh, dtype=dtype)
        self.narrow, self.widen = latent_matrices(name, config, moe, tp_comm, dtype=dtype)
        shared = moe.shared_ffn_hidden_size is not None
        built = (
            [SharedExperts(name, config, moe, mesh, tp_comm, dtype=dtype, act_again=act_again)]
            if shared
            else []
        )
        self.shared = nn.ModuleList(map(around_shared, built))

    def overlap_fn(self, something: OverlapFn) -> None:
        """Call this function during every dispatch and combine, before waiting for the
        communication."""
        self.dispatch = with_overlap_fn(self.dispatch, something)
        self.dispatch_within_capacity = with_overlap_fn(self.dispatch_within_capacity, something)

    def forward(self, x: LayerInput, tokens: PackedSeqParams) -> Tensor:
        """x [t, h] -> [t, h]."""
        dispatch = (
            self.dispatch if tokens.balance is None else self.dispatch_within_capacity
        )  # in training
        dispatched = dispatch(self.narrow(x), self.router(x, tokens))
        shared_outputs = [
            shared(x, tokens) for shared in self.shared
        ]  # overlaps the dispatch, and that of gradients in backward
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
        mesh: Mesh,
        tp_comm: TPComm,
        *,
        dtype: torch.dtype,
        act_again: RecomputedOutputFactory | None = None,
    ) -> None:
        super().__init__()
        assert moe.shared_ffn_hidden_size is not None
        sized = replace(config, ffn_hidden_size=moe.shared_ffn_hidden_size)
        self.mlp = build_mlp(
            f"{name}.shared", sized, mesh, tp_comm, dtype=dtype, act_again=act_again
        )
        weigh = _matrix(
            f"{name}.shared_gate", 1, config.hidden_size, config.init_std, tp_comm, dtype
        )
        self.weigh = nn.ModuleList([weigh] if moe.shared_gate else [])

    def forward(self, x: LayerInput, tokens: PackedSeqParams) -> Tensor:
        """x [t, h] -> [t, h]."""
        y: Tensor = self.mlp(x, tokens)
        for weigh in self.weigh:
            y = y * weigh(x).sigmoid()
        return y


def latent_matrices(
    name: str, config: ModelConfig, moe: MoEConfig, tp_comm: TPComm, *, dtype: torch.dtype
) -> tuple[nn.Module, nn.Module]:
    """Build the projections to the experts' features and back; identities if these are equal to the
    hidden size."""
    h, latent = config.hidden_size, moe.latent_size
    if latent is None:
        return nn.Identity(), nn.Identity()
    return (
        _matrix(f"{name}.latent_in", latent, h, config.init_std, tp_comm, dtype),
        _matrix(f"{name}.latent_out", h, latent, config.init_std, tp_comm, dtype),
    )


def _matrix(
    name: str, outputs: int, inputs: int, std: float, tp_comm: TPComm, dtype: torch.dtype
) -> ReplicatedLinear:
    """Build a replicated matrix for the local tokens."""
    return ReplicatedLinear(
        ParameterSpec(Shard.full(name, (outputs, inputs), invariant=tp_comm.invariant), Init(std)),
        dtype=dtype,
    )

"""The experts of an MoE layer: MLPs of equal shape, sharded over expert parallelism and expert
tensor parallelism."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.config.moe import MoEConfig
from megalith.kernels.activation import GatedActivation
from megalith.kernels.experts import experts
from megalith.kernels.recomputed import output_tensor
from megalith.kernels.weighted import weighted_activate, weighted_gated
from megalith.parallel.expert import DispatchedTokens
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import ZEROS, ExpertMatrix, Init, ParameterSpec
from megalith.plan.shards import Shard, split_evenly


class Experts(nn.Module):
    """Apply each expert to its rows: [r, d] -> [r, d], a partial sum over etp.

    The router weight of a row multiplies its expert's output. Source: Shazeer et al. 2017,
    arXiv:1701.06538.
    """

    def __init__(
        self, name: str, config: ModelConfig, moe: MoEConfig, mesh: Mesh, *, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.inner = weighted_activation(config)
        self.compute: Callable[..., Tensor] = (
            experts  # an attribute, so that nn/kernels.py can bind its backend
        )
        self.apply_router_weight_on_input = moe.apply_router_weight_on_input
        features = moe.latent_size or config.hidden_size
        halves, word = ((2,), "gate_up") if config.gated else ((), "up")
        inside = (moe.num_experts, *halves, moe.ffn_hidden_size)
        cut = partial(_cut, moe=moe, mesh=mesh)
        up = cut(f"{name}.{word}", (*inside, features), inner=1 + len(halves))
        down = cut(f"{name}.down", (moe.num_experts, features, moe.ffn_hidden_size), inner=2)
        up_bias = cut(f"{name}.{word}_bias", inside, inner=1 + len(halves), inputs=0)
        down_bias = cut(f"{name}.down_bias", (moe.num_experts, features), inner=None, inputs=0)
        std = config.init_std
        self.up = ExpertMatrix(
            ParameterSpec(up, Init(std)),
            ParameterSpec(up_bias, ZEROS) if moe.biases else None,
            dtype=dtype,
        )
        self.down = ExpertMatrix(
            ParameterSpec(down, Init(std / math.sqrt(2 * config.num_layers))),
            ParameterSpec(down_bias, ZEROS) if moe.biases else None,
            dtype=dtype,
        )

    def forward(self, sent: DispatchedTokens) -> Tensor:
        """Rows [r, d], sorted by expert -> [r, d]."""
        rows, weights, groups = sent
        if self.apply_router_weight_on_input:
            read = output_tensor(rows)
            rows, weights = read * weights.unsqueeze(1).to(read.dtype), torch.ones_like(weights)
        return self.compute(rows, weights, groups, self.up(), self.down(), self.inner)


def weighted_activation(config: ModelConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the activation between an expert's matmuls: that of the model's MLP, times the router
    weight of each row."""
    if not config.gated:
        return partial(weighted_activate, activation=config.activation)
    return partial(
        weighted_gated,
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

"""The experts of a layer: an MLP each, all of one shape, of which this rank holds some, or a part
of each."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.config.moe import MoEConfig
from megalith.kernels.activation import GatedActivation
from megalith.kernels.experts import experts
from megalith.kernels.rebuilt import output_tensor
from megalith.kernels.weighted import weighted_activate, weighted_gated
from megalith.parallel.expert import DispatchedTokens
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import ZEROS, ExpertMatrix, Init, ParameterSpec
from megalith.plan.shards import Shard, split_evenly


class Experts(nn.Module):
    """What each expert makes of the rows that were sent to it: [r, d] -> [r, d], my part of a sum
    over etp.

    The weight of a row multiplies what its expert makes of it. Source: Shazeer et al. 2017,
    arXiv:1701.06538.
    """

    def __init__(
        self, name: str, config: ModelConfig, moe: MoEConfig, mesh: Mesh, *, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.inner = weighted_activation(config)
        self.compute: Callable[..., Tensor] = (
            experts  # held here, so that nn/kernels.py can tell it how
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
        """Rows [r, d], expert after expert -> [r, d]."""
        rows, weights, groups = sent
        if self.apply_router_weight_on_input:
            read = output_tensor(rows)
            rows, weights = read * weights.unsqueeze(1).to(read.dtype), torch.ones_like(weights)
        return self.compute(rows, weights, groups, self.up(), self.down(), self.inner)


def weighted_activation(config: ModelConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """What lies between an expert's matmuls: that of the model's MLP, times the weight of each
    row."""
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
    """My experts' part of a parameter with all of them first: whole, or my features along dim
    `inner`."""
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

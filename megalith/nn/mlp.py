"""The gated MLP, its inner features split over the tensor-parallel ranks."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.kernels.rebuilt import Input, Rebuilding, Rebuilt
from megalith.kernels.swiglu import swiglu
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import ZEROS, ColumnLinear, Declared, Init, Region, RowLinear
from megalith.plan.shards import cut_dim, split_evenly, whole


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`: x [t, h] -> [t, h]. Source: Shazeer 2020, arXiv:2002.05202."""

    def __init__(
        self, name: str, config: ModelConfig, mesh: Mesh, region: Region, *, dtype: torch.dtype,
        act_again: Rebuilding | None = None,
    ) -> None:  # fmt: skip
        """`act_again`: backward computes the gated features again instead of keeping them."""
        super().__init__()
        self.activation: Callable[[Tensor], Input] = swiglu if act_again is None else partial(swiglu_again, act_again)
        h, f = config.hidden_size, config.ffn_hidden_size
        sizes, rank, axes = split_evenly(f, mesh.tp.size), mesh.tp.rank, mesh.tp.axes
        gate_up = cut_dim(whole(f"{name}.gate_up", (2, f, h)), 1, sizes, rank, axes)
        gate_up_bias = cut_dim(whole(f"{name}.gate_up_bias", (2, f), inputs=0), 1, sizes, rank, axes)
        down = cut_dim(whole(f"{name}.down", (h, f)), 1, sizes, rank, axes)
        down_bias = whole(f"{name}.down_bias", (h,), invariant=region.invariant, inputs=0)
        self.gate_up = ColumnLinear(
            [Declared(gate_up, Init(config.init_std))], [Declared(gate_up_bias, ZEROS)] if config.mlp_bias else [],
            region, dtype=dtype,
        )  # fmt: skip
        self.down = RowLinear(
            Declared(down, Init(config.init_std / math.sqrt(2 * config.num_layers))),
            Declared(down_bias, ZEROS) if config.mlp_bias else None, region, dtype=dtype,
        )  # fmt: skip

    def forward(self, x: Input) -> Tensor:
        """x [t, h] -> [t, h]."""
        return self.down(self.activation(self.gate_up(x)))


def swiglu_again(again: Rebuilding, gate_up: Tensor) -> Rebuilt:
    """`swiglu`, of which backward keeps gate_up alone, as it does anyway."""
    return again(swiglu(gate_up), swiglu, (gate_up,))

"""A single linear layer in place of attention or an MLP (Puzzle, DeciLM)."""

import math

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.kernels.recomputed import LayerInput
from megalith.kernels.tokens import PackedSeqParams
from megalith.nn.attention import LayerCache
from megalith.parallel.tensor import (
    ZEROS,
    Init,
    ParameterSpec,
    ReplicatedLinear,
    TPComm,
    register_param,
)
from megalith.plan.shards import Shard


class LinearReplacement(nn.Module):
    """Linear layer in place of attention or an MLP: `y = x @ W.T`, or with a bias `y = x @ W.T +
    b`: x [t, h] -> [t, h], in the layout of `tp_comm`.

    W [h, h] is replicated: it is small, and tokens need no communication. Source: Bercovich et al.
    2024, arXiv:2411.19146, section 3.1.
    """

    def __init__(
        self, name: str, config: ModelConfig, tp_comm: TPComm, *, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        h, start = config.hidden_size, Init(config.init_std / math.sqrt(2 * config.num_layers))
        weight = Shard.full(f"{name}.linear", (h, h), invariant=tp_comm.invariant)
        self.linear = ReplicatedLinear(ParameterSpec(weight, start), dtype=dtype)
        self.shift = (
            AddBias(f"{name}.linear_bias", h, tp_comm, dtype=dtype) if bias else nn.Identity()
        )

    def forward(
        self, x: LayerInput, tokens: PackedSeqParams | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        """x [t, h] -> [t, h]; `tokens` and `cache` are ignored."""
        y: Tensor = self.shift(self.linear(x))
        return y


class AddBias(nn.Module):
    """Adds a learned bias [h]: x [t, h] -> [t, h]."""

    weight: nn.Parameter

    def __init__(self, name: str, size: int, tp_comm: TPComm, *, dtype: torch.dtype) -> None:
        super().__init__()
        shard = Shard.full(name, (size,), invariant=tp_comm.invariant, inputs=0)
        register_param(self, "weight", ParameterSpec(shard, ZEROS), dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [t, h] -> [t, h]."""
        return x + self.weight

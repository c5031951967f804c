"""One matrix in place of attention or of an MLP, in layers that have learnt to do with so
little."""

import math

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.kernels.rebuilt import Input
from megalith.kernels.tokens import Tokens
from megalith.nn.attention import LayerCache
from megalith.parallel.tensor import ZEROS, Declared, Init, Region, WholeLinear, declare
from megalith.plan.shards import whole


class Square(nn.Module):
    """`y = x @ W.T`, or with a bias `y = x @ W.T + b`: x [t, h] -> [t, h], of the tokens that the
    region has.

    All of W [h, h] is on every rank: it is small beside what it replaces, and its tokens stay where
    they are. Source: Bercovich et al. 2024, arXiv:2411.19146, section 3.1.
    """

    def __init__(
        self, name: str, config: ModelConfig, region: Region, *, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        h, start = config.hidden_size, Init(config.init_std / math.sqrt(2 * config.num_layers))
        weight = whole(f"{name}.linear", (h, h), invariant=region.invariant)
        self.linear = WholeLinear(Declared(weight, start), dtype=dtype)
        self.shift = Shift(f"{name}.linear_bias", h, region, dtype=dtype) if bias else nn.Identity()

    def forward(
        self, x: Input, tokens: Tokens | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        """x [t, h] -> [t, h]; which tokens these are, and what came before them, is nothing to
        it."""
        y: Tensor = self.shift(self.linear(x))
        return y


class Shift(nn.Module):
    """Adds a learnt vector [h]: x [t, h] -> [t, h]."""

    weight: nn.Parameter

    def __init__(self, name: str, size: int, region: Region, *, dtype: torch.dtype) -> None:
        super().__init__()
        shard = whole(name, (size,), invariant=region.invariant, inputs=0)
        declare(self, "weight", Declared(shard, ZEROS), dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [t, h] -> [t, h]."""
        return x + self.weight

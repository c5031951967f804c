"""Normalisation of each token's features."""

import torch
from torch import Tensor, nn

from megalith.kernels.norm import add_rms_norm, rms_norm
from megalith.parallel.tensor import ONES, Declared, declare
from megalith.plan.shards import whole


class RMSNorm(nn.Module):
    """Divide each token by the root of its mean square, then scale its features: x [t, h] -> x [t, h].

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    weight: nn.Parameter

    def __init__(self, name: str, size: int, *, eps: float, invariant: frozenset[str], dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        shard = whole(f"{name}.weight", (size,), invariant=invariant, inputs=0)
        declare(self, "weight", Declared(shard, ONES), dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [t, h] -> [t, h]."""
        return rms_norm(x, self.weight, self.eps)

    def after_adding(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x, residual [t, h] -> their sum, and the norm of the sum; in one function, backward has one pass less."""
        return add_rms_norm(x, residual, self.weight, self.eps)

"""Normalisation of each token's features."""

from functools import partial

import torch
from torch import Tensor, nn

from megalith.kernels.norm import add_rms_norm, rms_norm
from megalith.kernels.rebuilt import Input, Rebuilding
from megalith.parallel.tensor import ONES, Declared, declare
from megalith.plan.shards import whole


class RMSNorm(nn.Module):
    """Divide each token by the root of its mean square, then scale its features: x [t, h] -> x [t, h].

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    weight: nn.Parameter

    def __init__(
        self, name: str, size: int, *, eps: float, invariant: frozenset[str], dtype: torch.dtype,
        again: Rebuilding | None = None,
    ) -> None:  # fmt: skip
        """`again`: the layer that reads the result computes it again in backward instead of keeping it."""
        super().__init__()
        self.eps, self.again = eps, again
        shard = whole(f"{name}.weight", (size,), invariant=invariant, inputs=0)
        declare(self, "weight", Declared(shard, ONES), dtype=dtype)

    def forward(self, x: Tensor) -> Input:
        """x [t, h] -> [t, h]."""
        return self._result(rms_norm(x, self.weight, self.eps), x)

    def after_adding(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Input]:
        """x, residual [t, h] -> their sum, and the norm of the sum; in one function, backward has one pass less."""
        total, normed = add_rms_norm(x, residual, self.weight, self.eps)
        return total, self._result(normed, total)

    def _result(self, normed: Tensor, x: Tensor) -> Input:
        if self.again is None:
            return normed
        return self.again(normed, partial(rms_norm, eps=self.eps), (x, self.weight))

"""A model whose parameter sizes are not divisible by any number of ranks."""

import torch
from torch import Tensor, nn

from megalith.plan.shards import Shard


class OddSizedModel(nn.Module):
    """Model with a parameter of one element, one with fewer rows than ranks, an unused one, and one
    larger than several buckets."""

    SHARDS = (
        Shard.full("one", (1,), inputs=0),
        Shard.full("matrix", (2, 3)),
        Shard.full("unused", (5,), inputs=0),
        Shard.full("long", (300,), inputs=0),
    )

    one: nn.Parameter
    matrix: nn.Parameter
    long: nn.Parameter

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        for shard in self.SHARDS:
            ones = torch.ones(shard.matrix_shape, dtype=torch.float64, device=device)
            self.register_parameter(shard.name, nn.Parameter(ones))

    def forward(self, factor: float) -> Tensor:
        """Return a loss whose gradients are `gradients(factor)`."""
        return factor * (self.one.sum() + 2 * self.matrix.sum() + 3 * self.long.sum())

    @staticmethod
    def gradients(factor: float) -> dict[str, float]:
        """Return the gradient value of every element of each parameter."""
        return {"one": factor, "matrix": 2 * factor, "unused": 0.0, "long": 3 * factor}

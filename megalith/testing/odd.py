"""A model with parameters of sizes that no number of ranks divides."""

import torch
from torch import Tensor, nn

from megalith.plan.shards import Shard


class Odd(nn.Module):
    """One element, fewer rows than ranks, a parameter that is not used, and one that several
    buckets would fit in."""

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
        """A loss whose gradients are the `gradients` of that factor."""
        return factor * (self.one.sum() + 2 * self.matrix.sum() + 3 * self.long.sum())

    @staticmethod
    def gradients(factor: float) -> dict[str, float]:
        """What every element of a parameter has for a gradient."""
        return {"one": factor, "matrix": 2 * factor, "unused": 0.0, "long": 3 * factor}

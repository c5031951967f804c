"""Lion, which updates by the sign of a momentum: an elementwise update rule."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.config.optim import OptimConfig
from megalith.optim.rules import UpdateScalars
from megalith.optim.slots import OptimizerSlot


class Lion:
    """Lion: `w -= lr * (sign(beta1 * m + (1 - beta1) * g) + decay * w); m = beta2 * m + (1 - beta2)
    * g`.

    Source: Chen et al. 2023, arXiv:2302.06675, algorithm 2.
    """

    roles: tuple[str, ...] = ("exp_avg",)

    def __init__(self, config: OptimConfig) -> None:
        self.config = config.lion

    def update(
        self, slots: Sequence[OptimizerSlot], gradients: list[Tensor], scalars: UpdateScalars
    ) -> None:
        """Update the weights of slots with equal scalars; overwrites the gradients."""
        lr, master_weights = scalars.lr, [slot.master for slot in slots]
        if scalars.scale is not None:
            torch._foreach_mul_(gradients, scalars.scale)
        averages = [slot.state["exp_avg"] for slot in slots]
        directions = torch._foreach_lerp(averages, gradients, 1 - self.config.beta1)
        torch._foreach_sign_(directions)
        torch._foreach_lerp_(averages, gradients, 1 - self.config.beta2)
        torch._foreach_mul_(master_weights, 1 - lr * scalars.weight_decay)
        torch._foreach_add_(master_weights, directions, alpha=-lr)

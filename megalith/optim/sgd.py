"""Stochastic gradient descent with momentum: an elementwise update rule."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.config.optim import OptimConfig
from megalith.optim.rules import UpdateScalars
from megalith.optim.slots import OptimizerSlot


class SGD:
    """SGD: `m = momentum * m + g; w -= lr * m`, where g includes the weight decay.

    With `nesterov` the step is along `g + momentum * m`. Bitwise equal to torch.optim.SGD. Source:
    Sutskever et al. 2013, "On the importance of initialization and momentum in deep learning",
    section 2.
    """

    def __init__(self, config: OptimConfig) -> None:
        self.config = config
        self.roles: tuple[str, ...] = ("momentum",) if config.momentum else ()

    def update(
        self, slots: Sequence[OptimizerSlot], gradients: list[Tensor], scalars: UpdateScalars
    ) -> None:
        """Update the weights of slots with equal scalars; overwrites the gradients."""
        momentum, master_weights = self.config.momentum, [slot.master for slot in slots]
        if scalars.scale is not None:
            torch._foreach_mul_(gradients, scalars.scale)
        if scalars.weight_decay:
            torch._foreach_add_(gradients, master_weights, alpha=scalars.weight_decay)
        if not momentum:
            torch._foreach_add_(master_weights, gradients, alpha=-scalars.lr)
            return
        momentum_buffers = [slot.state["momentum"] for slot in slots]
        torch._foreach_mul_(momentum_buffers, momentum)
        torch._foreach_add_(momentum_buffers, gradients)
        if self.config.nesterov:
            torch._foreach_add_(gradients, momentum_buffers, alpha=momentum)
        directions = gradients if self.config.nesterov else momentum_buffers
        torch._foreach_add_(master_weights, directions, alpha=-scalars.lr)

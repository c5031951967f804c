"""Stochastic gradient descent with momentum over (Shard, weight) pairs."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megalith.config.optim import OptimConfig
from megalith.optim.schedule import NO_GROUPS, GroupRates
from megalith.optim.slots import (
    OptimizerSlot,
    RatesOf,
    build_slot,
    equal_rates,
    group_by_rates,
    round_master_weights,
)
from megalith.plan.shards import Shard


class SGD:
    """SGD: `m = momentum * m + g; w -= lr * m`, where g includes the weight decay.

    Vectors (norms, biases) have no weight decay by default. With `nesterov` the step is along `g +
    momentum * m`. Bitwise equal to torch.optim.SGD. Source: Sutskever et al. 2013, "On the
    importance of initialization and momentum in deep learning", section 2.
    """

    def __init__(
        self,
        weights: Sequence[tuple[Shard, Tensor]],
        config: OptimConfig,
        rates: RatesOf = equal_rates,
    ) -> None:
        self.config = config
        self.updates = 0
        roles = ("momentum",) if config.momentum else ()
        self.slots = [build_slot(shard, weight, roles, rates(shard)) for shard, weight in weights]

    def step(
        self,
        gradients: Sequence[Tensor],
        *,
        lr: float,
        weight_decay: float,
        scale: Tensor | None = None,
        groups: Mapping[str, GroupRates] = NO_GROUPS,
    ) -> None:
        """Update every weight once.

        `scale` multiplies the gradients first (gradient clipping); None leaves them. `groups`:
        rates of parameter groups, which replace `lr` and `weight_decay`.
        """
        self.updates += 1
        for part in group_by_rates(
            self.slots, gradients, lr=lr, weight_decay=weight_decay, groups=groups
        ):
            self._update(part.slots, part.gradients, part.lr, part.weight_decay, scale)
        round_master_weights(self.slots)

    def set_updates(self, updates: int) -> None:
        """Set the number of updates after loading a checkpoint; the momentum is loaded
        separately."""
        self.updates = updates

    def _update(
        self,
        slots: list[OptimizerSlot],
        gradients: list[Tensor],
        lr: float,
        weight_decay: float,
        scale: Tensor | None,
    ) -> None:
        momentum, master_weights = self.config.momentum, [slot.master for slot in slots]
        if scale is not None:
            torch._foreach_mul_(gradients, scale)
        if weight_decay:
            torch._foreach_add_(gradients, master_weights, alpha=weight_decay)
        if not momentum:
            torch._foreach_add_(master_weights, gradients, alpha=-lr)
            return
        momentum_buffers = [slot.state["momentum"] for slot in slots]
        torch._foreach_mul_(momentum_buffers, momentum)
        torch._foreach_add_(momentum_buffers, gradients)
        if self.config.nesterov:
            torch._foreach_add_(gradients, momentum_buffers, alpha=momentum)
        torch._foreach_add_(
            master_weights, gradients if self.config.nesterov else momentum_buffers, alpha=-lr
        )

"""AdamW over (Shard, weight) pairs, with fp32 master weights for weights of lower precision."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

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

HAS_FUSED = hasattr(torch, "_fused_adamw_")


class AdamW:
    """AdamW optimizer. Vectors (norms, biases) have no weight decay by default.

    Source: Loshchilov and Hutter 2017, arXiv:1711.05101, algorithm 2; Kingma and Ba 2014,
    arXiv:1412.6980.
    """

    def __init__(
        self,
        weights: Sequence[tuple[Shard, Tensor]],
        config: OptimConfig,
        rates: RatesOf = equal_rates,
    ) -> None:
        self.config = config
        self.updates = 0
        self.slots = [
            build_slot(shard, weight, ("exp_avg", "exp_avg_sq"), rates(shard))
            for shard, weight in weights
        ]
        # One step count for all slots, as a tensor for the fused kernel.
        self._step = torch.zeros((), device=self.slots[0].master.device if self.slots else None)

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
        self._step += 1
        for part in group_by_rates(
            self.slots, gradients, lr=lr, weight_decay=weight_decay, groups=groups
        ):
            self._update(part.slots, part.gradients, part.lr, part.weight_decay, scale)
        round_master_weights(self.slots)

    def set_updates(self, updates: int) -> None:
        """Set the number of updates after loading a checkpoint; the moments are loaded
        separately."""
        self.updates = updates
        self._step.fill_(updates)

    def _update(
        self,
        slots: list[OptimizerSlot],
        gradients: list[Tensor],
        lr: float,
        weight_decay: float,
        scale: Tensor | None,
    ) -> None:
        c = replace(self.config, eps=self.config.eps * slots[0].rates.eps)
        if not HAS_FUSED:
            for slot, gradient in zip(slots, gradients, strict=True):
                update(
                    slot,
                    gradient,
                    c,
                    updates=self.updates,
                    lr=lr,
                    weight_decay=weight_decay,
                    scale=scale,
                )
            return
        if (
            scale is not None and gradients[0].dtype == torch.float64
        ):  # the fused kernel takes its scale in fp32
            torch._foreach_mul_(gradients, scale)
            scale = None
        fused = torch._fused_adamw_ if c.decoupled_weight_decay else torch._fused_adam_
        fused(
            [slot.master for slot in slots],
            gradients,
            [slot.state["exp_avg"] for slot in slots],
            [slot.state["exp_avg_sq"] for slot in slots],
            [],
            [self._step] * len(slots),
            lr=lr,
            beta1=c.beta1,
            beta2=c.beta2,
            weight_decay=weight_decay,
            eps=c.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=None if scale is None else scale.float().reciprocal(),
        )


def update(
    slot: OptimizerSlot,
    gradient: Tensor,
    config: OptimConfig,
    *,
    updates: int,
    lr: float,
    weight_decay: float,
    scale: Tensor | None,
) -> None:
    """Update one parameter with plain operations: the reference of the fused kernel."""
    mean, square = slot.state["exp_avg"], slot.state["exp_avg_sq"]
    gradient = gradient if scale is None else gradient * scale
    if config.decoupled_weight_decay:
        slot.master.mul_(1 - lr * weight_decay)
    else:
        gradient = gradient + weight_decay * slot.master
    mean.lerp_(gradient, 1 - config.beta1)
    square.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
    root = (square / (1 - config.beta2**updates)).sqrt_().add_(config.eps)
    slot.master.addcdiv_(mean, root, value=-lr / (1 - config.beta1**updates))

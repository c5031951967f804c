"""AdamW and Adam with L2 regularization: an elementwise update rule."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megalith.config.optim import OptimConfig
from megalith.optim.rules import UpdateScalars
from megalith.optim.slots import OptimizerSlot

HAS_FUSED = hasattr(torch, "_fused_adamw_")


class AdamW:
    """AdamW update rule, with the fused kernel where torch has it.

    Source: Loshchilov and Hutter 2017, arXiv:1711.05101, algorithm 2; Kingma and Ba 2014,
    arXiv:1412.6980.
    """

    roles: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(self, config: OptimConfig) -> None:
        self.config = config

    def update(
        self, slots: Sequence[OptimizerSlot], gradients: list[Tensor], scalars: UpdateScalars
    ) -> None:
        """Update the weights of slots with equal scalars."""
        c, scale = replace(self.config, eps=self.config.eps * scalars.eps_factor), scalars.scale
        if not HAS_FUSED:
            for slot, gradient in zip(slots, gradients, strict=True):
                update_slot(slot, gradient, c, scalars)
            return
        if scale is not None and gradients[0].dtype == torch.float64:
            # the fused kernel takes its scale in fp32
            torch._foreach_mul_(gradients, scale)
            scale = None
        step = torch.full((), scalars.updates, dtype=torch.float32, device=slots[0].master.device)
        fused = torch._fused_adamw_ if c.decoupled_weight_decay else torch._fused_adam_
        fused(
            [slot.master for slot in slots],
            gradients,
            [slot.state["exp_avg"] for slot in slots],
            [slot.state["exp_avg_sq"] for slot in slots],
            [],
            [step] * len(slots),
            lr=scalars.lr,
            beta1=c.beta1,
            beta2=c.beta2,
            weight_decay=scalars.weight_decay,
            eps=c.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=None if scale is None else scale.float().reciprocal(),
        )


def update_slot(
    slot: OptimizerSlot, gradient: Tensor, config: OptimConfig, scalars: UpdateScalars
) -> None:
    """Update one parameter with plain operations: the reference of the fused kernel."""
    mean, square = slot.state["exp_avg"], slot.state["exp_avg_sq"]
    lr, weight_decay, updates = scalars.lr, scalars.weight_decay, scalars.updates
    gradient = gradient if scalars.scale is None else gradient * scalars.scale
    if config.decoupled_weight_decay:
        slot.master.mul_(1 - lr * weight_decay)
    else:
        gradient = gradient + weight_decay * slot.master
    mean.lerp_(gradient, 1 - config.beta1)
    square.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
    root = (square / (1 - config.beta2**updates)).sqrt_().add_(config.eps)
    slot.master.addcdiv_(mean, root, value=-lr / (1 - config.beta1**updates))

"""AdamW over (Shard, weight) pairs, with fp32 master weights where the weights themselves are shorter."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.config.optim import OptimConfig
from megalith.plan.shards import Shard

HAS_FUSED = hasattr(torch, "_fused_adamw_")


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter as the optimizer holds it: weights, their master copy (the same tensor in fp32), two moments."""

    shard: Shard
    weight: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class AdamW:
    """Adam with decoupled weight decay. Vectors (norms, biases) are not decayed.

    Source: Loshchilov and Hutter 2017, arXiv:1711.05101, algorithm 2; Kingma and Ba 2014, arXiv:1412.6980.
    """

    def __init__(self, weights: Sequence[tuple[Shard, Tensor]], config: OptimConfig) -> None:
        self.config = config
        self.updates = 0
        self.slots = [_slot(shard, weight) for shard, weight in weights]
        self._steps = [torch.zeros((), dtype=torch.float32, device=slot.master.device) for slot in self.slots]

    def step(self, gradients: Sequence[Tensor], *, lr: float, weight_decay: float, scale: Tensor | None = None) -> None:
        """Update every weight once. `scale` multiplies the gradients first (clipping); None leaves them."""
        self.updates += 1
        for decayed in (True, False):
            numbers = [i for i, slot in enumerate(self.slots) if (slot.shard.inputs > 0) == decayed]
            if numbers:
                self._update(numbers, [gradients[i] for i in numbers], lr, weight_decay if decayed else 0.0, scale)
        for slot in self.slots:
            if slot.master is not slot.weight:
                slot.weight.copy_(slot.master)

    def set_updates(self, updates: int) -> None:
        """Continue as after this many updates; the moments are loaded elsewhere."""
        self.updates = updates
        for step in self._steps:
            step.fill_(updates)

    def _update(
        self, numbers: list[int], gradients: list[Tensor], lr: float, weight_decay: float, scale: Tensor | None
    ) -> None:
        slots, c = [self.slots[i] for i in numbers], self.config
        steps = [self._steps[i] for i in numbers]
        masters = [slot.master for slot in slots]
        first, second = [slot.exp_avg for slot in slots], [slot.exp_avg_sq for slot in slots]
        if not HAS_FUSED:
            for slot, gradient, step in zip(slots, gradients, steps, strict=True):
                step.add_(1)
                update(slot, gradient, c, updates=self.updates, lr=lr, weight_decay=weight_decay, scale=scale)
            return
        if scale is not None and masters[0].dtype == torch.float64:  # the fused kernel takes its scale in fp32
            torch._foreach_mul_(gradients, scale)
            scale = None
        torch._foreach_add_(steps, 1)
        fused = torch._fused_adamw_ if c.decoupled_weight_decay else torch._fused_adam_
        fused(
            masters, gradients, first, second, [], steps, lr=lr, beta1=c.beta1, beta2=c.beta2,
            weight_decay=weight_decay, eps=c.eps, amsgrad=False, maximize=False,
            grad_scale=None if scale is None else scale.float().reciprocal(),
        )  # fmt: skip


def update(
    slot: Slot, gradient: Tensor, config: OptimConfig, *, updates: int, lr: float, weight_decay: float,
    scale: Tensor | None,
) -> None:  # fmt: skip
    """One parameter's update in plain operations; the definition that the fused kernel is tested against."""
    gradient = gradient if scale is None else gradient * scale
    if config.decoupled_weight_decay:
        slot.master.mul_(1 - lr * weight_decay)
    else:
        gradient = gradient + weight_decay * slot.master
    slot.exp_avg.lerp_(gradient, 1 - config.beta1)
    slot.exp_avg_sq.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
    root = (slot.exp_avg_sq / (1 - config.beta2**updates)).sqrt_().add_(config.eps)
    slot.master.addcdiv_(slot.exp_avg, root, value=-lr / (1 - config.beta1**updates))


def _slot(shard: Shard, weight: Tensor) -> Slot:
    wide = torch.promote_types(weight.dtype, torch.float32)
    master = weight if weight.dtype == wide else weight.to(wide)
    return Slot(shard, weight, master, torch.zeros_like(master), torch.zeros_like(master))

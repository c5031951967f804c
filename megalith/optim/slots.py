"""What every optimizer holds of one parameter's slice: weights, a wide copy of them, and the rule's own tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megalith.plan.initial import PLAIN, Rates
from megalith.plan.shards import Shard

RatesOf = Callable[[Shard], Rates]
"""What the optimizer's settings are multiplied by for a parameter."""


def same_rates(shard: Shard) -> Rates:
    """All parameters learn alike."""
    return PLAIN


@dataclass(frozen=True, slots=True)
class Slot:
    """One slice as the optimizer holds it."""

    shard: Shard
    weight: Tensor
    """What forward reads, or is sent to those that do."""

    master: Tensor
    """The same in fp32 or float64: the weights themselves where they are as wide."""

    state: Mapping[str, Tensor]
    """The rule's tensors by role, like the master."""

    rates: Rates = PLAIN
    """What the optimizer's settings are multiplied by here."""


class Optimizer(Protocol):
    """An update rule over slices of parameters; every rank holds the slots of what it owns."""

    slots: list[Slot]
    updates: int
    """Steps so far."""

    def step(self, gradients: Sequence[Tensor], *, lr: float, weight_decay: float, scale: Tensor | None = None) -> None:
        """Update every weight once, from one gradient per slot. `scale` multiplies the gradients first, which may be
        overwritten; None leaves them."""

    def set_updates(self, updates: int) -> None:
        """Continue as after this many updates; tensors are loaded elsewhere."""


def build_slot(shard: Shard, weight: Tensor, roles: Sequence[str], rates: Rates = PLAIN) -> Slot:
    """A slot whose state is zero."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    master = weight if weight.dtype == wide else weight.to(wide)
    return Slot(shard, weight, master, {role: torch.zeros_like(master) for role in roles}, rates)


def round_masters(slots: Sequence[Slot]) -> None:
    """Write the weights anew from their masters, where they are apart."""
    apart = [slot for slot in slots if slot.master is not slot.weight]
    if apart:
        torch._foreach_copy_([slot.weight for slot in apart], [slot.master for slot in apart])


def by_decay(
    slots: Sequence[Slot], gradients: Sequence[Tensor], weight_decay: float
) -> list[tuple[list[Slot], list[Tensor], float]]:
    """Slots with their gradients and their decay: matrices, then vectors (norms, biases), which do not decay; those of
    one part have the same rates."""
    parts = []
    for matrices, decay in ((True, weight_decay), (False, 0.0)):
        alike: dict[Rates, list[int]] = {}
        for number, slot in enumerate(slots):
            if (slot.shard.inputs > 0) == matrices:
                alike.setdefault(slot.rates, []).append(number)
        parts += [
            ([slots[i] for i in part], [gradients[i] for i in part], decay * rates.decay)
            for rates, part in alike.items()
        ]
    return parts

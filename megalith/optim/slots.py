"""What every optimizer holds of one parameter's slice: weights, a wide copy of them, and the rule's
own tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megalith.optim.schedule import NO_GROUPS, GroupRates
from megalith.plan.initial import PLAIN, ParameterRates
from megalith.plan.shards import Shard

RatesOf = Callable[[Shard], ParameterRates]
"""What the optimizer's settings are multiplied by for a parameter."""


def same_rates(shard: Shard) -> ParameterRates:
    """All parameters learn alike."""
    return PLAIN


@dataclass(frozen=True, slots=True)
class OptimizerSlot:
    """One slice as the optimizer holds it."""

    shard: Shard
    weight: Tensor
    """What forward reads, or is sent to those that do."""

    master: Tensor
    """The same in fp32 or float64: the weights themselves where they are as wide."""

    state: Mapping[str, Tensor]
    """The rule's tensors by role, like the master."""

    rates: ParameterRates = PLAIN
    """What the optimizer's settings are multiplied by here."""


class Optimizer(Protocol):
    """An update rule over slices of parameters; every rank holds the slots of what it owns."""

    slots: list[OptimizerSlot]
    updates: int
    """Steps so far."""

    def step(
        self,
        gradients: Sequence[Tensor],
        *,
        lr: float,
        weight_decay: float,
        scale: Tensor | None = None,
        groups: Mapping[str, GroupRates] = NO_GROUPS,
    ) -> None:
        """Update every weight once, from one gradient per slot. `scale` multiplies the gradients
        first, which may be overwritten; None leaves them. `groups`: by name, what their
        parameters have in place of `lr` and `weight_decay`."""

    def set_updates(self, updates: int) -> None:
        """Continue as after this many updates; tensors are loaded elsewhere."""


def build_slot(
    shard: Shard, weight: Tensor, roles: Sequence[str], rates: ParameterRates = PLAIN
) -> OptimizerSlot:
    """A slot whose state is zero."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    master = weight if weight.dtype == wide else weight.to(wide)
    return OptimizerSlot(
        shard, weight, master, {role: torch.zeros_like(master) for role in roles}, rates
    )


def round_master_weights(slots: Sequence[OptimizerSlot]) -> None:
    """Write the weights anew from their master weights, where they are apart."""
    apart = [slot for slot in slots if slot.master is not slot.weight]
    if apart:
        torch._foreach_copy_([slot.weight for slot in apart], [slot.master for slot in apart])


class SlotGroup(NamedTuple):
    """Slots that are updated alike, and how."""

    slots: list[OptimizerSlot]
    gradients: list[Tensor]
    lr: float
    weight_decay: float


def by_rates(
    slots: Sequence[OptimizerSlot],
    gradients: Sequence[Tensor],
    *,
    lr: float,
    weight_decay: float,
    groups: Mapping[str, GroupRates] = NO_GROUPS,
) -> list[SlotGroup]:
    """Slots with gradients, rate and decay: what decays, matrices as a rule, then what does not
    (norms, biases)."""
    parts = []
    for decays in (True, False):
        alike: dict[ParameterRates, list[int]] = {}
        for number, slot in enumerate(slots):
            if (slot.shard.inputs > 0 or slot.rates.vector_decays) == decays:
                alike.setdefault(slot.rates, []).append(number)
        for rates, part in alike.items():
            decay = groups[rates.decay_of].weight_decay if rates.decay_of else weight_decay
            parts.append(
                SlotGroup(
                    [slots[i] for i in part],
                    [gradients[i] for i in part],
                    (groups[rates.lr_of].lr if rates.lr_of else lr) * rates.lr,
                    decay * rates.decay if decays else 0.0,
                )
            )
    return parts

"""Slots of an optimizer: parameter shards with their master weights and optimizer state."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megalith.observe.machine import DTYPES
from megalith.optim.schedule import NO_GROUPS, GroupRates
from megalith.parallel.mesh import Mesh
from megalith.plan.parameters import PLAIN, ParameterRates
from megalith.plan.shards import Shard, is_first_replica

RatesOf = Callable[[Shard], ParameterRates]
"""Factors of the optimizer's settings for a parameter."""


def equal_rates(shard: Shard) -> ParameterRates:
    """Return equal rates for all parameters."""
    return PLAIN


@dataclass(frozen=True, slots=True)
class OptimizerSlot:
    """One parameter shard with its optimizer state."""

    shard: Shard
    weight: Tensor
    """The shard of the model's parameter, in the model's dtype."""

    master: Tensor
    """Master weights in fp32 or float64; the weights themselves if they have this precision."""

    state: Mapping[str, Tensor]
    """Optimizer state by role, in the dtype of the master weights."""

    rates: ParameterRates = PLAIN
    """Factors of the optimizer's settings for this parameter."""


class Optimizer(Protocol):
    """Interface of optimizers over parameter shards; every rank has the slots of the shards it
    owns."""

    slots: list[OptimizerSlot]
    updates: int
    """Number of updates so far."""

    def step(
        self,
        gradients: Sequence[Tensor],
        *,
        lr: float,
        weight_decay: float,
        scale: Tensor | None = None,
        groups: Mapping[str, GroupRates] = NO_GROUPS,
        unclipped_scale: Tensor | None = None,
    ) -> None:
        """Update every weight once, from one gradient per slot.

        `scale` multiplies the gradients first, which may be overwritten; None leaves them.
        `unclipped_scale`: the same for slots whose gradients are not clipped. `groups`: rates of
        parameter groups by name, which replace `lr` and `weight_decay`.
        """

    def set_updates(self, updates: int) -> None:
        """Set the number of updates after loading a checkpoint; tensors are loaded separately."""

    def list_matrix_states(self) -> list[tuple[Shard, str, Tensor]]:
        """Return the states of whole matrices on this rank: shard, role and tensor."""


def zero_states(optimizer: Optimizer) -> None:
    """Set all states of an optimizer to zero, those of whole matrices included."""
    for slot in optimizer.slots:
        for tensor in slot.state.values():
            tensor.zero_()
    for _, _, tensor in optimizer.list_matrix_states():
        tensor.zero_()


def build_slot(
    shard: Shard, weight: Tensor, roles: Sequence[str], rates: ParameterRates = PLAIN
) -> OptimizerSlot:
    """Return a slot whose optimizer state is zero, in the dtype of the master weights."""
    master = weight if shard.dtype == shard.wide_dtype else weight.to(DTYPES[shard.wide_dtype])
    return OptimizerSlot(
        shard, weight, master, {role: torch.zeros_like(master) for role in roles}, rates
    )


def round_master_weights(slots: Sequence[OptimizerSlot]) -> None:
    """Copy the master weights into the weights, where these have lower precision."""
    low_precision = [slot for slot in slots if slot.master is not slot.weight]
    if low_precision:
        torch._foreach_copy_(
            [slot.weight for slot in low_precision], [slot.master for slot in low_precision]
        )


class SlotGroup(NamedTuple):
    """Slots with the same learning rate and weight decay."""

    slots: list[OptimizerSlot]
    gradients: list[Tensor]
    lr: float
    weight_decay: float


def group_by_rates(
    slots: Sequence[OptimizerSlot],
    gradients: Sequence[Tensor],
    *,
    lr: float,
    weight_decay: float,
    groups: Mapping[str, GroupRates] = NO_GROUPS,
) -> list[SlotGroup]:
    """Group slots and gradients by learning rate and weight decay; those with weight decay come
    first."""
    groups_of_slots = []
    for decays in (True, False):
        indices_by_rates: dict[ParameterRates, list[int]] = {}
        for number, slot in enumerate(slots):
            if (slot.shard.inputs > 0 or slot.rates.vector_decays) == decays:
                indices_by_rates.setdefault(slot.rates, []).append(number)
        for rates, indices in indices_by_rates.items():
            decay = groups[rates.decay_of].weight_decay if rates.decay_of else weight_decay
            groups_of_slots.append(
                SlotGroup(
                    [slots[i] for i in indices],
                    [gradients[i] for i in indices],
                    (groups[rates.lr_of].lr if rates.lr_of else lr) * rates.lr,
                    decay * rates.decay if decays else 0.0,
                )
            )
    return groups_of_slots


def find_first_replicas(shards: Iterable[Shard], mesh: Mesh) -> frozenset[str]:
    """Return the names of the shards of which this rank has the first replica."""
    return frozenset(shard.name for shard in shards if is_first_replica(shard, mesh.coordinates))

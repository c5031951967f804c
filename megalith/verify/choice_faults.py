"""Faulty replacement functions for frozen parameters and parameter groups; see
`verify/faults.py`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from megalith.config.lora import LoraConfig
from megalith.nn import lora
from megalith.optim.schedule import NO_GROUPS, GroupRates
from megalith.optim.slots import OptimizerSlot, SlotGroup, group_by_rates
from megalith.parallel.data import BucketedDataParallel
from megalith.parallel.grad_sync import ShardedParam
from megalith.parallel.tensor import TPComm
from megalith.plan.shards import Shard


def decaying_frozen(self: BucketedDataParallel) -> Sequence[ShardedParam]:
    """Shrink frozen weights slightly when the gradient sums of a step are complete."""
    for _, weight in self.frozen:
        weight.mul_(0.999)
    return ORIGINAL_FINISH(self)


def rates_of_slot_before(
    slots: Sequence[OptimizerSlot],
    gradients: Sequence[Tensor],
    *,
    lr: float,
    weight_decay: float,
    groups: Mapping[str, GroupRates] = NO_GROUPS,
) -> list[SlotGroup]:
    """Update every slot with the rates of the slot before it in the flat buffer."""
    before = [slots[-1], *slots[:-1]] if slots else []
    moved = [replace(slot, rates=other.rates) for slot, other in zip(slots, before, strict=True)]
    return group_by_rates(moved, gradients, lr=lr, weight_decay=weight_decay, groups=groups)


def whole_gradient(weight: Shard, adapters: LoraConfig, tp_comm: TPComm) -> tuple[Shard, Shard]:
    """Declare the replicated half of an adapter as invariant, as if its gradient were complete."""
    a, b = ORIGINAL_ADAPTER(weight, adapters, tp_comm)
    return replace(a, invariant=frozenset(tp_comm.group.axes)), b


ORIGINAL_FINISH, ORIGINAL_ADAPTER = BucketedDataParallel.finish, lora.column_adapter

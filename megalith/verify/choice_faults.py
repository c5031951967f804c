"""What faults in what is trained, and at which rates, put in place of the right functions; see
`verify/faults.py`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from megalith.config.lora import LoraConfig
from megalith.nn import lora
from megalith.optim.schedule import NO_GROUPS, GroupRates
from megalith.optim.slots import Part, Slot, by_rates
from megalith.parallel.data import DataParallel
from megalith.parallel.engine import Owned
from megalith.parallel.tensor import Region
from megalith.plan.shards import Shard


def decaying_frozen(self: DataParallel) -> Sequence[Owned]:
    """When the sums of a step are there, what is not trained has become a little smaller."""
    for _, weight in self.frozen:
        weight.mul_(0.999)
    return ORIGINAL_FINISH(self)


def rates_of_slot_before(
    slots: Sequence[Slot],
    gradients: Sequence[Tensor],
    *,
    lr: float,
    weight_decay: float,
    groups: Mapping[str, GroupRates] = NO_GROUPS,
) -> list[Part]:
    """Every slot is updated at the rates of the one before it in the flat buffer."""
    before = [slots[-1], *slots[:-1]] if slots else []
    moved = [replace(slot, rates=other.rates) for slot, other in zip(slots, before, strict=True)]
    return by_rates(moved, gradients, lr=lr, weight_decay=weight_decay, groups=groups)


def whole_gradient(weight: Shard, adapters: LoraConfig, region: Region) -> tuple[Shard, Shard]:
    """The whole half of an adapter says that every rank has its whole gradient."""
    a, b = ORIGINAL_ADAPTER(weight, adapters, region)
    return replace(a, invariant=frozenset(region.group.axes)), b


ORIGINAL_FINISH, ORIGINAL_ADAPTER = DataParallel.finish, lora.column_adapter

"""A `Group`: the ranks one collective runs over; and the in-place collectives that no gradient flows through."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks one collective runs over, and my place among them."""

    axes: tuple[str, ...]
    """Grid axes it spans, outer first: ("tp",), ("dp", "cp"), ("tp_kv", "tp_copy")."""

    ranks: tuple[int, ...]
    """Global ranks, in group order."""

    rank: int
    """My index within `ranks`."""

    handle: dist.ProcessGroup | None = field(default=None, repr=False)
    """Set whenever there is more than one rank and the ranks are real."""

    name: str = field(default="", repr=False)
    """What torch's functional collectives know the group by; any text on paper."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"{'_'.join(self.axes)}({self.rank} of {self.size})"


def alone(*axes: str) -> Group:
    """A group of one rank: every collective over it is free."""
    return Group(axes=axes, ranks=(0,), rank=0)


def all_reduce_(x: Tensor, group: Group) -> Tensor:
    """Sum `x` over `group`, in place; free when the group is a single rank. A meta tensor has no numbers to sum."""
    if group.size > 1 and not x.is_meta:
        dist.all_reduce(x, group=group.handle)
    return x


def start_all_reduce_(x: Tensor, group: Group) -> dist.Work | None:
    """Start summing `x` over `group` in place; the result may be read after `.wait()`. None: already done."""
    if group.size == 1:
        return None
    work: dist.Work | None = dist.all_reduce(x, group=group.handle, async_op=True)
    return work


def all_reduce_max_(x: Tensor, group: Group) -> Tensor:
    """Largest `x` over `group`, element by element, in place; nothing to do for a meta tensor."""
    if group.size > 1 and not x.is_meta:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group.handle)
    return x


def gather_objects(value: object, group: Group) -> list[object]:
    """Every rank's `value`, in group order; for small plain values outside the hot path."""
    if group.size == 1:
        return [value]
    values: list[object] = [None] * group.size
    dist.all_gather_object(values, value, group=group.handle)
    return values


def barrier(group: Group) -> None:
    """Wait until every rank of `group` is here."""
    if group.size > 1:
        dist.barrier(group=group.handle)


def my_range(sizes: Sequence[int], rank: int) -> tuple[int, int]:
    """Where rank number `rank`'s part starts and stops, given every rank's size."""
    start = sum(sizes[:rank])
    return start, start + sizes[rank]

"""A `Group`: the ranks one collective runs over; and the in-place collectives that no gradient
flows through."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.observe.flight import CollectiveRecord, Flight, message_lane


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

    flight: Flight | None = field(default=None, repr=False, compare=False)
    """Where this rank writes down what it enters, for the report of a hang; None: nowhere."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"{'_'.join(self.axes)}({self.rank} of {self.size})"


def alone(*axes: str) -> Group:
    """A group of one rank: every collective over it is free."""
    return Group(axes=axes, ranks=(0,), rank=0)


def note(
    group: Group,
    op: str,
    x: Tensor | None = None,
    *,
    rows: tuple[Sequence[int], Sequence[int]] | None = None,
) -> CollectiveRecord | None:
    """Write down that this rank is about to enter a collective; call it before every one, and
    `finished` after it.

    With parallel.check_collectives it first asks the other ranks whether they are about to do the
    same. `rows`: how many this rank sends to each and receives from each, where the ranks' tensors
    differ in their first dimension.

    Raises:
        CollectiveError: they are not.
    """
    if group.flight is None:
        return None
    shape = None if x is None else x.shape if rows is None else x.shape[1:]
    dtype = "" if x is None else str(x.dtype)
    return group.flight.enter(
        op, group.axes, group.ranks, group.name, shape=shape, dtype=dtype, rows=rows
    )


def note_message(
    group: Group, x: Tensor, peer: int, *, sends: bool, tag: int = 0
) -> CollectiveRecord | None:
    """The same for a message of `x` to, or from, rank number `peer` of the group; those of one tag
    keep their order."""
    if group.flight is None:
        return None
    other = group.ranks[peer]
    return group.flight.enter(
        "send" if sends else "receive",
        group.axes,
        tuple(sorted((group.ranks[group.rank], other))),
        message_lane(f"{group.name}#{tag}", other, sends=sends),
        shape=x.shape,
        dtype=str(x.dtype),
        peer=other,
    )


def finished(entry: CollectiveRecord | None) -> None:
    """Note that an operation of `note` is over."""
    if entry is not None:
        entry.done = True


def stands_still_for(entry: CollectiveRecord | None) -> None:
    """Note that this rank now waits for an operation of `note` that it called finished when it left
    it to itself.

    Who computes meanwhile is in no collective: if it never comes back, that is what a report of a
    hang has to say.
    """
    if entry is not None:
        entry.started, entry.done = time.monotonic(), False


def on_its_way(entry: CollectiveRecord | None, work: dist.Work | None) -> dist.Work:
    """Note that an operation of `note` is over when `work`, which is given back, is."""
    assert work is not None, "this process is not in the group"
    if entry is not None:
        entry.work = ref(work)
    return work


def all_reduce_(x: Tensor, group: Group) -> Tensor:
    """Sum `x` over `group`, in place; free when the group is a single rank. A meta tensor has no
    numbers to sum."""
    if group.size > 1 and not x.is_meta:
        entry = note(group, "all_reduce", x)
        dist.all_reduce(x, group=group.handle)
        finished(entry)
    return x


def start_all_reduce_(x: Tensor, group: Group) -> dist.Work | None:
    """InitialValues summing `x` over `group` in place; the result may be read after `.wait()`.
    None: already done."""
    if group.size == 1:
        return None
    entry = note(group, "all_reduce", x)
    return on_its_way(entry, dist.all_reduce(x, group=group.handle, async_op=True))


def all_reduce_max_(x: Tensor, group: Group) -> Tensor:
    """Largest `x` over `group`, element by element, in place; nothing to do for a meta tensor."""
    if group.size > 1 and not x.is_meta:
        entry = note(group, "all_reduce_max", x)
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group.handle)
        finished(entry)
    return x


def all_gathered(x: Tensor, group: Group) -> Tensor:
    """The ranks' equal parts [t, ...], x contiguous, on their way to [ranks * t, ...]: there after
    `wait_tensor`.

    Into a tensor made here: the operator that makes it by itself takes another way through gloo,
    which breaks the heap (torch 2.13, measured: a process that gathers small tensors without pause
    dies within two minutes; this one does not).
    """
    ops = torch.ops._c10d_functional
    if x.is_meta or torch.compiler.is_compiling():
        y: Tensor = ops.all_gather_into_tensor(x, group.size, group.name)
        return y
    whole = x.new_empty(group.size * x.shape[0], *x.shape[1:])
    y = ops.all_gather_into_tensor_out(x, group.size, group.name, out=whole)
    return y


def start_send(
    x: Tensor, group: Group, to: int, *, tag: int = 0, handle: dist.ProcessGroup | None = None
) -> dist.Work:
    """InitialValues sending `x` to rank number `to` of the group; it must not be written to before
    `.wait()`.

    `handle`: the process group to use, if it is not the group's own.
    """
    entry = note_message(group, x, to, sends=True, tag=tag)
    return on_its_way(entry, dist.isend(x, group=handle or group.handle, group_dst=to, tag=tag))


def start_receive(
    x: Tensor, group: Group, source: int, *, tag: int = 0, handle: dist.ProcessGroup | None = None
) -> dist.Work:
    """InitialValues receiving into `x` what rank number `source` of the group sends; it may be
    read after `.wait()`."""
    entry = note_message(group, x, source, sends=False, tag=tag)
    return on_its_way(entry, dist.irecv(x, group=handle or group.handle, group_src=source, tag=tag))


def gather_objects(value: object, group: Group) -> list[object]:
    """Every rank's `value`, in group order; for small plain values outside the hot path."""
    if group.size == 1:
        return [value]
    values: list[object] = [None] * group.size
    entry = note(group, "gather_objects")
    dist.all_gather_object(values, value, group=group.handle)
    finished(entry)
    return values


def barrier(group: Group) -> None:
    """Wait until every rank of `group` is here."""
    if group.size > 1:
        entry = note(group, "barrier")
        dist.barrier(group=group.handle)
        finished(entry)


def my_range(sizes: Sequence[int], rank: int) -> tuple[int, int]:
    """Where rank number `rank`'s part starts and stops, given every rank's size."""
    start = sum(sizes[:rank])
    return start, start + sizes[rank]

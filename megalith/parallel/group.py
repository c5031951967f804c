"""Process groups (`Group`), their collectives, and checks that values and errors are consistent
across ranks."""

import errno
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import zip_longest
from typing import Any, Generic, TypeVar, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.errors import CheckpointError, PlanError, RankError, UserError
from megalith.observe.flight import CollectiveRecord, FlightRecorder, message_lane


@dataclass(frozen=True, slots=True)
class Group:
    """Process group as an explicit argument: the ranks over which a collective runs, and this
    rank's index among them."""

    axes: tuple[str, ...]
    """Grid axes it spans, outer first: ("tp",), ("dp", "cp"), ("tp_kv", "tp_copy")."""

    ranks: tuple[int, ...]
    """Global ranks, in group order."""

    rank: int
    """Index of this rank within `ranks`."""

    handle: dist.ProcessGroup | None = field(default=None, repr=False)
    """Set if there is more than one rank and the processes exist."""

    name: str = field(default="", repr=False)
    """Name of the group in torch's functional collectives; any text for meta tensors."""

    flight: FlightRecorder | None = field(default=None, repr=False, compare=False)
    """Records this rank's collectives, for the report of a hang; None: not recorded."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"{'_'.join(self.axes)}({self.rank} of {self.size})"


def single_rank_group(*axes: str) -> Group:
    """Return a group of one rank, over which every collective is free."""
    return Group(axes=axes, ranks=(0,), rank=0)


SINGLE_RANK = single_rank_group("world")
"""The group of a process without others."""


def record_collective(
    group: Group,
    op: str,
    x: Tensor | None = None,
    *,
    rows: tuple[Sequence[int], Sequence[int]] | None = None,
    subject: str = "",
) -> CollectiveRecord | None:
    """Record that this rank is about to start a collective; `mark_finished` records its end.

    With parallel.check_collectives it first checks that the other ranks are about to start the same
    one. `rows`: how many rows this rank sends to each rank and receives from each, if the ranks'
    tensors differ in their first dimension. `subject`: description of `x`, if the call site does
    not identify it.

    Raises:
        CollectiveError: the ranks are about to start different collectives.
    """
    if group.flight is None:
        return None
    shape = None if x is None else x.shape if rows is None else x.shape[1:]
    dtype = "" if x is None else str(x.dtype)
    return group.flight.enter(
        op,
        group.axes,
        group.ranks,
        group.name,
        shape=shape,
        dtype=dtype,
        rows=rows,
        subject=subject,
    )


def record_message(
    group: Group, x: Tensor, peer: int, *, sends: bool, tag: int = 0
) -> CollectiveRecord | None:
    """Record a message of `x` to, or from, rank number `peer` of the group; messages of one tag
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


def mark_finished(entry: CollectiveRecord | None) -> None:
    """Record that an operation of `record_collective` is complete."""
    if entry is not None:
        entry.done = True
        entry.end_wait()


def mark_in_flight(entry: CollectiveRecord | None) -> CollectiveRecord | None:
    """Record that this rank has started an operation and does not wait for it yet; return its
    record."""
    if entry is not None:
        entry.leave_in_flight()
    return entry


def mark_waiting(entry: CollectiveRecord | None) -> None:
    """Record that this rank now waits for an operation started earlier.

    A rank that computes while its message is in flight is not in a collective; if it never returns,
    the report of the hang must say so.
    """
    if entry is not None:
        entry.started, entry.done = time.monotonic(), False
        entry.begin_wait()


def track_work(entry: CollectiveRecord | None, work: dist.Work | None) -> dist.Work:
    """Record that an operation of `record_collective` is complete when `work` is; return a handle
    whose `wait` is recorded."""
    assert work is not None, "this process is not in the group"
    if entry is None:
        return work
    entry.leave_in_flight()
    recorded = _RecordedWork(work, entry)
    entry.work = ref(recorded)
    return recorded


class _RecordedWork(dist.Work):
    """Handle of an operation in flight that records when this rank waits for it."""

    def __init__(self, work: dist.Work, entry: CollectiveRecord) -> None:
        super().__init__()
        self._work, self._entry = work, entry

    def wait(self, *arguments: Any) -> bool:  # Any: a timeout
        """Wait for the operation."""
        self._entry.begin_wait()
        is_complete: bool = self._work.wait(*arguments)
        self._entry.end_wait()
        return is_complete

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""
        return bool(self._work.is_completed())


def all_reduce_(x: Tensor, group: Group) -> Tensor:
    """Sum `x` over `group` in place; free for a single rank. Does nothing to a meta tensor."""
    if group.size > 1 and not x.is_meta:
        entry = record_collective(group, "all_reduce", x)
        dist.all_reduce(x, group=group.handle)
        mark_finished(entry)
    return x


def start_all_reduce_(x: Tensor, group: Group) -> dist.Work | None:
    """Start summing `x` over `group` in place; the result may be read after `.wait()`. None:
    already done."""
    if group.size == 1:
        return None
    entry = record_collective(group, "all_reduce", x)
    return track_work(entry, dist.all_reduce(x, group=group.handle, async_op=True))


def all_reduce_max_(x: Tensor, group: Group) -> Tensor:
    """Take the element-wise maximum of `x` over `group` in place; does nothing to a meta tensor."""
    if group.size > 1 and not x.is_meta:
        entry = record_collective(group, "all_reduce_max", x)
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group.handle)
        mark_finished(entry)
    return x


def start_all_gather(x: Tensor, group: Group) -> Tensor:
    """Start an all-gather of equal parts [t, ...], x contiguous -> [ranks * t, ...], readable after
    `wait_tensor`.

    The output is allocated here: the operator that allocates it itself takes another code path in
    gloo, which corrupts the heap (torch 2.13, measured: a process that gathers small tensors in a
    loop crashes within two minutes; this one does not).
    """
    ops = torch.ops._c10d_functional
    if x.is_meta or torch.compiler.is_compiling():
        y: Tensor = ops.all_gather_into_tensor(x, group.size, group.name)
        return y
    output = x.new_empty(group.size * x.shape[0], *x.shape[1:])
    y = ops.all_gather_into_tensor_out(x, group.size, group.name, out=output)
    return y


def start_send(
    x: Tensor, group: Group, to: int, *, tag: int = 0, handle: dist.ProcessGroup | None = None
) -> dist.Work:
    """Start sending `x` to rank number `to` of the group; it must not be written to before
    `.wait()`.

    `handle`: the process group to use, if not the group's own.
    """
    entry = record_message(group, x, to, sends=True, tag=tag)
    return track_work(entry, dist.isend(x, group=handle or group.handle, group_dst=to, tag=tag))


def start_receive(
    x: Tensor, group: Group, source: int, *, tag: int = 0, handle: dist.ProcessGroup | None = None
) -> dist.Work:
    """Start receiving into `x` what rank number `source` of the group sends; it may be read after
    `.wait()`."""
    entry = record_message(group, x, source, sends=False, tag=tag)
    return track_work(entry, dist.irecv(x, group=handle or group.handle, group_src=source, tag=tag))


def gather_objects(value: object, group: Group) -> list[object]:
    """Return every rank's `value` in group order; for small plain values outside the hot path."""
    if group.size == 1:
        return [value]
    values: list[object] = [None] * group.size
    entry = record_collective(group, "gather_objects")
    dist.all_gather_object(values, value, group=group.handle)
    mark_finished(entry)
    return values


def barrier(group: Group) -> None:
    """Wait until every rank of `group` reaches this call."""
    if group.size > 1:
        entry = record_collective(group, "barrier")
        dist.barrier(group=group.handle)
        mark_finished(entry)


def local_range(sizes: Sequence[int], rank: int) -> tuple[int, int]:
    """Return start and stop of the part of rank number `rank`, given every rank's size."""
    start = sum(sizes[:rank])
    return start, start + sizes[rank]


# --- consistency across ranks: ranks that sum gradients have the same parameters, and an error on
# one rank is raised on all
#
# A sum over slices that do not coincide gives wrong numbers without an error, so the layouts are
# compared once, before the first step.

Places = Mapping[str, str]
"""Parameter name -> text that describes its position, in the rank's order of parameters."""


def check_consistent_across_ranks(places: Places, group: Group) -> None:
    """Check that every rank of `group` has the same parameters in the same order and at the same
    positions; collective.

    Raises:
        PlanError: on all ranks of the group; it names two ranks and the first parameter that
        differs.
    """
    if _is_single_or_meta(group):
        return
    digest = blake2b(repr(list(places.items())).encode()).hexdigest()
    if len(set(gather_objects(digest, group))) == 1:
        return
    layouts = [
        list(other.items())
        for other in gather_objects(dict(places), group)
        if isinstance(other, dict)
    ]
    index = next(index for index, other in enumerate(layouts) if other != layouts[0])
    _raise_difference(layouts[0], layouts[index], (group.ranks[0], group.ranks[index]))


def check_shared_consistent_across_ranks(places: Places, group: Group) -> None:
    """Check that each parameter that several ranks of `group` have lies at the same position on all
    of them; collective. Ranks may have other parameters that the others lack.

    Raises:
        PlanError: on all ranks of the group.
    """
    if _is_single_or_meta(group):
        return
    first: dict[str, tuple[int, str]] = {}
    for rank, other in zip(group.ranks, gather_objects(dict(places), group), strict=True):
        assert isinstance(other, dict)
        for name, place in other.items():
            first_rank, first_place = first.setdefault(name, (rank, place))
            if first_place != place:
                _raise_difference([(name, first_place)], [(name, place)], (first_rank, rank))


def _is_single_or_meta(group: Group) -> bool:
    return group.size == 1 or group.handle is None


def _raise_difference(
    first: Sequence[tuple[str, str]], second: Sequence[tuple[str, str]], ranks: tuple[int, int]
) -> None:
    nothing = ("no parameter", "there")
    one, other = next((a, b) for a, b in zip_longest(first, second, fillvalue=nothing) if a != b)
    raise PlanError(
        f"ranks {ranks[0]} and {ranks[1]} sum the gradients of parameters that they lay out "
        f"differently; the first difference is {' '.join(one)} on rank {ranks[0]} and "
        f"{' '.join(other)} on rank {ranks[1]}. Run the same version with the same settings on "
        "all ranks."
    )


# --- errors across ranks: if one rank fails, all ranks raise the same error instead of waiting for
# it

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _RankOutcome(Generic[T]):
    """Result or error of one rank's work."""

    value: T | None
    failure: str | None = None
    """Message of an error that a user can fix."""

    bug: str | None = None
    """Traceback of any other error."""


def raise_on_all_ranks(work: Callable[[], T], world: Group) -> list[T]:
    """Run `work` on every rank and return the results in rank order. Collective over `world`.

    Raises:
        CheckpointError: on every rank with the same text, if a rank raised a UserError or OSError;
            chained to the original error on that rank.
        RankError: a rank raised another error, which is a bug; the text starts with the traceback
            of the first such rank. That rank raises its original error.
    """
    cause: Exception | None = None
    try:
        local_outcome = _RankOutcome(work())
    except Exception as error:  # any error must reach the other ranks before this rank ends
        cause = error
        local_outcome = _failed(error, world)
    outcomes = [cast(_RankOutcome[T], outcome) for outcome in gather_objects(local_outcome, world)]
    if cause is not None and local_outcome.bug is not None:
        raise cause
    _raise_first_failure(outcomes, world, cause)
    return [cast(T, outcome.value) for outcome in outcomes]  # no failure: every value is set


def _failed(error: Exception, world: Group) -> _RankOutcome[T]:
    if isinstance(error, UserError | OSError):
        return _RankOutcome(None, failure=_describe(error, world))
    return _RankOutcome(None, bug="".join(traceback.format_exception(error)).rstrip())


def _raise_first_failure(
    outcomes: Sequence[_RankOutcome[T]], world: Group, cause: Exception | None
) -> None:
    """Raise if any rank failed; bugs first, because other ranks' errors may be consequences."""
    for rank, outcome in zip(world.ranks, outcomes, strict=True):
        if outcome.bug is not None:
            raise RankError(
                f"{outcome.bug}\n"
                f"This was rank {rank}; rank {world.ranks[world.rank]} ends because of it."
            )
    failures = list(
        dict.fromkeys(outcome.failure for outcome in outcomes if outcome.failure is not None)
    )
    if failures:
        raise CheckpointError("\n".join(failures)) from cause


def _describe(error: Exception, world: Group) -> str:
    """Return the error message with advice."""
    if isinstance(error, UserError):
        return str(error)
    where = f"rank {world.ranks[world.rank]}: " if world.size > 1 else ""
    return f"{where}{type(error).__name__}: {error}.{_remedy(error)}"


def _remedy(error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return " Free some space, or set checkpoint.keep to a lower number."
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return " Make the folder writable, or choose another one with --run."
    return ""

"""Gradient buckets: where each gradient lies in one flat buffer, and which of them are summed as one piece."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import lcm

from megalith.errors import PlanError


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter's gradient lies: elements `start` to `stop` of the flat buffer."""

    bucket: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements `start` to `stop` of the flat buffer, sent as one piece once all members are ready."""

    start: int
    stop: int
    members: tuple[int, ...]
    """Parameters by registration number, in the order in which they lie."""


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """A flat gradient buffer: the slot of each parameter (by registration number), and its buckets in sending order.

    Elements of a bucket that belong to no slot are padding and stay zero.
    """

    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.buckets[-1].stop if self.buckets else 0


def plan_buckets(
    sizes: Sequence[int],
    *,
    bucket_numel: int | None,
    align: int = 64,
    end_align: int | None = None,
    alone: Collection[int] = (),
    together: Sequence[Sequence[int]] = (),
) -> BucketPlan:
    """Lay out the gradients of parameters with these element counts, given in registration order.

    Parameters are placed in reverse, the order in which backward finishes them, so that the first bucket is full while
    most of backward is still to come. A bucket closes once it holds at least `bucket_numel` elements; None: one bucket
    for all. Layouts depend on the arguments alone, so ranks with the same sizes agree on every offset.

    align: elements; every start is a multiple (64: 128 bytes in bf16, two cache lines). end_align: elements; every
    bucket's length is made a multiple of it too (a multiple of dp lets dp ranks own equal slices); unset: `align`.
    alone: parameters with a bucket of their own, such as a tied embedding that two stages must place alike.
    together: runs of parameters, ascending, that lie without a gap in one bucket because one matmul writes them all;
    a run is placed where its last parameter would be.

    Raises:
        PlanError: a size is negative, an alignment is below one, or `alone` and `together` contradict each other.
    """
    _check(sizes, bucket_numel, align, end_align, alone, together)
    quantum = lcm(align, end_align or align)
    slots: list[Slot | None] = [None] * len(sizes)
    buckets: list[Bucket] = []
    start, end, members = 0, 0, list[int]()
    for unit in _units(len(sizes), together):
        lonely = unit[0] in alone
        if lonely and members:
            end = start = _close(buckets, start, end, members, quantum)
            members = []
        end = _round_up(end, align)
        for number in unit:
            slots[number] = Slot(len(buckets), end, end + sizes[number])
            end += sizes[number]
            members.append(number)
        if lonely or (bucket_numel is not None and end - start >= bucket_numel):
            end = start = _close(buckets, start, end, members, quantum)
            members = []
    if members:
        _close(buckets, start, end, members, quantum)
    return BucketPlan(tuple(slot for slot in slots if slot is not None), tuple(buckets))


def _close(buckets: list[Bucket], start: int, end: int, members: Sequence[int], quantum: int) -> int:
    """Append the bucket of `start` to `end`, its length rounded up to `quantum`; returns where the next starts."""
    stop = start + _round_up(end - start, quantum)
    buckets.append(Bucket(start, stop, tuple(members)))
    return stop


def _units(count: int, together: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Parameters in the order of placement: the last first; a run as one unit at the place of its last member."""
    run_ending_at = {run[-1]: tuple(run) for run in together if run}
    inside = {number for run in together for number in run[:-1]}
    return [run_ending_at.get(number, (number,)) for number in reversed(range(count)) if number not in inside]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _check(
    sizes: Sequence[int],
    bucket_numel: int | None,
    align: int,
    end_align: int | None,
    alone: Collection[int],
    together: Sequence[Sequence[int]],
) -> None:
    if bucket_numel is not None and bucket_numel < 1:
        raise PlanError(f"parallel.bucket_numel={bucket_numel} must be at least 1. Use 4000000 if in doubt.")
    if align < 1 or (end_align is not None and end_align < 1):
        raise PlanError(f"align={align}, end_align={end_align}: both must be at least 1. Use align=1 for no gaps.")
    negative = [number for number, size in enumerate(sizes) if size < 0]
    if negative:
        raise PlanError(f"parameters {negative} have a negative size. Pass element counts of at least 0.")
    in_runs = [number for run in together for number in run]
    strange = [number for number in {*alone, *in_runs} if not 0 <= number < len(sizes)]
    if strange:
        raise PlanError(f"alone, together: no parameters {sorted(strange)}. Use numbers from 0 to {len(sizes) - 1}.")
    if len(set(in_runs)) < len(in_runs) or any(list(run) != sorted(run) for run in together):
        raise PlanError(f"together={together}: pass ascending runs in which each parameter occurs once.")
    both = sorted(set(alone) & {number for run in together if len(run) > 1 for number in run})
    if both:
        raise PlanError(f"parameters {both} are to lie alone and together with others. Choose one of the two.")

"""Gradient buckets: the layout of gradients in flat buffers, the buckets that are reduced together,
and the shards of each rank.

Slots and buckets are numbered by the elements of one flat buffer. If parameters have several
dtypes, each bucket holds parameters of one, and lies in the flat buffer of its dtype: see
`flat_buffer_offsets`.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from types import MappingProxyType

from megalith.config.parallel import ParallelConfig
from megalith.errors import PlanError
from megalith.plan.grid import divisors


@dataclass(frozen=True, slots=True)
class BucketSlot:
    """Position of one parameter's gradient: elements `start` to `stop` of the flat buffer."""

    bucket: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements `start` to `stop` of the flat buffer, reduced together once all members are
    ready."""

    start: int
    stop: int
    members: tuple[int, ...]
    """Parameter indices in registration order, in the order of their slots."""


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Layout of a flat gradient buffer: the slot of each parameter, and the buckets in the order of
    reduction.

    Elements of a bucket outside of all slots are padding and stay zero.
    """

    slots: tuple[BucketSlot, ...]
    buckets: tuple[Bucket, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.buckets[-1].stop if self.buckets else 0


@dataclass(frozen=True, slots=True)
class BucketSlice:
    """One rank's shard of one parameter, if every bucket is split into equal slices."""

    number: int
    """Parameter index, in registration order."""

    bucket: int
    start: int
    stop: int
    """Elements of the flat buffer."""

    flat: tuple[int, int]
    """The same elements, as offsets in the parameter."""


NOT_ALIGNED: Mapping[Hashable, int] = MappingProxyType({})
"""No kind of parameters has to be whole in one slice."""


def flat_buffer_offsets(
    lengths: Sequence[int], dtypes: Sequence[str]
) -> tuple[list[int], dict[str, int]]:
    """Place buckets of these lengths one after the other in the flat buffer of their dtype: return
    where each starts, and the elements of each buffer.

    >>> flat_buffer_offsets([64, 128, 64], ["bf16", "fp32", "bf16"])
    ([0, 0, 64], {'bf16': 128, 'fp32': 128})
    """
    starts: list[int] = []
    totals = dict.fromkeys(dtypes, 0)
    for length, dtype in zip(lengths, dtypes, strict=True):
        starts.append(totals[dtype])
        totals[dtype] += length
    return starts, totals


def bucket_slice(bucket: Bucket, rank: int, ranks: int) -> tuple[int, int]:
    """Return the elements of the flat buffer that rank `rank` of `ranks` owns; all slices have
    equal size.

    >>> bucket_slice(Bucket(128, 384, (0,)), rank=1, ranks=2)
    (256, 384)
    """
    length = (bucket.stop - bucket.start) // ranks
    assert length * ranks == bucket.stop - bucket.start, (bucket, ranks)
    return bucket.start + rank * length, bucket.start + (rank + 1) * length


def local_bucket_parts(plan: BucketPlan, places: Sequence[tuple[int, int]]) -> list[BucketSlice]:
    """Return the nonempty parameter parts in a rank's slices, in registration order.

    places: for each bucket, (rank, number of ranks) of its sharding. All ranks together own every
    element of its parameters exactly once.
    """
    parts = []
    for index, (bucket, (rank, ranks)) in enumerate(zip(plan.buckets, places, strict=True)):
        first, last = bucket_slice(bucket, rank, ranks)
        for number in bucket.members:
            slot = plan.slots[number]
            start, stop = max(slot.start, first), min(slot.stop, last)
            if start < stop:
                parts.append(
                    BucketSlice(number, index, start, stop, (start - slot.start, stop - slot.start))
                )
    return sorted(parts, key=lambda part: part.number)


def plan_buckets(
    sizes: Sequence[int],
    *,
    bucket_numel: int | None,
    align: int = 64,
    end_align: int | None = None,
    alone: Collection[int] = (),
    contiguous: Sequence[Sequence[int]] = (),
    kinds: Sequence[Hashable] | None = None,
    whole_in: Mapping[Hashable, int] = NOT_ALIGNED,
) -> BucketPlan:
    """Lay out the gradients of parameters with these element counts, given in registration order.

    Parameters are placed in reverse, the order in which backward completes them, so that the first
    bucket is full early in backward. A bucket closes once it has at least `bucket_numel` elements;
    None: one bucket for all. Layouts depend on the arguments only, so ranks with the same sizes
    have the same offsets.

    align: every start is a multiple of this many elements (64: 128 bytes in bf16, two cache lines).
    end_align: every bucket's length is also a multiple of it (a multiple of dp gives dp ranks equal
    slices); unset: `align`. alone: parameters with a bucket of their own, such as a tied embedding
    that two stages must place alike. contiguous: ascending runs of parameters without gaps in one
    bucket, because one matmul writes them all; a run is placed where its last parameter would be.
    kinds: one per parameter; a bucket holds one kind, and its layout does not depend on the other
    kinds, so that ranks on which the parameters of one kind have the same sizes split them alike.
    Unset: all are of one kind. whole_in: kinds whose parameters and runs must each be whole in one
    of this many slices of a bucket; see `_pack_whole`.

    Raises:
        PlanError: a size is negative, an alignment is below one, `alone`, `contiguous` and `kinds`
            contradict each other, or parameters cannot be whole in slices of about equal length.
    """
    kinds = [None] * len(sizes) if kinds is None else kinds
    _check(sizes, bucket_numel, align, end_align, alone, contiguous, kinds)
    quantum = lcm(align, end_align or align)
    units = list(enumerate(_units(len(sizes), contiguous)))
    packed: list[_Packed] = []
    for kind in dict.fromkeys(kinds):
        own = [unit for unit in units if kinds[unit[1][0]] == kind]
        if whole_in.get(kind, 1) > 1:
            packed += _pack_whole(own, sizes, bucket_numel, align, quantum, whole_in[kind])
        else:
            packed += _pack(own, sizes, bucket_numel, align, alone)
    slots: list[BucketSlot | None] = [None] * len(sizes)
    buckets: list[Bucket] = []
    start = 0
    for bucket in sorted(packed, key=lambda bucket: bucket.finished):
        for number, offset in bucket.offsets.items():
            slots[number] = BucketSlot(len(buckets), start + offset, start + offset + sizes[number])
        stop = start + round_up(bucket.length, quantum)
        buckets.append(Bucket(start, stop, tuple(bucket.offsets)))
        start = stop
    return BucketPlan(tuple(slot for slot in slots if slot is not None), tuple(buckets))


PlacedUnit = tuple[int, tuple[int, ...]]
"""Placement index of parameters that lie together, and their numbers."""


@dataclass(slots=True)
class _Packed:
    """A bucket before its start in the buffer is known."""

    offsets: dict[int, int]
    """Start of each member relative to the bucket, in order."""

    length: int
    """Elements, without padding at the end."""

    finished: int
    """Placement index of its last member, which backward completes last."""


def _pack(
    units: Sequence[PlacedUnit],
    sizes: Sequence[int],
    bucket_numel: int | None,
    align: int,
    alone: Collection[int],
) -> list[_Packed]:
    """Pack the units of one kind, given with their placement indices, into buckets."""
    packed: list[_Packed] = []
    full = True
    for place, unit in units:
        is_alone = unit[0] in alone
        if full or is_alone:
            packed.append(_Packed({}, 0, place))
        bucket = packed[-1]
        bucket.length, bucket.finished = round_up(bucket.length, align), place
        for number in unit:
            bucket.offsets[number] = bucket.length
            bucket.length += sizes[number]
        full = is_alone or (bucket_numel is not None and bucket.length >= bucket_numel)
    return packed


LONGEST_SLICE = 1.15
"""Length of the longest slice relative to the mean up to which a bucket of whole matrices is padded
(heuristic: at most 13 % of memory and messages are padding)."""


def _pack_whole(
    units: Sequence[PlacedUnit],
    sizes: Sequence[int],
    bucket_numel: int | None,
    align: int,
    quantum: int,
    num_slices: int,
) -> list[_Packed]:
    """Pack units into buckets such that each is whole in one slice.

    A bucket closes once it has `bucket_numel` elements and its longest slice is at most
    `LONGEST_SLICE` times the mean; it is padded so that all slices are as long as the longest.

    Raises:
        PlanError: even one bucket with all units has no such slices.
    """
    packed: list[_Packed] = []
    groups: list[list[PlacedUnit]] = []
    current: list[PlacedUnit] = []

    def numel(group: Sequence[PlacedUnit]) -> int:
        return sum(sizes[number] for _, unit in group for number in unit)

    for unit in units:
        current.append(unit)
        is_full = bucket_numel is not None and numel(current) >= bucket_numel
        if is_full and _imbalance(current, sizes, align, num_slices) <= LONGEST_SLICE:
            groups.append(current)
            current = []
    while current and _imbalance(current, sizes, align, num_slices) > LONGEST_SLICE:
        if not groups:
            ratio = _imbalance(current, sizes, align, num_slices)
            raise PlanError(
                f"parallel.bucket_alignment=matrices: {len(current)} weight matrices, or groups of "
                f"them that one matmul writes, cannot be divided among {num_slices} ranks: the "
                f"longest slice would be {ratio:.2f} times the mean, more than {LONGEST_SLICE}. "
                "Set parallel.bucket_alignment=none, or a larger parallel.dp_replicate."
            )
        current = groups.pop() + current
    groups += [current] if current else []
    for group in groups:
        slices = _divide(group, sizes, align, num_slices)
        longest = max(sum(_aligned(unit, sizes, align) for _, unit in own) for own in slices)
        length = round_up(longest, quantum // num_slices)
        offsets: dict[int, int] = {}
        for index, own in enumerate(slices):
            offset = index * length
            for _, numbers in own:
                for number in numbers:
                    offsets[number] = offset
                    offset += sizes[number]
                offset = round_up(offset, align)
        packed.append(_Packed(offsets, num_slices * length, max(place for place, _ in group)))
    return packed


def _aligned(unit: Sequence[int], sizes: Sequence[int], align: int) -> int:
    """Return the elements of a unit, with padding up to the next."""
    return round_up(sum(sizes[number] for number in unit), align)


def _divide(
    units: Sequence[PlacedUnit],
    sizes: Sequence[int],
    align: int,
    num_slices: int,
) -> list[list[PlacedUnit]]:
    """Divide units among slices, the longest first, each to the shortest slice so far; within a
    slice they are in the order of placement."""
    slices: list[list[PlacedUnit]] = [[] for _ in range(num_slices)]
    lengths = [0] * num_slices
    for place, unit in sorted(units, key=lambda each: (-_aligned(each[1], sizes, align), each[0])):
        shortest = min(range(num_slices), key=lambda index: (lengths[index], index))
        slices[shortest].append((place, unit))
        lengths[shortest] += _aligned(unit, sizes, align)
    return [sorted(own) for own in slices]


def _imbalance(
    units: Sequence[PlacedUnit],
    sizes: Sequence[int],
    align: int,
    num_slices: int,
) -> float:
    """Return the length of the longest slice relative to the mean."""
    lengths = [
        sum(_aligned(unit, sizes, align) for _, unit in own)
        for own in _divide(units, sizes, align, num_slices)
    ]
    return max(lengths) * num_slices / max(sum(lengths), 1)


def _units(count: int, contiguous: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return parameters in placement order, the last first; a run is one unit at the place of its
    last member."""
    run_ending_at = {run[-1]: tuple(run) for run in contiguous if run}
    inside = {number for run in contiguous for number in run[:-1]}
    return [
        run_ending_at.get(number, (number,))
        for number in reversed(range(count))
        if number not in inside
    ]


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def _check(
    sizes: Sequence[int],
    bucket_numel: int | None,
    align: int,
    end_align: int | None,
    alone: Collection[int],
    contiguous: Sequence[Sequence[int]],
    kinds: Sequence[Hashable],
) -> None:
    if len(kinds) != len(sizes):
        raise PlanError(
            f"kinds={list(kinds)}: {len(kinds)} for {len(sizes)} parameters. Pass one per "
            "parameter."
        )
    if bucket_numel is not None and bucket_numel < 1:
        raise PlanError(
            f"parallel.bucket_numel={bucket_numel} must be at least 1. Use 4000000 if in doubt."
        )
    if align < 1 or (end_align is not None and end_align < 1):
        raise PlanError(
            f"align={align}, end_align={end_align}: both must be at least 1. Use align=1 for no "
            "gaps."
        )
    negative = [number for number, size in enumerate(sizes) if size < 0]
    if negative:
        raise PlanError(
            f"parameters {negative} have a negative size. Pass element counts of at least 0."
        )
    in_runs = [number for run in contiguous for number in run]
    unknown = [number for number in {*alone, *in_runs} if not 0 <= number < len(sizes)]
    if unknown:
        raise PlanError(
            f"alone, contiguous: no parameters {sorted(unknown)}. Use numbers from 0 to "
            f"{len(sizes) - 1}."
        )
    if len(set(in_runs)) < len(in_runs) or any(list(run) != sorted(run) for run in contiguous):
        raise PlanError(
            f"contiguous={contiguous}: pass ascending runs in which each parameter occurs once."
        )
    both = sorted(set(alone) & {number for run in contiguous if len(run) > 1 for number in run})
    if both:
        raise PlanError(
            f"parameters {both} are in `alone` and in a run of `contiguous`. Remove them from one."
        )
    mixed = [list(run) for run in contiguous if len({kinds[number] for number in run}) > 1]
    if mixed:
        raise PlanError(
            f"parameters {mixed[0]} are to lie together and are of several kinds. Choose one of "
            "the two."
        )


def zero_problems(parallel: ParallelConfig, dp: int) -> list[str]:
    """Return an error text for each ZeRO or HSDP setting that cannot work on `dp` data-parallel
    ranks."""
    p, problems = parallel, []
    if p.bucket_alignment == "matrices" and p.zero not in (1, 2):
        problems.append(
            f"parallel.bucket_alignment={p.bucket_alignment} with parallel.zero={p.zero}: only "
            "parallel.zero 1 and 2 cut buckets into slices. Set parallel.zero=1, or "
            "parallel.bucket_alignment=none."
        )
    if p.dp_replicate > 1 and p.zero == 0:
        problems.append(
            f"parallel.dp_replicate={p.dp_replicate} with parallel.zero={p.zero}: nothing is "
            "sharded "
            "without ZeRO. Set parallel.zero=1, or remove parallel.dp_replicate."
        )
    elif p.dp_replicate < 1 or dp % p.dp_replicate:
        fits = divisors(dp)
        problems.append(
            f"parallel.dp_replicate={p.dp_replicate} does not divide dp={dp}: each replica is an "
            "equal "
            "number of ranks. "
            f"Set parallel.dp_replicate to one of {fits}."
        )
    if p.reduce_dtype == "bf16" and p.zero == 0:
        problems.append(
            f"parallel.reduce_dtype={p.reduce_dtype} with parallel.zero={p.zero}: bf16 "
            "gradients are "
            "added in fp32 by the rank that owns the shard, and without ZeRO there are no shards. "
            "Set parallel.zero=1, or parallel.reduce_dtype=fp32."
        )
    elif p.reduce_dtype == "bf16" and dp * p.cp == p.dp_replicate:
        problems.append(
            f"parallel.reduce_dtype={p.reduce_dtype} with dp={dp}, parallel.cp={p.cp} and "
            "parallel.dp_replicate="
            f"{p.dp_replicate}: one rank owns each whole gradient, so none is sent in bf16. Set "
            "parallel.reduce_dtype=fp32"
            f"{'' if p.dp_replicate == 1 else ', or parallel.dp_replicate=1'}."
        )
    return problems


def zero_notes(parallel: ParallelConfig, dp: int) -> list[str]:
    """Return a note if ZeRO has nothing to shard on `dp` ranks."""
    p = parallel
    if p.zero == 0 or dp * p.cp > p.dp_replicate:
        return []
    return [
        f"parallel.zero={p.zero} shards nothing: with dp={dp}, parallel.cp={p.cp} and "
        "parallel.dp_replicate="
        f"{p.dp_replicate}, one rank owns everything"
    ]

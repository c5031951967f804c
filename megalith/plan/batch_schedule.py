"""Batch-size schedule: the global batch size of each step, as a pure function of the samples that
earlier steps have consumed.

A step reads the size that applies at its first sample. No state is stored: a resumed run, or one
with another number of ranks, evaluates the same function at its position in the data.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise

from megalith.config.train import BatchSizeConfig, LoopConfig
from megalith.errors import PlanError

_FIELD = "train.batch_size_schedule"


@dataclass(frozen=True, slots=True)
class BatchSizeSchedule:
    """Global batch sizes, each from a number of consumed samples on.

    >>> schedule = BatchSizeSchedule(starts=(0, 8, 16), sizes=(4, 8, 12))
    >>> [schedule.get_batch_size(consumed) for consumed in (0, 4, 8, 16, 100)]
    [4, 4, 8, 12, 12]
    >>> [schedule.count_samples(num_steps) for num_steps in range(6)]
    [0, 4, 8, 16, 28, 40]
    """

    starts: tuple[int, ...]
    """Consumed samples from which each size applies: 0 first, strictly increasing."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.starts) == len(self.sizes) and self.starts[:1] == (0,), self
        assert all(before < after for before, after in pairwise(self.starts)), self
        assert min(self.sizes) > 0, self

    @property
    def is_constant(self) -> bool:
        """Whether all steps have the same size."""
        return len(set(self.sizes)) == 1

    @property
    def largest_size(self) -> int:
        """The largest global batch size, which determines the memory of a run."""
        return max(self.sizes)

    def get_batch_size(self, consumed: int) -> int:
        """Return the global batch size of the step that begins after `consumed` samples."""
        return self.sizes[bisect_right(self.starts, consumed) - 1]

    def count_samples(self, num_steps: int, *, consumed: int = 0) -> int:
        """Return the number of samples that `num_steps` steps read, beginning after `consumed`
        samples."""
        position = consumed
        for end, size in self._remaining_phases(consumed):
            needed = num_steps if end is None else max(0, -(-(end - position) // size))
            steps = min(num_steps, needed)
            position += steps * size
            num_steps -= steps
        return position - consumed

    def count_steps(self, num_samples: int, *, consumed: int = 0) -> int:
        """Return the most steps, beginning after `consumed` samples, that read at most
        `num_samples`.

        >>> schedule = BatchSizeSchedule(starts=(0, 8), sizes=(4, 8))
        >>> [schedule.count_steps(num_samples) for num_samples in (0, 3, 8, 15, 16)]
        [0, 0, 2, 2, 3]
        """
        num_steps, position, last = 0, consumed, consumed + num_samples
        for end, size in self._remaining_phases(consumed):
            steps = max(0, (last - position) // size)
            if end is not None:
                steps = min(steps, max(0, -(-(end - position) // size)))
            num_steps += steps
            position += steps * size
            if end is None or position < end:
                break
        return num_steps

    def list_phases(self, num_steps: int) -> list[tuple[int, int, int]]:
        """Return (consumed samples, size, number of steps) of each phase of a run of `num_steps`
        steps that has any.

        >>> BatchSizeSchedule(starts=(0, 8, 9), sizes=(4, 8, 12)).list_phases(5)
        [(0, 4, 2), (8, 8, 1), (16, 12, 2)]
        """
        phases, position = [], 0
        for end, size in self._remaining_phases(0):
            needed = num_steps if end is None else max(0, -(-(end - position) // size))
            steps = min(num_steps, needed)
            phases += [(position, size, steps)] if steps else []
            position += steps * size
            num_steps -= steps
        return phases

    def convert_to_steps(self, num_samples: int) -> float:
        """Return the length of `num_samples` samples in steps, with the fraction of the last step.

        >>> BatchSizeSchedule(starts=(0, 8), sizes=(4, 8)).convert_to_steps(18)
        3.25
        """
        steps = self.count_steps(num_samples)
        read = self.count_samples(steps)
        return steps + (num_samples - read) / self.get_batch_size(read)

    def find_difference(self, other: "BatchSizeSchedule") -> int | None:
        """Return the first number of consumed samples at which the sizes differ; None if they are
        equal everywhere.

        >>> BatchSizeSchedule((0,), (4,)).find_difference(BatchSizeSchedule((0, 80), (4, 8)))
        80
        """
        starts = sorted({*self.starts, *other.starts})
        return next(
            (each for each in starts if self.get_batch_size(each) != other.get_batch_size(each)),
            None,
        )

    def _remaining_phases(self, consumed: int) -> Iterator[tuple[int | None, int]]:
        """Yield the end of each size (None: no end) and the size, from `consumed` on."""
        first = bisect_right(self.starts, consumed) - 1
        yield from zip((*self.starts[first + 1 :], None), self.sizes[first:], strict=True)


def constant_batch_size(size: int) -> BatchSizeSchedule:
    """Return the schedule of a run in which every step has `size` samples."""
    return BatchSizeSchedule((0,), (size,))


def build_batch_schedule(train: LoopConfig) -> BatchSizeSchedule:
    """Return the batch-size schedule of a run whose settings are valid.

    >>> train = LoopConfig(steps=9, global_batch_size=4, batch_size_schedule=())
    >>> build_batch_schedule(train).get_batch_size(100)
    4
    """
    if not train.batch_size_schedule:
        return constant_batch_size(train.global_batch_size)
    return BatchSizeSchedule(
        tuple(_start_in_samples(entry, train.seq_len) or 0 for entry in train.batch_size_schedule),
        tuple(entry.size for entry in train.batch_size_schedule),
    )


def list_batch_sizes(train: LoopConfig) -> list[tuple[str, int]]:
    """Return the settings that are global batch sizes of steps, with their values; the schedule
    need not be valid."""
    if not train.batch_size_schedule:
        return [("train.global_batch_size", train.global_batch_size)]
    return [
        (f"{_FIELD}[{index}].size", entry.size)
        for index, entry in enumerate(train.batch_size_schedule)
    ]


def largest_batch_size(train: LoopConfig) -> int:
    """Return the largest global batch size of a run, for plans of its memory and time."""
    return max(size for _, size in list_batch_sizes(train))


def batch_schedule_problems(train: LoopConfig) -> list[str]:
    """Return the violated rules of the entries of train.batch_size_schedule, except that each size
    must fit the ranks."""
    entries = train.batch_size_schedule
    if not entries:
        return []
    problems = [*_start_problems(train)]
    if entries[-1].size != train.global_batch_size:
        problems.append(
            f"train.global_batch_size={train.global_batch_size} must be the last size of {_FIELD}, "
            f"{entries[-1].size}. Set train.global_batch_size={entries[-1].size}."
        )
    return problems


def _start_problems(train: LoopConfig) -> Iterator[str]:
    """Yield the violated rules of the starts: 0 first, one unit each, strictly increasing."""
    before: int | None = None
    for index, entry in enumerate(train.batch_size_schedule):
        at, start = f"{_FIELD}[{index}]", _start_in_samples(entry, train.seq_len)
        if entry.samples is not None and entry.tokens is not None:
            yield (
                f"{at}: samples={entry.samples} and tokens={entry.tokens} are two starts. Remove "
                "one of them."
            )
        if entry.tokens is not None and train.tokens_per_microbatch is not None:
            yield (
                f"{at}.tokens={entry.tokens} with "
                f"train.tokens_per_microbatch={train.tokens_per_microbatch}: samples are documents "
                f"of different lengths, so tokens cannot be converted to samples. Set {at}.samples."
            )
        unit = "samples" if entry.tokens is None else "tokens"
        if index == 0:
            if start:
                yield (
                    f"{at}.{unit}={getattr(entry, unit)}: the first size applies from the start of "
                    f"the run. Set {at}.{unit}=0."
                )
            before = 0
        elif start is None:
            yield (
                f"{at}: it has no start. Set {at}.samples to the samples, or {at}.tokens to the "
                f"tokens, from which size={entry.size} applies."
            )
        else:
            assert before is not None, "set by the first entry"
            if start <= before:
                least = before + 1 if unit == "samples" else (before + 1) * train.seq_len
                in_samples = "" if unit == "samples" else f" = sample {start}"
                yield (
                    f"{at}.{unit}={getattr(entry, unit)}{in_samples} must be after the start of "
                    f"the entry before it, sample {before}. Set {at}.{unit} to {least} or more."
                )
            before = max(before, start)


def _start_in_samples(entry: BatchSizeConfig, seq_len: int) -> int | None:
    """Return the start of an entry in samples; tokens that do not fill a sample are dropped, as in
    Megatron."""
    return entry.samples if entry.tokens is None else entry.tokens // seq_len


# --- batch size schedules of Megatron's flags


def plan_linear_rampup(
    *, start: int, increment: int, num_samples: int, size: int
) -> BatchSizeSchedule:
    """Return a linear ramp-up from `start` to `size` in equal parts of `num_samples`, as
    Megatron's --rampup-batch-size.

    Raises:
        PlanError: the increments do not lead from `start` to `size`.

    >>> plan_linear_rampup(start=4, increment=4, num_samples=24, size=16)
    BatchSizeSchedule(starts=(0, 8, 16, 24), sizes=(4, 8, 12, 16))
    """
    flag = f"--rampup-batch-size {start} {increment} {num_samples}"
    if start < 1 or increment < 1 or num_samples < 0:
        raise PlanError(
            f"{flag}: the first size and the increment must be at least 1, and the samples at "
            "least 0. Use for example --rampup-batch-size 32 32 1000000."
        )
    if start > size:
        raise PlanError(
            f"{flag}: the first size, {start}, is larger than --global-batch-size {size}. Use a "
            f"first size of at most {size}."
        )
    num_increments, rest = divmod(size - start, increment)
    if rest:
        raise PlanError(
            f"{flag}: increments of {increment} do not lead from {start} to --global-batch-size "
            f"{size}. Use an increment that divides {size - start}, or --global-batch-size "
            f"{size - rest} or {size - rest + increment}."
        )
    sizes = {0: start}  # by start: of increments at the same sample, the last one applies
    for number in range(1, num_increments + 1):
        position = number * num_samples // num_increments
        while num_samples and int(position / (num_samples / num_increments)) < number:
            position += 1  # the first sample after the rounding of Megatron's formula
        sizes[position] = start + number * increment
    return BatchSizeSchedule(tuple(sizes), tuple(sizes.values()))


_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([KMBT]?)", re.IGNORECASE)


def parse_step_schedule(text: str, *, seq_len: int) -> BatchSizeSchedule:
    """Return the schedule that Megatron's --step-batch-size-schedule states: pairs of tokens and
    size.

    Raises:
        PlanError: a pair cannot be read, or the starts are not 0 and increasing.

    >>> parse_step_schedule("0:768 250B:1536", seq_len=8192)
    BatchSizeSchedule(starts=(0, 30517578), sizes=(768, 1536))
    """
    flag = f'--step-batch-size-schedule "{text}"'
    pairs = sorted(
        (_parse_pair(pair, flag) for pair in re.split(r"[\s,]+", text.strip()) if pair),
        key=lambda pair: pair[0],
    )
    starts = tuple(tokens // seq_len for tokens, _ in pairs)
    if not pairs or pairs[0][0] != 0:
        raise PlanError(f"{flag}: no size applies from token 0 on. Add a pair such as 0:256.")
    for before, after in pairwise(range(len(pairs))):
        if starts[before] == starts[after]:
            raise PlanError(
                f"{flag}: two sizes apply from sample {starts[after]} on ({pairs[before][0]} and "
                f"{pairs[after][0]} tokens of --seq-length {seq_len}). Use thresholds that are at "
                f"least {seq_len} tokens apart."
            )
    return BatchSizeSchedule(starts, tuple(size for _, size in pairs))


def _parse_pair(pair: str, flag: str) -> tuple[int, int]:
    threshold, _, size = pair.partition(":")
    counts = _parse_count(threshold), _parse_count(size)
    if counts[0] is None or not counts[1]:
        raise PlanError(
            f"{flag}: {pair} is no pair of a threshold and a size of at least 1. Use for example "
            "0:768 250B:1536, with the suffixes K, M, B and T."
        )
    return counts[0], counts[1]


def _parse_count(text: str) -> int | None:
    """Return a whole number with an optional suffix; None if it is not one.

    >>> _parse_count("1.5K"), _parse_count("x")
    (1500, None)
    """
    match = _COUNT.fullmatch(text)
    if match is None:
        return None
    value = Decimal(match[1]) * _SUFFIXES[match[2].upper()]
    return int(value) if value == int(value) else None

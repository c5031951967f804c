"""Paired measurements: contenders take turns within each round, so that a busy machine slows all of
them alike.

A single time on a shared machine says nothing. What counts are ratios of two times of the same
round: their median, and their quartiles, which show how far the machine allows the median to be
trusted.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """A sample in three numbers."""

    lower: float
    """A quarter of the values are below."""

    median: float

    upper: float
    """A quarter of the values are above."""

    def __str__(self) -> str:
        return f"{self.median:.3f} (quartiles {self.lower:.3f} to {self.upper:.3f})"


@dataclass(frozen=True, slots=True)
class Turns:
    """What every contender took in every round."""

    seconds: Mapping[str, list[float]]
    """By the clock on the wall."""

    cpu_seconds: Mapping[str, list[float]]
    """Computing time of all threads of this process: less disturbed by other jobs, but it also
    counts idle spinning."""


def take_turns(
    contenders: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int, seed: int = 0
) -> Turns:
    """Run every contender once a round, in an order drawn anew each round; `warmup` rounds come
    first, untimed."""
    draw = random.Random(seed)
    turns = Turns({name: [] for name in contenders}, {name: [] for name in contenders})
    for number in range(warmup + rounds):
        for name in draw.sample(list(contenders), len(contenders)):
            wall, cpu = time.perf_counter(), time.process_time()
            contenders[name]()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if number >= warmup:
                turns.seconds[name].append(wall)
                turns.cpu_seconds[name].append(cpu)
    return turns


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles; of a single value three times that value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(lower, median, upper)


def times_as_fast(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Over the rounds, how many times as fast the first was as the second, from the seconds of
    both."""
    return spread([other / actual for actual, other in zip(ours, theirs, strict=True)])

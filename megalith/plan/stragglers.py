"""Stragglers: which ranks compute slower than ranks with the same work, and which slower than they
did before. Pure functions on measured times.

The wall time of a synchronous step is the same on all ranks, because the others wait for the
slowest one. So ranks are compared by their busy time, without waits in collectives.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

BusyTimes = Mapping[str, float]
"""Section of a step -> median of its busy seconds."""

SLOW_SCORE = 0.8
"""Score below which a rank is slow."""

NUM_REPORTS = 3
"""Number of consecutive reports with a low score after which a rank is a straggler."""

MIN_SHARE = 0.05
"""Shortest delay, relative to the busy time of the slowest rank in a step, for which a section is
slow: short sections vary, and do not delay the step (heuristic)."""


@dataclass(frozen=True, slots=True, order=True)
class Straggler:
    """A slow section of a rank."""

    rank: int
    section: str
    score: float
    """Reference time / own time."""
    seconds: float
    """Own time per step."""
    reference_seconds: float
    """The shortest time of ranks with the same work, or the own time in the first report."""


def compute_median_times(steps: Sequence[BusyTimes]) -> dict[str, float]:
    """Return the median of each section over steps; a section that a step lacks took no time.

    >>> compute_median_times([{"forward": 1.0}, {"forward": 3.0, "data": 1.0}, {"forward": 2.0}])
    {'data': 0.0, 'forward': 2.0}
    """
    sections = sorted({section for step in steps for section in step})
    return {section: median(step.get(section, 0.0) for step in steps) for section in sections}


def find_slow_sections(
    rank: int, times: BusyTimes, reference: BusyTimes, *, step_seconds: float
) -> list[Straggler]:
    """Return the sections in which a rank takes longer than the reference by more than the
    threshold; `step_seconds`: busy time of the slowest rank.

    >>> times = {"data": 0.2, "forward": 1.3, "backward": 2.0}
    >>> reference = {"data": 0.1, "forward": 1.0, "backward": 1.9}
    >>> [each.section for each in find_slow_sections(0, times, reference, step_seconds=3.5)]
    ['forward']
    """
    return [
        Straggler(rank, section, reference[section] / seconds, seconds, reference[section])
        for section, seconds in times.items()
        if section in reference
        and reference[section] < SLOW_SCORE * seconds
        and seconds - reference[section] > MIN_SHARE * step_seconds
    ]


def find_shortest_times(ranks: Sequence[BusyTimes]) -> dict[str, float]:
    """Return the shortest time of each section over ranks that all have it.

    >>> find_shortest_times([{"data": 1.0, "forward": 2.0}, {"forward": 1.0}])
    {'forward': 1.0}
    """
    shared = set.intersection(*(set(times) for times in ranks)) if ranks else set()
    return {section: min(times[section] for times in ranks) for section in sorted(shared)}


@dataclass(frozen=True, slots=True)
class StragglerReport:
    """Result of one report."""

    slowest_rank: int
    """Rank with the lowest score of its whole busy time among ranks with the same work."""
    slowest_score: float
    slower_than_others: tuple[Straggler, ...]
    """Sections that become stragglers with this report, compared with ranks of the same work."""
    slower_than_before: tuple[Straggler, ...]
    """The same, compared with the first report of the same rank."""


@dataclass(slots=True)
class StragglerHistory:
    """Reports so far: a rank becomes a straggler after `NUM_REPORTS` low scores in a row, and is
    reported once until it recovers."""

    first: Sequence[BusyTimes] = ()
    """Times of all ranks in the first report; empty before that."""
    num_low: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    """Number of low scores in a row by reference (others or before), rank and section."""

    def reset(self) -> None:
        """Restart the comparison, because the work of a step has changed."""
        self.first = ()
        self.num_low.clear()

    def add(self, ranks: Sequence[BusyTimes], work: Sequence[int]) -> StragglerReport:
        """Add the times of all ranks and return the new stragglers.

        `work`: a number for each rank; ranks with equal numbers compute the same, such as those of
        one pipeline stage.
        """
        peers = [
            [times for times, other in zip(ranks, work, strict=True) if other == own]
            for own in work
        ]
        best = [find_shortest_times(each) for each in peers]
        totals = [sum(times.values()) for times in ranks]
        scores = [
            min(sum(times.values()) for times in each) / total if total else 1.0
            for each, total in zip(peers, totals, strict=True)
        ]
        slowest = min(range(len(ranks)), key=lambda rank: (scores[rank], rank))
        slow = [
            each
            for rank, times in enumerate(ranks)
            for each in find_slow_sections(rank, times, best[rank], step_seconds=max(totals))
        ]
        changed = [
            each
            for rank, times in enumerate(ranks)
            if self.first
            for each in find_slow_sections(rank, times, self.first[rank], step_seconds=max(totals))
        ]
        self.first = self.first or [dict(times) for times in ranks]
        return StragglerReport(
            slowest, scores[slowest], self._count("others", slow), self._count("before", changed)
        )

    def _count(self, reference: str, slow: Sequence[Straggler]) -> tuple[Straggler, ...]:
        """Count low scores in a row; return the sections that have just reached `NUM_REPORTS`."""
        low = {(reference, each.rank, each.section) for each in slow}
        for key in [key for key in self.num_low if key[0] == reference and key not in low]:
            del self.num_low[key]
        self.num_low.update(low)
        return tuple(
            each for each in slow if self.num_low[reference, each.rank, each.section] == NUM_REPORTS
        )


def describe_straggler(straggler: Straggler, *, where: str, reference: str) -> str:
    """Describe a slow section in one line; `where`: the rank with coordinates, host and device.

    >>> straggler = Straggler(3, "data", 0.5, 0.2, 0.1)
    >>> describe_straggler(straggler, where="3 (dp=1)", reference="in its first 100 steps")
    'rank 3 (dp=1) is slow in data: 200.0 ms per step, 100.0 ms in its first 100 steps (score 0.50)'
    """
    return (
        f"rank {where} is slow in {straggler.section}: {1000 * straggler.seconds:.1f} ms per step, "
        f"{1000 * straggler.reference_seconds:.1f} ms {reference} (score {straggler.score:.2f})"
    )

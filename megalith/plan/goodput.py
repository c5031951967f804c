"""Goodput of a run: its wall time by cause, as a pure function of the lines of `starts.jsonl` and
`events.jsonl`, and the optimal checkpoint interval.

Each start is a process, whose events are ordered by a monotonic clock; the starts follow
each other by the wall clock. The causes are a partition: they sum to the wall time.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megalith.plan.starts import Start, StartExit, is_number

CAUSES = {
    "productive": "steps of the final history of the run",
    "start-up": "from the start of the process to training, without loading",
    "load": "opening and loading a checkpoint",
    "save": "saving, as far as it delays training",
    "evaluate": "evaluations",
    "waiting": "waiting for stragglers",
    "repeated": "steps that were discarded or computed again: restarts, rollbacks, reruns",
    "skipped": "steps without an update",
    "detection": "from the last event of a start to its end by a fault",
    "downtime": "between two starts",
    "other": "callbacks, logging and the end of the process",
}
"""Causes of time, with their meaning."""

_SECTIONS = {
    "start": "load",
    "save": "save",
    "save_local": "save",
    "drain": "save",
    "evaluate": "evaluate",
    "rollback": "repeated",
}
"""Events whose `seconds` are time of a cause."""

CLOCK_TOLERANCE_SECONDS = 1.0
"""Difference of clocks that is not reported (heuristic: clocks of a cluster are set more
precisely)."""


@dataclass(slots=True)
class _Timeline:
    """One start: its events in order, and when it ended."""

    number: int
    began: float
    """Seconds since 1970."""
    step: int
    events: list[Mapping[str, Any]] = field(default_factory=list)  # Any: JSON
    exit: StartExit | None = None
    tier: str = ""
    checkpoint: str | None = None
    world_size: int = 0
    chosen: float | None = None
    """Time at which its checkpoint was chosen, as `began`."""

    def compute_duration(self) -> float:
        """Return the seconds from the start to its exit, or to its last event."""
        last = max((float(each["elapsed"]) for each in self.events), default=0.0)
        last = max(last, 0.0 if self.chosen is None else self.chosen - self.began)
        if self.exit is None:
            return last
        if self.exit.elapsed is not None:
            return max(last, self.exit.elapsed)
        return max(last, self.exit.time - self.wall_clock_at_start)

    @property
    def wall_clock_at_start(self) -> float:
        """Wall-clock time of the start, computed back from the last event."""
        if not self.events:
            return self.began
        return float(self.events[-1]["time"]) - float(self.events[-1]["elapsed"])


@dataclass(frozen=True, slots=True)
class StartReport:
    """Time of one start by cause."""

    number: int
    began: float
    step: int
    """Step of the checkpoint with which it began."""
    last_step: int
    """Last step that it finished and wrote."""
    tier: str
    world_size: int
    seconds: float
    causes: Mapping[str, float]
    exit: StartExit | None

    @property
    def goodput(self) -> float:
        """Share of its time in productive steps."""
        return self.causes.get("productive", 0.0) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class GoodputReport:
    """Wall time of a run by cause, as a whole and for each start."""

    wall_seconds: float
    causes: Mapping[str, float]
    """Seconds by cause, in the order of `CAUSES`."""
    starts: tuple[StartReport, ...]
    num_steps: int
    """Steps of the final history."""
    num_repeated_steps: int
    num_faults: int
    mean_step_seconds: float | None
    mean_save_seconds: float | None
    """Mean time for which a persistent save delays training."""
    mtbf_seconds: float | None
    """Mean time between faults: time in starts divided by the number of starts that ended by a
    fault, or of which no exit was recorded."""
    checkpoint_every: int | None
    """Setting of the last start."""
    event_counts: Mapping[str, int]
    notes: tuple[str, ...]
    """Missing and invalid rows of the files, and changes of clocks."""

    @property
    def goodput(self) -> float:
        """Share of the wall time in productive steps: the effective training time ratio (ETTR).

        Source: arXiv:2407.21783, section 3.3.4.
        """
        return self.causes["productive"] / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def optimal_interval_seconds(self) -> float | None:
        """Time between saves that minimizes the time of saves and repeated steps."""
        save, between = self.mean_save_seconds, self.mtbf_seconds
        return None if not save or not between else compute_optimal_interval(save, between)

    @property
    def optimal_interval_steps(self) -> int | None:
        """The same in steps, at least 1."""
        seconds, step = self.optimal_interval_seconds, self.mean_step_seconds
        return None if not seconds or not step else max(1, round(seconds / step))


def compute_optimal_interval(save_seconds: float, mtbf_seconds: float) -> float:
    """Return the checkpoint interval that minimizes the expected lost time.

    Source: Young 1974, "A first order approximation to the optimum checkpoint interval"; Daly 2006,
    "A higher order estimate of the optimum checkpoint interval for restart dumps".

    >>> compute_optimal_interval(2.0, 10_000.0)
    200.0
    """
    return math.sqrt(2 * save_seconds * mtbf_seconds)


def compute_goodput(
    starts: Sequence[Start],
    events: Iterable[Mapping[str, Any]],  # Any: JSON
) -> GoodputReport:
    """Return the wall time of a run by cause. `events`: rows of events.jsonl, without problems that
    `find_event_problem` finds."""
    notes: list[str] = []
    timelines = _build_timelines(starts, list(events), notes)
    kept = _count_kept_steps(timelines)
    reports: list[StartReport] = []
    totals = dict.fromkeys(CAUSES, 0.0)
    previous_end: float | None = None
    wall = 0.0
    for timeline in timelines:
        skipped_seconds = 0.0
        if previous_end is not None:
            gap = timeline.began - previous_end
            first = timeline.chosen or _first_event_time(timeline) or timeline.began
            if gap >= 0:
                totals["downtime"] += gap
                wall += gap
            elif first >= previous_end - CLOCK_TOLERANCE_SECONDS:
                skipped_seconds = -gap  # an earlier run of the same process
            else:
                notes.append(
                    f"start {timeline.number} began {-gap:.1f} s before start "
                    f"{reports[-1].number} ended: the clock was set back, or clocks of hosts "
                    "differ. No downtime is counted before it."
                )
        report = _account_start(timeline, kept, skipped_seconds)
        for cause, seconds in report.causes.items():
            totals[cause] += seconds
        wall += report.seconds
        reports.append(report)
        previous_end = timeline.wall_clock_at_start + timeline.compute_duration()
        if abs(change := timeline.wall_clock_at_start - timeline.began) > CLOCK_TOLERANCE_SECONDS:
            notes.append(f"the clock was set by {change:+.1f} s during start {timeline.number}")
    return _summarize(timelines, reports, kept, totals, wall, notes)


def _summarize(
    timelines: Sequence[_Timeline],
    reports: Sequence[StartReport],
    kept: Mapping[tuple[int, int], int],
    totals: dict[str, float],
    wall: float,
    notes: list[str],
) -> GoodputReport:
    rows = [row for timeline in timelines for row in timeline.events]
    num_done = sum(
        int(row["last"]) - int(row["first"]) + 1 for row in rows if row["event"] == "steps"
    )
    num_kept = sum(kept.values())
    step_seconds = sum(float(row["seconds"]) for row in rows if row["event"] == "steps")
    num_saves = sum(row["event"] == "save" for row in rows)
    # Of asynchronous saves the waiting within steps, too.
    save_seconds = max(
        sum(float(row.get("seconds", 0.0)) for row in rows if row["event"] in ("save", "drain")),
        sum(float(row.get("blocked_seconds", 0.0)) for row in rows if row["event"] == "saved"),
    )
    num_faults = sum(
        each.exit.is_fault if each.exit is not None else each is not reports[-1] for each in reports
    )
    in_starts = sum(report.seconds for report in reports)
    every = [row.get("checkpoint_every") for row in rows if row["event"] == "start"]
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["event"]] = counts.get(row["event"], 0) + 1
    if rows and not num_done:
        notes.append("no step was finished, so there is no productive time")
    return GoodputReport(
        wall_seconds=wall,
        causes=totals,
        starts=tuple(reports),
        num_steps=num_kept,
        num_repeated_steps=num_done - num_kept,
        num_faults=num_faults,
        mean_step_seconds=step_seconds / num_done if num_done else None,
        mean_save_seconds=save_seconds / num_saves if num_saves else None,
        mtbf_seconds=in_starts / num_faults if num_faults else None,
        checkpoint_every=every[-1] if every else None,
        event_counts=counts,
        notes=tuple(notes),
    )


def find_event_problem(row: Mapping[str, Any]) -> str:  # Any: JSON
    """Return why a row of `events.jsonl` cannot be used; empty if it can."""
    if not isinstance(row.get("event"), str):
        return "it has no event"
    numbers = ["start", "time", "elapsed"]
    if row["event"] == "steps":
        numbers += ["first", "last", "seconds"]
    elif row["event"] in ("start", "rollback"):
        numbers += ["step"]
    if row["event"] == "start":
        numbers += ["began"]
    for name in numbers:
        if not is_number(row.get(name)):
            return f"{name} is not a number"
    for name in ("seconds", "rerun_seconds", "skipped_seconds", "blocked_seconds"):
        if not is_number(row.get(name, 0.0)) or row.get(name, 0.0) < 0:
            return f"{name} is not a duration"
    for name in ("step", "began", "world_size", "checkpoint_every"):
        if row.get(name) is not None and not is_number(row[name]):
            return f"{name} is not a number"
    if row["event"] == "steps" and row["last"] < row["first"]:
        return "last is less than first"
    return ""


def _build_timelines(
    starts: Sequence[Start],
    events: Sequence[Mapping[str, Any]],  # Any: JSON
    notes: list[str],
) -> list[_Timeline]:
    """Return the starts in order with their events."""
    timelines: dict[int, _Timeline] = {
        start.number: _Timeline(
            start.number,
            start.began,
            start.step,
            exit=start.exit,
            tier=start.tier,
            checkpoint=start.checkpoint,
            world_size=start.world_size,
            chosen=start.time,
        )
        for start in starts
    }
    unknown: list[int] = []
    for row in events:
        number = int(row["start"])
        if number not in timelines:
            unknown.append(number)
            began = row.get("began")
            began = float(row["time"]) - float(row["elapsed"]) if began is None else float(began)
            timelines[number] = _Timeline(number, began, int(row.get("step") or 0))
        timeline = timelines[number]
        if timeline.events and float(row["elapsed"]) < float(timeline.events[-1]["elapsed"]):
            notes.append(
                f"start {number}: event {row['event']} comes after a later one; it is ignored"
            )
            continue
        if row["event"] == "start":
            timeline.step = int(row["step"])
            timeline.world_size = int(row.get("world_size") or timeline.world_size)
        timeline.events.append(row)
    if unknown:
        listed = ", ".join(map(str, dict.fromkeys(unknown)))
        notes.append(f"starts.jsonl has no line of start {listed}, so its exit is not known")
    without_events = [number for number, timeline in timelines.items() if not timeline.events]
    if without_events:
        listed = ", ".join(map(str, without_events))
        notes.append(f"events.jsonl has no line of start {listed}: it ended before training, or ")
        notes[-1] += "the file is incomplete"
    return [timelines[number] for number in sorted(timelines)]


def _first_event_time(timeline: _Timeline) -> float | None:
    return float(timeline.events[0]["time"]) if timeline.events else None


def _count_kept_steps(timelines: Sequence[_Timeline]) -> dict[tuple[int, int], int]:
    """Return the number of steps of the final history by (start, index of the event).

    A step is discarded by a later start or rollback that continues from an earlier step.
    """
    kept: dict[tuple[int, int], int] = {}
    limit = math.inf
    for timeline in reversed(timelines):
        for index in range(len(timeline.events) - 1, -1, -1):
            row = timeline.events[index]
            if row["event"] == "steps":
                first, last = int(row["first"]), int(row["last"])
                kept[timeline.number, index] = max(0, int(min(last, limit)) - first + 1)
            elif row["event"] == "rollback":
                limit = min(limit, int(row["step"]))
        if timeline.events:  # one that ended before training discarded nothing
            limit = min(limit, timeline.step)
    return kept


def _account_start(
    timeline: _Timeline, kept: Mapping[tuple[int, int], int], skipped_seconds: float
) -> StartReport:
    """Return the time of a start by cause; its first `skipped_seconds` belong to the start
    before."""
    causes = dict.fromkeys(CAUSES, 0.0)
    cursor, waiting = min(skipped_seconds, timeline.compute_duration()), 0.0
    began, is_training = cursor, False
    last_step = timeline.step
    for index, row in enumerate(timeline.events):
        end = max(cursor, float(row["elapsed"]))
        seconds = min(float(row.get("seconds", 0.0)), end - cursor)
        if row["event"] == "waiting":
            waiting += float(row.get("seconds", 0.0))
            seconds = 0.0
        elif row["event"] == "steps":
            last_step = int(row["last"])
            _add_steps(causes, row, seconds, kept[timeline.number, index])
        elif row["event"] in _SECTIONS:
            causes[_SECTIONS[row["event"]]] += seconds
        else:
            seconds = 0.0
        causes["other" if is_training else "start-up"] += end - cursor - seconds
        is_training = is_training or row["event"] == "start"
        cursor = end
    end = max(cursor, timeline.compute_duration())
    rest = "other" if is_training else "start-up"
    if timeline.exit is not None and timeline.exit.is_fault:
        rest = "detection" if is_training else "start-up"
    causes[rest] += end - cursor
    moved = min(waiting, causes["productive"])
    causes["productive"] -= moved
    causes["waiting"] += moved
    return StartReport(
        timeline.number,
        timeline.began,
        timeline.step,
        last_step,
        timeline.tier,
        timeline.world_size,
        end - began,
        causes,
        timeline.exit,
    )


def _add_steps(
    causes: dict[str, float],
    row: Mapping[str, Any],  # Any: JSON
    seconds: float,
    num_kept: int,
) -> None:
    """Add the time of consecutive steps, of which the first `num_kept` are in the final history."""
    rerun = min(float(row.get("rerun_seconds", 0.0)), seconds)
    skipped = min(float(row.get("skipped_seconds", 0.0)), seconds - rerun)
    share = num_kept / (int(row["last"]) - int(row["first"]) + 1)
    causes["productive"] += share * (seconds - rerun - skipped)
    causes["skipped"] += share * skipped
    causes["repeated"] += seconds - share * (seconds - rerun)

"""Goodput: the causes of time are a partition of the wall time of any history of a run."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from megalith.plan.goodput import (
    CAUSES,
    GoodputReport,
    compute_goodput,
    compute_optimal_interval,
    find_event_problem,
)
from megalith.plan.starts import parse_starts
from tests.cases import loop_over


@dataclass
class History:
    """A random history of a run: the lines of its files, and the truth."""

    draw: random.Random
    now: float = 1_000_000.0
    rows: list[dict[str, Any]] = field(default_factory=list)  # starts.jsonl
    events: list[dict[str, Any]] = field(default_factory=list)
    truth: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    steps: list[tuple[int, float, float, float]] = field(default_factory=list)
    """Step, and seconds of its last run, of reruns and without an update; those that are discarded
    leave the list."""
    saved: int = 0
    num_done: int = 0

    def spend(self, cause: str, most: float = 5.0) -> float:
        seconds = self.draw.uniform(0.0, most)
        self.now += seconds
        self.truth[cause] += seconds
        return seconds

    def add_event(self, name: str, number: int, origin: float, **fields: Any) -> None:
        at = {"start": number, "time": self.now, "elapsed": self.now - origin}
        self.events.append({"event": name, **at, **fields})

    def discard_after(self, step: int) -> None:
        for each in self.steps:
            if each[0] > step:
                self.truth["repeated"] += sum(each[1:])
        self.steps = [each for each in self.steps if each[0] <= step]

    def run_start(self, number: int, *, is_last: bool) -> None:
        began = self.now
        self.spend("start-up")
        dies_early = not is_last and self.draw.random() < 0.1
        self.rows.append(
            {
                "kind": "start",
                "start": number,
                "time": self.now,
                "began": began,
                "step": self.saved,
                "newest_step": self.saved,
                "world_size": 2,
                "hosts": ["a"],
                "layout": "",
                "checkpoint": None,
                "tier": "none",
            }
        )
        if dies_early:
            self.spend("start-up")
            self.end(number, began, 1, None)
            return
        self.discard_after(self.saved)
        seconds = self.spend("load")
        self.add_event("start", number, began, began=began, step=self.saved, seconds=seconds)
        step = self.saved
        for _ in range(self.draw.randrange(8)):
            step = self.run_steps(number, began, step)
            action = self.draw.choice(["save", "evaluate", "rollback", "saved", "callback"])
            if action == "save":
                seconds = self.spend("save")
                self.add_event("save", number, began, step=step, seconds=seconds)
                self.saved = step
            elif action == "evaluate":
                seconds = self.spend("evaluate")
                self.add_event("evaluate", number, began, seconds=seconds)
            elif action == "rollback":
                seconds = self.spend("repeated")
                self.discard_after(self.saved)
                step = self.saved
                self.add_event("rollback", number, began, step=step, seconds=seconds)
            elif action == "saved":
                self.add_event("saved", number, began)
            else:
                self.spend("other")
                self.add_event("of a later version", number, began)
        kind = self.draw.choice(["done", "fault", "fault of a launcher", "unknown"])
        if kind == "unknown":
            return
        is_fault = kind != "done"
        self.spend("detection" if is_fault else "other")
        self.end(number, began, int(is_fault), None if "launcher" in kind else self.now - began)

    def end(self, number: int, began: float, code: int, elapsed: float | None) -> None:
        self.rows.append(
            {
                "kind": "exit",
                "start": number,
                "time": self.now,
                "elapsed": elapsed,
                "cause": "done" if code == 0 else "fault",
                "code": code,
            }
        )

    def run_steps(self, number: int, began: float, step: int) -> int:
        """Run steps and write them as one event, as long as no callback takes time in between."""
        first, seconds = step + 1, [0.0, 0.0, 0.0]
        for _ in range(self.draw.randint(1, 4)):
            step += 1
            self.num_done += 1
            run = self.draw.uniform(0.1, 2.0)
            rerun = run if self.draw.random() < 0.1 else 0.0
            is_skipped = self.draw.random() < 0.1
            self.now += run + rerun
            self.steps.append((step, 0.0 if is_skipped else run, rerun, run if is_skipped else 0.0))
            seconds = [
                seconds[0] + run + rerun,
                seconds[1] + rerun,
                seconds[2] + (run if is_skipped else 0.0),
            ]
        self.add_event(
            "steps",
            number,
            began,
            first=first,
            last=step,
            seconds=seconds[0],
            rerun_seconds=seconds[1],
            skipped_seconds=seconds[2],
        )
        return step

    def finish(self) -> GoodputReport:
        for _, run, rerun, skipped in self.steps:
            self.truth["productive"] += run
            self.truth["repeated"] += rerun
            self.truth["skipped"] += skipped
        return compute_goodput(parse_starts(self.rows), self.events)


def build_history(seed: int) -> History:
    """Return a history of several starts. Checkpoints are at the end of events of steps, as the
    writer of events ensures."""
    history = History(random.Random(seed))
    num_starts = history.draw.randint(1, 6)
    for number in range(1, num_starts + 1):
        history.run_start(number, is_last=number == num_starts)
        if number < num_starts:
            history.spend("downtime", 50.0)
    return history


@loop_over("seed", range(300))
def test_causes_are_those_of_random_histories_and_sum_to_the_wall_time(seed: int) -> None:
    history = build_history(seed)
    began = history.rows[0]["began"]
    report = history.finish()
    end = history.now
    assert sum(report.causes.values()) == pytest.approx(report.wall_seconds, abs=1e-6)
    assert report.wall_seconds == pytest.approx(end - began, abs=1e-5)
    assert min(report.causes.values()) >= -1e-9
    assert report.causes == pytest.approx(history.truth, abs=1e-4)
    assert report.num_steps == len({step for step, *_ in history.steps})
    assert report.num_steps + report.num_repeated_steps == history.num_done
    in_starts = sum(each.seconds for each in report.starts)
    assert in_starts + report.causes["downtime"] == pytest.approx(report.wall_seconds)
    for each in report.starts:
        assert sum(each.causes.values()) == pytest.approx(each.seconds, abs=1e-6)
    assert not [note for note in report.notes if "clock" in note]


@loop_over("seed", range(300))
def test_damaged_histories_still_sum_to_the_wall_time(seed: int) -> None:
    history = build_history(seed)
    draw = random.Random(-seed)
    for rows in (history.rows, history.events):
        for _ in range(draw.randrange(4)):
            if rows:
                rows.pop(draw.randrange(len(rows)))
    for row in (*history.rows, *history.events):
        if draw.random() < 0.1:
            row["time"] += draw.uniform(-100, 100)
        if draw.random() < 0.05 and "elapsed" in row and row["elapsed"] is not None:
            row["elapsed"] *= draw.random()
    report = compute_goodput(parse_starts(history.rows), history.events)
    assert sum(report.causes.values()) == pytest.approx(report.wall_seconds, abs=1e-6)
    assert min(report.causes.values()) >= -1e-9 and report.wall_seconds >= 0


def start_row(number: int, began: float, step: int = 0) -> dict[str, Any]:
    return {
        "kind": "start",
        "start": number,
        "time": began + 1,
        "began": began,
        "step": step,
        "newest_step": step,
        "world_size": 1,
        "hosts": ["a"],
        "layout": "",
        "checkpoint": None,
        "tier": "none",
    }


def event_row(name: str, number: int, origin: float, elapsed: float, **more: Any) -> dict[str, Any]:
    return {
        "event": name,
        "start": number,
        "time": origin + elapsed,
        "elapsed": elapsed,
        **more,
    }


def test_a_clock_that_goes_back_between_starts_counts_no_downtime() -> None:
    rows = [start_row(1, 1000.0), start_row(2, 500.0)]
    events = [
        event_row("start", 1, 1000.0, 2.0, began=1000.0, step=0),
        event_row("steps", 1, 1000.0, 12.0, first=1, last=5, seconds=10.0),
        event_row("start", 2, 500.0, 2.0, began=500.0, step=0),
    ]
    report = compute_goodput(parse_starts(rows), events)
    assert report.causes["downtime"] == 0 and report.wall_seconds == 14.0
    assert report.notes == (
        "start 2 began 512.0 s before start 1 ended: the clock was set back, or clocks of hosts "
        "differ. No downtime is counted before it.",
    )


def test_a_clock_that_is_set_during_a_start_does_not_change_durations() -> None:
    rows = [
        start_row(1, 1000.0),
        {"kind": "exit", "start": 1, "time": 5013.0, "cause": "killed", "code": 1},
        start_row(2, 5020.0),
    ]
    events = [
        event_row("start", 1, 1000.0, 2.0, began=1000.0, step=0),
        event_row("steps", 1, 5000.0, 12.0, first=1, last=5, seconds=10.0),
    ]
    report = compute_goodput(parse_starts(rows), events)
    assert report.starts[0].seconds == 13.0 and report.causes["detection"] == 1.0
    assert report.causes["downtime"] == 7.0
    assert "the clock was set by +4000.0 s during start 1" in report.notes


def test_two_runs_of_one_process_do_not_overlap() -> None:
    rows = [start_row(1, 1000.0), start_row(2, 1000.0) | {"time": 1013.0}]
    events = [
        event_row("start", 1, 1000.0, 2.0, began=1000.0, step=0),
        event_row("steps", 1, 1000.0, 12.0, first=1, last=5, seconds=10.0),
        event_row("start", 2, 1000.0, 14.0, began=1000.0, step=5),
        event_row("steps", 2, 1000.0, 16.0, first=6, last=7, seconds=2.0),
    ]
    report = compute_goodput(parse_starts(rows), events)
    assert report.wall_seconds == 16.0 and report.causes["start-up"] == 4.0
    assert report.causes["productive"] == 12.0


def test_waiting_for_stragglers_is_part_of_steps() -> None:
    events = [
        event_row("start", 1, 0.0, 2.0, began=0.0, step=0),
        event_row("steps", 1, 0.0, 12.0, first=1, last=5, seconds=10.0),
        event_row("waiting", 1, 0.0, 12.0, seconds=3.0),
    ]
    report = compute_goodput([], events)
    assert (report.causes["productive"], report.causes["waiting"]) == (7.0, 3.0)
    assert report.notes == ("starts.jsonl has no line of start 1, so its exit is not known",)


def test_optimal_interval_follows_from_saves_and_faults() -> None:
    rows = [
        row
        for number in (1, 2)
        for row in (
            start_row(number, 1000.0 * number),
            {
                "kind": "exit",
                "start": number,
                "time": 1000.0 * number + 200,
                "cause": "x",
                "code": 1,
                "elapsed": 200.0,
            },
        )
    ]
    events = [
        row
        for number in (1, 2)
        for row in (
            event_row(
                "start",
                number,
                1000.0 * number,
                2.0,
                began=1000.0 * number,
                step=0,
                checkpoint_every=50,
            ),
            event_row("steps", number, 1000.0 * number, 42.0, first=1, last=20, seconds=40.0),
            event_row("save", number, 1000.0 * number, 43.0, step=20, seconds=1.0),
        )
    ]
    report = compute_goodput(parse_starts(rows), events)
    assert (report.num_faults, report.mtbf_seconds) == (2, 200.0)
    assert (report.mean_save_seconds, report.mean_step_seconds) == (1.0, 2.0)
    assert report.optimal_interval_seconds == compute_optimal_interval(1.0, 200.0) == 20.0
    assert (report.optimal_interval_steps, report.checkpoint_every) == (10, 50)


def test_a_run_without_events_or_steps_is_described() -> None:
    assert compute_goodput([], []).wall_seconds == 0 and compute_goodput([], []).goodput == 0
    report = compute_goodput(parse_starts([start_row(1, 1000.0)]), [])
    assert report.causes["start-up"] == report.wall_seconds == 1.0
    assert report.notes == (
        "events.jsonl has no line of start 1: it ended before training, or the file is incomplete",
    )
    report = compute_goodput([], [event_row("start", 1, 0.0, 2.0, began=0.0, step=0)])
    assert "no step was finished, so there is no productive time" in report.notes
    assert report.optimal_interval_steps is None


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({}, "it has no event"),
        ({"event": "save", "start": 1, "time": 1.0}, "elapsed is not a number"),
        (event_row("steps", 1, 0.0, 1.0, first=3, last=2, seconds=1.0), "last is less than first"),
        (event_row("steps", 1, 0.0, 1.0, first=3, last="x", seconds=1.0), "last is not a number"),
        (event_row("save", 1, 0.0, 1.0, seconds=-1.0), "seconds is not a duration"),
        (event_row("rollback", 1, 0.0, 1.0), "step is not a number"),
        (event_row("save", 1, 0.0, float("inf"), seconds=1.0), "time is not a number"),
        (event_row("steps", 1, 0.0, 1.0, first=1, last=10**400), "last is not a number"),
        (event_row("saved", 1, 0.0, 1.0, blocked_seconds="x"), "blocked_seconds is not a duration"),
        (event_row("error", 1, 0.0, 1.0, step=[3]), "step is not a number"),
        (event_row("of a later version", 1, 0.0, 1.0), ""),
    ],
)
def test_rows_that_cannot_be_used_are_described(row: dict[str, Any], problem: str) -> None:
    assert find_event_problem(row) == problem


def test_save_without_duration_is_read() -> None:
    report = compute_goodput([], [event_row("save", 1, 0.0, 1.0), event_row("drain", 1, 0.0, 2.0)])
    assert report.causes["save"] == 0.0 and report.mean_save_seconds == 0.0

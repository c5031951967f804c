"""Timers: sections by level, per step, with the extremes over ranks."""

from typing import cast

import pytest
import torch

from megalith.observe import timers
from megalith.observe.timers import SECTION_LEVELS, Timers, summarize_times


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the clock of the timers."""
    clock = Clock()
    monkeypatch.setattr(timers.time, "perf_counter", clock)
    return clock


@pytest.mark.parametrize(
    ("level", "expected"),
    [(0, {}), (1, {"data": 2.0}), (2, {"data": 2.0, "forward": 0.75})],
)
def test_sections_are_measured_up_to_the_level(
    clock: Clock, level: int, expected: dict[str, float]
) -> None:
    measured = Timers(level=level)
    with measured.section("data"):
        for _ in range(3):
            with measured.section("forward"):
                clock.now += 0.25
        clock.now += 1.25
    assert measured.take() == expected
    assert measured.take() == {}


def test_time_of_a_section_that_fails_counts(clock: Clock) -> None:
    measured = Timers(level=1)
    with pytest.raises(ZeroDivisionError), measured.section("data"):
        clock.now += 0.5
        raise ZeroDivisionError
    assert measured.take() == {"data": 0.5}


class Event:
    """An event of 0.5 s that has not finished until the host waits for it."""

    finished = False

    def query(self) -> bool:
        return self.finished

    def synchronize(self) -> None:
        self.finished = True

    def elapsed_time(self, end: "Event") -> float:
        assert end.finished
        return 500.0


def test_sections_belong_to_the_row_of_their_steps() -> None:
    measured = Timers(level=1)
    for _ in range(2):  # as the kernels of a step run until the host waits
        event = cast(torch.cuda.Event, Event())
        measured._events.append(("optimizer", event, event))
        measured.add("data", 1.0)
        assert measured.take() == {"data": 1.0, "optimizer": 0.5}


def test_one_section_is_taken_when_its_kernels_have_finished() -> None:
    measured = Timers(level=1)
    event, other = cast(torch.cuda.Event, Event()), cast(torch.cuda.Event, Event())
    measured._events = [("save", other, other), ("evaluate", event, event)]
    measured.add("data", 1.0)
    assert measured.take_section("evaluate") == 0.5
    assert measured.take_section("evaluate") == 0.0
    assert measured.take() == {"data": 1.0, "save": 0.5}


def test_every_section_has_a_level() -> None:
    assert set(SECTION_LEVELS.values()) == {1, 2}
    with pytest.raises(KeyError):
        Timers(level=1).section("unknown")


def test_profiler_annotates_sections_of_all_levels() -> None:
    events: list[str] = []

    class Ranges:
        def push(self, name: str) -> None:
            events.append(name)

        def pop(self) -> None:
            events.append("end")

    measured = Timers()
    measured.ranges = Ranges()
    with measured.section("optimizer"), measured.section("forward"):
        pass
    assert events == ["optimizer", "forward", "end", "end"]
    assert measured.take() == {}


def test_mean_and_extremes_are_those_of_the_ranks_that_run_a_section() -> None:
    seconds: list[dict[str, float]] = [{"a": 0.1}, {"a": 0.5, "b": 1.0}, {"a": 0.3}]
    metrics = summarize_times(seconds, (4, 5, 6), num_steps=10)
    assert metrics == {
        "time_a_ms": 30.0,
        "time_a_min_ms": 10.0,
        "time_a_max_ms": 50.0,
        "time_a_max_rank": 5,
        "time_b_ms": 100.0,
        "time_b_min_ms": 100.0,
        "time_b_max_ms": 100.0,
        "time_b_max_rank": 5,
    }
    assert summarize_times(seconds[:1], (0,), num_steps=1) == {"time_a_ms": 100.0}

"""Timers of the sections of a step, and ranges of the same sections in profilers."""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Protocol

import torch

from megalith.observe.busy import BUSY_SECTIONS, BusyMeter
from megalith.observe.metrics import Value

SECTION_LEVELS: Mapping[str, int] = {
    "data": 1,
    "forward_backward": 1,
    "grad_reduce": 1,
    "step_stats": 1,
    "optimizer": 1,
    "param_gather": 1,
    "evaluate": 1,
    "save": 1,
    "forward": 2,
    "backward": 2,
    "weight_grads": 2,
    "pipeline_send": 2,
    "pipeline_receive": 2,
}
"""Sections by name, with the lowest observe.timer_level that measures them. `grad_reduce` is the
part of the gradient reduction that backward does not overlap. `param_gather` is the all-gather of
updated weights; if forward waits for it layer by layer, only its start."""

_UNTIMED = nullcontext()


class ProfilerRanges(Protocol):
    """Annotates ranges of time in a profiler: NVTX, or `torch.profiler.record_function`."""

    def push(self, name: str) -> None:
        """Start a range, within the current one."""

    def pop(self) -> None:
        """End the innermost range."""


class Timers:
    """Measures the sections of this rank's steps, up to a level.

    On a GPU a section is the time between two events on the current stream, which includes waits of
    the stream. No section waits for the device; `take`, at a logged step, waits for the events of
    the steps before it, so that a row has all sections of its own steps and of no others.
    """

    def __init__(self, *, level: int = 0, device: torch.device | None = None) -> None:
        """`level`: observe.timer_level, 0: nothing is measured; `device`: of this rank."""
        self.level = level
        self.ranges: ProfilerRanges | None = None
        """Annotates every section while a profiler records."""
        self.meter: BusyMeter | None = None
        """Measures the busy time of `BUSY_SECTIONS`; None: not measured."""

        self._uses_events = (
            device is not None
            and device.type == "cuda"  # lint: allow cuda-literal: events are CUDA's
        )
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def section(self, name: str) -> AbstractContextManager[object]:
        """Return a context that measures one of `SECTION_LEVELS`."""
        if self.level == 0 and self.ranges is None and self.meter is None:
            return _UNTIMED
        return _Section(self, name, is_timed=SECTION_LEVELS[name] <= self.level)

    def add(self, name: str, seconds: float) -> None:
        """Add host time to a section."""
        self._seconds[name] += seconds

    def start(self) -> float | torch.cuda.Event:
        """Return the current time, or an event that records it on the device."""
        if not self._uses_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self, name: str, started: float | torch.cuda.Event) -> None:
        """Add the time since `start` to a section."""
        ended = self.start()
        if isinstance(started, float) and isinstance(ended, float):
            self._seconds[name] += ended - started
        elif isinstance(started, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
            self._events.append((name, started, ended))

    def take(self) -> dict[str, float]:
        """Return the seconds of each section since the last call; waits for their kernels."""
        self._read_events(self._events)
        self._events = []
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds

    def take_section(self, name: str) -> float:
        """Return the seconds of one section since it was last taken; waits for its kernels."""
        events = [event for event in self._events if event[0] == name]
        self._events = [event for event in self._events if event[0] != name]
        self._read_events(events)
        return self._seconds.pop(name, 0.0)

    def _read_events(
        self, events: Sequence[tuple[str, torch.cuda.Event, torch.cuda.Event]]
    ) -> None:
        """Wait for events, and add the times between them to their sections."""
        for name, started, ended in events:
            ended.synchronize()
            self._seconds[name] += started.elapsed_time(ended) / 1000

    def clear(self) -> None:
        """Forget all sections, which belong to discarded steps."""
        self._seconds.clear()
        self._events.clear()


class _Section:
    """Context of one section."""

    __slots__ = ("_busy_since", "_is_timed", "_meter", "_name", "_ranges", "_started", "_timers")

    def __init__(self, timers: Timers, name: str, *, is_timed: bool) -> None:
        self._timers, self._name, self._is_timed = timers, name, is_timed
        self._ranges = timers.ranges
        self._meter = timers.meter if name in BUSY_SECTIONS else None

    def __enter__(self) -> None:
        if self._ranges is not None:
            self._ranges.push(self._name)
        if self._is_timed:
            self._started = self._timers.start()
        if self._meter is not None:
            self._busy_since = self._meter.begin(self._name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._meter is not None:
            self._meter.end(self._name, self._busy_since)
        if self._is_timed:
            self._timers.stop(self._name, self._started)
        if self._ranges is not None:
            self._ranges.pop()


def summarize_times(
    rank_seconds: Sequence[Mapping[str, float]], ranks: Sequence[int], *, num_steps: int
) -> dict[str, Value]:
    """Return the metrics of all sections: milliseconds per step, the mean of the ranks that run
    the section; with several ranks also the extremes and the slowest rank.

    >>> summarize_times([{"data": 0.002}, {"data": 0.004}], [0, 1], num_steps=2)
    {'time_data_ms': 1.5, 'time_data_min_ms': 1.0, 'time_data_max_ms': 2.0, 'time_data_max_rank': 1}
    """
    metrics: dict[str, Value] = {}
    for name in dict.fromkeys(name for seconds in rank_seconds for name in seconds):
        times = {
            rank: 1000 * seconds[name] / num_steps
            for rank, seconds in zip(ranks, rank_seconds, strict=True)
            if name in seconds
        }
        metrics[f"time_{name}_ms"] = round(sum(times.values()) / len(times), 3)
        if len(ranks) > 1:
            slowest = max(times, key=lambda rank: times[rank])
            metrics[f"time_{name}_min_ms"] = round(min(times.values()), 3)
            metrics[f"time_{name}_max_ms"] = round(times[slowest], 3)
            metrics[f"time_{name}_max_rank"] = slowest
    return metrics

"""Busy time of this rank: the time of a step's sections without the waits in collectives."""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

BUSY_SECTIONS = frozenset(
    {"data", "forward_backward", "forward", "backward", "weight_grads", "optimizer"}
)
"""Sections whose busy time is measured. `forward_backward` contains the three after it; it is used
where they are not measured, in dual-batch overlap."""

WAITING = "waiting"
"""Name of the time in which a rank waits for others, inside and outside of sections."""

_INNER_SECTIONS = ("forward", "backward", "weight_grads")

Instant = float | torch.cuda.Event
"""Time on the host, or an event that records it on the device."""

_Span = tuple[str, int, Instant, Instant]  # section, sign of the time, start and end


class BusyMeter:
    """Measures sections and waits of this rank.

    On a GPU both are times between events on the current stream, which also waits for collectives;
    no method but `take` waits for the device. A step begins with its section `data`.
    """

    def __init__(self, device: torch.device) -> None:
        self._uses_events = (
            device.type == "cuda"  # lint: allow cuda-literal: events are CUDA's
        )
        self._open: list[str] = []  # sections that this rank is in, outer first
        self._seconds: defaultdict[str, float] = defaultdict(float)  # of the current step
        self._spans: list[_Span] = []  # between events, of the current step
        self._steps: list[tuple[defaultdict[str, float], list[_Span]]] = []

    def now(self) -> Instant:
        """Return the current time."""
        if not self._uses_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self, section: str) -> Instant:
        """Begin a section."""
        if section == "data":
            self.discard_step()  # waits between steps: callbacks, evaluation, saves
        self._open.append(section)
        return self.now()

    def end(self, section: str, started: Instant) -> None:
        """End a section that `begin` began."""
        self._open.remove(section)
        self._add(section, 1, started, self.now())

    def add_wait(self, started: Instant) -> None:
        """Subtract the time since `started`, in which this rank has waited, from the sections that
        it is in."""
        now = self.now()
        self._add(WAITING, 1, started, now)
        for section in self._open:
            self._add(section, -1, started, now)

    def _add(self, section: str, sign: int, started: Instant, ended: Instant) -> None:
        if isinstance(started, float) and isinstance(ended, float):
            self._seconds[section] += sign * (ended - started)
        else:
            self._spans.append((section, sign, started, ended))

    def finish_step(self) -> None:
        """Complete a step."""
        self._steps.append((self._seconds, self._spans))
        self.discard_step()

    def discard_step(self) -> None:
        """Discard the measurements of the current step."""
        self._seconds, self._spans = defaultdict(float), []

    def take(self) -> list[Mapping[str, float]]:
        """Return the busy seconds of each section in every step since the last call, and those
        of all waits as `WAITING`; waits for the device."""
        steps, self._steps = self._steps, []
        return [_sum_spans(seconds, spans) for seconds, spans in steps]


def _sum_spans(seconds: defaultdict[str, float], spans: Sequence[_Span]) -> dict[str, float]:
    """Return the busy seconds of each section of a step, without sections that contain others."""
    for section, sign, started, ended in spans:
        assert isinstance(started, torch.cuda.Event) and isinstance(ended, torch.cuda.Event)
        ended.synchronize()
        seconds[section] += sign * started.elapsed_time(ended) / 1000
    if any(name in seconds for name in _INNER_SECTIONS):
        seconds.pop("forward_backward", None)
    return {section: max(0.0, each) for section, each in seconds.items()}

"""The busy time of a section has no waits in collectives, of whichever kind, and no time between
steps."""

import time

import pytest
import torch

from megalith.observe import busy as busy_module
from megalith.observe.busy import WAITING, BusyMeter
from megalith.observe.flight import FlightRecorder
from megalith.observe.timers import Timers
from megalith.parallel.collectives import AsyncAllToAll, reduce_from_tp
from megalith.parallel.group import Group, all_reduce_, gather_objects, start_all_reduce_
from megalith.parallel.tensor_overlap import start_all_reduce
from megalith.testing.ranks import run_ranks, world_group


class Clock:
    """Replaces the time of the module."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(busy_module, "time", fake)
    return fake


def open_timers() -> tuple[BusyMeter, Timers]:
    timers = Timers()
    timers.meter = BusyMeter(torch.device("cpu"))
    return timers.meter, timers


def test_waits_are_subtracted_from_the_sections_around_them(clock: Clock) -> None:
    meter, timers = open_timers()
    with timers.section("data"):
        clock.now += 1.0
    with timers.section("forward_backward"):
        for _ in range(2):
            with timers.section("forward"):
                clock.now += 2.0
                started = meter.now()
                clock.now += 5.0
                meter.add_wait(started)
    started = meter.now()
    clock.now += 7.0
    meter.add_wait(started)
    meter.finish_step()
    assert meter.take() == [{"data": 1.0, "forward": 4.0, WAITING: 17.0}]
    assert meter.take() == []


def test_without_inner_sections_forward_and_backward_are_one(clock: Clock) -> None:
    meter, timers = open_timers()
    with timers.section("forward_backward"):
        clock.now += 3.0
    meter.finish_step()
    assert meter.take() == [{"forward_backward": 3.0}]


def test_waits_between_steps_do_not_count(clock: Clock) -> None:
    meter, timers = open_timers()
    started = meter.now()
    clock.now += 9.0
    meter.add_wait(started)
    with timers.section("data"):
        clock.now += 1.0
    meter.finish_step()
    assert meter.take() == [{"data": 1.0}]


def test_sections_are_not_measured_without_a_meter() -> None:
    meter, timers = open_timers()
    timers.meter = None
    with timers.section("forward"):
        pass
    meter.finish_step()
    assert meter.take() == [{}]


DELAY = 0.05


def _late(group: Group, rank: int) -> None:
    """Rank 1 is late, at a barrier that nothing measures."""
    gather_objects(None, group)
    if rank == 1:
        time.sleep(DELAY)


def _measure(rank: int, world: int) -> dict[str, float]:
    """Return the seconds that this rank waits in each kind of collective."""
    plain = world_group(rank, world, "dp")
    flight = FlightRecorder()
    flight.meter = BusyMeter(torch.device("cpu"))
    group = Group(plain.axes, plain.ranks, plain.rank, plain.handle, plain.name, flight)
    x = torch.ones(2)
    exchange = AsyncAllToAll(group, [1, 1], [1, 1])

    def run_async() -> None:
        work = start_all_reduce_(x, group)
        assert work is not None and work.wait() and work.is_completed()

    kinds = {
        "in place": lambda: all_reduce_(x, group),
        "handle": run_async,
        "functional": lambda: reduce_from_tp(x, group),
        "overlapped": lambda: start_all_reduce(x, group).wait(),
        "exchange": lambda: exchange.wait(exchange.start(x, back=False)),
        "objects": lambda: gather_objects(None, group),
    }
    waited = {}
    for kind, run in kinds.items():
        run()  # the first one connects the ranks
        _late(plain, rank)
        flight.meter.begin("data")
        run()
        flight.meter.finish_step()
        waited[kind] = flight.meter.take()[-1].get(WAITING, 0.0)
    started = start_all_reduce(x, group)
    gather_objects(None, plain)
    time.sleep(DELAY)  # computation while the message is in flight
    flight.meter.begin("data")
    started.wait()
    flight.meter.finish_step()
    waited["nothing"] = flight.meter.take()[-1][WAITING]
    return waited


def test_waits_in_every_kind_of_collective_are_measured() -> None:
    first, _ = run_ranks(_measure, 2)
    nothing = first.pop("nothing")
    for kind, seconds in first.items():
        assert seconds > 0.8 * DELAY, (kind, seconds)
    assert nothing < DELAY, "a message that has arrived is not waited for"

"""A pipeline step on paper: when every action runs, who waits for whom, how much is alive; nothing
touches a device.

Times are whatever the costs are given in. With integers or Fractions every result is exact.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from megalith.errors import PlanError
from megalith.plan.matching import action_text, has_transfers, matching_problems
from megalith.plan.schedule import Kind, Schedule
from megalith.plan.transfers import (
    AGAINST,
    COMPUTES,
    RECEIVES,
    SENDS,
    Channel,
    Direction,
    channels,
    neighbor,
)

Number = int | float | Fraction

Row = list[Number | None]
"""By microbatch: when something was there; None: not yet, or never."""


@dataclass(frozen=True, slots=True)
class Costs:
    """How long things take: one number per stage for each part of the computing, one for any
    message."""

    forward: tuple[Number, ...]
    backward_input: tuple[Number, ...]
    backward_weight: tuple[Number, ...]
    transfer: Number = 0
    """From the moment when both sides are there until the message has arrived; a channel carries
    one at a time."""

    def of(self, kind: Kind, stage: int) -> Number:
        """The time that one action takes its rank."""
        if kind == "F":
            return self.forward[stage]
        towards_input = self.backward_input[stage] if kind in ("B", "I") else 0
        weights = self.backward_weight[stage] if kind in ("B", "W") else 0
        return towards_input + weights


def even_costs(
    num_stages: int,
    *,
    forward: Number = 1,
    backward_input: Number = 1,
    backward_weight: Number = 1,
    transfer: Number = 0,
) -> Costs:
    """The same costs on every stage."""
    stages = range(num_stages)
    return Costs(
        forward=tuple(forward for _ in stages),
        backward_input=tuple(backward_input for _ in stages),
        backward_weight=tuple(backward_weight for _ in stages),
        transfer=transfer,
    )


@dataclass(frozen=True, slots=True)
class SimulatedMessage:
    """One transfer as it happened."""

    channel: Channel
    microbatch: int
    stage: int
    """The stage it is for."""

    start: Number
    end: Number


@dataclass(frozen=True, slots=True)
class Simulation:
    """What happened on paper."""

    schedule: Schedule
    costs: Costs
    starts: list[list[Number]]
    """By rank and action: when it began; for transfers, when they were posted."""

    busy: tuple[Number, ...]
    """By rank: time spent computing."""

    makespan: Number
    """From the first action's start to the last one's end."""

    arrived: dict[Direction, list[Row]]
    """By direction, stage and microbatch: when a stage's input was there."""

    @property
    def idle(self) -> tuple[Number, ...]:
        """By rank: time within the makespan without computing; the bubble."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble(self) -> Fraction:
        """Idle time as a fraction of computing time, over all ranks. 1F1B: (p-1)/m."""
        return Fraction(sum(self.idle)) / Fraction(sum(self.busy))

    @property
    def bubble_of_total(self) -> Fraction:
        """Idle time as a fraction of all time, over all ranks. 1F1B: (p-1)/(m+p-1)."""
        return Fraction(sum(self.idle)) / (Fraction(self.makespan) * len(self.busy))

    def end(self, rank: int, index: int) -> Number:
        """When an action of computing ended."""
        action = self.schedule.ranks[rank][index]
        return self.starts[rank][index] + self.costs.of(
            action.kind, self.schedule.stage_of(rank, action.chunk)
        )

    def waits(self, rank: int) -> tuple[Number, Number, Number]:
        """A rank's idle time before its first computing, between, and after its last."""
        computing = [
            index for index, action in enumerate(self.schedule.ranks[rank]) if action.peer < 0
        ]
        before = self.starts[rank][computing[0]]
        after = self.makespan - self.end(rank, computing[-1])
        return before, self.idle[rank] - before - after, after

    def messages(self) -> list[SimulatedMessage]:
        """Every transfer, by channel."""
        found = []
        for direction, rows in self.arrived.items():
            for stage, row in enumerate(rows):
                rank, chunk = self.schedule.place_of(stage)
                source = neighbor(self.schedule, rank, chunk, AGAINST[direction])
                if source is not None and source[0] != rank:
                    channel, takes = Channel(source[0], rank, direction), self.costs.transfer
                    times = ((m, at) for m, at in enumerate(row) if at is not None)
                    found += [
                        SimulatedMessage(channel, m, stage, at - takes, at) for m, at in times
                    ]
        return found


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Run the lists of all ranks on paper. Lists without messages pass results on as soon as they
    are computed.

    Messages are told apart by tags, as on gloo. Where both ends of every channel list them in one
    order, tags make no difference; whether they do is for `plan/queues` to say.

    costs: unset: 1 for each F, I and W (so 2 for a B), nothing for messages.

    Raises:
        PlanError: the lists do not fit together or block for ever; with rank, action and what it
        waits for.
    """
    problems = matching_problems(schedule)
    if not problems:
        run = _SimulationRun(schedule, costs or even_costs(schedule.num_stages))
        problems = run.play()
    if problems:
        raise PlanError(_refusal(schedule, problems))
    return run.result()


def find_problems(schedule: Schedule) -> list[str]:
    """Everything that keeps the lists from being run to their end over messages with tags, naming
    rank and action.

    Empty when they can be. Without tags: `plan/queues.queue_problems`.
    """
    return (
        matching_problems(schedule)
        or _SimulationRun(schedule, even_costs(schedule.num_stages)).play()
    )


class _SimulatedCompute(NamedTuple):
    """One (kind, chunk) of a rank: waits for its microbatch in `inputs`, and may hand its result on
    itself."""

    inputs: Row
    cost: Number
    outputs: Row | None
    delay: Number
    wakes: int


class _Transfer(NamedTuple):
    """One (kind, chunk) of a rank: notes in `mine` when its side is there; once `other` is too, the
    message arrives."""

    mine: Row
    other: Row
    arrived: Row
    free: list[Number]
    """One number: when the channel has carried its last message."""

    wakes: int


class _SimulationRun:
    """The state of a simulation: how far each rank has come, and which messages are there."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        self.linked = has_transfers(schedule)
        self.arrived: dict[Direction, list[Row]] = {
            "forward": self._rows(),
            "backward": self._rows(),
        }
        self.sent: dict[Direction, list[Row]] = {"forward": self._rows(), "backward": self._rows()}
        self.posted: dict[Direction, list[Row]] = {
            "forward": self._rows(),
            "backward": self._rows(),
        }
        ready: Row = [0] * schedule.num_microbatches
        self.arrived["forward"][0] = self.arrived["backward"][-1] = (
            ready  # from the loader, from the loss
        )
        self.free: dict[Channel, list[Number]] = {channel: [0] for channel in channels(schedule)}
        self.clocks: list[Number] = [0] * schedule.num_ranks
        self.starts: list[list[Number]] = [[] for _ in schedule.ranks]
        self.blocked = [False] * schedule.num_ranks
        self.runnable = list(range(schedule.num_ranks))
        self.computing = [self._computing(rank, ready) for rank in range(schedule.num_ranks)]
        self.transfers = [self._transfers(rank) for rank in range(schedule.num_ranks)]

    def play(self) -> list[str]:
        """Run all ranks as far as they come; a text if they block."""
        while self.runnable:
            self._advance(self.runnable.pop())
        return [self._circle()] if any(self.blocked) else []

    def result(self) -> Simulation:
        """What happened, after `play`."""
        busy = []
        for rank, actions in enumerate(self.schedule.ranks):
            counts = Counter((kind, chunk) for kind, chunk, _, peer in actions if peer < 0)
            busy.append(
                sum(self.computing[rank][key].cost * count for key, count in counts.items())
            )
        return Simulation(
            self.schedule, self.costs, self.starts, tuple(busy), max(self.clocks), self.arrived
        )

    def _advance(self, rank: int) -> None:
        """Run one rank until it has to wait for a message that is not there, or ends."""
        actions, starts, clock = self.schedule.ranks[rank], self.starts[rank], self.clocks[rank]
        computing, transfers, blocked = self.computing[rank], self.transfers[rank], self.blocked
        for index in range(len(starts), len(actions)):
            kind, chunk, microbatch, _ = actions[index]
            step = computing.get((kind, chunk))
            if step is not None:
                inputs, cost, outputs, delay, wakes = step
                ready = inputs[microbatch]
                if ready is None:
                    break
                if ready > clock:
                    clock = ready
                starts.append(clock)
                clock += cost
                if outputs is None:
                    continue
                outputs[microbatch] = clock + delay
            else:
                mine, other, arrived, free, wakes = transfers[kind, chunk]
                starts.append(clock)
                there = other[microbatch]
                if there is None:
                    mine[microbatch] = clock
                    continue
                arrived[microbatch] = free[0] = max(clock, there, free[0]) + self.costs.transfer
            if wakes >= 0 and blocked[wakes]:
                blocked[wakes] = False
                self.runnable.append(wakes)
        self.clocks[rank] = clock
        blocked[rank] = len(starts) < len(actions)

    def _rows(self) -> list[Row]:
        return [[None] * self.schedule.num_microbatches for _ in range(self.schedule.num_stages)]

    def _computing(self, rank: int, ready: Row) -> dict[tuple[Kind, int], _SimulatedCompute]:
        steps: dict[tuple[Kind, int], _SimulatedCompute] = {}
        for chunk in range(self.schedule.num_chunks):
            stage = self.schedule.stage_of(rank, chunk)
            steps["W", chunk] = _SimulatedCompute(ready, self.costs.of("W", stage), None, 0, -1)
            for direction, kinds in COMPUTES.items():
                inputs, passed = (
                    self.arrived[direction][stage],
                    self._handed_on(rank, chunk, direction),
                )
                steps |= {
                    (kind, chunk): _SimulatedCompute(inputs, self.costs.of(kind, stage), *passed)
                    for kind in kinds
                }
        return steps

    def _handed_on(
        self, rank: int, chunk: int, direction: Direction
    ) -> tuple[Row | None, Number, int]:
        """Where a result goes without a message in the lists: (row, delay, rank to wake)."""
        target = neighbor(self.schedule, rank, chunk, direction)
        if target is None or (target[0] != rank and self.linked):
            return None, 0, -1
        row = self.arrived[direction][self.schedule.stage_of(*target)]
        return (row, 0, -1) if target[0] == rank else (row, self.costs.transfer, target[0])

    def _transfers(self, rank: int) -> dict[tuple[Kind, int], _Transfer]:
        steps: dict[tuple[Kind, int], _Transfer] = {}
        for chunk in range(self.schedule.num_chunks):
            for direction in SENDS:
                target = neighbor(self.schedule, rank, chunk, direction)
                if target is not None and target[0] != rank:
                    sent, posted, arrived = self._rows_of(
                        direction, self.schedule.stage_of(*target)
                    )
                    free = self.free[Channel(rank, target[0], direction)]
                    steps[SENDS[direction], chunk] = _Transfer(
                        sent, posted, arrived, free, target[0]
                    )
                source = neighbor(self.schedule, rank, chunk, AGAINST[direction])
                if source is not None and source[0] != rank:
                    sent, posted, arrived = self._rows_of(
                        direction, self.schedule.stage_of(rank, chunk)
                    )
                    free = self.free[Channel(source[0], rank, direction)]
                    steps[RECEIVES[direction], chunk] = _Transfer(posted, sent, arrived, free, -1)
        return steps

    def _rows_of(self, direction: Direction, stage: int) -> tuple[Row, Row, Row]:
        return (
            self.sent[direction][stage],
            self.posted[direction][stage],
            self.arrived[direction][stage],
        )

    def _circle(self) -> str:
        """Who waits for whom: every blocked rank waits for a blocked one, so following them comes
        around."""
        rank, seen = self.blocked.index(True), list[int]()
        while rank not in seen:
            seen.append(rank)
            rank = self._awaited(rank)[0]
        return "deadlock: " + "; ".join(map(self._wait_text, seen[seen.index(rank) :]))

    def _awaited(self, rank: int) -> tuple[int, int]:
        """(rank, index of the action) that sends, or on its own rank computes, what a blocked rank
        waits for."""
        kind, chunk, microbatch, _ = self.schedule.ranks[rank][len(self.starts[rank])]
        direction: Direction = "forward" if kind == "F" else "backward"
        place = neighbor(self.schedule, rank, chunk, AGAINST[direction])
        assert place is not None  # the first stage's F and the last one's B wait for nobody
        kinds = (SENDS[direction],) if self.linked and place[0] != rank else COMPUTES[direction]
        keys = [(its_kind, place[1], microbatch) for its_kind in kinds]
        found = (
            index
            for index, action in enumerate(self.schedule.ranks[place[0]])
            if action[:3] in keys
        )
        return place[0], next(found)

    def _wait_text(self, rank: int) -> str:
        other, index = self._awaited(rank)
        here = action_text(self.schedule, rank, len(self.starts[rank]))
        return (
            f"{here} waits for {action_text(self.schedule, other, index)}, "
            f"but rank {other} stands at action {len(self.starts[other])}"
        )


def _refusal(schedule: Schedule, problems: Sequence[str]) -> str:
    return (
        f"The lists of schedule {schedule.name} on {schedule.num_ranks} ranks cannot be run: "
        f"{'; '.join(problems)}. "
        "Use lists made by build_schedule and with_transfers."
    )

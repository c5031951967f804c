"""Simulate a pipeline step: start time of every action, waiting times and bubble, without a device.

Times are in the unit of the costs. With integers or Fractions every result is exact.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

from megalith.errors import PlanError
from megalith.plan.check_schedule import action_text, has_transfers, matching_problems
from megalith.plan.schedule import (
    AGAINST,
    COMPUTES,
    RECEIVES,
    SENDS,
    Channel,
    Direction,
    Kind,
    Schedule,
    channels,
    neighbor,
)

Number = int | float | Fraction

Row = list[Number | None]
"""Arrival time by microbatch; None: not arrived."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Durations: per stage for each part of the computation, and one for any message."""

    forward: tuple[Number, ...]
    backward_input: tuple[Number, ...]
    backward_weight: tuple[Number, ...]
    transfer: Number = 0
    """From the moment when both sides are ready until the message has arrived; a channel transfers
    one message at a time."""

    def duration(self, kind: Kind, stage: int) -> Number:
        """Return the time of one action on its rank."""
        if kind == "F":
            return self.forward[stage]
        input_backward = self.backward_input[stage] if kind in ("B", "I") else 0
        weights = self.backward_weight[stage] if kind in ("B", "W") else 0
        return input_backward + weights


def even_costs(
    num_stages: int,
    *,
    forward: Number = 1,
    backward_input: Number = 1,
    backward_weight: Number = 1,
    transfer: Number = 0,
) -> Costs:
    """Return costs that are the same for every stage."""
    stages = range(num_stages)
    return Costs(
        forward=tuple(forward for _ in stages),
        backward_input=tuple(backward_input for _ in stages),
        backward_weight=tuple(backward_weight for _ in stages),
        transfer=transfer,
    )


@dataclass(frozen=True, slots=True)
class SimulatedMessage:
    """One simulated transfer."""

    channel: Channel
    microbatch: int
    stage: int
    """The stage that receives it."""

    start: Number
    end: Number


@dataclass(frozen=True, slots=True)
class Simulation:
    """Result of a simulated pipeline step."""

    schedule: Schedule
    costs: Costs
    starts: list[list[Number]]
    """By rank and action: its start time; for transfers, the time when it was posted."""

    busy: tuple[Number, ...]
    """By rank: computation time."""

    makespan: Number
    """From the start of the first action to the end of the last."""

    arrived: dict[Direction, list[Row]]
    """By direction, stage and microbatch: arrival time of a stage's input."""

    @property
    def idle(self) -> tuple[Number, ...]:
        """By rank: time within the makespan without computation; the bubble."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble(self) -> Fraction:
        """Idle time as a fraction of computation time, over all ranks. 1F1B: (p-1)/m."""
        return Fraction(sum(self.idle)) / Fraction(sum(self.busy))

    @property
    def bubble_fraction_of_total(self) -> Fraction:
        """Idle time as a fraction of all time, over all ranks. 1F1B: (p-1)/(m+p-1)."""
        return Fraction(sum(self.idle)) / (Fraction(self.makespan) * len(self.busy))

    def end(self, rank: int, index: int) -> Number:
        """Return the end time of a computation."""
        action = self.schedule.ranks[rank][index]
        return self.starts[rank][index] + self.costs.duration(
            action.kind, self.schedule.stage_index(rank, action.chunk)
        )

    def waits(self, rank: int) -> tuple[Number, Number, Number]:
        """Return a rank's idle time before its first computation, in between, and after its
        last."""
        computing = [
            index for index, action in enumerate(self.schedule.ranks[rank]) if action.peer < 0
        ]
        before = self.starts[rank][computing[0]]
        after = self.makespan - self.end(rank, computing[-1])
        return before, self.idle[rank] - before - after, after

    def messages(self) -> list[SimulatedMessage]:
        """Return every transfer, by channel."""
        transfers = []
        for direction, rows in self.arrived.items():
            for stage, row in enumerate(rows):
                rank, chunk = self.schedule.rank_and_chunk(stage)
                source = neighbor(self.schedule, rank, chunk, AGAINST[direction])
                if source is not None and source[0] != rank:
                    channel, takes = Channel(source[0], rank, direction), self.costs.transfer
                    times = ((m, at) for m, at in enumerate(row) if at is not None)
                    transfers += [
                        SimulatedMessage(channel, m, stage, at - takes, at) for m, at in times
                    ]
        return transfers


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Simulate the action lists of all ranks. Without messages, results are available as soon as
    computed.

    Messages are matched by tags, as on gloo. If both ends of every channel list them in one order,
    tags make no difference; `plan/check_schedule` checks that.

    costs: unset: 1 for each F, I and W (so 2 for a B), 0 for messages.

    Raises:
        PlanError: the lists do not match or deadlock; names the rank, the action and what it
            waits for.
    """
    problems = matching_problems(schedule)
    if not problems:
        run = _SimulationRun(schedule, costs or even_costs(schedule.num_stages))
        problems = run.run_to_end()
    if problems:
        raise PlanError(_format_problems(schedule, problems))
    return run.result()


def find_problems(schedule: Schedule) -> list[str]:
    """Return the reasons why the lists cannot be executed with tagged messages, with rank and
    action.

    Empty if they can. Without tags: `check_schedule.queue_problems`.
    """
    return (
        matching_problems(schedule)
        or _SimulationRun(schedule, even_costs(schedule.num_stages)).run_to_end()
    )


class _SimulatedCompute(NamedTuple):
    """A computation (kind, chunk) of a rank: its inputs by microbatch, and where its result
    goes."""

    inputs: Row
    cost: Number
    outputs: Row | None
    delay: Number
    wakes: int


class _Transfer(NamedTuple):
    """A transfer (kind, chunk) of a rank: the message arrives when both sides are ready."""

    local_ready: Row
    peer_ready: Row
    arrived: Row
    free: list[Number]
    """One number: when the channel has completed its last message."""

    wakes: int


class _SimulationRun:
    """State of a simulation: progress of each rank, and the messages that have arrived."""

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
            ready  # inputs from the data loader and the loss
        )
        self.free: dict[Channel, list[Number]] = {channel: [0] for channel in channels(schedule)}
        self.clocks: list[Number] = [0] * schedule.num_ranks
        self.starts: list[list[Number]] = [[] for _ in schedule.ranks]
        self.blocked = [False] * schedule.num_ranks
        self.runnable = list(range(schedule.num_ranks))
        self.computing = [self._computing(rank, ready) for rank in range(schedule.num_ranks)]
        self.transfers = [self._transfers(rank) for rank in range(schedule.num_ranks)]

    def run_to_end(self) -> list[str]:
        """Run all ranks until none can progress; return a text if they deadlock."""
        while self.runnable:
            self._advance(self.runnable.pop())
        return [self._describe_deadlock()] if any(self.blocked) else []

    def result(self) -> Simulation:
        """Return the simulation after `run_to_end`."""
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
        """Run one rank until it waits for a message or ends."""
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
                local_ready, peer_ready, arrived, free, wakes = transfers[kind, chunk]
                starts.append(clock)
                peer_time = peer_ready[microbatch]
                if peer_time is None:
                    local_ready[microbatch] = clock
                    continue
                arrived[microbatch] = free[0] = max(clock, peer_time, free[0]) + self.costs.transfer
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
            stage = self.schedule.stage_index(rank, chunk)
            steps["W", chunk] = _SimulatedCompute(
                ready, self.costs.duration("W", stage), None, 0, -1
            )
            for direction, kinds in COMPUTES.items():
                inputs, output = (
                    self.arrived[direction][stage],
                    self._find_output(rank, chunk, direction),
                )
                steps |= {
                    (kind, chunk): _SimulatedCompute(
                        inputs, self.costs.duration(kind, stage), *output
                    )
                    for kind in kinds
                }
        return steps

    def _find_output(
        self, rank: int, chunk: int, direction: Direction
    ) -> tuple[Row | None, Number, int]:
        """Return where a result goes without a message: (row, delay, rank to wake)."""
        target = neighbor(self.schedule, rank, chunk, direction)
        if target is None or (target[0] != rank and self.linked):
            return None, 0, -1
        row = self.arrived[direction][self.schedule.stage_index(*target)]
        return (row, 0, -1) if target[0] == rank else (row, self.costs.transfer, target[0])

    def _transfers(self, rank: int) -> dict[tuple[Kind, int], _Transfer]:
        steps: dict[tuple[Kind, int], _Transfer] = {}
        for chunk in range(self.schedule.num_chunks):
            for direction in SENDS:
                target = neighbor(self.schedule, rank, chunk, direction)
                if target is not None and target[0] != rank:
                    sent, posted, arrived = self._rows_of(
                        direction, self.schedule.stage_index(*target)
                    )
                    free = self.free[Channel(rank, target[0], direction)]
                    steps[SENDS[direction], chunk] = _Transfer(
                        sent, posted, arrived, free, target[0]
                    )
                source = neighbor(self.schedule, rank, chunk, AGAINST[direction])
                if source is not None and source[0] != rank:
                    sent, posted, arrived = self._rows_of(
                        direction, self.schedule.stage_index(rank, chunk)
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

    def _describe_deadlock(self) -> str:
        """Describe the cycle of blocked ranks; every blocked rank waits for another blocked one."""
        rank, visited = self.blocked.index(True), list[int]()
        while rank not in visited:
            visited.append(rank)
            rank = self._find_blocker(rank)[0]
        return "deadlock: " + "; ".join(map(self._wait_text, visited[visited.index(rank) :]))

    def _find_blocker(self, rank: int) -> tuple[int, int]:
        """Return (rank, action index) of the send or computation that a blocked rank waits for."""
        kind, chunk, microbatch, _ = self.schedule.ranks[rank][len(self.starts[rank])]
        direction: Direction = "forward" if kind == "F" else "backward"
        place = neighbor(self.schedule, rank, chunk, AGAINST[direction])
        assert place is not None  # the first stage's F and the last stage's B do not wait
        kinds = (SENDS[direction],) if self.linked and place[0] != rank else COMPUTES[direction]
        keys = [(producer_kind, place[1], microbatch) for producer_kind in kinds]
        indices = (
            index
            for index, action in enumerate(self.schedule.ranks[place[0]])
            if action[:3] in keys
        )
        return place[0], next(indices)

    def _wait_text(self, rank: int) -> str:
        other, index = self._find_blocker(rank)
        waiting_action = action_text(self.schedule, rank, len(self.starts[rank]))
        return (
            f"{waiting_action} waits for {action_text(self.schedule, other, index)}, "
            f"but rank {other} stands at action {len(self.starts[other])}"
        )


def _format_problems(schedule: Schedule, problems: Sequence[str]) -> str:
    return (
        f"The lists of schedule {schedule.name} on {schedule.num_ranks} ranks cannot be run: "
        f"{'; '.join(problems)}. "
        "Use lists made by build_schedule and with_transfers."
    )


# --- activations: microbatches that each rank holds at once in a pipeline schedule

CHANGES: dict[Kind, int] = {"F": 1, "B": -1, "W": -1}
"""Change of the number of microbatches in flight by each action."""


def peak_microbatches_in_flight(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Return, by rank and chunk, the largest number of microbatches between their F and the end of
    their backward."""
    peaks = []
    for actions in schedule.ranks:
        live, peak = [0] * schedule.num_chunks, [0] * schedule.num_chunks
        for kind, chunk, _, _ in actions:
            if kind in CHANGES:
                live[chunk] += CHANGES[kind]
                peak[chunk] = max(peak[chunk], live[chunk])
        peaks.append(tuple(peak))
    return tuple(peaks)


def peak_activation_memory(
    schedule: Schedule,
    *,
    activations: Sequence[Number] | None = None,
    for_weights: Sequence[Number] | None = None,
) -> tuple[Number, ...]:
    """Return, by rank, the largest amount of activations held at once over all its chunks.

    activations: by stage, the amount one microbatch holds from its F on (for example bytes); unset:
    1. for_weights: by stage, the part of it still held between I and W; unset: all of it.
    """
    held = activations or (1,) * schedule.num_stages
    held_for_weights = for_weights or held
    peaks = []
    for rank, actions in enumerate(schedule.ranks):
        changes: dict[tuple[Kind, int], Number] = {}
        for chunk in range(schedule.num_chunks):
            stage = schedule.stage_index(rank, chunk)
            deltas: dict[Kind, Number] = {
                "F": held[stage],
                "B": -held[stage],
                "I": held_for_weights[stage] - held[stage],
                "W": -held_for_weights[stage],
            }
            changes |= {(kind, chunk): change for kind, change in deltas.items()}
        held_over_time = accumulate(changes.get((kind, chunk), 0) for kind, chunk, _, _ in actions)
        peaks.append(max(held_over_time))
    return tuple(peaks)

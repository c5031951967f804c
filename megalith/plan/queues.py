"""A pipeline step over queues without tags, as NCCL has them: which message each receive really
gets, and who blocks.

A *communicator* joins two ranks. At each of them, the sends and receives given to it run one after
the other in the order in which they were given, on a stream of their own, and none is over before
the other side has come to its counterpart. So the k-th receive of a channel gets the k-th send,
whatever either was meant to be; and an operation that waits holds up those behind it, though not
the rank, which goes on until it computes with what it has not received.

`parallel/link` gives each channel a communicator of its own. Two channels on one could hold up each
other in a circle.
"""

from collections import defaultdict, deque
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from megalith.plan.matching import action_text, has_transfers
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

RankAction = tuple[int, int]
"""(rank, index) of an action."""


def queue_problems(
    schedule: Schedule, communicators: Mapping[Channel, int] | None = None
) -> list[str]:
    """Receives that would get a message meant for another, and circles of waiting, over NCCL;
    empty: none.

    The lists must fit together, see `plan/matching.matching_problems`; without messages in them
    there is nothing to find. communicators: by channel, the number of the one that carries it;
    unset: every channel has its own.
    """
    if not has_transfers(schedule):
        return []
    own = {channel: number for number, channel in enumerate(channels(schedule))}
    return _QueueRun(schedule, communicators or own).play()


class _MessageChannel(NamedTuple):
    """What a (kind, chunk) that sends or receives needs to know; equal but for `sends` and the
    queues at both ends."""

    channel: Channel
    sends: bool
    mine: "deque[_Operation]"
    theirs: "deque[_Operation]"
    stage: int
    """The stage its messages are for."""

    came: bytearray
    """By microbatch: whether a receive is over; of a send nobody asks."""


class _Operation(NamedTuple):
    """A send or receive in its queue."""

    place: RankAction
    microbatch: int
    way: _MessageChannel


class _QueuedCompute(NamedTuple):
    """What a (kind, chunk) that computes waits for, and what it lets another chunk of this rank go
    on with."""

    needs: bytearray | None
    gives: bytearray | None


class _QueueRun:
    """How far every rank and every queue has come."""

    def __init__(self, schedule: Schedule, communicators: Mapping[Channel, int]) -> None:
        self.schedule, self.communicators = schedule, communicators
        ranks = range(schedule.num_ranks)
        self.queues: dict[tuple[int, int], deque[_Operation]] = defaultdict(
            deque
        )  # by communicator and rank
        self.came: dict[tuple[Direction, int], bytearray] = {
            (direction, stage): bytearray(schedule.num_microbatches)
            for direction in COMPUTES
            for stage in range(schedule.num_stages)
        }
        self.computing = [self._computing(rank) for rank in ranks]
        self.ways = [self._ways(rank) for rank in ranks]
        self.carried = dict.fromkeys(communicators, 0)
        self.crossed: dict[Channel, str] = {}
        self.at = [0] * schedule.num_ranks

    def play(self) -> list[str]:
        """Run all ranks and queues as far as they come."""
        runnable = set(range(self.schedule.num_ranks))
        while runnable:
            runnable |= self._advance(runnable.pop())
        return [*self.crossed.values(), *self._circles()]

    def _advance(self, rank: int) -> set[int]:
        """Run one rank until it computes with what is not there, or ends; the ranks that have got
        something since."""
        actions, computing, ways = self.schedule.ranks[rank], self.computing[rank], self.ways[rank]
        woken: set[int] = set()
        for index in range(self.at[rank], len(actions)):
            kind, chunk, microbatch, _ = actions[index]
            step = computing.get((kind, chunk))
            if step is None:
                way = ways[kind, chunk]
                way.mine.append(_Operation((rank, index), microbatch, way))
                if len(way.mine) == 1 and way.theirs:
                    woken |= self._carry(way.mine)
                continue
            if step.needs is not None and not step.needs[microbatch]:
                self.at[rank] = index
                break
            if step.gives is not None:
                step.gives[microbatch] = True
        else:
            self.at[rank] = len(actions)
        return woken - {rank}

    def _carry(self, queue: deque[_Operation]) -> set[int]:
        """Carry what two queues have in front of them, and then what was behind it; the ranks that
        received."""
        received, queues = set(), [queue]
        while queues:
            mine = queues.pop()
            theirs = mine[0].way.theirs if mine else None
            if not theirs or not _are_counterparts(mine[0], theirs[0]):
                continue
            one, other = mine.popleft(), theirs.popleft()
            send, receive = (one, other) if one.way.sends else (other, one)
            self._compare(send, receive)
            self.carried[send.way.channel] += 1
            receive.way.came[receive.microbatch] = True
            received.add(receive.place[0])
            queues += [each for each in (mine, theirs) if each]
        return received

    def _compare(self, send: _Operation, receive: _Operation) -> None:
        channel = send.way.channel
        if (send.way.stage, send.microbatch) != (
            receive.way.stage,
            receive.microbatch,
        ) and channel not in self.crossed:
            number = self.carried[channel] + 1
            self.crossed[channel] = (
                f"over NCCL, {self._text(send.place)} would be taken by "
                f"{self._text(receive.place)}: without tags, receive {number} of a channel gets "
                f"send {number}, so both ranks must list its messages in one order"
            )

    # --- what each (kind, chunk) of a rank needs

    def _computing(self, rank: int) -> dict[tuple[Kind, int], _QueuedCompute]:
        steps: dict[tuple[Kind, int], _QueuedCompute] = {}
        for chunk in range(self.schedule.num_chunks):
            stage = self.schedule.stage_of(rank, chunk)
            steps["W", chunk] = _QueuedCompute(None, None)
            for direction, kinds in COMPUTES.items():
                source = neighbor(self.schedule, rank, chunk, AGAINST[direction])
                target = neighbor(self.schedule, rank, chunk, direction)
                needs = None if source is None else self.came[direction, stage]
                here = target is not None and target[0] == rank
                gives = (
                    self.came[direction, self.schedule.stage_of(*target)]
                    if target is not None and here
                    else None
                )
                steps |= {(kind, chunk): _QueuedCompute(needs, gives) for kind in kinds}
        return steps

    def _ways(self, rank: int) -> dict[tuple[Kind, int], _MessageChannel]:
        ways: dict[tuple[Kind, int], _MessageChannel] = {}
        for chunk in range(self.schedule.num_chunks):
            for direction in COMPUTES:
                target = neighbor(self.schedule, rank, chunk, direction)
                if target is not None and target[0] != rank:
                    channel = Channel(rank, target[0], direction)
                    ways[SENDS[direction], chunk] = self._way(
                        channel, rank, self.schedule.stage_of(*target)
                    )
                source = neighbor(self.schedule, rank, chunk, AGAINST[direction])
                if source is not None and source[0] != rank:
                    channel = Channel(source[0], rank, direction)
                    ways[RECEIVES[direction], chunk] = self._way(
                        channel, rank, self.schedule.stage_of(rank, chunk)
                    )
        return ways

    def _way(self, channel: Channel, rank: int, stage: int) -> _MessageChannel:
        number, sends = self.communicators[channel], channel.source == rank
        mine, theirs = (
            self.queues[number, rank],
            self.queues[number, channel.target if sends else channel.source],
        )
        return _MessageChannel(
            channel, sends, mine, theirs, stage, self.came[channel.direction, stage]
        )

    # --- who waits for whom

    def _circles(self) -> list[str]:
        """A text if ranks or queues do not come to their end: what waits for what, followed until
        it comes around."""
        standing = [
            (rank, at) for rank, at in enumerate(self.at) if at < len(self.schedule.ranks[rank])
        ]
        waiting = [queue[0].place for queue in self.queues.values() if queue]
        if not standing + waiting:
            return []
        place, seen = (standing + waiting)[0], dict[RankAction, str]()
        while place not in seen:
            seen[place], place = self._awaited(place)
        circle = list(seen)[list(seen).index(place) :]
        chain = ", which ".join(
            f"{seen[each]} {self._text(after)}" for each, after in pairwise(circle)
        )
        return [
            f"deadlock over NCCL: {self._text(circle[0])} {chain}, which {seen[circle[-1]]} the "
            "first of these"
        ]

    def _awaited(self, place: RankAction) -> tuple[str, RankAction]:
        """(how it waits, for what) of an action that is not over."""
        rank, index = place
        kind, chunk, microbatch, peer = self.schedule.ranks[rank][index]
        if index > self.at[rank]:
            return "comes after", (rank, self.at[rank])
        if peer < 0:
            direction: Direction = "forward" if kind == "F" else "backward"
            source = neighbor(self.schedule, rank, chunk, AGAINST[direction])
            assert source is not None  # else it would not wait
            keys = (
                [(RECEIVES[direction], chunk)]
                if source[0] != rank
                else [(k, source[1]) for k in COMPUTES[direction]]
            )
            return "waits for", (rank, self._find(rank, keys, microbatch))
        way = self.ways[rank][kind, chunk]
        if way.mine[0].place != place:
            return "is queued behind", way.mine[0].place
        wanted = RECEIVES if way.sends else SENDS
        same = [
            other
            for other, action in enumerate(self.schedule.ranks[peer])
            if action.kind == wanted[way.channel.direction] and action.peer == rank
        ]
        return "waits for", (peer, same[self.carried[way.channel]])

    def _find(self, rank: int, keys: list[tuple[Kind, int]], microbatch: int) -> int:
        wanted = [(kind, chunk, microbatch) for kind, chunk in keys]
        return next(
            index for index, action in enumerate(self.schedule.ranks[rank]) if action[:3] in wanted
        )

    def _text(self, place: RankAction) -> str:
        return action_text(self.schedule, *place)


def _are_counterparts(one: _Operation, other: _Operation) -> bool:
    return one.way.channel == other.way.channel and one.way.sends != other.way.sends

"""Simulate a pipeline step over message queues without tags, as in NCCL: mismatched receives and
deadlocks.

A *communicator* joins two ranks. On each of them, the sends and receives run one after the other in
the order of submission, on their own stream, and each completes only when the other side reaches
its counterpart. So the k-th receive of a channel gets the k-th send, whatever it was meant for; an
operation that waits delays those behind it, but not the rank, which continues until it needs a
message that has not arrived.

`parallel/link` gives each channel its own communicator. Two channels on one communicator could
deadlock.
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
    """Return receives that would get the wrong message, and deadlocks, over NCCL; empty: none.

    The action lists must match, see `plan/matching.matching_problems`; lists without messages have
    no problems. communicators: communicator number by channel; unset: one for every channel.
    """
    if not has_transfers(schedule):
        return []
    one_per_channel = {channel: number for number, channel in enumerate(channels(schedule))}
    return _QueueRun(schedule, communicators or one_per_channel).run_to_end()


class _MessageChannel(NamedTuple):
    """Channel and queues of a (kind, chunk) that sends or receives."""

    channel: Channel
    sends: bool
    local_queue: "deque[_Operation]"
    remote_queue: "deque[_Operation]"
    stage: int
    """The stage that consumes its messages."""

    received: bytearray
    """By microbatch: whether the receive has completed; not used for sends."""


class _Operation(NamedTuple):
    """A send or receive in its queue."""

    place: RankAction
    microbatch: int
    message_channel: _MessageChannel


class _QueuedCompute(NamedTuple):
    """Inputs that a computation (kind, chunk) waits for, and the input of a local chunk that it
    produces."""

    needs: bytearray | None
    gives: bytearray | None


class _QueueRun:
    """Progress of every rank and every queue."""

    def __init__(self, schedule: Schedule, communicators: Mapping[Channel, int]) -> None:
        self.schedule, self.communicators = schedule, communicators
        ranks = range(schedule.num_ranks)
        self.queues: dict[tuple[int, int], deque[_Operation]] = defaultdict(
            deque
        )  # by communicator and rank
        self.received: dict[tuple[Direction, int], bytearray] = {
            (direction, stage): bytearray(schedule.num_microbatches)
            for direction in COMPUTES
            for stage in range(schedule.num_stages)
        }
        self.computing = [self._computing(rank) for rank in ranks]
        self.message_channels = [self._list_message_channels(rank) for rank in ranks]
        self.num_matched = dict.fromkeys(communicators, 0)
        self.mismatches: dict[Channel, str] = {}
        self.at = [0] * schedule.num_ranks

    def run_to_end(self) -> list[str]:
        """Run all ranks and queues until none can progress; return the problems."""
        runnable = set(range(self.schedule.num_ranks))
        while runnable:
            runnable |= self._advance(runnable.pop())
        return [*self.mismatches.values(), *self._find_deadlock()]

    def _advance(self, rank: int) -> set[int]:
        """Run one rank until it waits for a message or ends; return the ranks that received a
        message."""
        actions, computing, message_channels = (
            self.schedule.ranks[rank],
            self.computing[rank],
            self.message_channels[rank],
        )
        woken: set[int] = set()
        for index in range(self.at[rank], len(actions)):
            kind, chunk, microbatch, _ = actions[index]
            step = computing.get((kind, chunk))
            if step is None:
                message_channel = message_channels[kind, chunk]
                message_channel.local_queue.append(
                    _Operation((rank, index), microbatch, message_channel)
                )
                if len(message_channel.local_queue) == 1 and message_channel.remote_queue:
                    woken |= self._match_messages(message_channel.local_queue)
                continue
            if step.needs is not None and not step.needs[microbatch]:
                self.at[rank] = index
                break
            if step.gives is not None:
                step.gives[microbatch] = True
        else:
            self.at[rank] = len(actions)
        return woken - {rank}

    def _match_messages(self, first_queue: deque[_Operation]) -> set[int]:
        """Match the operations at the front of two queues, then those behind; return the receiving
        ranks."""
        receiving_ranks, queues = set(), [first_queue]
        while queues:
            local_queue = queues.pop()
            remote_queue = local_queue[0].message_channel.remote_queue if local_queue else None
            if not remote_queue or not _are_counterparts(local_queue[0], remote_queue[0]):
                continue
            one, other = local_queue.popleft(), remote_queue.popleft()
            send, receive = (one, other) if one.message_channel.sends else (other, one)
            self._compare(send, receive)
            self.num_matched[send.message_channel.channel] += 1
            receive.message_channel.received[receive.microbatch] = True
            receiving_ranks.add(receive.place[0])
            queues += [each for each in (local_queue, remote_queue) if each]
        return receiving_ranks

    def _compare(self, send: _Operation, receive: _Operation) -> None:
        channel = send.message_channel.channel
        if (send.message_channel.stage, send.microbatch) != (
            receive.message_channel.stage,
            receive.microbatch,
        ) and channel not in self.mismatches:
            number = self.num_matched[channel] + 1
            self.mismatches[channel] = (
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
                needs = None if source is None else self.received[direction, stage]
                is_local = target is not None and target[0] == rank
                gives = (
                    self.received[direction, self.schedule.stage_of(*target)]
                    if target is not None and is_local
                    else None
                )
                steps |= {(kind, chunk): _QueuedCompute(needs, gives) for kind in kinds}
        return steps

    def _list_message_channels(self, rank: int) -> dict[tuple[Kind, int], _MessageChannel]:
        message_channels: dict[tuple[Kind, int], _MessageChannel] = {}
        for chunk in range(self.schedule.num_chunks):
            for direction in COMPUTES:
                target = neighbor(self.schedule, rank, chunk, direction)
                if target is not None and target[0] != rank:
                    channel = Channel(rank, target[0], direction)
                    message_channels[SENDS[direction], chunk] = self._make_message_channel(
                        channel, rank, self.schedule.stage_of(*target)
                    )
                source = neighbor(self.schedule, rank, chunk, AGAINST[direction])
                if source is not None and source[0] != rank:
                    channel = Channel(source[0], rank, direction)
                    message_channels[RECEIVES[direction], chunk] = self._make_message_channel(
                        channel, rank, self.schedule.stage_of(rank, chunk)
                    )
        return message_channels

    def _make_message_channel(self, channel: Channel, rank: int, stage: int) -> _MessageChannel:
        number, sends = self.communicators[channel], channel.source == rank
        local_queue, remote_queue = (
            self.queues[number, rank],
            self.queues[number, channel.target if sends else channel.source],
        )
        return _MessageChannel(
            channel,
            sends,
            local_queue,
            remote_queue,
            stage,
            self.received[channel.direction, stage],
        )

        # --- deadlocks

    def _find_deadlock(self) -> list[str]:
        """Return a text if ranks or queues do not reach their end: the cycle of actions that wait
        for each other."""
        standing = [
            (rank, at) for rank, at in enumerate(self.at) if at < len(self.schedule.ranks[rank])
        ]
        waiting = [queue[0].place for queue in self.queues.values() if queue]
        if not standing + waiting:
            return []
        place, seen = (standing + waiting)[0], dict[RankAction, str]()
        while place not in seen:
            seen[place], place = self._find_blocker(place)
        circle = list(seen)[list(seen).index(place) :]
        chain = ", which ".join(
            f"{seen[each]} {self._text(after)}" for each, after in pairwise(circle)
        )
        return [
            f"deadlock over NCCL: {self._text(circle[0])} {chain}, which {seen[circle[-1]]} the "
            "first of these"
        ]

    def _find_blocker(self, place: RankAction) -> tuple[str, RankAction]:
        """Return (how it waits, the action that it waits for) of an action that has not
        completed."""
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
        message_channel = self.message_channels[rank][kind, chunk]
        if message_channel.local_queue[0].place != place:
            return "is queued behind", message_channel.local_queue[0].place
        wanted = RECEIVES if message_channel.sends else SENDS
        same = [
            other
            for other, action in enumerate(self.schedule.ranks[peer])
            if action.kind == wanted[message_channel.channel.direction] and action.peer == rank
        ]
        return "waits for", (peer, same[self.num_matched[message_channel.channel]])

    def _find(self, rank: int, keys: list[tuple[Kind, int]], microbatch: int) -> int:
        wanted = [(kind, chunk, microbatch) for kind, chunk in keys]
        return next(
            index for index, action in enumerate(self.schedule.ranks[rank]) if action[:3] in wanted
        )

    def _text(self, place: RankAction) -> str:
        return action_text(self.schedule, *place)


def _are_counterparts(one: _Operation, other: _Operation) -> bool:
    return (
        one.message_channel.channel == other.message_channel.channel
        and one.message_channel.sends != other.message_channel.sends
    )

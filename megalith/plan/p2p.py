"""Messages between pipeline ranks: where each is sent, and where its receive is posted.

Messages travel on *channels*: (source rank, target rank, direction); forward carries activations to
the next stage, backward their gradients to the previous one. A channel is a queue: NCCL has no
tags, so the k-th send matches the k-th receive. Both sides therefore list a channel's messages in
the order in which the source computes them, and each channel needs its own queue (a process group,
or tags on gloo): two channels between the same two ranks, as with two ranks or in a V, may be
interleaved differently on both sides. `plan/queues` checks both.

Stages that are neighbors on one rank (the turn of a V, or a single rank) pass tensors without a
message.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Literal, NamedTuple

from megalith.plan.schedule import Action, Kind, Schedule, concurrent_actions

Direction = Literal["forward", "backward"]

SENDS: dict[Direction, Kind] = {"forward": "send_forward", "backward": "send_backward"}
RECEIVES: dict[Direction, Kind] = {"forward": "recv_forward", "backward": "recv_backward"}

COMPUTES: dict[Direction, tuple[Kind, ...]] = {"forward": ("F",), "backward": ("B", "I")}
"""Actions that consume the messages of a direction and produce its next message."""

AGAINST: dict[Direction, Direction] = {"forward": "backward", "backward": "forward"}
"""Opposite direction: forward messages come from the previous stage."""


class Channel(NamedTuple):
    """Queue of messages from one rank to another."""

    source: int
    target: int
    direction: Direction


def neighbor(
    schedule: Schedule, rank: int, chunk: int, direction: Direction
) -> tuple[int, int] | None:
    """Return (rank, chunk) of the stage that receives this chunk's result: the next stage forward,
    the previous one backward; None at the end."""
    stage = schedule.stage_index(rank, chunk) + (1 if direction == "forward" else -1)
    return schedule.rank_and_chunk(stage) if 0 <= stage < schedule.num_stages else None


def channels(schedule: Schedule) -> tuple[Channel, ...]:
    """Return all channels of the pipeline, in the same order on every rank."""
    all_channels = set()
    for rank in range(schedule.num_ranks):
        for chunk in range(schedule.num_chunks):
            for direction in SENDS:
                target = neighbor(schedule, rank, chunk, direction)
                if target is not None and target[0] != rank:
                    all_channels.add(Channel(rank, target[0], direction))
    return tuple(sorted(all_channels))


def with_transfers(schedule: Schedule, *, overlap: bool = True) -> Schedule:
    """Return the schedule with its messages: `recv_*` posts a receive, and the action that needs it
    waits for it.

    A `send_*` follows the action whose result it sends and is asynchronous too; its buffer is freed
    when it completes. overlap: a receive is posted before the action that precedes its consumer, so
    that communication overlaps with computation, with at most two open receives per rank. Without
    overlap it is posted just before its consumer. If messages are consumed in another order than
    they are sent, receives are posted earlier, in the order of sending. Since no transfer blocks,
    two ranks that send to each other at the same time cannot deadlock. A pair of dual-batch overlap
    counts as one action: its messages come before and after both halves.
    """
    ranks = []
    for rank, (slots, receives) in enumerate(_receives(schedule, overlap)):
        links = _links(schedule, rank)
        listed: list[Action] = []
        posted = 0
        for index, actions in enumerate(concurrent_actions(schedule, rank)):
            while posted < len(slots) and slots[posted] == index:
                listed.append(receives[posted])
                posted += 1
            listed += actions
            for kind, chunk, microbatch, _ in actions:
                link = links.get((kind, chunk))
                if link is not None:
                    listed.append(Action(SENDS[link.direction], chunk, microbatch, link.target))
        ranks.append(tuple(listed))
    return replace(schedule, ranks=tuple(ranks))


class _Link(NamedTuple):
    """Target of a chunk's result, on another rank."""

    direction: Direction
    target: int
    chunk: int
    """Chunk number on the target rank."""


def _links(schedule: Schedule, rank: int) -> dict[tuple[Kind, int], _Link]:
    """Return, by (kind, chunk) of one rank, the results that are sent to another rank."""
    links: dict[tuple[Kind, int], _Link] = {}
    for direction, producers in COMPUTES.items():
        for chunk in range(schedule.num_chunks):
            place = neighbor(schedule, rank, chunk, direction)
            if place is not None and place[0] != rank:
                links |= {(kind, chunk): _Link(direction, *place) for kind in producers}
    return links


def _receives(schedule: Schedule, overlap: bool) -> Iterator[tuple[list[int], list[Action]]]:
    """Yield for each rank the action indices before which receives are posted, ascending, and the
    receives.

    Receives of one index are in the order of their channels.
    """
    num_early = 1 if overlap else 0
    by_channel = _messages(schedule)
    for rank in range(schedule.num_ranks):
        first_use = _needed_at(schedule, rank)
        slots: list[int] = []
        receives: list[Action] = []
        for messages in (
            messages for channel, messages in by_channel.items() if channel.target == rank
        ):
            needs = (
                first_use[kind][chunk][microbatch]
                for kind, chunk, microbatch, _ in reversed(messages)
            )
            slots += [max(first - num_early, 0) for first in accumulate(needs, min)][::-1]
            receives += messages
        order = sorted(range(len(slots)), key=slots.__getitem__)
        yield [slots[at] for at in order], [receives[at] for at in order]


def _needed_at(schedule: Schedule, rank: int) -> dict[Kind, list[list[int]]]:
    """Return, by kind of receive, chunk and microbatch, the index of the action (or pair) that
    consumes it."""
    rows = {
        kind: [[-1] * schedule.num_microbatches for _ in range(schedule.num_chunks)]
        for kind in RECEIVES.values()
    }
    takes = {
        kind: rows[RECEIVES[direction]] for direction, kinds in COMPUTES.items() for kind in kinds
    }
    for index, actions in enumerate(concurrent_actions(schedule, rank)):
        for kind, chunk, microbatch, _ in actions:
            if kind in takes:
                takes[kind][chunk][microbatch] = index
    return rows


def _messages(schedule: Schedule) -> dict[Channel, list[Action]]:
    """Return, by channel, the receive of each message in the order in which the source computes
    them."""
    messages: dict[Channel, list[Action]] = {channel: [] for channel in channels(schedule)}
    for rank, actions in enumerate(schedule.ranks):
        links = _links(schedule, rank)
        outgoing = {
            key: messages[Channel(rank, link.target, link.direction)] for key, link in links.items()
        }
        for kind, chunk, microbatch, _ in actions:
            link = links.get((kind, chunk))
            if link is not None:
                receive = Action(RECEIVES[link.direction], link.chunk, microbatch, rank)
                outgoing[kind, chunk].append(receive)
    return messages

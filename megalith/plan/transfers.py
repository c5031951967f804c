"""The messages between pipeline ranks: where each is sent, and where its receive is posted.

Messages travel on *channels*: (source rank, target rank, direction); forward carries activations to
the next stage, backward their gradients to the one before. A channel is a queue: NCCL has no tags,
so the k-th send is matched with the k-th receive. Both sides therefore list a channel's messages in
one order, the one in which the source computes them, and each channel needs a queue of its own (a
process group, or tags on gloo): two channels between the same two ranks, as with two ranks in all
or in a V, may interleave differently on both sides. `plan/queues` proves both on paper.

Stages that are neighbors on one rank (the turn of a V, or a single rank) pass tensors without a
message.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Literal, NamedTuple

from megalith.plan.pairs import concurrent_actions
from megalith.plan.schedule import Action, Kind, Schedule

Direction = Literal["forward", "backward"]

SENDS: dict[Direction, Kind] = {"forward": "send_forward", "backward": "send_backward"}
RECEIVES: dict[Direction, Kind] = {"forward": "recv_forward", "backward": "recv_backward"}

COMPUTES: dict[Direction, tuple[Kind, ...]] = {"forward": ("F",), "backward": ("B", "I")}
"""The computing that takes what comes in a direction and gives what goes on in it."""

AGAINST: dict[Direction, Direction] = {"forward": "backward", "backward": "forward"}
"""Where messages of a direction come from: forward ones from the neighbor that lies backward."""


class Channel(NamedTuple):
    """A queue of messages from one rank to another."""

    source: int
    target: int
    direction: Direction


def neighbor(
    schedule: Schedule, rank: int, chunk: int, direction: Direction
) -> tuple[int, int] | None:
    """(rank, chunk) that gets what this one computes: the next stage forward, the one before
    backward; None: nobody."""
    stage = schedule.stage_of(rank, chunk) + (1 if direction == "forward" else -1)
    return schedule.place_of(stage) if 0 <= stage < schedule.num_stages else None


def channels(schedule: Schedule) -> tuple[Channel, ...]:
    """Every channel the pipeline needs, the same order on every rank."""
    found = set()
    for rank in range(schedule.num_ranks):
        for chunk in range(schedule.num_chunks):
            for direction in SENDS:
                target = neighbor(schedule, rank, chunk, direction)
                if target is not None and target[0] != rank:
                    found.add(Channel(rank, target[0], direction))
    return tuple(sorted(found))


def with_transfers(schedule: Schedule, *, overlap: bool = True) -> Schedule:
    """The schedule with its messages: `recv_*` posts a receive and goes on, the computing that
    needs it waits for it.

    A `send_*` follows the computing whose result it sends and does not wait either; its buffer is
    free once it is done. overlap: the receive for an action is posted before the computing of the
    action before, so that a message travels while its receiver computes, and at most two receives
    per rank are open. Without: just before it is needed. Where messages are needed in another order
    than they are sent in, receives are posted earlier, in the order of sending. Since no transfer
    waits, two ranks that send to each other at the same time cannot block, two ranks in all
    included. What is computed together counts as one action: its messages come before and after
    both.
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
    """Where what a chunk computes goes to, if to another rank."""

    direction: Direction
    target: int
    chunk: int
    """Of the target."""


def _links(schedule: Schedule, rank: int) -> dict[tuple[Kind, int], _Link]:
    """By (kind, chunk) of one rank's computing; what is not listed sends nothing."""
    links: dict[tuple[Kind, int], _Link] = {}
    for direction, producers in COMPUTES.items():
        for chunk in range(schedule.num_chunks):
            place = neighbor(schedule, rank, chunk, direction)
            if place is not None and place[0] != rank:
                links |= {(kind, chunk): _Link(direction, *place) for kind in producers}
    return links


def _receives(schedule: Schedule, overlap: bool) -> Iterator[tuple[list[int], list[Action]]]:
    """By rank: indices of what it computes (together), rising, and of each receive the one to post
    it before.

    Receives of one index are in the order of their channels.
    """
    ahead = 1 if overlap else 0
    by_channel = _messages(schedule)
    for rank in range(schedule.num_ranks):
        needed = _needed_at(schedule, rank)
        slots: list[int] = []
        receives: list[Action] = []
        for messages in (
            messages for channel, messages in by_channel.items() if channel.target == rank
        ):
            needs = (
                needed[kind][chunk][microbatch] for kind, chunk, microbatch, _ in reversed(messages)
            )
            slots += [max(first - ahead, 0) for first in accumulate(needs, min)][::-1]
            receives += messages
        order = sorted(range(len(slots)), key=slots.__getitem__)
        yield [slots[at] for at in order], [receives[at] for at in order]


def _needed_at(schedule: Schedule, rank: int) -> dict[Kind, list[list[int]]]:
    """By kind of receive, chunk and microbatch: the index of the computing (together) that takes
    what comes."""
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
    """By channel: the receive of each message, in the order in which the source computes them."""
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

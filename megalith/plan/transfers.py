"""The messages between pipeline ranks: where each is sent, and where its receive is posted.

Messages travel on *channels*: (source rank, target rank, direction); forward carries activations to the next stage,
backward their gradients to the one before. A channel is a queue: NCCL has no tags, so the k-th send is matched with the
k-th receive. Both sides therefore list a channel's messages in one order, the one in which the source computes them,
and each channel needs a queue of its own (a process group, or tags on gloo): two channels between the same two ranks,
as with two ranks in all or in a V, may interleave differently on both sides. `plan/queues` proves both on paper.

Stages that are neighbours on one rank (the turn of a V, or a single rank) pass tensors without a message.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from megalith.plan.pairs import together
from megalith.plan.schedule import Action, Kind, Schedule

Direction = Literal["forward", "backward"]

SENDS: dict[Direction, Kind] = {"forward": "send_forward", "backward": "send_backward"}
RECEIVES: dict[Direction, Kind] = {"forward": "recv_forward", "backward": "recv_backward"}

COMPUTES: dict[Direction, tuple[Kind, ...]] = {"forward": ("F",), "backward": ("B", "I")}
"""The computing that takes what comes in a direction and gives what goes on in it."""

AGAINST: dict[Direction, Direction] = {"forward": "backward", "backward": "forward"}
"""Where messages of a direction come from: forward ones from the neighbour that lies backward."""


class Channel(NamedTuple):
    """A queue of messages from one rank to another."""

    source: int
    target: int
    direction: Direction


def neighbour(schedule: Schedule, rank: int, chunk: int, direction: Direction) -> tuple[int, int] | None:
    """(rank, chunk) that gets what this one computes: the next stage forward, the one before backward; None: nobody."""
    stage = schedule.stage_of(rank, chunk) + (1 if direction == "forward" else -1)
    return schedule.place_of(stage) if 0 <= stage < schedule.num_stages else None


def channels(schedule: Schedule) -> tuple[Channel, ...]:
    """Every channel the pipeline needs, the same order on every rank."""
    found = set()
    for rank in range(schedule.num_ranks):
        for chunk in range(schedule.num_chunks):
            for direction in SENDS:
                target = neighbour(schedule, rank, chunk, direction)
                if target is not None and target[0] != rank:
                    found.add(Channel(rank, target[0], direction))
    return tuple(sorted(found))


def with_transfers(schedule: Schedule, *, overlap: bool = True) -> Schedule:
    """The schedule with its messages: `recv_*` posts a receive and goes on, the computing that needs it waits for it.

    A `send_*` follows the computing whose result it sends and does not wait either; its buffer is free once it is done.
    overlap: the receive for an action is posted before the computing of the action before, so that a message travels
    while its receiver computes, and at most two receives per rank are open. Without: just before it is needed. Where
    messages are needed in another order than they are sent in, receives are posted earlier, in the order of sending.
    Since no transfer waits, two ranks that send to each other at the same time cannot block, two ranks in all included.
    What is computed together counts as one action: its messages come before and after both.
    """
    receives = _receives(schedule, overlap)
    ranks = []
    for rank in range(schedule.num_ranks):
        links = _links(schedule, rank)
        listed: list[Action] = []
        for actions, posted in zip(together(schedule, rank), receives[rank], strict=True):
            if posted:
                listed += posted
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
            place = neighbour(schedule, rank, chunk, direction)
            if place is not None and place[0] != rank:
                links |= {(kind, chunk): _Link(direction, *place) for kind in producers}
    return links


def _receives(schedule: Schedule, overlap: bool) -> list[list[list[Action]]]:
    """By rank and index of what it computes (together): the receives to post before, in the order of their channels."""
    computed = [together(schedule, rank) for rank in range(schedule.num_ranks)]
    needed = [_needed_at(schedule, each) for each in computed]
    posts: list[list[list[Action]]] = [[[] for _ in each] for each in computed]
    for channel, messages in _messages(schedule).items():
        kind, rows = RECEIVES[channel.direction], needed[channel.target]
        first = len(computed[channel.target])
        slots = []
        for chunk, microbatch in reversed(messages):
            first = min(first, rows[channel.direction, chunk][microbatch])
            slots.append(max(first - 1, 0) if overlap else first)
        for (chunk, microbatch), slot in zip(messages, reversed(slots), strict=True):
            posts[channel.target][slot].append(Action(kind, chunk, microbatch, channel.source))
    return posts


def _needed_at(
    schedule: Schedule, computed: Sequence[tuple[Action, ...]]
) -> dict[tuple[Direction, int], list[int]]:  # fmt: skip
    """By (direction, chunk): for each microbatch the index of the computing that takes what comes this way."""
    chunks = range(schedule.num_chunks)
    rows = {(direction, chunk): [-1] * schedule.num_microbatches for direction in COMPUTES for chunk in chunks}
    by_kind = {(kind, key[1]): row for key, row in rows.items() for kind in COMPUTES[key[0]]}
    for index, actions in enumerate(computed):
        for kind, chunk, microbatch, _ in actions:
            row = by_kind.get((kind, chunk))
            if row is not None:
                row[microbatch] = index
    return rows


def _messages(schedule: Schedule) -> dict[Channel, list[tuple[int, int]]]:
    """By channel: (chunk of the target, microbatch) of each message in the order in which the source computes them."""
    messages: dict[Channel, list[tuple[int, int]]] = {channel: [] for channel in channels(schedule)}
    for rank, actions in enumerate(schedule.ranks):
        outgoing = {
            producer: (messages[Channel(rank, link.target, link.direction)], link.chunk)
            for producer, link in _links(schedule, rank).items()
        }
        for kind, chunk, microbatch, _ in actions:
            entry = outgoing.get((kind, chunk))
            if entry is not None:
                entry[0].append((entry[1], microbatch))
    return messages

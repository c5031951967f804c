"""Whether the lists of a pipeline fit together: each action once and in order on its rank, every send with its receive.

What is left after this is a question of time: whether ranks wait for each other in a circle (`plan/simulate`).
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from megalith.plan.schedule import Action, Kind, Schedule
from megalith.plan.transfers import AGAINST, RECEIVES, SENDS, Channel, Direction, neighbour

# What has happened to a microbatch in a chunk, as bits of one number.
FORWARD, INPUT, WEIGHT, CAME_FORWARD, CAME_BACKWARD, SENT_FORWARD, SENT_BACKWARD = (1 << bit for bit in range(7))

WORDS = {
    FORWARD: "its F",
    INPUT: "its B or I",
    WEIGHT: "its B or W",
    CAME_FORWARD: "its recv_forward",
    CAME_BACKWARD: "its recv_backward",
    SENT_FORWARD: "its send_forward",
    SENT_BACKWARD: "its send_backward",
}


class _Rule(NamedTuple):
    """One kind of action in one chunk: the bits that must be there before, those that must not, those it adds."""

    after: int
    before: int
    adds: int
    peer: int = -1


NOT_HERE = _Rule(0, 0, 0, peer=-2)  # equals no peer


def has_transfers(schedule: Schedule) -> bool:
    """Whether the messages are in the lists already."""
    return any(action.peer >= 0 for actions in schedule.ranks for action in actions)


def has_backward(schedule: Schedule) -> bool:
    """Whether this is training, not evaluation."""
    return any(action.kind in ("B", "I", "W") for actions in schedule.ranks for action in actions[::-1])


def action_text(schedule: Schedule, rank: int, index: int) -> str:
    """For people: `rank 1, action 12 (B of microbatch 3)`."""
    return f"rank {rank}, action {index} ({_what(schedule, schedule.ranks[rank][index])})"


def matching_problems(schedule: Schedule) -> list[str]:
    """Every place where the lists do not fit together, naming rank and action; empty when they do.

    Without messages in the lists, only the order on each rank is looked at.
    """
    if len(schedule.ranks) != schedule.num_ranks:
        return [f"there are lists for {len(schedule.ranks)} ranks, expected {schedule.num_ranks}"]
    linked, trained = has_transfers(schedule), has_backward(schedule)
    problems = []
    for rank in range(schedule.num_ranks):
        problems += _rank_problems(schedule, rank, linked, trained)
    if linked and not problems:
        problems = _channel_problems(schedule)
    return problems


def _rank_problems(schedule: Schedule, rank: int, linked: bool, trained: bool) -> list[str]:
    """One rank's list by itself."""
    rules = _rules(schedule, rank, linked, trained)
    state = [bytearray(schedule.num_microbatches) for _ in range(schedule.num_chunks)]
    problems = []
    known = set(range(schedule.num_microbatches))
    for index, (kind, chunk, microbatch, peer) in enumerate(schedule.ranks[rank]):
        rule = rules.get((kind, chunk), NOT_HERE)
        after, before, adds, expected = rule
        if peer != expected or microbatch not in known:
            problems.append(f"{action_text(schedule, rank, index)}: {_misplaced(rule, peer)}")
            continue
        row = state[chunk]
        done = row[microbatch]
        if done & after != after or done & before:
            problems.append(f"{action_text(schedule, rank, index)}: {_untimely(done, rule)}")
        row[microbatch] = done | adds
    return problems + _missing(schedule, rank, rules, state)


def _rules(schedule: Schedule, rank: int, linked: bool, trained: bool) -> dict[tuple[Kind, int], _Rule]:
    """By (kind, chunk): what one rank may do, and when."""
    rules: dict[tuple[Kind, int], _Rule] = {}
    for chunk in range(schedule.num_chunks):
        came = _peer(schedule, rank, chunk, "backward") if linked else -1  # who sends activations gets gradients
        follows = _peer(schedule, rank, chunk, "forward") if linked else -1
        rules["F", chunk] = _Rule(CAME_FORWARD if came >= 0 else 0, FORWARD, FORWARD)
        if came >= 0:
            rules["recv_forward", chunk] = _Rule(0, CAME_FORWARD, CAME_FORWARD, came)
        if follows >= 0:
            rules["send_forward", chunk] = _Rule(FORWARD, SENT_FORWARD, SENT_FORWARD, follows)
        if not trained:
            continue
        ready = FORWARD | (CAME_BACKWARD if follows >= 0 else 0)
        rules["B", chunk] = _Rule(ready, INPUT | WEIGHT, INPUT | WEIGHT)
        rules["I", chunk] = _Rule(ready, INPUT, INPUT)
        rules["W", chunk] = _Rule(INPUT, WEIGHT, WEIGHT)
        if follows >= 0:
            rules["recv_backward", chunk] = _Rule(0, CAME_BACKWARD, CAME_BACKWARD, follows)
        if came >= 0:
            rules["send_backward", chunk] = _Rule(INPUT, SENT_BACKWARD, SENT_BACKWARD, came)
    return rules


def _peer(schedule: Schedule, rank: int, chunk: int, direction: Direction) -> int:
    """The rank at the other end of a chunk's messages; -1 where there are none."""
    place = neighbour(schedule, rank, chunk, direction)
    return -1 if place is None or place[0] == rank else place[0]


def _misplaced(rule: _Rule, peer: int) -> str:
    if rule is NOT_HERE:
        return "this chunk has no such action here"
    if rule.peer != peer:
        return f"the peer is rank {peer}, expected {rule.peer}"
    return "there is no such microbatch"


def _untimely(done: int, rule: _Rule) -> str:
    missing = [word for bit, word in WORDS.items() if rule.after & ~done & bit]
    if missing:
        return f"must come after {' and '.join(missing)}"
    return f"must not come after {' and '.join(word for bit, word in WORDS.items() if rule.before & done & bit)}"


def _missing(
    schedule: Schedule, rank: int, rules: dict[tuple[Kind, int], _Rule], state: Sequence[bytearray]
) -> list[str]:
    """What a rank should have done and has not, per chunk."""
    problems = []
    for chunk, row in enumerate(state):
        whole = 0
        for (_, its_chunk), rule in rules.items():
            whole |= rule.adds if its_chunk == chunk else 0
        if row.count(whole) == len(row):
            continue
        for bit, word in WORDS.items():
            lacking = [microbatch for microbatch, done in enumerate(row) if whole & ~done & bit]
            if lacking:
                where = f" of chunk {chunk}" if schedule.num_chunks > 1 else ""
                problems.append(f"rank {rank}: microbatch {lacking[0]}{where} lacks {word[4:]}, in the whole list")
    return problems


def _channel_problems(schedule: Schedule) -> list[str]:
    """Where the k-th send of a channel is not what the k-th receive expects."""
    problems = []
    sent, received = _queues(schedule, SENDS), _queues(schedule, RECEIVES)
    for channel in sorted(sent.keys() | received.keys()):
        sends, receives = sent.get(channel, []), received.get(channel, [])
        if [message for message, _ in sends] != [message for message, _ in receives]:
            problems.append(_first_difference(schedule, channel, sends, receives))
    return problems


Queue = list[tuple[int, int]]
"""(message, index of the action) in the order of a list; a message is microbatch · stages + stage it is for."""


def _queues(schedule: Schedule, kinds: dict[Direction, Kind]) -> dict[Channel, Queue]:
    """The sends, or the receives, of every channel."""
    queues: dict[Channel, Queue] = {}
    sending = kinds is SENDS
    for rank, actions in enumerate(schedule.ranks):
        entries: dict[tuple[Kind, int], tuple[Queue, int]] = {}
        for direction, kind in kinds.items():
            for chunk in range(schedule.num_chunks):
                peer = _peer(schedule, rank, chunk, direction if sending else AGAINST[direction])
                if peer >= 0:
                    channel = Channel(rank, peer, direction) if sending else Channel(peer, rank, direction)
                    step = (1 if direction == "forward" else -1) if sending else 0
                    stage = schedule.stage_of(rank, chunk) + step
                    entries[kind, chunk] = queues.setdefault(channel, []), stage
        for index, (kind, chunk, microbatch, _) in enumerate(actions):
            entry = entries.get((kind, chunk))
            if entry is not None:
                entry[0].append((microbatch * schedule.num_stages + entry[1], index))
    return queues


def _first_difference(schedule: Schedule, channel: Channel, sends: Queue, receives: Queue) -> str:
    for send, receive in zip_longest(sends, receives):
        if send is None:
            return f"{action_text(schedule, channel.target, receive[1])}: rank {channel.source} never sends this"
        if receive is None:
            return f"{action_text(schedule, channel.source, send[1])}: rank {channel.target} never receives this"
        if send[0] != receive[0]:
            return (
                f"{action_text(schedule, channel.source, send[1])} would be taken by "
                f"{action_text(schedule, channel.target, receive[1])}: both must list the messages in one order"
            )
    raise AssertionError("these queues are equal")


def _what(schedule: Schedule, action: Action) -> str:
    where = f", chunk {action.chunk}" if schedule.num_chunks > 1 else ""
    way = ""
    if action.peer >= 0:
        way = f" {'to' if action.kind.startswith('send') else 'from'} rank {action.peer}"
    return f"{action.kind} of microbatch {action.microbatch}{where}{way}"

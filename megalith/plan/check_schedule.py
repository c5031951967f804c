"""Check that the action lists of a pipeline match: each action once and in order, every send with a
receive.

Deadlocks are found by `plan/simulate`; mismatched receives without tags by `queue_problems`.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from megalith.plan.schedule import (
    AGAINST,
    COMPUTES,
    RECEIVES,
    SENDS,
    Action,
    Channel,
    Direction,
    Kind,
    Schedule,
    channels,
    neighbor,
)

# Completed actions of a microbatch in a chunk, as bits of one number.
FORWARD, INPUT, WEIGHT, CAME_FORWARD, CAME_BACKWARD, SENT_FORWARD, SENT_BACKWARD = (
    1 << bit for bit in range(7)
)

DONE: dict[Direction, int] = {"forward": FORWARD, "backward": INPUT}
CAME: dict[Direction, int] = {"forward": CAME_FORWARD, "backward": CAME_BACKWARD}
SENT: dict[Direction, int] = {"forward": SENT_FORWARD, "backward": SENT_BACKWARD}

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
    """Rule of an action kind in one chunk: bits required before, bits forbidden before, bits it
    adds."""

    after: int
    before: int
    adds: int
    peer: int = -1


UNKNOWN_ACTION = _Rule(0, 0, 0, peer=-2)  # equals no peer


def has_transfers(schedule: Schedule) -> bool:
    """Return whether the lists contain messages."""
    return any(action.peer >= 0 for actions in schedule.ranks for action in actions)


def has_backward(schedule: Schedule) -> bool:
    """Return whether the schedule is for training."""
    return any(
        action.kind in ("B", "I", "W") for actions in schedule.ranks for action in actions[::-1]
    )


def action_text(schedule: Schedule, rank: int, index: int) -> str:
    """Describe an action: `rank 1, action 12 (B of microbatch 3)`."""
    return (
        f"rank {rank}, action {index} ({_describe_action(schedule, schedule.ranks[rank][index])})"
    )


def matching_problems(schedule: Schedule) -> list[str]:
    """Return each mismatch of the action lists with rank and action; empty if they match.

    Without messages in the lists, only the order on each rank is checked. Messages count as tagged:
    the two ends of a channel may list them in different orders.
    """
    if len(schedule.ranks) != schedule.num_ranks:
        return [f"there are lists for {len(schedule.ranks)} ranks, expected {schedule.num_ranks}"]
    trained, linked = has_backward(schedule), has_transfers(schedule)
    problems = []
    for rank in range(schedule.num_ranks):
        problems += _rank_problems(schedule, rank, _rules(schedule, rank, trained, linked))
    return problems


def _rank_problems(
    schedule: Schedule, rank: int, rules: dict[tuple[Kind, int], _Rule]
) -> list[str]:
    """Check one rank's list."""
    state = [bytearray(schedule.num_microbatches) for _ in range(schedule.num_chunks)]
    problems = []
    known = set(range(schedule.num_microbatches))
    for index, (kind, chunk, microbatch, peer) in enumerate(schedule.ranks[rank]):
        rule = rules.get((kind, chunk), UNKNOWN_ACTION)
        after, before, adds, expected = rule
        if peer != expected or microbatch not in known:
            problems.append(
                f"{action_text(schedule, rank, index)}: {_explain_unknown_action(rule, peer)}"
            )
            continue
        row = state[chunk]
        done = row[microbatch]
        if done & after != after or done & before:
            problems.append(f"{action_text(schedule, rank, index)}: {_explain_order(done, rule)}")
        row[microbatch] = done | adds
    return problems + _find_missing_actions(schedule, rank, rules, state)


def _rules(
    schedule: Schedule, rank: int, trained: bool, linked: bool
) -> dict[tuple[Kind, int], _Rule]:
    """Return the rules of one rank by (kind, chunk)."""
    rules: dict[tuple[Kind, int], _Rule] = {}
    for chunk in range(schedule.num_chunks):
        rules["F", chunk] = _Rule(0, FORWARD, FORWARD)
        if trained:
            rules["B", chunk] = _Rule(FORWARD, INPUT | WEIGHT, INPUT | WEIGHT)
            rules["I", chunk] = _Rule(FORWARD, INPUT, INPUT)
            rules["W", chunk] = _Rule(INPUT, WEIGHT, WEIGHT)
        for direction in COMPUTES:
            if linked and (trained or direction == "forward"):
                rules |= _transfer_rules(schedule, rank, chunk, direction)
                if (RECEIVES[direction], chunk) in rules:
                    waiting = {(kind, chunk): rules[kind, chunk] for kind in COMPUTES[direction]}
                    rules |= {
                        key: rule._replace(after=rule.after | CAME[direction])
                        for key, rule in waiting.items()
                    }
    return rules


def _transfer_rules(
    schedule: Schedule, rank: int, chunk: int, direction: Direction
) -> dict[tuple[Kind, int], _Rule]:
    """Return the rules of the sends and receives of one chunk in one direction."""
    rules: dict[tuple[Kind, int], _Rule] = {}
    target = neighbor(schedule, rank, chunk, direction)
    if target is not None and target[0] != rank:
        rules[SENDS[direction], chunk] = _Rule(
            DONE[direction], SENT[direction], SENT[direction], target[0]
        )
    source = neighbor(schedule, rank, chunk, AGAINST[direction])
    if source is not None and source[0] != rank:
        rules[RECEIVES[direction], chunk] = _Rule(0, CAME[direction], CAME[direction], source[0])
    return rules


def _explain_unknown_action(rule: _Rule, peer: int) -> str:
    if rule is UNKNOWN_ACTION:
        return "this chunk has no such action here"
    if rule.peer != peer:
        return f"the peer is rank {peer}, expected {rule.peer}"
    return "there is no such microbatch"


def _explain_order(done: int, rule: _Rule) -> str:
    missing = [word for bit, word in WORDS.items() if rule.after & ~done & bit]
    if missing:
        return f"must come after {' and '.join(missing)}"
    return (
        "must not come after "
        f"{' and '.join(word for bit, word in WORDS.items() if rule.before & done & bit)}"
    )


def _find_missing_actions(
    schedule: Schedule, rank: int, rules: dict[tuple[Kind, int], _Rule], state: Sequence[bytearray]
) -> list[str]:
    """Return the actions that are missing on a rank, by chunk."""
    problems = []
    for chunk, row in enumerate(state):
        all_bits = 0
        for (_, rule_chunk), rule in rules.items():
            all_bits |= rule.adds if rule_chunk == chunk else 0
        if row.count(all_bits) == len(row):
            continue
        for bit, word in WORDS.items():
            missing_microbatches = [
                microbatch for microbatch, done in enumerate(row) if all_bits & ~done & bit
            ]
            if missing_microbatches:
                where = f" of chunk {chunk}" if schedule.num_chunks > 1 else ""
                problems.append(
                    f"rank {rank}: microbatch {missing_microbatches[0]}{where} lacks {word[4:]} "
                    "in the whole "
                    "list"
                )
    return problems


def _describe_action(schedule: Schedule, action: Action) -> str:
    chunk_text = f", chunk {action.chunk}" if schedule.num_chunks > 1 else ""
    peer_text = ""
    if action.peer >= 0:
        peer_text = f" {'to' if action.kind.startswith('send') else 'from'} rank {action.peer}"
    return f"{action.kind} of microbatch {action.microbatch}{chunk_text}{peer_text}"


# --- message queues without tags, as in NCCL: mismatched receives and deadlocks
#
# A *communicator* joins two ranks. On each of them, the sends and receives run one after the other
# in the order of submission, on their own stream, and each completes only when the other side
# reaches its counterpart. So the k-th receive of a channel gets the k-th send, whatever it was
# meant for; an operation that waits delays those behind it, but not the rank, which continues until
# it needs a message that has not arrived.
#
# `parallel/p2p` gives each channel its own communicator. Two channels on one communicator could
# deadlock.

RankAction = tuple[int, int]
"""(rank, index) of an action."""


def queue_problems(
    schedule: Schedule, communicators: Mapping[Channel, int] | None = None
) -> list[str]:
    """Return receives that would get the wrong message, and deadlocks, over NCCL; empty: none.

    The action lists must match, see `matching_problems`; lists without messages have
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
        # Keys: communicator and rank.
        self.queues: dict[tuple[int, int], deque[_Operation]] = defaultdict(deque)
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
            stage = self.schedule.stages[rank][chunk]
            steps["W", chunk] = _QueuedCompute(None, None)
            for direction, kinds in COMPUTES.items():
                source = neighbor(self.schedule, rank, chunk, AGAINST[direction])
                target = neighbor(self.schedule, rank, chunk, direction)
                needs = None if source is None else self.received[direction, stage]
                is_local = target is not None and target[0] == rank
                gives = (
                    self.received[direction, self.schedule.stages[target[0]][target[1]]]
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
                        channel, rank, self.schedule.stages[target[0]][target[1]]
                    )
                source = neighbor(self.schedule, rank, chunk, AGAINST[direction])
                if source is not None and source[0] != rank:
                    channel = Channel(source[0], rank, direction)
                    message_channels[RECEIVES[direction], chunk] = self._make_message_channel(
                        channel, rank, self.schedule.stages[rank][chunk]
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
        blocked = [
            (rank, at) for rank, at in enumerate(self.at) if at < len(self.schedule.ranks[rank])
        ]
        waiting = [queue[0].place for queue in self.queues.values() if queue]
        if not blocked + waiting:
            return []
        place, visited = (blocked + waiting)[0], dict[RankAction, str]()
        while place not in visited:
            visited[place], place = self._find_blocker(place)
        cycle = list(visited)[list(visited).index(place) :]
        chain = ", which ".join(
            f"{visited[each]} {self._text(after)}" for each, after in pairwise(cycle)
        )
        return [
            f"deadlock over NCCL: {self._text(cycle[0])} {chain}, which {visited[cycle[-1]]} the "
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

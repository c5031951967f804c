"""Check that the action lists of a pipeline match: each action once and in order, every send with a
receive.

Deadlocks are found by `plan/simulate`; mismatched receives without tags by `plan/queues`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megalith.plan.schedule import Action, Kind, Schedule
from megalith.plan.transfers import AGAINST, COMPUTES, RECEIVES, SENDS, Direction, neighbor

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

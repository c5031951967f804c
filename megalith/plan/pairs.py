"""Pairs: the forward of one microbatch and the backward of another, computed together.

What one of them sends and waits for travels while the other computes: of use where the messages are
inside of layers, as those to experts are. In a pair, `parallel/turns` decides who computes when;
here it is decided what is a pair. Source: DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.pipeline import ScheduleName
from megalith.plan.schedule import Action, Schedule, in_turns, pipeline_in_use, schedule_name

PAIRED_SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "interleaved", "dualpipe-v")
"""Schedules in which forwards and backwards take turns."""


def pair_forward_backward(schedule: Schedule) -> Schedule:
    """The schedule with its forwards and backwards in pairs, where they take turns.

    dualpipe-v is made of pairs as it is. In the others a forward comes next to the backward of the
    same microbatch on the last rank, so every rank runs forwards earlier: one in the interleaved
    schedule, which thus holds a microbatch of a chunk more. In 1f1b it is num_ranks - rank: a pair
    sends what both halves gave when it ends, so a microbatch takes the time of a pair to the next
    stage and another to come back, for each stage that lies behind.
    """
    assert schedule.name in PAIRED_SCHEDULES, schedule.name
    if schedule.name == "dualpipe-v":
        return replace(
            schedule, pairs=tuple(_pairs_of_chunks(actions) for actions in schedule.ranks)
        )
    ranks, pairs = [], []
    for rank, actions in enumerate(schedule.ranks):
        forwards = [action for action in actions if action.kind == "F"]
        backwards = [action for action in actions if action.kind == "B"]
        num_mtp_layers = schedule.num_ranks - 1 - rank if schedule.name == "1f1b" else 0
        first = min(actions.index(backwards[0]) + num_mtp_layers, len(forwards))
        ranks.append(tuple(in_turns(forwards, backwards, first)))
        pairs.append(frozenset((action.chunk, action.microbatch) for action in forwards[first:]))
    return replace(schedule, ranks=tuple(ranks), pairs=tuple(pairs))


def _pairs_of_chunks(actions: Sequence[Action]) -> frozenset[tuple[int, int]]:
    """Forwards of one chunk before a backward of the other, of another microbatch."""
    return frozenset(
        (one.chunk, one.microbatch)
        for one, other in pairwise(actions)
        if (one.kind, other.kind) == ("F", "B")
        and one.chunk != other.chunk
        and one.microbatch != other.microbatch
    )


def concurrent_actions(schedule: Schedule, rank: int) -> Iterator[tuple[Action, ...]]:
    """What a rank does, in order: single actions, and pairs of a forward and the backward that
    comes next.

    They do not need each other if their microbatches differ: a backward needs all forwards of its
    own, and a forward no backward.

    >>> from megalith.plan.schedule import build_schedule
    >>> schedule = pair_forward_backward(build_schedule("1f1b", num_ranks=1, num_microbatches=3))
    >>> [
    ...     "+".join(f"{action.kind}{action.microbatch}" for action in each)
    ...     for each in together(schedule, 0)
    ... ]
    ['F0', 'F1+B0', 'F2+B1', 'B2']
    """
    actions = schedule.ranks[rank]
    return _joined(actions, schedule.pairs[rank]) if schedule.pairs else zip(actions, strict=True)


def _joined(
    actions: Sequence[Action], pairs: frozenset[tuple[int, int]]
) -> Iterator[tuple[Action, ...]]:
    forward: tuple[Action, ...] = ()
    for action in actions:
        if action.kind == "F" and (action.chunk, action.microbatch) in pairs:
            forward = (action,)
        else:
            yield (*forward, action)
            forward = ()
    if forward:
        yield forward


def pairing_problems(model: ModelConfig, parallel: ParallelConfig) -> list[str]:
    """Everything that keeps parallel.overlap_experts from doing what it is for: one text each."""
    p, needed = parallel, "parallel.overlap_experts=true"
    if not p.overlap_experts:
        return []
    if model.moe is None:
        return [
            f"{needed} with model.moe=null: there are no messages to experts. Set "
            "parallel.overlap_experts=false."
        ]
    problems = []
    if p.ep == 1:
        problems.append(
            f"{needed} with parallel.ep={p.ep}: no rank sends tokens to another one's experts. Set "
            "parallel.ep to a "
            f"divisor of model.moe.num_experts={model.moe.num_experts} above 1, or "
            "parallel.overlap_experts=false."
        )
    if p.dispatcher != "alltoall":
        problems.append(
            f"{needed} with parallel.dispatcher={p.dispatcher}: only an exchange can be left to "
            "travel. Set parallel.dispatcher=alltoall, or parallel.overlap_experts=false."
        )
    if p.zero == 3:
        problems.append(
            f"{needed} with parallel.zero={p.zero}: weights are gathered for one pass through a "
            "layer at a time, and "
            "the other lane would lose them. Set parallel.zero to 2 or less, or "
            "parallel.overlap_experts=false."
        )
    name = schedule_name(pipeline_in_use(p.pipeline, p.pp))
    if name not in PAIRED_SCHEDULES:
        problems.append(
            f"{needed} with parallel.pipeline.schedule={name}: it does not run forwards and "
            "backwards by turns. "
            f"Set parallel.pipeline.schedule to one of {', '.join(PAIRED_SCHEDULES)}."
        )
    return problems

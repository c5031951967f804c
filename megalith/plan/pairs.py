"""Dual-batch overlap: run the forward of one microbatch and the backward of another together.

The all-to-all of one microbatch overlaps with the computation of the other. `parallel/turns`
alternates between the two; this module decides which actions form a pair. Source: DeepSeek-AI 2024,
arXiv:2412.19437, section 3.2.1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.pipeline import ScheduleName
from megalith.plan.schedule import (
    Action,
    Schedule,
    alternate_forward_backward,
    effective_pipeline,
    schedule_name,
)

PAIRED_SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "interleaved", "dualpipe-v")
"""Schedules that alternate forwards and backwards, so that dual-batch overlap is possible."""


def pair_forward_backward(schedule: Schedule) -> Schedule:
    """Return the schedule with pairs of a forward and a backward, and with the warmup that pairs
    need.

    dualpipe-v consists of such pairs already. In the other schedules a forward would be next to the
    backward of the same microbatch on the last rank, so every rank runs more warmup forwards: one
    in the interleaved schedule, which holds one more microbatch of a chunk. In 1f1b it is num_ranks
    - rank: a pair sends the results of both halves when it ends, so a microbatch needs one pair
    time to reach the next stage and another one to return, for each later stage.
    """
    assert schedule.name in PAIRED_SCHEDULES, schedule.name
    if schedule.name == "dualpipe-v":
        return replace(
            schedule, pairs=tuple(_find_chunk_pairs(actions) for actions in schedule.ranks)
        )
    ranks, pairs = [], []
    for rank, actions in enumerate(schedule.ranks):
        forwards = [action for action in actions if action.kind == "F"]
        backwards = [action for action in actions if action.kind == "B"]
        num_extra_warmup = schedule.num_ranks - 1 - rank if schedule.name == "1f1b" else 0
        first = min(actions.index(backwards[0]) + num_extra_warmup, len(forwards))
        ranks.append(tuple(alternate_forward_backward(forwards, backwards, first)))
        pairs.append(frozenset((action.chunk, action.microbatch) for action in forwards[first:]))
    return replace(schedule, ranks=tuple(ranks), pairs=tuple(pairs))


def _find_chunk_pairs(actions: Sequence[Action]) -> frozenset[tuple[int, int]]:
    """Return the forwards that precede a backward of the other chunk and of another microbatch."""
    return frozenset(
        (one.chunk, one.microbatch)
        for one, other in pairwise(actions)
        if (one.kind, other.kind) == ("F", "B")
        and one.chunk != other.chunk
        and one.microbatch != other.microbatch
    )


def concurrent_actions(schedule: Schedule, rank: int) -> Iterator[tuple[Action, ...]]:
    """Yield the actions of a rank in order: single actions, and pairs of a forward and the next
    backward.

    The two halves of a pair are of different microbatches, so neither needs the other's result.

    >>> from megalith.plan.schedule import build_schedule
    >>> schedule = pair_forward_backward(build_schedule("1f1b", num_ranks=1, num_microbatches=3))
    >>> [
    ...     "+".join(f"{action.kind}{action.microbatch}" for action in each)
    ...     for each in concurrent_actions(schedule, 0)
    ... ]
    ['F0', 'F1+B0', 'F2+B1', 'B2']
    """
    actions = schedule.ranks[rank]
    return (
        _group_actions(actions, schedule.pairs[rank])
        if schedule.pairs
        else zip(actions, strict=True)
    )


def _group_actions(
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
    """Return one error text for each setting that prevents parallel.overlap_experts."""
    p, needed = parallel, "parallel.overlap_experts=true"
    if not p.overlap_experts:
        return []
    if model.moe is None:
        return [
            f"{needed} with model.moe=null: there is no token dispatch to overlap. Set "
            "parallel.overlap_experts=false."
        ]
    problems = []
    if p.ep == 1:
        problems.append(
            f"{needed} with parallel.ep={p.ep}: there is no all-to-all to overlap. Set "
            "parallel.ep to a "
            f"divisor of model.moe.num_experts={model.moe.num_experts} above 1, or "
            "parallel.overlap_experts=false."
        )
    if p.dispatcher != "alltoall":
        problems.append(
            f"{needed} with parallel.dispatcher={p.dispatcher}: only an all-to-all can be "
            "overlapped. Set parallel.dispatcher=alltoall, or parallel.overlap_experts=false."
        )
    if p.zero == 3:
        problems.append(
            f"{needed} with parallel.zero={p.zero}: weights are gathered for one pass through a "
            "layer "
            "at a time, and the other microbatch of a pair "
            "would lose them. Set parallel.zero to 2 or less, or "
            "parallel.overlap_experts=false."
        )
    name = schedule_name(effective_pipeline(p.pipeline, p.pp))
    if name not in PAIRED_SCHEDULES:
        problems.append(
            f"{needed} with parallel.pipeline.schedule={name}: it does not alternate forwards "
            "and backwards. "
            f"Set parallel.pipeline.schedule to one of {', '.join(PAIRED_SCHEDULES)}."
        )
    return problems

"""How many microbatches a rank keeps activations of, read off its list of actions."""

from collections.abc import Sequence
from itertools import accumulate

from megalith.plan.schedule import Kind, Schedule
from megalith.plan.simulate import Number

CHANGES: dict[Kind, int] = {"F": 1, "B": -1, "W": -1}
"""Of the number of microbatches between their F and the end of their backward."""


def peak_live(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """By rank and chunk: how many microbatches at most are between their F and the end of their
    backward."""
    peaks = []
    for actions in schedule.ranks:
        live, peak = [0] * schedule.num_chunks, [0] * schedule.num_chunks
        for kind, chunk, _, _ in actions:
            if kind in CHANGES:
                live[chunk] += CHANGES[kind]
                peak[chunk] = max(peak[chunk], live[chunk])
        peaks.append(tuple(peak))
    return tuple(peaks)


def peak_held(
    schedule: Schedule,
    *,
    activations: Sequence[Number] | None = None,
    for_weights: Sequence[Number] | None = None,
) -> tuple[Number, ...]:
    """By rank: the most that is held at once over all its chunks.

    activations: by stage, what one microbatch holds from its F on (bytes, say); unset: 1.
    for_weights: by stage, how much of it is still held between its I and its W; unset: all of it.
    """
    held = activations or (1,) * schedule.num_stages
    kept = for_weights or held
    peaks = []
    for rank, actions in enumerate(schedule.ranks):
        changes: dict[tuple[Kind, int], Number] = {}
        for chunk in range(schedule.num_chunks):
            stage = schedule.stage_of(rank, chunk)
            parts: dict[Kind, Number] = {
                "F": held[stage],
                "B": -held[stage],
                "I": kept[stage] - held[stage],
                "W": -kept[stage],
            }
            changes |= {(kind, chunk): change for kind, change in parts.items()}
        alive = accumulate(changes.get((kind, chunk), 0) for kind, chunk, _, _ in actions)
        peaks.append(max(alive))
    return tuple(peaks)

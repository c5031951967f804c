"""Compute how many microbatches of activations each rank holds at once in a pipeline schedule."""

from collections.abc import Sequence
from itertools import accumulate

from megalith.plan.schedule import Kind, Schedule
from megalith.plan.simulate import Number

CHANGES: dict[Kind, int] = {"F": 1, "B": -1, "W": -1}
"""Change of the number of microbatches in flight by each action."""


def peak_microbatches_in_flight(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Return, by rank and chunk, the largest number of microbatches between their F and the end of
    their backward."""
    peaks = []
    for actions in schedule.ranks:
        live, peak = [0] * schedule.num_chunks, [0] * schedule.num_chunks
        for kind, chunk, _, _ in actions:
            if kind in CHANGES:
                live[chunk] += CHANGES[kind]
                peak[chunk] = max(peak[chunk], live[chunk])
        peaks.append(tuple(peak))
    return tuple(peaks)


def peak_activation_memory(
    schedule: Schedule,
    *,
    activations: Sequence[Number] | None = None,
    for_weights: Sequence[Number] | None = None,
) -> tuple[Number, ...]:
    """Return, by rank, the largest amount of activations held at once over all its chunks.

    activations: by stage, the amount one microbatch holds from its F on (for example bytes); unset:
    1. for_weights: by stage, the part of it still held between I and W; unset: all of it.
    """
    held = activations or (1,) * schedule.num_stages
    held_for_weights = for_weights or held
    peaks = []
    for rank, actions in enumerate(schedule.ranks):
        changes: dict[tuple[Kind, int], Number] = {}
        for chunk in range(schedule.num_chunks):
            stage = schedule.stage_of(rank, chunk)
            deltas: dict[Kind, Number] = {
                "F": held[stage],
                "B": -held[stage],
                "I": held_for_weights[stage] - held[stage],
                "W": -held_for_weights[stage],
            }
            changes |= {(kind, chunk): change for kind, change in deltas.items()}
        held_over_time = accumulate(changes.get((kind, chunk), 0) for kind, chunk, _, _ in actions)
        peaks.append(max(held_over_time))
    return tuple(peaks)

"""Random pipeline schedules for property tests."""

import random

from megalith.config.pipeline import ScheduleName
from megalith.plan.schedule import Schedule, build_schedule

NAMES: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")


def random_schedule(
    rng: random.Random, name: ScheduleName | None = None, *, forward_only: bool = False
) -> Schedule:
    """Return a random schedule, or one of the given name, with up to 8 ranks, 4 chunks and 32
    microbatches, in groups of any valid size."""
    chosen: ScheduleName = name if name is not None else rng.choice(NAMES)
    p, group = rng.randint(1, 8), None
    m = rng.randint(p if chosen == "interleaved" else 1, 32)
    chunks = {"interleaved": rng.randint(2, 4), "zb-v": 2, "dualpipe-v": 2}.get(chosen, 1)
    if chosen == "interleaved":
        group = rng.choice([size for size in range(p, m + 1) if m % size == 0 or m % size >= p])
    return build_schedule(
        chosen,
        num_ranks=p,
        num_chunks=chunks,
        num_microbatches=m,
        group=group,
        forward_only=forward_only,
    )

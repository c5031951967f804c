"""What theory says about a schedule: the bubble and the activations, as formulas instead of a simulation.

For stages that all take equally long and messages that take no time. The simulation gives the same numbers exactly,
where these hold; with anything else, ask `plan/simulate`.
"""

from fractions import Fraction

from megalith.config.pipeline import ScheduleName
from megalith.plan.schedule import interleaved_warmup
from megalith.plan.simulate import Number


def idle_time(
    name: ScheduleName,
    *,
    num_ranks: int,
    num_microbatches: int,
    forward: Number = 1,
    backward_input: Number = 1,
    backward_weight: Number = 1,
) -> Number | None:
    """How long each rank computes nothing in a step, in the unit of the costs, which are those of one chunk.

    None where there is no formula: interleaved with a last group that is not whole, zb-h1 with fewer microbatches than
    ranks, the V schedules with fewer than two per rank or with parts that do not take equally long.
    Sources: Narayanan et al. 2021, arXiv:2104.04473, section 2.2; Qi et al. 2024, arXiv:2401.10241, sections 2 and 6.
    """
    hops, backward = num_ranks - 1, backward_input + backward_weight
    if name in ("gpipe", "1f1b"):
        return hops * (forward + backward)
    if name == "interleaved":
        return hops * (forward + backward) if num_microbatches % num_ranks == 0 else None
    if name == "zb-h1":
        # A weights' part fills the wait for the next forward; where it is longer than one, it cannot fill more.
        return hops * (backward_input + max(forward - backward_weight, 0)) if num_microbatches >= num_ranks else None
    even = forward == backward_input == backward_weight
    return hops * forward if even and num_microbatches >= 2 * num_ranks else None


def bubble_fraction(name: ScheduleName, *, num_ranks: int, num_chunks: int, num_microbatches: int) -> Fraction | None:
    """Idle time over computing time when F, I and W take equally long; None where there is no formula.

    1F1B: (p-1)/m; interleaved: (p-1)/(v·m); ZB-H1: a third of 1F1B's.
    """
    idle = idle_time(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    return None if idle is None else Fraction(idle) / (3 * num_chunks * num_microbatches)


def most_held(
    name: ScheduleName, rank: int, *, num_ranks: int, num_chunks: int, num_microbatches: int, group: int | None = None
) -> int | None:
    """(microbatch, chunk) pairs that a rank holds at once at most, from F to the end of backward.

    Divide by the number of chunks to compare with 1F1B. None: a V schedule with fewer than two microbatches per rank.
    """
    if name == "gpipe":
        return num_microbatches
    if name == "1f1b":
        return min(num_microbatches, num_ranks - rank)
    if name == "zb-h1":
        return min(num_microbatches, num_ranks)
    if name == "interleaved":
        sizes = {"num_ranks": num_ranks, "num_chunks": num_chunks, "num_microbatches": num_microbatches}
        warmup = interleaved_warmup(rank, group=group or num_ranks, **sizes)
        return min(warmup + 1, num_chunks * num_microbatches)
    if num_microbatches < 2 * num_ranks:
        return None
    return 2 * num_ranks + (1 if name == "dualpipe-v" else 0)

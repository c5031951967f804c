"""Samples that each rank reads in a step: global batch = micro batch · dp · microbatches.

In one microbatch, all data-parallel ranks read a *group* of micro_batch_size · dp samples, in the
order of ranks. In sequential order a step therefore reads the same samples under any layout.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from megalith.errors import DataError, PlanError
from megalith.plan.grid import divisors

Permutation = Callable[[int, int], Sequence[int] | NDArray[np.int64]]
"""(length, epoch) -> the numbers 0 to length - 1, shuffled; deterministic."""


def batch_problems(*, global_batch_size: int, micro_batch_size: int, dp: int) -> list[str]:
    """Return an error text if the global batch cannot be split over dp ranks in whole
    microbatches."""
    sizes = {
        "train.global_batch_size": global_batch_size,
        "train.micro_batch_size": micro_batch_size,
        "parallel.dp": dp,
    }
    problems = [f"{name}={size} must be at least 1." for name, size in sizes.items() if size < 1]
    if problems:
        return problems
    group = micro_batch_size * dp
    if global_batch_size % group == 0:
        return []
    below = global_batch_size // group * group
    valid = f"{below} or {below + group}" if below else f"{group}"
    problem = (
        f"train.global_batch_size={global_batch_size} is not a multiple of train.micro_batch_size "
        f"· dp = {micro_batch_size}·{dp} = {group}. Set train.global_batch_size to {valid}"
    )
    if global_batch_size % dp:
        return [f"{problem}."]
    share = global_batch_size // dp
    near = sorted(sorted(divisors(share), key=lambda rows: abs(rows - micro_batch_size))[:4])
    return [f"{problem}, or train.micro_batch_size to one of {near}."]


def num_microbatches(*, global_batch_size: int, micro_batch_size: int, dp: int) -> int:
    """Return the number of microbatches of each rank per step.

    Raises:
        PlanError: the global batch is not a multiple of micro_batch_size · dp; the message has
            the nearest multiples.
    """
    problems = batch_problems(
        global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, dp=dp
    )
    if problems:
        raise PlanError(
            f"The batch cannot be divided over dp={dp}. Use other settings: {' '.join(problems)}"
        )
    return global_batch_size // (micro_batch_size * dp)


def sample_ids(
    *,
    consumed: int,
    global_batch_size: int,
    micro_batch_size: int,
    dp: int,
    dp_rank: int,
    total: int | None = None,
) -> list[list[int]]:
    """Return the samples that one rank reads in the next step in sequential order, by microbatch.

    Microbatch m of rank r holds the `micro_batch_size` samples from consumed + (m · dp + r) ·
    micro_batch_size on, as in Megatron's default sampler. consumed: samples of all earlier steps;
    total: samples of the dataset, if known.

    Raises:
        DataError: fewer samples are left than a step reads.
        PlanError: see `num_microbatches`.
    """
    count = num_microbatches(
        global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, dp=dp
    )
    _check_rank(dp, dp_rank)
    if total is not None and consumed + global_batch_size > total:
        raise DataError(
            f"The dataset has {total} samples and {consumed} are consumed: too few for a step of "
            f"{global_batch_size}. "
            "Use more data, or set train.steps lower."
        )
    starts = [consumed + (m * dp + dp_rank) * micro_batch_size for m in range(count)]
    return [list(range(start, start + micro_batch_size)) for start in starts]


def cyclic_sample_ids(
    *,
    consumed: int,
    total: int,
    global_batch_size: int,
    micro_batch_size: int,
    dp: int,
    dp_rank: int,
    permutation: Permutation,
    sharded: bool = True,
) -> list[list[int]]:
    """Return the samples that one rank reads in the next step in cyclic shuffled order, by
    microbatch.

    Every epoch has its own shuffle; samples that do not fill a group are dropped in that epoch.
    sharded: each rank shuffles its own contiguous part of the data, so the samples of a step depend
    on dp and micro_batch_size; else the whole set is shuffled and assigned round-robin.

    Raises:
        DataError: there are fewer samples than one group.
        PlanError: `consumed` is inside a group (see `next_group`); and see `num_microbatches`.
    """
    count = num_microbatches(
        global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, dp=dp
    )
    _check_rank(dp, dp_rank)
    group_start = next_group(
        consumed=consumed, total=total, micro_batch_size=micro_batch_size, dp=dp
    )
    if group_start != consumed:
        raise PlanError(
            f"consumed={consumed} is inside a group of micro_batch_size · dp = "
            f"{micro_batch_size}·{dp} samples. "
            f"Use consumed={group_start}, which skips {group_start - consumed} samples."
        )
    group = micro_batch_size * dp
    num_used = total // group * group
    epoch_offsets = [
        divmod(consumed + m * group, num_used) for m in range(count)
    ]  # (epoch, samples into it)
    if sharded:
        samples_per_rank = num_used // dp
        orders = {epoch: permutation(samples_per_rank, epoch) for epoch, _ in epoch_offsets}
        firsts = [(orders[epoch], offset // dp) for epoch, offset in epoch_offsets]
        return [
            [dp_rank * samples_per_rank + int(order[first + i]) for i in range(micro_batch_size)]
            for order, first in firsts
        ]
    # The shuffle covers whole microbatches and is then cut to whole groups, so that every rank gets
    # equally many.
    orders = {
        epoch: permutation(total // micro_batch_size * micro_batch_size, epoch)
        for epoch, _ in epoch_offsets
    }
    firsts = [(orders[epoch], offset + dp_rank) for epoch, offset in epoch_offsets]
    return [
        [int(order[first + i * dp]) for i in range(micro_batch_size)] for order, first in firsts
    ]


def next_group(*, consumed: int, total: int, micro_batch_size: int, dp: int) -> int:
    """Return `consumed` in cyclic order, rounded up to the start of a group if micro_batch_size or
    dp changed.

    Raises:
        DataError: there are fewer samples than one group.
    """
    group = micro_batch_size * dp
    active = total // group * group
    if active == 0:
        raise DataError(
            f"The dataset has {total} samples, fewer than train.micro_batch_size · dp = "
            f"{micro_batch_size}·{dp}. "
            "Use more data, or set train.micro_batch_size or parallel.dp lower."
        )
    return -(-consumed // group) * group


def _check_rank(dp: int, dp_rank: int) -> None:
    if not 0 <= dp_rank < dp:
        raise PlanError(f"dp_rank={dp_rank} must be one of 0 to {dp - 1}.")

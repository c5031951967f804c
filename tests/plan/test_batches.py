"""Tests of megalith/plan/batch_assignment.py."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megalith.errors import DataError, PlanError
from megalith.plan.batch_assignment import (
    batch_problems,
    cyclic_sample_ids,
    next_group,
    num_microbatches,
    sample_ids,
)
from tests.cases import loop_over


def torch_permutation(length: int, epoch: int) -> Sequence[int]:
    """The shuffle Megatron's cyclic sampler uses: seeded by the epoch number alone."""
    return list(torch.randperm(length, generator=torch.Generator().manual_seed(epoch)).tolist())


def megatron_sequential(
    *, total: int, consumed: int, mbs: int, dp: int, rank: int
) -> list[list[int]]:
    """Megatron's default sampler as its documentation tells it: fill a group sample by sample, hand
    out rank's part."""
    group, batches = [], []
    for sample in range(consumed, total):
        group.append(sample)
        if len(group) == mbs * dp:
            batches.append(group[rank * mbs : (rank + 1) * mbs])
            group = []
    return batches


@loop_over("seed", range(30))
def test_sequential_order_matches_megatron(seed: int) -> None:
    rng = random.Random(seed)
    mbs, dp, count, steps = (rng.randint(1, 4) for _ in range(4))
    size, start = mbs * dp * count, rng.randint(0, 50)
    for rank in range(dp):
        ours: list[list[int]] = []
        for step in range(steps):
            consumed = start + step * size
            ours += sample_ids(
                consumed=consumed, global_batch_size=size, micro_batch_size=mbs, dp=dp, dp_rank=rank
            )
        total = start + steps * size + rng.randint(0, mbs * dp - 1)
        assert ours == megatron_sequential(total=total, consumed=start, mbs=mbs, dp=dp, rank=rank)


@pytest.mark.parametrize("size", [1, 6, 12, 30])
def test_every_layout_reads_the_same_samples_in_a_step(size: int) -> None:
    for dp in range(1, size + 1):
        for mbs in range(1, size + 1):
            if size % (dp * mbs):
                continue
            read = [
                sample
                for rank in range(dp)
                for microbatch in sample_ids(
                    consumed=7,
                    global_batch_size=size,
                    micro_batch_size=mbs,
                    dp=dp,
                    dp_rank=rank,
                    total=7 + size,
                )
                for sample in microbatch
            ]
            assert sorted(read) == list(range(7, 7 + size))


def test_microbatches_are_assigned_in_rank_order() -> None:
    read = sample_ids(consumed=100, global_batch_size=8, micro_batch_size=2, dp=2, dp_rank=1)
    assert read == [[102, 103], [106, 107]]
    assert num_microbatches(global_batch_size=8, micro_batch_size=2, dp=2) == 2


@pytest.mark.parametrize(
    ("sizes", "texts"),
    [
        (
            (10, 4, 2),
            [
                "train.global_batch_size=10 is not a multiple of train.micro_batch_size · dp = 4·2 "
                "= 8",
                "Set train.global_batch_size to 8 or 16, or train.micro_batch_size to one "
                "of [1, 5]",
            ],
        ),
        ((3, 4, 2), ["Set train.global_batch_size to 8."]),
        ((0, -1, 2), ["train.global_batch_size=0 must be at least 1", "train.micro_batch_size=-1"]),
        ((4, 1, 0), ["parallel.dp=0 must be at least 1"]),
    ],
)
def test_indivisible_batches_are_rejected_with_the_nearest_multiples(
    sizes: tuple[int, int, int], texts: list[str]
) -> None:
    arguments = dict(zip(("global_batch_size", "micro_batch_size", "dp"), sizes, strict=True))
    with pytest.raises(PlanError) as caught:
        num_microbatches(**arguments)
    for text in [*texts, *batch_problems(**arguments)]:
        assert text in str(caught.value)


def test_the_suggested_sizes_work() -> None:
    assert batch_problems(global_batch_size=8, micro_batch_size=4, dp=2) == []
    assert batch_problems(global_batch_size=16, micro_batch_size=4, dp=2) == []
    assert batch_problems(global_batch_size=10, micro_batch_size=5, dp=2) == []


def test_too_few_samples_left_for_a_step() -> None:
    with pytest.raises(
        DataError,
        match="has 20 samples and 16 are consumed.*Use more data, or set train.steps lower",
    ):
        sample_ids(consumed=16, global_batch_size=8, micro_batch_size=2, dp=2, dp_rank=0, total=20)


def test_a_rank_outside_dp_is_rejected() -> None:
    with pytest.raises(PlanError, match="dp_rank=2 must be one of 0 to 1"):
        sample_ids(consumed=0, global_batch_size=8, micro_batch_size=2, dp=2, dp_rank=2)


def cyclic(consumed: int, rank: int, batches: int, **changes: Any) -> list[list[int]]:
    arguments: dict[str, Any] = {
        "total": 22,
        "micro_batch_size": 2,
        "dp": 2,
        "permutation": torch_permutation,
    }
    return cyclic_sample_ids(
        consumed=consumed, dp_rank=rank, global_batch_size=4 * batches, **(arguments | changes)
    )


def test_cyclic_sharded_order_matches_megatron() -> None:
    assert cyclic(0, 0, 5) == [[4, 1], [7, 5], [3, 9], [0, 8], [6, 2]]
    assert cyclic(0, 1, 5) == [[14, 11], [17, 15], [13, 19], [10, 18], [16, 12]]
    assert cyclic(8, 0, 3) == [[3, 9], [0, 8], [6, 2]]
    assert cyclic(20, 0, 5) == [[5, 6], [1, 2], [0, 8], [9, 3], [7, 4]]


def test_cyclic_unsharded_order_matches_megatron() -> None:
    assert cyclic(0, 0, 5, sharded=False) == [[10, 15], [11, 9], [19, 2], [18, 7], [6, 17]]
    assert cyclic(0, 1, 5, sharded=False) == [[4, 3], [5, 20], [13, 0], [16, 8], [14, 1]]


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_resumed_cyclic_run_reads_the_same_samples(sharded: bool, rank: int) -> None:
    whole = cyclic(0, rank, 12, sharded=sharded)  # through three epochs
    for cut in range(1, 12):
        assert (
            cyclic(0, rank, cut, sharded=sharded) + cyclic(4 * cut, rank, 12 - cut, sharded=sharded)
            == whole
        )


@pytest.mark.parametrize("sharded", [True, False])
def test_a_cyclic_epoch_reads_no_sample_twice(sharded: bool) -> None:
    read = [
        sample
        for rank in range(2)
        for batch in cyclic(0, rank, 5, sharded=sharded)
        for sample in batch
    ]
    assert len(set(read)) == len(read) == 20


def test_cyclic_run_continues_at_the_next_group_if_the_layout_changes() -> None:
    with pytest.raises(
        PlanError, match="consumed=6 is inside a group.*Use consumed=8, which skips 2 samples"
    ):
        cyclic(6, 0, 1)
    assert next_group(consumed=6, total=22, micro_batch_size=2, dp=2) == 8
    assert next_group(consumed=8, total=22, micro_batch_size=2, dp=2) == 8
    with pytest.raises(
        DataError, match="has 3 samples, fewer than train.micro_batch_size · dp = 2·2"
    ):
        cyclic(0, 0, 1, total=3)

"""Tests of megalith/plan/buckets.py."""

import random
from dataclasses import replace
from itertools import pairwise
from math import lcm
from typing import Any, NamedTuple

import pytest

from megalith.config.parallel import ParallelConfig
from megalith.errors import PlanError
from megalith.plan.buckets import (
    LONGEST_SLICE,
    BucketPlan,
    bucket_slice,
    local_bucket_parts,
    plan_buckets,
    zero_notes,
    zero_problems,
)
from tests.cases import loop_over

# Registration order: emb, ln, w1, b1, w2. Offsets are those Megatron's distributed optimizer gives
# these sizes, so that its shards can be read by position.
SIZES = [800, 8, 512, 64, 500]


def spans(plan: BucketPlan) -> list[tuple[int, int]]:
    return [(slot.start, slot.stop) for slot in plan.slots]


def bounds(plan: BucketPlan) -> list[tuple[int, int]]:
    return [(bucket.start, bucket.stop) for bucket in plan.buckets]


@pytest.mark.parametrize(
    ("bucket_numel", "dp", "offsets", "expected"),
    [
        (
            None,
            2,
            [(1152, 1952), (1088, 1096), (576, 1088), (512, 576), (0, 500)],
            [(0, 1152), (1152, 2048)],
        ),
        (
            600,
            2,
            [(1280, 2080), (1152, 1160), (576, 1088), (512, 576), (0, 500)],
            [(0, 1152), (1152, 1280), (1280, 2176)],
        ),
        (
            600,
            3,
            [(1536, 2336), (1152, 1160), (576, 1088), (512, 576), (0, 500)],
            [(0, 1152), (1152, 1536), (1536, 2688)],
        ),
    ],
)
def test_offsets_match_megatron(
    bucket_numel: int | None,
    dp: int,
    offsets: list[tuple[int, int]],
    expected: list[tuple[int, int]],
) -> None:
    plan = plan_buckets(SIZES, bucket_numel=bucket_numel, end_align=lcm(dp, 128), alone=[0])
    assert spans(plan) == offsets
    assert bounds(plan) == expected
    assert plan.numel == expected[-1][1]


def test_one_bucket_when_no_size_is_given() -> None:
    plan = plan_buckets([3, 5, 7], bucket_numel=None, align=1)
    assert bounds(plan) == [(0, 15)]
    assert plan.buckets[0].members == (2, 1, 0)


def test_a_bucket_closes_with_the_parameter_that_fills_it() -> None:
    plan = plan_buckets([4, 4, 4, 4], bucket_numel=8, align=1)
    assert [bucket.members for bucket in plan.buckets] == [(3, 2), (1, 0)]
    plan = plan_buckets([4, 4, 4, 4], bucket_numel=9, align=1)
    assert [bucket.members for bucket in plan.buckets] == [(3, 2, 1), (0,)]


def test_stacked_parameters_are_contiguous_at_the_position_of_the_last_one() -> None:
    plan = plan_buckets([10, 3, 5, 7, 9], bucket_numel=1, align=8, contiguous=[[1, 3]])
    assert [bucket.members for bucket in plan.buckets] == [(4,), (1, 3), (2,), (0,)]
    assert spans(plan) == [(40, 50), (16, 19), (32, 37), (19, 26), (0, 9)]


def test_no_parameters_make_no_buckets() -> None:
    plan = plan_buckets([], bucket_numel=10)
    assert (plan.slots, plan.buckets, plan.numel) == ((), (), 0)


class Case(NamedTuple):
    sizes: list[int]
    bucket_numel: int | None
    align: int
    end_align: int | None
    alone: list[int]
    contiguous: list[list[int]]


def random_case(rng: random.Random) -> Case:
    count = rng.randint(1, 40)
    numbers = list(range(count))
    runs = []
    for _ in range(rng.randint(0, 5)):
        run = sorted(rng.sample(numbers, min(len(numbers), rng.randint(1, 3))))
        numbers = [number for number in numbers if number not in run]
        if run:
            runs.append(run)
    return Case(
        sizes=[rng.choice([0, 1, 3, 64, 100, 1000]) for _ in range(count)],
        bucket_numel=rng.choice([None, 1, 65, 1000, 10**9]),
        align=rng.choice([1, 3, 64]),
        end_align=rng.choice([None, 1, 6, 128, 384]),
        alone=[number for number in numbers if rng.random() < 0.2],
        contiguous=runs,
    )


def plan_of(case: Case) -> BucketPlan:
    return plan_buckets(
        case.sizes,
        bucket_numel=case.bucket_numel,
        align=case.align,
        end_align=case.end_align,
        alone=case.alone,
        contiguous=case.contiguous,
    )


@loop_over("seed", range(200))
def test_slots_cover_everything_once_in_order_and_on_their_alignment(seed: int) -> None:
    case = random_case(random.Random(seed))
    plan = plan_of(case)
    assert [slot.stop - slot.start for slot in plan.slots] == case.sizes
    placed = [number for bucket in plan.buckets for number in bucket.members]
    assert sorted(placed) == list(range(len(case.sizes)))
    for earlier, later in pairwise(placed):
        assert plan.slots[earlier].stop <= plan.slots[later].start
    follows = {later: earlier for run in case.contiguous for earlier, later in pairwise(run)}
    for number, slot in enumerate(plan.slots):
        bucket = plan.buckets[slot.bucket]
        assert number in bucket.members and bucket.start <= slot.start <= slot.stop <= bucket.stop
        if number in follows:
            before = plan.slots[follows[number]]
            assert (slot.bucket, slot.start) == (before.bucket, before.stop)
        else:
            assert slot.start % case.align == 0
    free = [number for number in placed if not any(number in run for run in case.contiguous)]
    assert free == sorted(free, reverse=True)


@loop_over("seed", range(200))
def test_buckets_are_contiguous_and_have_the_requested_size(seed: int) -> None:
    case = random_case(random.Random(seed))
    plan = plan_of(case)
    quantum = lcm(case.align, case.end_align or case.align)
    alone = [bucket.members[0] in case.alone for bucket in plan.buckets]
    assert plan.buckets[0].start == 0
    assert all(bucket.stop == following.start for bucket, following in pairwise(plan.buckets))
    for place, bucket in enumerate(plan.buckets):
        assert (bucket.stop - bucket.start) % quantum == 0
        if alone[place]:
            assert len(bucket.members) == 1
            continue
        run_of_last = next(
            (run for run in case.contiguous if bucket.members[-1] in run), [bucket.members[-1]]
        )
        before_last = [number for number in bucket.members if number not in run_of_last]
        full = case.bucket_numel or 10**12
        assert all(plan.slots[number].stop - bucket.start < full for number in before_last)
        if place + 1 < len(plan.buckets) and not alone[place + 1]:
            assert plan.slots[bucket.members[-1]].stop - bucket.start >= full


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"bucket_numel": 0}, "parallel.bucket_numel=0 must be at least 1"),
        ({"bucket_numel": 1, "align": 0}, "align=0"),
        ({"bucket_numel": 1, "alone": [5]}, r"no parameters \[5\]. Use numbers from 0 to 2"),
        ({"bucket_numel": 1, "contiguous": [[1, 0]]}, "pass ascending runs"),
        ({"bucket_numel": 1, "contiguous": [[0, 1], [1, 2]]}, "each parameter occurs once"),
        (
            {"bucket_numel": 1, "contiguous": [[0, 1]], "alone": [1]},
            r"parameters \[1\] are in `alone` and in a run of `contiguous`",
        ),
    ],
)
def test_contradicting_arguments_are_rejected(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        plan_buckets([1, 2, 3], **arguments)


def test_negative_sizes_are_rejected() -> None:
    with pytest.raises(PlanError, match=r"parameters \[1\] have a negative size"):
        plan_buckets([1, -2], bucket_numel=None)


def test_dtypes_that_do_not_match_the_parameters_are_rejected() -> None:
    with pytest.raises(
        PlanError, match=r"kinds=\['a'\]: 1 for 2 parameters. Pass one per parameter"
    ):
        plan_buckets([1, 2], bucket_numel=None, kinds=["a"])
    with pytest.raises(
        PlanError, match=r"parameters \[0, 1\] are to lie together and are of several kinds"
    ):
        plan_buckets([1, 2], bucket_numel=None, contiguous=[[0, 1]], kinds=["a", "b"])


# What each rank of dp 2 and 3 owns of emb, ln, w1, b1 and w2, as Megatron's distributed optimizer
# divides them.
OWNED = {
    (None, 2): [
        {4: (0, 500), 3: (0, 64), 0: (0, 448)},
        {2: (0, 512), 1: (0, 8), 0: (448, 800)},
    ],
    (600, 2): [
        {4: (0, 500), 3: (0, 64), 1: (0, 8), 0: (0, 448)},
        {2: (0, 512), 0: (448, 800)},
    ],
    (600, 3): [
        {4: (0, 384), 1: (0, 8), 0: (0, 384)},
        {4: (384, 500), 3: (0, 64), 2: (0, 192), 0: (384, 768)},
        {2: (192, 512), 0: (768, 800)},
    ],
}


@pytest.mark.parametrize(("bucket_numel", "dp"), OWNED)
def test_ownership_matches_megatron(bucket_numel: int | None, dp: int) -> None:
    plan = plan_buckets(SIZES, bucket_numel=bucket_numel, end_align=lcm(dp, 128), alone=[0])
    for rank, expected in enumerate(OWNED[bucket_numel, dp]):
        assert {
            part.number: part.flat
            for part in local_bucket_parts(plan, [(rank, dp)] * len(plan.buckets))
        } == expected


@loop_over("seed", range(200))
def test_the_slices_of_all_ranks_are_equal_and_partition_every_parameter(seed: int) -> None:
    rng = random.Random(seed)
    case, ranks = random_case(rng), rng.choice([1, 2, 3, 5, 64])
    plan = plan_buckets(
        case.sizes,
        bucket_numel=case.bucket_numel,
        end_align=64 * ranks,
        alone=case.alone,
        contiguous=case.contiguous,
    )
    for bucket in plan.buckets:
        bounds_of_ranks = [bucket_slice(bucket, rank, ranks) for rank in range(ranks)]
        assert (bounds_of_ranks[0][0], bounds_of_ranks[-1][1]) == (bucket.start, bucket.stop)
        assert all(before[1] == after[0] for before, after in pairwise(bounds_of_ranks))
        assert all((stop - start) % 64 == 0 for start, stop in bounds_of_ranks)
    pieces: dict[int, list[tuple[int, int]]] = {number: [] for number in range(len(case.sizes))}
    for rank in range(ranks):
        parts = local_bucket_parts(plan, [(rank, ranks)] * len(plan.buckets))
        # one part of each at most
        assert [part.number for part in parts] == sorted({part.number for part in parts})
        for part in parts:
            slot = plan.slots[part.number]
            first, last = bucket_slice(plan.buckets[part.bucket], rank, ranks)
            assert first <= part.start < part.stop <= last
            assert part.flat == (part.start - slot.start, part.stop - slot.start)
            pieces[part.number].append(part.flat)
    for number, size in enumerate(case.sizes):
        covered = sorted(pieces[number])
        assert [start for start, _ in covered] == [0, *(stop for _, stop in covered)][
            : len(covered)
        ]
        assert (covered[-1][1] if covered else 0) == size


@loop_over("seed", range(100))
def test_each_kind_is_laid_out_independently(seed: int) -> None:
    """So that ranks whose parameters of other kinds have other sizes cut this kind alike."""
    rng = random.Random(seed)
    count = rng.randint(1, 30)
    kinds = [rng.choice("abc") for _ in range(count)]
    actual = [rng.choice([1, 3, 64, 100, 1000]) for _ in range(count)]
    reference = [
        size if kind == "b" else rng.randint(1, 2000)
        for size, kind in zip(actual, kinds, strict=True)
    ]
    shared = [number for number in range(count) if kinds[number] == "b"]
    results = []
    for sizes in (actual, reference):
        plan = plan_buckets(sizes, bucket_numel=600, end_align=64 * 4, kinds=kinds)
        for bucket in plan.buckets:
            assert len({kinds[number] for number in bucket.members}) == 1
        parts = [local_bucket_parts(plan, [(rank, 4)] * len(plan.buckets)) for rank in range(4)]
        results.append(
            [[(part.number, part.flat) for part in own if part.number in shared] for own in parts]
        )
    assert results[0] == results[1]


def test_buckets_of_all_kinds_are_sent_in_the_order_in_which_backward_finishes_them() -> None:
    plan = plan_buckets(
        [8, 1, 8, 1, 8, 1], bucket_numel=8, align=1, kinds=["w", "n", "w", "n", "w", "n"]
    )
    assert [bucket.members for bucket in plan.buckets] == [(4,), (2,), (5, 3, 1), (0,)]


def test_valid_zero_settings_violate_no_rule() -> None:
    assert zero_problems(ParallelConfig(), 6) == []
    assert zero_problems(ParallelConfig(zero=1, dp_replicate=3, reduce_dtype="bf16"), 6) == []


@pytest.mark.parametrize(
    ("parallel", "text"),
    [
        (
            ParallelConfig(dp_replicate=2),
            "parallel.dp_replicate=2 with parallel.zero=0: nothing is sharded without "
            "ZeRO. Set parallel.zero=1, or remove parallel.dp_replicate.",
        ),
        (
            ParallelConfig(dp_replicate=4, zero=1),
            "parallel.dp_replicate=4 does not divide dp=6: each replica is an equal number of "
            "ranks. "
            "Set parallel.dp_replicate "
            "to one of [1, 2, 3, 6].",
        ),
        (
            ParallelConfig(dp_replicate=0, zero=2),
            "parallel.dp_replicate=0 does not divide dp=6: each replica is an equal number of "
            "ranks. "
            "Set parallel.dp_replicate "
            "to one of [1, 2, 3, 6].",
        ),
        (
            ParallelConfig(reduce_dtype="bf16"),
            "parallel.reduce_dtype=bf16 with parallel.zero=0: bf16 gradients are added "
            "in fp32 by the rank that owns the shard, and without ZeRO there are no "
            "shards. Set parallel.zero=1, or parallel.reduce_dtype=fp32.",
        ),
    ],
)
def test_invalid_zero_settings_are_rejected(parallel: ParallelConfig, text: str) -> None:
    assert zero_problems(parallel, 6) == [text]


@pytest.mark.parametrize(
    ("cp", "replicas", "fix"), [(1, 1, "."), (1, 3, ", or parallel.dp_replicate=1."), (2, 1, None)]
)
def test_bf16_reduction_without_sharding_is_rejected_and_zero_without_shards_is_noted(
    cp: int, replicas: int, fix: str | None
) -> None:
    parallel = ParallelConfig(zero=1, cp=cp, dp_replicate=replicas, reduce_dtype="bf16")
    place = f"with dp={replicas}, parallel.cp=1 and parallel.dp_replicate={replicas}"
    problem = (
        f"parallel.reduce_dtype=bf16 {place}: one rank owns each whole gradient, so none "
        "is sent in bf16. Set "
    )
    note = f"parallel.zero=1 shards nothing: {place}, one rank owns everything"
    assert zero_problems(parallel, replicas) == (
        [] if fix is None else [f"{problem}parallel.reduce_dtype=fp32{fix}"]
    )
    assert zero_notes(parallel, replicas) == ([] if fix is None else [note])
    # the same run starts on a laptop
    assert zero_problems(replace(parallel, reduce_dtype="fp32"), replicas) == []


def test_no_note_without_anything_to_shard() -> None:
    assert zero_notes(ParallelConfig(), 1) == zero_notes(ParallelConfig(zero=3), 2) == []


# --- slices of whole matrices


def test_units_are_whole_in_slices_of_about_equal_length() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        dp, numel = rng.randint(2, 5), rng.choice([1, 500, 5000, None])
        layer = rng.choices([300, 500, 700, 1100], k=rng.randint(2, 5))
        sizes = [40, *layer * 2 * dp * rng.randint(2, 4), 900]
        kinds = ["other", *["matrix"] * (len(sizes) - 2), "other"]
        runs = [[number, number + 1] for number in range(1, len(sizes) - 2, len(layer))]
        plan = plan_buckets(
            sizes,
            bucket_numel=numel,
            end_align=64 * dp,
            contiguous=runs,
            kinds=kinds,
            whole_in={"matrix": dp},
        )
        assert [slot.stop - slot.start for slot in plan.slots] == sizes, seed
        in_order = sorted(spans(plan))
        assert all(stop <= start for (_, stop), (start, _) in pairwise(in_order)), seed
        for first, second in runs:
            assert plan.slots[first].stop == plan.slots[second].start, seed
        for rank in range(dp):
            parts = local_bucket_parts(plan, [(rank, dp)] * len(plan.buckets))
            matrices = [part for part in parts if kinds[part.number] == "matrix"]
            assert all(part.flat == (0, sizes[part.number]) for part in matrices), seed
        for bucket in plan.buckets:
            if kinds[bucket.members[0]] == "matrix":
                lengths = sum(sizes[number] for number in bucket.members)
                padding = 64 * (len(bucket.members) + dp)
                assert bucket.stop - bucket.start <= LONGEST_SLICE * (lengths + padding), seed


def test_matrices_that_cannot_be_divided_are_rejected() -> None:
    with pytest.raises(
        PlanError, match=r"bucket_alignment=matrices: 3 weight matrices.*2 ranks.*1\.33"
    ):
        plan_buckets([640] * 3, bucket_numel=1, kinds=["a"] * 3, whole_in={"a": 2})


def test_alignment_to_matrices_needs_slices_of_buckets() -> None:
    for zero in (0, 3):
        (problem,) = zero_problems(ParallelConfig(zero=zero, bucket_alignment="matrices"), 2)
        assert problem.startswith(f"parallel.bucket_alignment=matrices with parallel.zero={zero}")
        assert "parallel.zero=1" in problem

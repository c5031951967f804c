"""Buckets of model steps: which batch dimensions have graphs, and which of them covers a batch."""

import random
from dataclasses import replace

import pytest

from megalith.plan.serving.graph_buckets import (
    BatchDimensions,
    BatchLimits,
    BucketPolicy,
    EagerReason,
    Prefills,
    add_prefill,
    covers,
    is_valid_bucket,
    match_bucket,
    plan_decode_buckets,
    plan_graph_buckets,
    plan_mixed_buckets,
    plan_token_ladder,
    snap_chunk,
)


@pytest.mark.parametrize(
    ("multiple", "num_entries", "max_tokens", "ladder"),
    [
        (1, 8, 128, [128, 64, 32, 16, 8, 4, 2, 1]),
        (2, 8, 128, [128, 64, 32, 16, 8, 4, 2]),
        (1, 4, 100, [100, 50, 24, 1]),
        (4, None, 512, [512, 256, 128, 64, 32, 16, 8, 4]),
        (1, 1, 64, [64]),
        (1, None, 1, [1]),
    ],
)
def test_exponential_ladders_are_those_of_the_specification(
    multiple: int, num_entries: int | None, max_tokens: int, ladder: list[int]
) -> None:
    assert plan_token_ladder(max_tokens, num_entries=num_entries, multiple=multiple) == ladder


def test_linear_ladders_are_those_of_the_specification() -> None:
    ladder = plan_token_ladder(512, distribution="linear")
    assert len(ladder) == 51
    assert ladder[::-1] == [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    assert plan_token_ladder(512, distribution="linear", multiple=4)[-1] == 4
    assert plan_token_ladder(64, num_entries=4, distribution="linear") == [64, 48, 32, 16]
    assert plan_token_ladder(10, num_entries=4, distribution="linear", multiple=2) == [10, 6, 4]


def test_ladders_have_multiples_up_to_the_largest_count() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        multiple = draw.choice([1, 2, 3, 4, 8])
        largest = multiple * draw.randint(1, 90)
        num_entries = draw.choice([None, 1, 2, 5])
        ladder = plan_token_ladder(
            largest,
            num_entries=num_entries,
            multiple=multiple,
            distribution=draw.choice(["exponential", "linear"]),
        )
        assert ladder == sorted(set(ladder), reverse=True), seed
        assert ladder[0] == largest, seed
        assert all(count % multiple == 0 and count > 0 for count in ladder), seed
        assert num_entries is None or len(ladder) <= num_entries, seed


def test_decode_buckets_have_as_many_rows_as_tokens_allow() -> None:
    limits = BatchLimits(max_rows=8, max_tokens=64, max_model_len=32, num_drafts=2)
    buckets = plan_decode_buckets(limits, BucketPolicy())
    # one and two rows with all drafts are among them
    assert sorted(buckets) == [
        (1, 0, 1),
        (2, 0, 2),
        (3, 0, 3),
        (6, 0, 6),
        (12, 0, 8),
        (24, 0, 8),
    ]
    assert all(is_valid_bucket(bucket, limits) for bucket in buckets)
    sharded = BatchLimits(max_rows=8, max_tokens=64, max_model_len=32, num_drafts=2, num_shards=4)
    buckets = plan_decode_buckets(sharded, BucketPolicy())
    assert sorted(bucket.num_tokens for bucket in buckets) == [4, 8, 12, 24]
    assert plan_decode_buckets(limits, BucketPolicy(num_buckets=1)) == {(24, 0, 8)}
    few = BatchLimits(max_rows=3, max_tokens=3, max_model_len=32, num_shards=4)
    assert plan_graph_buckets(few, BucketPolicy(prefills="all")) == ()


def test_all_decode_steps_have_buckets() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        limits = BatchLimits(
            max_rows=draw.randint(1, 9),
            max_tokens=draw.randint(9, 30),
            max_model_len=40,
            num_drafts=draw.randint(0, 4),
        )
        num_rows = draw.randint(1, limits.max_rows)
        num_tokens = draw.randint(num_rows, num_rows * (limits.num_drafts + 1))
        if num_tokens <= limits.max_tokens:
            buckets = plan_graph_buckets(limits, BucketPolicy(num_buckets=draw.choice([None, 1])))
            match = match_bucket(buckets, BatchDimensions(num_tokens, 0, num_rows))
            assert not isinstance(match, str), seed


def test_mixed_buckets_combine_token_counts_with_numbers_of_prefills() -> None:
    limits = BatchLimits(max_rows=6, max_tokens=32, max_model_len=100, num_drafts=1)
    assert plan_mixed_buckets(limits, BucketPolicy()) == set()
    mixed = plan_mixed_buckets(limits, BucketPolicy(prefills="mixed", num_buckets=1))
    assert mixed == {(12, 1, 5), (12, 2, 4), (12, 4, 2), (12, 6, 0)}
    policy = BucketPolicy(prefills="mixed", num_buckets=1, max_tokens=20)
    assert {bucket.num_tokens for bucket in plan_mixed_buckets(limits, policy)} == {20}
    policy = BucketPolicy(prefills="mixed", num_buckets=1, max_tokens=500)
    assert {bucket.num_tokens for bucket in plan_mixed_buckets(limits, policy)} == {32}
    every = plan_mixed_buckets(limits, BucketPolicy(prefills="all"))
    assert max(every).num_tokens == 32 and min(every).num_tokens == 2
    linear = BucketPolicy(prefills="all", distribution="linear", num_buckets=2)
    assert plan_mixed_buckets(limits, linear) == {(32, 6, 0), (16, 6, 0)}
    short = replace(limits, max_model_len=4)
    assert (32, 1, 5) not in plan_mixed_buckets(short, BucketPolicy(prefills="all"))


def test_buckets_with_most_prefill_tokens_are_captured_first() -> None:
    limits = BatchLimits(max_rows=4, max_tokens=16, max_model_len=64)
    buckets = plan_graph_buckets(limits, BucketPolicy(prefills="all"))
    prefill_tokens = [bucket.num_tokens for bucket in buckets if bucket.num_prefills]
    assert prefill_tokens == sorted(prefill_tokens, reverse=True)
    assert all(bucket.num_prefills for bucket in buckets[: len(prefill_tokens)])
    assert buckets[0].num_tokens == 16 and buckets[-1] == (1, 0, 1)
    assert len(set(buckets)) == len(buckets)


def draw_batch(draw: random.Random, limits: BatchLimits) -> BatchDimensions:
    """Dimensions that the scheduler may plan, or a few more tokens or rows."""
    num_rows = draw.randint(0, limits.max_rows + 1)
    num_prefills = draw.choice([0, draw.randint(0, num_rows)])
    num_decodes = num_rows - num_prefills
    most = num_decodes * (limits.num_drafts + 1) + num_prefills * 20
    return BatchDimensions(draw.randint(num_rows, max(most, num_rows)), num_prefills, num_decodes)


def test_matched_bucket_covers_the_batch_and_is_the_smallest_one() -> None:
    reasons = set[str]()
    for seed in range(2000):
        draw = random.Random(seed)
        limits = BatchLimits(
            max_rows=draw.randint(1, 9),
            max_tokens=draw.randint(9, 64),
            max_model_len=40,
            num_drafts=draw.choice([0, 2]),
            num_shards=draw.choice([1, 1, 2]),
        )
        prefills: Prefills = draw.choice(["none", "mixed", "all"])
        policy = BucketPolicy(prefills=prefills, num_buckets=draw.choice([None, 1, 3]))
        buckets, batch = plan_graph_buckets(limits, policy), draw_batch(draw, limits)
        match = match_bucket(buckets, batch)
        covering = [bucket for bucket in buckets if covers(bucket, batch)]
        if isinstance(match, str):
            reasons.add(match)
            assert not covering or batch.num_tokens == 0, seed
            continue
        assert match == min(covering), seed
        assert match.num_tokens >= batch.num_tokens > 0 and match.num_rows >= batch.num_rows, seed
        assert match.is_decode_only == batch.is_decode_only, seed
        assert match.num_prefills >= batch.num_prefills, seed
        assert match.num_tokens % limits.num_shards == 0, seed
    assert reasons == {"empty", "oversize", "prefill", "no_bucket"}


def test_all_batches_of_the_scheduler_have_buckets_with_all_prefills() -> None:
    for seed in range(500):
        draw = random.Random(seed)
        limits = BatchLimits(max_rows=draw.randint(1, 9), max_tokens=32, max_model_len=40)
        batch = draw_batch(draw, limits)
        if 0 < batch.num_tokens <= 32 and batch.num_rows <= limits.max_rows:
            buckets = plan_graph_buckets(limits, BucketPolicy(prefills="all"))
            assert not isinstance(match_bucket(buckets, batch), str), (seed, batch)


@pytest.mark.parametrize(
    ("batch", "shares_experts", "expected"),
    [
        ((2, 0, 2), False, BatchDimensions(4, 0, 4)),
        ((12, 1, 5), False, BatchDimensions(16, 4, 2)),  # decodes in prefill slots
        ((4, 0, 4), True, BatchDimensions(4, 0, 4)),
        ((12, 1, 2), True, "prefill"),  # on any of the ranks
        ((5, 0, 2), False, "no_bucket"),
        ((17, 1, 2), False, "oversize"),
        ((0, 0, 0), False, "empty"),
    ],
)
def test_rules_of_matching(
    batch: tuple[int, int, int],
    shares_experts: bool,
    expected: BatchDimensions | EagerReason,
) -> None:
    buckets = [BatchDimensions(16, 4, 2), BatchDimensions(4, 0, 4), BatchDimensions(16, 2, 0)]
    dimensions = BatchDimensions(*batch)
    match = match_bucket(buckets, dimensions, shares_experts=shares_experts)
    assert match == expected


def test_chunks_have_sizes_of_buckets_where_one_fits() -> None:
    limits = BatchLimits(max_rows=8, max_tokens=64, max_model_len=500)
    buckets = plan_graph_buckets(limits, BucketPolicy(prefills="all"))
    for seed in range(300):
        draw = random.Random(seed)
        num_decodes = draw.randint(0, 7)
        batch, largest = BatchDimensions(num_decodes, 0, num_decodes), draw.randint(1, 60)
        smallest = draw.randint(1, largest)
        size = snap_chunk(buckets, batch, smallest=smallest, largest=largest)
        assert smallest <= size <= largest
        fitting = [
            each
            for each in range(smallest, largest + 1)
            for match in [match_bucket(buckets, add_prefill(batch, each))]
            if not isinstance(match, str) and match.num_tokens == num_decodes + each
        ]
        assert size == max(fitting, default=largest), seed


def test_dimensions_are_written_as_tokens_prefills_decodes() -> None:
    assert str(BatchDimensions(64, 2, 6)) == "64x2x6"
    assert sorted([BatchDimensions(8, 1, 1), BatchDimensions(8, 0, 8)])[0].num_prefills == 0

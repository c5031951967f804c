"""Tests of load-balanced batching: every document once, packs within the limit, ranks equal."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megalith.config.data import DataConfig, SFTConfig
from megalith.config.model import AttentionConfig, ModelConfig
from megalith.config.parallel import ContextConfig, ParallelConfig, PipelineConfig
from megalith.config.train import LoopConfig
from megalith.errors import PlanError
from megalith.plan.batch_assignment import (
    BatchAssignment,
    DocumentCost,
    MicrobatchCounts,
    SampleAssignment,
    TokenBudget,
    assign_balanced_rows,
    budget_problems,
    build_token_budget,
    count_microbatches_of_longest,
    document_cost,
    imbalance,
    smallest_valid_num_microbatches,
)
from megalith.plan.costs import step_flops
from megalith.plan.layers.base import num_attended_pairs
from megalith.plan.schedule import schedule_problems
from tests.cases import loop_over

MODEL = ModelConfig(
    vocab_size=61, hidden_size=24, num_layers=4, num_heads=4, num_kv_heads=2, ffn_hidden_size=20
)
PACKED = LoopConfig(steps=1, global_batch_size=12, seq_len=32, tokens_per_microbatch=64)


def lengths_of(seed: int, count: int, longest: int) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(2.0, 1.0, count)
    return [int(length) for length in np.clip(np.rint(drawn), 1, longest)]


def costs_of(assignment: BatchAssignment, budget: TokenBudget, lengths: Sequence[int]) -> list[int]:
    return [sum(budget.cost(lengths[number]) for number in pack) for pack in assignment.packs]


@loop_over("seed", range(40))
def test_every_document_is_assigned_once_and_ranks_differ_by_less_than_a_pack(
    seed: int,
) -> None:
    draw = np.random.default_rng(seed)
    dp, count, longest = (int(draw.integers(1, most)) for most in (6, 90, 70))
    longest += 1
    budget = TokenBudget(
        capacity=longest + int(draw.integers(0, 200)) + 8,
        longest=longest,
        multiple=int(draw.choice([1, 4])),
        cost=DocumentCost(int(draw.integers(0, 9)), int(draw.integers(0, 3))),
    )
    lengths = lengths_of(seed, count, longest)
    assignment = budget.assign_batches(lengths, dp)
    assert sorted(number for pack in assignment.packs for number in pack) == list(range(count))
    assert all(
        sum(budget.padded(lengths[n]) for n in pack) <= budget.capacity for pack in assignment.packs
    )
    assert {len(assignment.rank_packs(rank)) for rank in range(dp)} == {assignment.num_microbatches}
    costs = costs_of(assignment, budget, lengths)
    assert assignment.costs == tuple(sum(costs[rank::dp]) for rank in range(dp))
    within = max(
        max(costs[at : at + dp]) - min(costs[at : at + dp]) for at in range(0, len(costs), dp)
    )
    assert max(assignment.costs) - min(assignment.costs) <= within <= max(costs, default=0)
    assert (
        assignment == budget.assign_batches(lengths, dp)
        and assignment.digest() == budget.assign_batches(lengths, dp).digest()
    )


def test_larger_packs_are_fewer_and_ranks_are_balanced() -> None:
    lengths = lengths_of(3, 600, 500)
    counts = []
    for capacity, bound in ((512, 0.03), (1024, 0.05), (4096, 0.1)):
        assignment = TokenBudget(
            capacity=capacity, longest=500, cost=document_cost(MODEL)
        ).assign_batches(lengths, 4)
        counts.append(assignment.num_microbatches)
        in_order = [sum(map(document_cost(MODEL), lengths[rank::4])) for rank in range(4)]
        assert assignment.imbalance < bound < imbalance(in_order)
    assert counts[0] > counts[1] > counts[2]


def test_too_few_packs_are_split_for_balance_and_the_rest_are_empty() -> None:
    budget = TokenBudget(capacity=100, longest=60)
    assert budget.assign_batches([10, 20, 30], 3).packs == ((2,), (1,), (0,))
    assert budget.assign_batches([10, 20, 30], 2).packs == ((0, 1), (2,))
    assert budget.assign_batches([60], 3).packs == ((0,), (), ())
    assert (
        budget.assign_batches([], 2).packs == ((), ())
        and budget.assign_batches([], 2).imbalance == 0.0
    )


def test_pipeline_gets_the_required_packs_and_evaluation_the_fewest() -> None:
    pipeline = PipelineConfig(vpp=2)
    budget = TokenBudget(capacity=40, longest=40, pipeline=pipeline, pp=4)
    assert budget.assign_batches([40] * 5, 1).num_microbatches == 8
    assert budget.assign_batches([40] * 5, 1, forward_only=True).num_microbatches == 5
    assert [smallest_valid_num_microbatches(pipeline, 2, least) for least in (0, 1, 3, 4, 5)] == [
        2,
        2,
        4,
        4,
        6,
    ]
    assert smallest_valid_num_microbatches(PipelineConfig(vpp=2, group=5), 2, 6) == 7
    assert smallest_valid_num_microbatches(PipelineConfig(), 4, 3) == 3
    with pytest.raises(
        PlanError,
        match="6 microbatches do not fit the pipeline. Use other settings: parallel.pipeline",
    ):
        smallest_valid_num_microbatches(PipelineConfig(vpp=2, group=2), 4, 6)


def test_a_document_longer_than_a_pack_is_rejected() -> None:
    with pytest.raises(PlanError, match="do not fit rows of 16 tokens. Use lengths of 1 to 16"):
        TokenBudget(capacity=16, longest=16).assign_batches([3, 17], 1)


@pytest.mark.parametrize("window", [None, 3])
def test_costs_are_the_operations_of_a_step(window: int | None) -> None:
    model = replace(MODEL, attention=AttentionConfig(window=window, window_layers=(True, False)))
    for length in (1, 2, 7, 40):
        window_pair = None if window is None else num_attended_pairs(length, model.attention)
        flops = step_flops(model, tokens=length, squared_lengths=length**2, windowed=window_pair)
        assert document_cost(model)(length) == flops


def test_digests_of_different_assignments_differ() -> None:
    assignments = [
        BatchAssignment(packs, 1, (0,))
        for packs in (((0, 1), (2,)), ((0,), (1, 2)), ((0, 1, 2),), ((0, 1), (2,), ()))
    ]
    assert len({assignment.digest() for assignment in assignments}) == 4 and all(
        0 <= assignment.digest() < 1 << 24 for assignment in assignments
    )


def test_padding_is_split_so_that_it_costs_little() -> None:
    assert TokenBudget(capacity=4096, longest=2048).filler(150) == (64, 64, 22)
    assert TokenBudget(capacity=48, longest=12, multiple=8).filler(40) == (8,) * 5
    assert TokenBudget(capacity=48, longest=12).filler(0) == ()


@loop_over("seed", range(10))
def test_rows_are_balanced_over_ranks(seed: int) -> None:
    costs = lengths_of(seed, 24, 500)
    assigned = assign_balanced_rows(costs, dp=2, rows=3)
    assert sorted(row for rank in assigned for rows in rank for row in rows) == list(range(24))
    assert {len(rows) for rank in assigned for rows in rank} == {3}
    totals = [sum(costs[row] for rows in rank for row in rows) for rank in assigned]
    ordered = sorted(costs, reverse=True)
    assert abs(totals[0] - totals[1]) <= max(
        a - b for a, b in zip(ordered[::2], ordered[1::2], strict=True)
    )


@loop_over("seed", range(10))
def test_rows_that_do_not_divide_are_balanced_with_unequal_shares(seed: int) -> None:
    rng = random.Random(seed)
    count, dp, rows = rng.randint(1, 30), rng.randint(1, 7), rng.randint(1, 4)
    assigned = assign_balanced_rows(lengths_of(seed, count, 500), dp=dp, rows=rows)
    assert sorted(row for rank in assigned for part in rank for row in part) == list(range(count))
    shares = [sum(map(len, rank)) for rank in assigned]
    assert len(shares) == dp and max(shares) - min(shares) <= 1
    assert all(len(part) == rows for rank in assigned for part in rank[:-1])


@loop_over("seed", range(40))
def test_every_sample_is_assigned_once_and_in_the_same_microbatch_under_any_dp(seed: int) -> None:
    rng = random.Random(seed)
    count, rows, dp = rng.randint(1, 60), rng.randint(1, 5), rng.randint(1, 9)
    pipeline = rng.choice([PipelineConfig(), PipelineConfig(vpp=2)])
    counts = MicrobatchCounts(equal=rng.random() < 0.5, pipeline=pipeline, pp=3)
    assignment = SampleAssignment(
        num_samples=count, micro_batch_size=rows, num_ranks=dp, counts=counts
    )
    local = [assignment.list_microbatches(rank) for rank in range(dp)]
    parts = sorted(tuple(part) for rank in local for part in rank if part)
    one_rank = SampleAssignment(num_samples=count, micro_batch_size=rows, num_ranks=1)
    assert parts == [tuple(part) for part in one_rank.list_microbatches(0)]
    assert sum(parts, ()) == tuple(range(count)) and len(parts) == assignment.num_filled
    numbers = [len(rank) for rank in local]
    assert numbers == [assignment.count_microbatches(rank) for rank in range(dp)]
    assert min(numbers) >= 1 and (max(numbers) == min(numbers) or not counts.equal)
    for number in numbers:
        assert not schedule_problems(pipeline, pp=3, num_microbatches=number)
    assert assignment.is_even == (assignment.describe_idle_ranks() == "")


def test_cost_of_unequal_shares_is_described() -> None:
    def describe(num_samples: int, **settings: Any) -> str:
        return SampleAssignment(num_samples=num_samples, **settings).describe_idle_ranks()

    assert describe(12, micro_batch_size=2, num_ranks=3) == ""
    assert describe(7, micro_batch_size=2, num_ranks=3) == (
        "2 of 3 ranks idle for 1 of 2 microbatches, the last microbatch has 1 of 2 rows"
    )
    interleaved = MicrobatchCounts(equal=True, pipeline=PipelineConfig(vpp=2), pp=4)
    assert describe(6, micro_batch_size=1, num_ranks=3, counts=interleaved) == (
        "2 of 4 microbatches are empty on all ranks"
    )


def test_token_budget_is_that_of_the_run() -> None:
    assert (
        build_token_budget(replace(PACKED, tokens_per_microbatch=None), ParallelConfig(), MODEL)
        is None
    )
    parallel = ParallelConfig(cp=2, tp=2, sp=True, context=ContextConfig(slicing="document"))
    budget = build_token_budget(PACKED, parallel, MODEL)
    assert budget is not None and (budget.capacity, budget.multiple, budget.longest) == (128, 8, 32)
    rows = replace(PACKED, tokens_per_microbatch=None, micro_batch_size=2)
    assert count_microbatches_of_longest(rows, ParallelConfig(), 3) == 2
    assert count_microbatches_of_longest(PACKED, ParallelConfig(), 3) == 2
    interleaved = ParallelConfig(pp=4, pipeline=PipelineConfig(vpp=2))
    assert count_microbatches_of_longest(PACKED, interleaved, 1) == 8


SP, CP = ParallelConfig(tp=2, sp=True), ParallelConfig(cp=2)
TEXT, TALKS = DataConfig(path=("a",)), DataConfig(sft=SFTConfig(path=("a",)))
WRONG = {
    "train.micro_batch_size=2 with train.tokens_per_microbatch=64: a microbatch is one pack. Set": (
        replace(PACKED, micro_batch_size=2),
        SP,
        TEXT,
    ),
    "train.tokens_per_microbatch=63 is not divisible by parallel.tp=2 = 2, over which "
    "packs are split. Set train.tokens_per_microbatch to 64": (
        replace(PACKED, tokens_per_microbatch=63),
        SP,
        TEXT,
    ),
    "train.tokens_per_microbatch=33 is not divisible by 2 = 2": (
        replace(PACKED, tokens_per_microbatch=33),
        CP,
        TEXT,
    ),
    r"train.tokens_per_microbatch=14 \* parallel.cp=2 = 28 tokens do not hold a document of "
    r"train.seq_len=32. Set train.tokens_per_microbatch to 16 or more, or train.seq_len to 28 or "
    r"less": (
        replace(PACKED, tokens_per_microbatch=14),
        CP,
        TEXT,
    ),
    "data.document_masking=True: a sample is a whole document, shuffled in each epoch. Remove it": (
        PACKED,
        SP,
        replace(TEXT, document_masking=True),
    ),
    "data.sampler=cyclic: a sample is a whole document": (
        PACKED,
        SP,
        replace(TEXT, sampler="cyclic"),
    ),
    "data.sft.packing=row: conversations are packed per step. Remove": (
        PACKED,
        SP,
        replace(TALKS, sft=replace(TALKS.sft, packing="row")),
    ),
    "train.balance_rows=true with train.tokens_per_microbatch=64, which balances packs "
    "already. Remove train.balance_rows": (
        replace(PACKED, balance_rows=True),
        SP,
        TALKS,
    ),
    "train.balance_rows=true without data.sft: .* Set train.balance_rows=false": (
        replace(PACKED, tokens_per_microbatch=None, balance_rows=True),
        SP,
        TEXT,
    ),
    "data.overlong=drop without train.tokens_per_microbatch: .* set train.tokens_per_microbatch": (
        replace(PACKED, tokens_per_microbatch=None),
        SP,
        replace(TEXT, overlong="drop"),
    ),
}


@pytest.mark.parametrize("text", WRONG)
def test_conflicting_settings_of_token_budget_are_reported(text: str) -> None:
    problems = budget_problems(*WRONG[text])
    assert len(problems) == 1
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(problems[0])


def test_compatible_settings_have_no_problem() -> None:
    for data in (TEXT, TALKS, replace(TEXT, overlong="truncate")):
        assert all(
            not budget_problems(PACKED, parallel, data) for parallel in (SP, CP, ParallelConfig())
        )
    assert not budget_problems(
        replace(PACKED, tokens_per_microbatch=None, balance_rows=True), SP, TALKS
    )

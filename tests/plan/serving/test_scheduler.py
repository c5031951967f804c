"""Scheduler: token budget, order of service, preemption, forks, batching policies, errors."""

import time
from collections.abc import Iterable
from dataclasses import replace
from statistics import median

import pytest

from megalith.errors import DataError, PlanError
from megalith.plan.serving.cache_layout import AttentionView
from megalith.plan.serving.scheduler import (
    PlannedRow,
    Scheduler,
    SchedulerConfig,
    SequenceState,
    StepPlan,
)
from tests.cases import least_of

FULL = AttentionView()
BASE = SchedulerConfig(
    num_blocks=100,
    block_size=4,
    groups=(FULL,),
    max_num_seqs=8,
    max_num_batched_tokens=64,
    min_prefill_chunk_tokens=8,
)


def add(
    scheduler: Scheduler, seq_id: int, prompt: Iterable[int], total: int = 0, **options: object
) -> SequenceState:
    """Add a sequence with this prompt; by default it may generate 20 tokens."""
    tokens = list(prompt)
    state = SequenceState(seq_id, tokens, len(tokens), **options)  # type: ignore[arg-type]  # options of the test
    scheduler.add(state, max_total_tokens=total or len(tokens) + 20)
    return state


def step(scheduler: Scheduler, token: int = 7) -> StepPlan:
    """Run one step and append a token to every sequence that samples."""
    plan = scheduler.schedule()
    scheduler.complete(plan)
    for row in plan.rows:
        if row.samples:
            scheduler.append_token(row.seq_id, token)
    scheduler.check()
    return plan


def spans(plan: StepPlan) -> list[tuple[int, int, int]]:
    """Return (request id, start, count) of each row."""
    return [(row.seq_id, row.start, row.count) for row in plan.rows]


def test_decodes_come_first_and_prefills_share_the_rest_of_the_budget() -> None:
    scheduler = Scheduler(replace(BASE, max_num_batched_tokens=32))
    add(scheduler, 0, range(10))
    add(scheduler, 1, range(50, 60))
    assert spans(step(scheduler)) == [(0, 0, 10), (1, 0, 10)]
    for seq_id in (2, 3, 4):
        add(scheduler, seq_id, range(100 * seq_id, 100 * seq_id + 20))
    plan = step(scheduler)
    assert spans(plan) == [(0, 10, 1), (1, 10, 1), (2, 0, 20), (3, 0, 10)]
    assert [row.samples for row in plan.rows] == [True, True, True, False]
    plan = step(scheduler)
    assert spans(plan) == [(0, 11, 1), (1, 11, 1), (2, 20, 1), (3, 10, 10), (4, 0, 19)]
    assert spans(step(scheduler))[-1] == (4, 19, 1)  # the last chunk may be small
    assert plan.num_tokens == 32


def test_chunk_below_the_minimum_is_not_scheduled_after_other_rows() -> None:
    scheduler = Scheduler(replace(BASE, max_num_batched_tokens=16))
    add(scheduler, 0, range(10))
    add(scheduler, 1, range(50, 80))
    assert spans(step(scheduler)) == [(0, 0, 10)]  # 6 tokens are left, the minimum is 8
    assert spans(step(scheduler)) == [(0, 10, 1), (1, 0, 15)]


@pytest.mark.parametrize("max_num_seqs", [3, 4])
def test_first_sequence_prefills_even_if_decodes_leave_few_tokens(max_num_seqs: int) -> None:
    config = replace(BASE, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs)
    scheduler = Scheduler(config)
    for seq_id in range(3):
        add(scheduler, seq_id, [seq_id], priority=1)
    while scheduler.make_stats().num_running < 3:
        step(scheduler)
    add(scheduler, 9, range(20))
    plan = step(scheduler)
    assert spans(plan)[-1] == (9, 0, 1)
    assert plan.preempted == ((2,) if max_num_seqs == 3 else ())


def test_prefill_limit_of_one_step_does_not_apply_to_decodes() -> None:
    scheduler = Scheduler(BASE)
    add(scheduler, 0, range(10))
    add(scheduler, 1, range(50, 90))
    plan = scheduler.schedule(max_prefill_tokens=12)
    assert spans(plan) == [(0, 0, 10)]
    scheduler.discard(plan)
    assert spans(step(scheduler)) == [(0, 0, 10), (1, 0, 40)]
    add(scheduler, 2, range(20))
    plan = scheduler.schedule(max_prefill_tokens=9)
    assert spans(plan)[:2] == [(0, 10, 1), (1, 40, 1)]
    assert sum(count for _, _, count in spans(plan)[2:]) <= 9


def decode_with_drafts(scheduler: Scheduler, num_drafts: int, *seq_ids: int) -> StepPlan:
    return scheduler.schedule(drafts={seq_id: [1] * num_drafts for seq_id in seq_ids})


def test_drafts_get_the_tokens_that_decodes_and_prefills_leave() -> None:
    scheduler = Scheduler(replace(BASE, max_num_batched_tokens=16))
    for seq_id in range(3):
        add(scheduler, seq_id, [seq_id], 40)
    step(scheduler)
    plan = decode_with_drafts(scheduler, 5, 0, 1, 2)
    assert [(row.count, len(row.draft_ids)) for row in plan.rows] == [(6, 5), (6, 5), (4, 3)]
    scheduler.discard(plan)
    add(scheduler, 3, range(60, 72))
    plan = decode_with_drafts(scheduler, 5, 0, 1, 2)
    assert spans(plan) == [(0, 1, 2), (1, 1, 1), (2, 1, 1), (3, 0, 12)]
    scheduler.check()


def test_drafts_take_free_blocks_only_and_preempt_no_sequence() -> None:
    scheduler = Scheduler(replace(BASE, num_blocks=5, prefix_caching=False))
    for seq_id in range(2):
        add(scheduler, seq_id, range(100 * seq_id, 100 * seq_id + 6), 12)
    step(scheduler)
    plan = decode_with_drafts(scheduler, 7, 0, 1)  # one block of 4 tokens is free
    assert [(row.count, row.draft_ids) for row in plan.rows] == [(6, (1,) * 5), (2, (1,))]
    assert not plan.preempted
    scheduler.complete(plan)
    assert scheduler.make_stats().num_used_blocks == 5
    for token in (1, 1, 9):
        scheduler.append_token(0, token, is_cached=token == 1)
    scheduler.append_token(1, 9)
    assert scheduler.make_stats().num_used_blocks == 5  # 9 and 7 tokens are computed
    scheduler.check()


def test_blocks_of_rejected_drafts_are_released_and_never_cached() -> None:
    scheduler = Scheduler(BASE)
    state = add(scheduler, 0, range(6), 40)
    step(scheduler)
    plan = decode_with_drafts(scheduler, 7, 0)
    scheduler.complete(plan)
    assert scheduler.make_stats().num_used_blocks == 4
    scheduler.append_token(0, 9)
    assert (state.num_computed_tokens, state.num_registered_blocks) == (7, 1)
    assert scheduler.make_stats().num_used_blocks == 2
    plan = decode_with_drafts(scheduler, 7, 0)
    scheduler.complete(plan)
    for token in (1, 1, 3):
        scheduler.append_token(0, token, is_cached=token == 1)
    assert (state.num_computed_tokens, state.num_registered_blocks) == (10, 2)
    scheduler.check()


def test_drafts_are_counted_by_position() -> None:
    scheduler = Scheduler(BASE)
    for num_drafts, num_accepted in ((3, 1), (2, 2), (4, 0)):
        scheduler.count_drafts(num_drafts, num_accepted)
    stats = scheduler.make_stats()
    assert stats.num_drafts == 3
    assert stats.num_draft_tokens_per_pos == (3, 3, 2, 1)
    assert stats.num_accepted_tokens_per_pos == (2, 1, 0, 0)


def test_order_of_service_is_priority_then_arrival() -> None:
    scheduler = Scheduler(replace(BASE, max_num_batched_tokens=30))
    for seq_id, priority in ((0, 1), (1, 0), (2, 0), (3, -1)):
        add(scheduler, seq_id, range(100 * seq_id, 100 * seq_id + 20), priority=priority)
    assert spans(step(scheduler)) == [(3, 0, 20), (1, 0, 10)]


def test_youngest_sequence_of_the_lowest_priority_is_preempted() -> None:
    scheduler = Scheduler(replace(BASE, num_blocks=6, prefix_caching=False))
    for seq_id, priority in ((0, 0), (1, 1), (2, 1)):
        add(
            scheduler,
            seq_id,
            range(100 * seq_id, 100 * seq_id + 8),
            24,
            priority=priority,
        )
    assert len(step(scheduler).rows) == 3
    plan = step(scheduler)
    assert plan.preempted == (2,)
    assert spans(plan) == [(0, 8, 1), (1, 8, 1)]
    for _ in range(3):
        step(scheduler)
    assert step(scheduler).preempted == (1,)
    assert scheduler.make_stats().num_preemptions == 2


def test_generated_tokens_are_prefilled_again_after_a_preemption() -> None:
    scheduler = Scheduler(replace(BASE, num_blocks=5, prefix_caching=False))
    add(scheduler, 0, range(8), 20)
    state = add(scheduler, 1, range(50, 55), 20)
    while not state.num_preemptions:
        step(scheduler)
    assert (state.num_computed_tokens, state.block_tables) == (0, [[]])
    assert state.token_ids[:5] == list(range(50, 55))
    scheduler.finish(0)
    plan = step(scheduler)
    assert spans(plan) == [(1, 0, len(state.token_ids) - 1)]
    assert plan.rows[0].samples


def test_preempted_sequence_is_resumed_before_later_arrivals_of_its_priority() -> None:
    scheduler = Scheduler(replace(BASE, num_blocks=5, prefix_caching=False))
    add(scheduler, 0, range(8), 20)
    state = add(scheduler, 1, range(50, 58), 20)
    while not state.num_preemptions:
        step(scheduler)
    add(scheduler, 2, [1])  # fits, but came later
    add(scheduler, 3, [1], priority=1)
    assert [row.seq_id for row in step(scheduler).rows] == [0]
    scheduler.finish(0)
    assert sorted(row.seq_id for row in step(scheduler).rows) == [1, 2, 3]


def test_waiting_sequence_preempts_only_lower_priorities() -> None:
    scheduler = Scheduler(replace(BASE, max_num_seqs=2))
    add(scheduler, 0, range(8))
    add(scheduler, 1, range(50, 58), priority=1)
    step(scheduler)
    add(scheduler, 2, range(70, 78), priority=0)
    plan = step(scheduler)
    assert plan.preempted == (1,)
    assert spans(plan) == [(0, 8, 1), (2, 0, 8)]
    add(scheduler, 3, range(90, 98), priority=0)
    assert not step(scheduler).preempted


def test_admission_reserves_blocks_for_prompts_that_are_not_yet_prefilled() -> None:
    config = replace(BASE, num_blocks=12, max_num_batched_tokens=16, batching="static")
    scheduler = Scheduler(config)
    for seq_id in range(3):
        add(scheduler, seq_id, range(100 * seq_id, 100 * seq_id + 20), 21)
    for _ in range(3):
        assert not step(scheduler).preempted
        assert scheduler.make_stats().num_running == 2  # the third would need 15 blocks in total


def test_every_sequence_finishes_while_new_ones_arrive() -> None:
    """With one priority, a request waits at most for the tokens of those before it."""
    scheduler = Scheduler(replace(BASE, num_blocks=12, max_num_batched_tokens=16))
    states: dict[int, SequenceState] = {}
    added: dict[int, int] = {}
    finished: dict[int, int] = {}
    for number in range(600):
        if number % 6 == 0:
            length = 3 + number * 7 % 29
            states[number] = add(scheduler, number, [number] * length, length + 8)
            added[number] = number
        plan = scheduler.schedule()
        oldest = min(set(added) - set(finished))
        assert oldest in {row.seq_id for row in plan.rows}
        scheduler.complete(plan)
        for row in plan.rows:
            if not row.samples:
                continue
            scheduler.append_token(row.seq_id, 1)
            if len(states[row.seq_id].token_ids) == states[row.seq_id].num_prompt_tokens + 8:
                scheduler.finish(row.seq_id)
                finished[row.seq_id] = number
    assert scheduler.make_stats().num_preemptions > 0
    for number in sorted(finished):
        num_before = sum(other <= number and finished.get(other, 600) > number for other in added)
        assert finished[number] - number <= 12 * num_before
    assert len(finished) > 50


def test_static_batching_admits_only_when_no_sequence_runs() -> None:
    scheduler = Scheduler(replace(BASE, batching="static", max_num_batched_tokens=16))
    for seq_id in range(3):
        add(scheduler, seq_id, range(100 * seq_id, 100 * seq_id + 10))
    step(scheduler)
    assert scheduler.make_stats().num_running == 3  # admitted, although the budget is used up
    add(scheduler, 3, range(50, 55), priority=-1)
    for _ in range(5):
        assert 3 not in {row.seq_id for row in step(scheduler).rows}
    for seq_id in range(3):
        scheduler.finish(seq_id)
    assert spans(step(scheduler)) == [(3, 0, 5)]


def test_hit_skips_tokens_and_counts_them() -> None:
    scheduler = Scheduler(BASE)
    add(scheduler, 0, range(18))
    step(scheduler)
    state = add(scheduler, 1, [*range(10), *range(50, 60)])
    assert spans(step(scheduler))[-1] == (1, 8, 12)
    assert state.num_cached_tokens == 8
    stats = scheduler.make_stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (38, 8)


def test_blocks_completed_in_decode_are_hit_by_the_next_turn() -> None:
    scheduler = Scheduler(BASE)
    state = add(scheduler, 0, range(6))
    for token in range(100, 112):
        step(scheduler, token)
    text = list(state.token_ids)
    scheduler.finish(0)
    add(scheduler, 1, [*text, 200, 201])
    assert spans(step(scheduler)) == [(1, 16, 4)]


def test_sequence_that_does_not_read_the_cache_still_fills_it() -> None:
    scheduler = Scheduler(BASE)
    for seq_id in (0, 1):
        add(scheduler, seq_id, range(9), reads_prefix_cache=seq_id > 0)
        assert spans(step(scheduler))[-1] == (seq_id, 8 * seq_id, 9 - 8 * seq_id)
    add(scheduler, 2, range(9), reads_prefix_cache=False)
    assert spans(step(scheduler))[-1] == (2, 0, 9)


def test_equal_prompts_of_one_step_share_their_blocks_afterwards() -> None:
    scheduler = Scheduler(BASE)
    states = [add(scheduler, seq_id, range(9)) for seq_id in range(3)]
    step(scheduler)
    assert len({tuple(state.block_tables[0][:2]) for state in states}) == 1
    assert scheduler.make_stats().num_used_blocks == 2 + 3


def test_discarded_plan_neither_advances_nor_registers() -> None:
    scheduler = Scheduler(BASE)
    state = add(scheduler, 0, range(18))
    scheduler.discard(scheduler.schedule())
    scheduler.check()
    assert state.num_computed_tokens == 0
    add(scheduler, 1, range(18))
    assert spans(step(scheduler)) == [(0, 0, 18), (1, 0, 18)]


def test_plan_must_be_completed_or_discarded_once() -> None:
    scheduler = Scheduler(BASE)
    add(scheduler, 0, range(4))
    plan = scheduler.schedule()
    with pytest.raises(RuntimeError, match="neither completed nor discarded"):
        scheduler.schedule()
    scheduler.complete(plan)
    for close in (scheduler.complete, scheduler.discard):
        with pytest.raises(RuntimeError, match="not the one of the latest schedule"):
            close(plan)


def test_fork_shares_the_prompt_and_copies_its_partial_block_on_write() -> None:
    scheduler = Scheduler(BASE)
    parent = add(scheduler, 0, range(10))
    plan = scheduler.schedule()
    scheduler.complete(plan)
    children = [SequenceState(number, list(range(10)), 10) for number in (1, 2)]
    for child in children:
        scheduler.fork(0, child)
        assert child.block_tables == parent.block_tables
        assert child.num_computed_tokens == 10
    assert scheduler.make_stats().num_used_blocks == 3
    for number in (0, 1, 2):
        scheduler.append_token(number, 70 + number)
    shared = parent.block_tables[0][2]
    plan = step(scheduler)
    assert spans(plan) == [(0, 10, 1), (1, 10, 1), (2, 10, 1)]
    assert [copy.source for copy in plan.copies] == [shared, shared]  # the last one writes in place
    assert children[1].block_tables[0][2] == shared
    assert not step(scheduler).copies
    assert scheduler.make_stats().num_used_blocks == 2 + 3


def test_discard_restores_a_shared_block_whose_copy_may_be_missing() -> None:
    scheduler = Scheduler(BASE)
    parent = add(scheduler, 0, range(10))
    scheduler.complete(scheduler.schedule())
    child = SequenceState(1, list(range(10)), 10)
    scheduler.fork(0, child)
    tables = [list(parent.block_tables[0]), list(child.block_tables[0])]
    for number in (0, 1):
        scheduler.append_token(number, number)
    plan = scheduler.schedule()
    assert len(plan.copies) == 1
    scheduler.discard(plan)
    scheduler.check()
    assert [parent.block_tables[0], child.block_tables[0]] == tables
    assert len(scheduler.schedule().copies) == 1


def test_fork_without_a_free_row_waits_and_hits_the_prompt() -> None:
    scheduler = Scheduler(replace(BASE, max_num_seqs=1))
    add(scheduler, 0, range(10))
    scheduler.complete(scheduler.schedule())
    child = SequenceState(1, list(range(10)), 10)
    scheduler.fork(0, child)
    assert not child.is_running
    add(scheduler, 2, [5])
    scheduler.append_token(1, 3)
    scheduler.finish(0)
    assert spans(step(scheduler)) == [(1, 8, 3)]  # before request 2, which came before the fork
    assert child.num_cached_tokens == 0


def test_waiting_fork_does_not_preempt_later_arrivals_of_its_priority() -> None:
    scheduler = Scheduler(replace(BASE, max_num_seqs=2))
    for seq_id in (0, 1):
        add(scheduler, seq_id, range(100 * seq_id, 100 * seq_id + 10))
    scheduler.complete(scheduler.schedule())
    scheduler.fork(0, SequenceState(2, list(range(10)), 10))
    for seq_id in range(3):
        scheduler.append_token(seq_id, 3)
    plan = step(scheduler)
    assert not plan.preempted
    assert spans(plan) == [(0, 10, 1), (1, 10, 1)]


def test_fork_is_rejected_if_blocks_cannot_be_shared() -> None:
    scheduler = Scheduler(BASE)
    add(scheduler, 0, range(10))
    child = SequenceState(1, list(range(10)), 10)
    with pytest.raises(ValueError, match="request 0 has 0 computed tokens and a prompt of 10"):
        scheduler.fork(0, child)
    scheduler.complete(scheduler.schedule())
    for other in (
        SequenceState(1, list(range(1, 11)), 10),
        SequenceState(1, list(range(10)), 9),
        SequenceState(1, list(range(10)), 10, salt=b"x"),
    ):
        with pytest.raises(ValueError, match="another prompt or salt than request 0"):
            scheduler.fork(0, other)
    with pytest.raises(ValueError, match="request id 0 is in use"):
        scheduler.fork(0, SequenceState(0, list(range(10)), 10))
    scheduler.check()


def test_sequence_that_reaches_recompute_length_is_prefilled_again() -> None:
    scheduler = Scheduler(BASE)
    state = add(scheduler, 0, range(10), recompute_length=13)
    for _ in range(3):
        step(scheduler)
    assert len(state.token_ids) == 13
    assert state.num_computed_tokens == 0
    plan = step(scheduler)
    assert spans(plan) == [(0, 0, 13)]  # cached blocks have other rotary frequencies
    assert plan.rows[0].samples
    assert spans(step(scheduler)) == [(0, 13, 1)]
    text = list(state.token_ids)
    add(scheduler, 1, text, recompute_length=13)
    assert spans(step(scheduler))[-1] == (1, 12, 3)  # starts beyond the length: hits the new blocks
    assert state.num_preemptions == 0


def test_tokens_after_the_prompt_are_processed_one_per_step() -> None:
    scheduler = Scheduler(replace(BASE, num_blocks=8, max_num_batched_tokens=9))
    add(scheduler, 0, range(8), 32)
    state = add(scheduler, 1, range(12), 18, one_token_after_prompt=True, priority=1)
    while not state.num_preemptions:
        step(scheduler)
    num_tokens = len(state.token_ids)
    assert num_tokens > 14
    scheduler.finish(0)
    plans = [step(scheduler) for _ in range(2 + num_tokens - 12)]
    rows = [(1, 0, 9), (1, 9, 3)] + [(1, position, 1) for position in range(12, num_tokens)]
    assert [spans(plan) for plan in plans] == [[row] for row in rows]
    assert [plan.rows[0].samples for plan in plans] == [False] * (len(rows) - 1) + [True]


def test_windowed_group_holds_only_the_blocks_of_its_window() -> None:
    scheduler = Scheduler(replace(BASE, groups=(AttentionView(6), FULL), num_blocks=60))
    state = add(scheduler, 0, range(40), 90)
    for _ in range(30):
        row = step(scheduler).rows[0]
        held = [block for block in state.block_tables[0] if block >= 0]
        assert len(held) <= -(-(6 + row.count) // 4) + 1
        first = (state.num_computed_tokens - 5) // 4
        assert state.block_tables[0][:first] == [-1] * first
        assert -1 not in state.block_tables[1]


def test_sequence_that_can_never_fit_is_rejected_with_a_limit_that_fits() -> None:
    config = replace(BASE, num_blocks=20, groups=(FULL, AttentionView(6)))
    with pytest.raises(DataError) as error:
        add(Scheduler(config), 5, range(30), 100)
    text = str(error.value)
    assert "request 5: 100 tokens" in text
    assert "require 28 KV cache blocks of 4 tokens, but the pool has 20" in text
    assert "Limit prompt and output to 69 tokens" in text
    scheduler = Scheduler(config)
    state = add(scheduler, 5, range(30), 69)
    while len(state.token_ids) < 69:
        step(scheduler)
    assert not state.num_preemptions
    with pytest.raises(DataError):
        add(scheduler, 6, range(30), 70)
    add(Scheduler(replace(config, num_blocks=28)), 5, range(30), 100)


def test_windows_alone_fit_any_length() -> None:
    scheduler = Scheduler(replace(BASE, num_blocks=8, groups=(AttentionView(6),)))
    add(scheduler, 0, range(500), 10**9)
    for _ in range(100):
        step(scheduler)
    assert scheduler.make_stats().num_preemptions == 0


def test_empty_and_too_long_prompts_and_used_ids_are_rejected() -> None:
    scheduler = Scheduler(BASE)
    with pytest.raises(DataError, match="request 0 has an empty prompt"):
        add(scheduler, 0, [], 4)
    with pytest.raises(DataError, match="request 0 has 9 tokens, but at most 8 are allowed"):
        add(scheduler, 0, range(9), 8)
    add(scheduler, 0, range(9), 9)
    with pytest.raises(ValueError, match="request id 0 is in use"):
        add(scheduler, 0, range(9), 9)
    scheduler.finish(0)
    with pytest.raises(KeyError):
        scheduler.finish(0)
    assert scheduler.make_stats().num_waiting == 0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_blocks", 0, "cache.num_blocks=0 is less than 1"),
        ("block_size", -1, "cache.block_size=-1 is less than 1"),
        ("max_num_seqs", 0, "engine.max_num_seqs=0 is less than 1"),
        (
            "max_num_batched_tokens",
            7,
            "engine.max_num_batched_tokens=7 is less than engine.max_num_seqs=8.*to 8 or more",
        ),
    ],
)
def test_invalid_sizes_are_rejected(field: str, value: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(BASE, **{field: value})  # type: ignore[arg-type]  # a field of the table


def test_abort_frees_the_blocks_of_waiting_running_and_planned_sequences() -> None:
    scheduler = Scheduler(replace(BASE, max_num_seqs=2, prefix_caching=False))
    for seq_id in range(3):
        add(scheduler, seq_id, range(9))
    step(scheduler)
    scheduler.finish(2)
    scheduler.finish(1)
    plan = scheduler.schedule()
    row: PlannedRow = plan.rows[0]
    tables = [list(table) for table in row.block_tables]
    scheduler.finish(0)
    assert row.block_tables == tables  # the plan stays readable
    scheduler.complete(plan)
    scheduler.check()
    assert scheduler.make_stats().num_used_blocks == 0
    assert not scheduler.schedule().rows


@pytest.mark.parametrize("view", [FULL, AttentionView(9)])
@pytest.mark.parametrize("num_prompt_tokens", [2, 18])
def test_reset_of_the_prefix_cache_also_excludes_running_sequences(
    view: AttentionView, num_prompt_tokens: int
) -> None:
    scheduler = Scheduler(replace(BASE, groups=(view,)))
    state = add(scheduler, 0, range(num_prompt_tokens))
    step(scheduler)
    scheduler.reset_prefix_cache()
    for _ in range(10):
        step(scheduler)
    text = list(state.token_ids)
    scheduler.finish(0)
    add(scheduler, 1, text)
    assert spans(step(scheduler))[-1] == (1, 0, len(text))
    add(scheduler, 2, text)
    num_hit = (len(text) - 1) // 4 * 4
    assert spans(step(scheduler))[-1] == (2, num_hit, len(text) - num_hit)


def test_held_sequences_wait_until_those_that_have_started_are_finished() -> None:
    """A preempted sequence has started; one of a higher priority that arrives later waits."""
    scheduler = Scheduler(replace(BASE, num_blocks=5, prefix_caching=False))
    add(scheduler, 0, range(8), 20)
    state = add(scheduler, 1, range(50, 58), 20)
    while not state.num_preemptions:
        step(scheduler)
    add(scheduler, 2, [1], priority=-1)
    scheduler.holds_new = True
    assert [row.seq_id for row in step(scheduler).rows] == [0]
    scheduler.finish(0)
    assert [row.seq_id for row in step(scheduler).rows] == [1]
    scheduler.finish(1)
    assert not scheduler.has_started and not step(scheduler).rows
    scheduler.holds_new = False
    assert [row.seq_id for row in step(scheduler).rows] == [2]
    assert scheduler.has_started


def test_preempt_all_releases_all_blocks_and_prefills_again() -> None:
    scheduler = Scheduler(BASE)
    states = [add(scheduler, number, range(number, 9 + number)) for number in range(3)]
    step(scheduler)
    plan = scheduler.schedule()
    with pytest.raises(RuntimeError, match="neither completed nor discarded"):
        scheduler.preempt_all()
    scheduler.discard(plan)
    scheduler.reset_prefix_cache()
    scheduler.preempt_all()
    scheduler.check()
    assert scheduler.make_stats().num_used_blocks == 0
    assert scheduler.make_stats().num_preemptions == 3
    assert spans(step(scheduler)) == [(number, 0, 10) for number in range(3)]
    assert [state.num_preemptions for state in states] == [1, 1, 1]


def test_fork_beyond_recompute_length_does_not_share_blocks() -> None:
    scheduler = Scheduler(BASE)
    add(scheduler, 0, range(10), recompute_length=11)
    scheduler.complete(scheduler.schedule())
    child = SequenceState(1, [*range(10), 3], 10, recompute_length=11)
    scheduler.fork(0, child)
    assert spans(scheduler.schedule()) == [(1, 0, 11)]


def test_planning_64_decode_rows_takes_less_than_half_a_millisecond() -> None:
    scheduler = Scheduler(
        replace(BASE, num_blocks=5000, block_size=16, max_num_seqs=64, max_num_batched_tokens=8192)
    )
    for seq_id in range(64):
        add(scheduler, seq_id, [seq_id] * 100, 1000)
    step(scheduler)

    def measure() -> float:
        """Return the CPU seconds of the median step, without appending tokens."""
        seconds = []
        for _ in range(32):
            begin = time.process_time()
            plan = scheduler.schedule()
            scheduler.complete(plan)
            seconds.append(time.process_time() - begin)
            for row in plan.rows:
                scheduler.append_token(row.seq_id, 1)
        return median(seconds)

    assert least_of(measure, below=0.5e-3) < 0.5e-3

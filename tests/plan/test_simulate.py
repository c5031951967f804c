"""Tests of megalith/plan/simulate.py."""

import random
import time
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest

from megalith.config.parallel import ScheduleName
from megalith.errors import PlanError
from megalith.plan.schedule import Action, Kind, Schedule, build_schedule, with_transfers
from megalith.plan.simulate import (
    Costs,
    Simulation,
    even_costs,
    find_problems,
    peak_microbatches_in_flight,
    simulate,
)
from megalith.testing.tiny import random_schedule
from tests.cases import loop_over


def test_1f1b_of_four_ranks_and_eight_microbatches_has_the_published_bubble() -> None:
    result = simulate(with_transfers(build_schedule("1f1b", num_ranks=4, num_microbatches=8)))
    assert result.bubble == Fraction(3, 8) and result.bubble_fraction_of_total == Fraction(3, 11)
    assert result.makespan == (8 + 3) * 3 and result.idle == (9,) * 4
    assert [result.waits(rank) for rank in range(4)] == [(0, 9, 0), (1, 6, 2), (2, 3, 4), (3, 0, 6)]


def test_1f1b_of_eight_ranks_and_64_microbatches() -> None:
    result = simulate(build_schedule("1f1b", num_ranks=8, num_microbatches=64))
    assert result.bubble == Fraction(7, 64) and result.bubble_fraction_of_total == Fraction(7, 71)


def random_costs(rng: random.Random, num_stages: int) -> Costs:
    parts = [
        tuple(Fraction(rng.randint(1, 9), rng.randint(1, 4)) for _ in range(num_stages))
        for _ in range(3)
    ]
    return Costs(
        forward=parts[0],
        backward_input=parts[1],
        backward_weight=parts[2],
        transfer=Fraction(rng.randint(0, 4), 3),
    )


@loop_over("seed", range(60))
def test_actions_start_after_their_dependencies_in_any_schedule(seed: int) -> None:
    rng = random.Random(seed)
    schedule = with_transfers(random_schedule(rng), overlap=rng.random() < 0.5)
    costs = random_costs(rng, schedule.num_stages)
    result = simulate(schedule, costs)
    ends = ends_by_stage(result)
    last = schedule.num_stages - 1
    for rank, row in enumerate(schedule.ranks):
        free: Fraction | float = Fraction(0)
        for index, action in enumerate(row):
            start = result.starts[rank][index]
            assert start >= free
            stage = schedule.stage_index(rank, action.chunk)
            needs = []
            if action.kind == "F" and stage > 0:
                needs.append(("F", stage - 1))
            if action.kind in ("B", "I"):
                needs.append(("F", stage) if stage == last else ("I", stage + 1))
            for kind, other in needs:
                hop = costs.transfer if schedule.rank_and_chunk(other)[0] != rank else 0
                assert start >= ends[kind, other, action.microbatch] + hop
            free = result.end(rank, index) if action.peer < 0 else free
        assert result.busy[rank] + sum(result.waits(rank)) == result.makespan
    kinds = 3 if any(kind == "W" for kind, _, _ in ends) else 2
    assert len(ends) <= kinds * schedule.num_microbatches * schedule.num_stages


def ends_by_stage(result: Simulation) -> dict[tuple[str, int, int], Fraction | float]:
    """When each part of each microbatch ended on each stage; a B is its I here."""
    ends: dict[tuple[str, int, int], Fraction | float] = {}
    for rank, row in enumerate(result.schedule.ranks):
        for index, action in enumerate(row):
            if action.peer < 0:
                kind = "I" if action.kind == "B" else action.kind
                stage = result.schedule.stage_index(rank, action.chunk)
                ends[kind, stage, action.microbatch] = result.end(rank, index)
    return ends


@loop_over("seed", range(20))
def test_messages_of_a_channel_are_sequential_after_both_sides_are_ready(
    seed: int,
) -> None:
    rng = random.Random(seed)
    schedule = with_transfers(random_schedule(rng))
    result = simulate(schedule, random_costs(rng, schedule.num_stages))
    messages = sorted(result.messages(), key=lambda message: (message.channel, message.end))
    for before, after in pairwise(messages):
        assert before.channel != after.channel or after.start >= before.end
    posted = {
        (
            schedule.stage_index(rank, action.chunk),
            str(action.kind),
            action.microbatch,
        ): result.starts[rank][index]
        for rank, row in enumerate(schedule.ranks)
        for index, action in enumerate(row)
    }
    for message in messages:
        assert (
            message.start
            >= posted[message.stage, f"recv_{message.channel.direction}", message.microbatch]
        )
    sends = sum(action.kind.startswith("send") for row in schedule.ranks for action in row)
    assert len(messages) == sends


@pytest.mark.parametrize(("p", "transfer"), [(2, Fraction(17, 4)), (4, Fraction(13, 4))])
def test_interleaving_hides_four_fifths_of_messages_that_would_add_half_a_step(
    p: int, transfer: Fraction
) -> None:
    schedule = build_schedule("interleaved", num_ranks=p, num_chunks=2, num_microbatches=16 * p)
    costs = even_costs(2 * p, forward=4, backward_input=4, backward_weight=4)
    free = simulate(schedule, costs).makespan
    slow = replace(costs, transfer=transfer)
    exposed = simulate(with_transfers(schedule, overlap=False), slow).makespan - free
    left = simulate(with_transfers(schedule), slow).makespan - free
    assert exposed >= free / 2
    assert 0 < left <= exposed / 5


@loop_over("seed", range(20))
def test_receives_posted_one_action_ahead_take_no_more_time(seed: int) -> None:
    schedule = random_schedule(random.Random(seed))
    costs = even_costs(
        schedule.num_stages, forward=3, backward_input=4, backward_weight=2, transfer=1
    )
    assert simulate(with_transfers(schedule), costs).makespan == simulate(schedule, costs).makespan


def test_step_time_of_uneven_stages_follows_the_slowest() -> None:
    costs = Costs(forward=(1, 3), backward_input=(1, 3), backward_weight=(1, 3))
    result = simulate(build_schedule("1f1b", num_ranks=2, num_microbatches=10), costs)
    assert result.makespan == 1 + 10 * 9 + 2 and result.busy == (30, 90)


def test_float_costs_are_supported() -> None:
    result = simulate(
        build_schedule("1f1b", num_ranks=2, num_microbatches=2), even_costs(2, forward=0.5)
    )
    assert result.makespan == pytest.approx(7.5)


def circle() -> Schedule:
    """Each rank wants the other's next result before it gives its own."""
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    f0, f1, b0, b1 = Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1)
    return replace(schedule, ranks=((f0, b0, f1, b1), (f0, f1, b0, b1)))


@pytest.mark.parametrize("overlap", [True, False])
def test_a_deadlock_names_the_ranks_their_actions_and_what_they_wait_for(overlap: bool) -> None:
    [problem] = find_problems(with_transfers(circle(), overlap=overlap))
    waits = problem.removeprefix("deadlock: ").split("; ")
    assert len(waits) == 2
    assert "(B of microbatch 0) waits for rank 1, action" in waits[0]
    assert "(send_backward of microbatch 0 to rank 0), but rank 1 stands at action" in waits[0]
    assert "(F of microbatch 1) waits for rank 0, action" in waits[1]
    assert "(send_forward of microbatch 1 to rank 1), but rank 0 stands at action" in waits[1]


def test_rank_that_waits_for_itself_is_a_deadlock() -> None:
    schedule = build_schedule("interleaved", num_ranks=1, num_chunks=2, num_microbatches=1)
    first, second, *backward = schedule.ranks[0]
    assert find_problems(replace(schedule, ranks=((second, first, *backward),))) == [
        "deadlock: rank 0, action 0 (F of microbatch 0, chunk 1) waits for rank 0, action 1 "
        "(F of microbatch 0, chunk 0), but rank 0 stands at action 0"
    ]


def test_deadlock_without_messages_is_detected() -> None:
    assert find_problems(circle()) == [
        "deadlock: rank 0, action 1 (B of microbatch 0) waits for rank 1, action 2 (B of "
        "microbatch 0), "
        "but rank 1 stands at action 1; rank 1, action 1 (F of microbatch 1) waits for rank 0, "
        "action 2 (F of microbatch 1), but rank 0 stands at action 1"
    ]


def test_simulating_invalid_schedules_raises_with_their_problems() -> None:
    with pytest.raises(
        PlanError,
        match="The lists of schedule 1f1b on 2 ranks cannot be run: deadlock: .*Use lists made by",
    ) as caught:
        simulate(circle())
    assert "rank 0, action 1" in str(caught.value)
    whole = with_transfers(build_schedule("1f1b", num_ranks=2, num_microbatches=2))
    with pytest.raises(PlanError, match="rank 1: microbatch 1 lacks send_backward"):
        simulate(replace(whole, ranks=(whole.ranks[0], whole.ranks[1][:-1])))


def test_waiting_on_a_channel_queue_counts_the_messages_before() -> None:
    schedule = with_transfers(
        build_schedule("gpipe", num_ranks=2, num_microbatches=3, forward_only=True)
    )
    result = simulate(schedule, even_costs(2, forward=1, transfer=5))
    assert [(message.start, message.end) for message in result.messages()] == [
        (1, 6),
        (6, 11),
        (11, 16),
    ]
    assert result.makespan == 17


def seconds_of_the_largest() -> float:
    """Of computing time, to build and check 64 stages and 1024 microbatches in three schedules."""
    started = time.process_time()
    sizes: list[tuple[ScheduleName, int, int]] = [
        ("1f1b", 64, 1),
        ("interleaved", 32, 2),
        ("zb-h1", 64, 1),
    ]
    for name, ranks, chunks in sizes:
        schedule = with_transfers(
            build_schedule(name, num_ranks=ranks, num_chunks=chunks, num_microbatches=1024)
        )
        result = simulate(schedule)
        hops = ranks - 1
        assert result.idle == (hops if name == "zb-h1" else 3 * hops,) * ranks
        assert max(map(max, peak_microbatches_in_flight(schedule))) <= ranks * 2
    return time.process_time() - started


def seconds_of_a_yardstick() -> float:
    """Of computing time, for a fixed piece of work of the same sort: a quarter of a second on an
    idle core."""
    started = time.process_time()
    for _ in range(4):
        rows = [
            [Action("F", chunk, microbatch) for microbatch in range(1024)] for chunk in range(64)
        ]
        last: dict[tuple[Kind, int], int] = {}
        for row in rows:
            for kind, chunk, microbatch, _ in row:
                last[kind, chunk] = max(last.get((kind, chunk), 0), microbatch)
    return time.process_time() - started


# the slowest test of plans; a bound on time, and other tests check the same schedules
@pytest.mark.slow
def test_schedules_of_64_stages_and_1024_microbatches_are_checked_in_five_seconds() -> None:
    # Computing takes longer where other jobs share the cores and their caches; a yardstick before
    # and after shows it.
    def idle_seconds() -> float:
        before, seconds, after = (
            seconds_of_a_yardstick(),
            seconds_of_the_largest(),
            seconds_of_a_yardstick(),
        )
        return 0.25 * seconds / ((before + after) / 2)

    assert any(idle_seconds() < 5 for _ in range(3))

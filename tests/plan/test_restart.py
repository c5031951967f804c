"""When a restart in place is allowed, and which ranks remain without those that are lost."""

import random

from megalith.plan.grid import dense_grid
from megalith.plan.restart import choose_remaining_ranks, find_restart_problem, list_replicas


def problem(times: list[float], now: float, num_rounds_without_step: int = 0) -> str | None:
    """The reason with two restarts an hour."""
    return find_restart_problem(
        times,
        now,
        max_in_place=2,
        window_minutes=60.0,
        num_rounds_without_step=num_rounds_without_step,
    )


def test_restarts_are_counted_within_the_window() -> None:
    assert problem([0.0], 1.0) is None
    assert problem([0.0, 3000.0], 3601.0) is None
    assert problem([0.0, 1.0], 3500.0) == (
        "there were 2 restarts in the last 60 minutes (restart.max_in_place=2)"
    )


def test_rounds_without_a_step_end_the_job() -> None:
    assert problem([], 0.0, num_rounds_without_step=2) is None
    expected = "the last 3 starts did not finish a step"
    assert problem([], 0.0, num_rounds_without_step=3) == expected


def test_the_remaining_ranks_are_whole_replicas_in_rank_order_for_random_layouts() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        tp, pp, dp = (draw.choice([1, 2, 3]) for _ in range(3))
        grid = dense_grid(world=tp * pp * dp, tp=tp, pp=pp)
        replicas = list_replicas(grid)
        assert sorted(rank for replica in replicas for rank in replica) == [*grid.ranks], seed
        lost = set(draw.sample([*grid.ranks], draw.randint(0, min(3, len(grid.ranks)))))
        ranks = choose_remaining_ranks(replicas, lost, lambda world: True)
        assert not lost & set(ranks), seed
        intact = [replica for replica in replicas if not lost & set(replica)]
        assert len(ranks) == len(intact) * tp * pp, seed
        # each rank keeps its place in its replica
        smaller = dense_grid(world=max(len(ranks), tp * pp), tp=tp, pp=pp)
        for number, rank in enumerate(ranks):
            before, after = grid.coordinates(rank), smaller.coordinates(number)
            assert (before["tp"], before["pp"]) == (after["tp"], after["pp"]), seed


def test_replicas_are_removed_until_the_run_fits() -> None:
    replicas = [(rank,) for rank in range(8)]
    divides = {1, 2, 3, 4, 6}.__contains__  # the numbers of ranks that divide a batch of 12 rows
    assert choose_remaining_ranks(replicas, {5}, divides) == (0, 1, 2, 3, 4, 6)
    assert choose_remaining_ranks(replicas, {0, 1, 2}, divides) == (3, 4, 5, 6)
    assert choose_remaining_ranks(replicas, {5}, lambda world: False) == ()

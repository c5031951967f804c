"""Restart in place: whether another restart is allowed, and which ranks remain if some cannot be
replaced; no torch."""

from collections.abc import Callable, Sequence, Set

from megalith.plan.grid import Grid

MAX_ROUNDS_WITHOUT_STEP = 3
"""Rounds in a row without a finished step after which the next fault ends the job. Heuristic: a
fault may hit a restart, too, but one that recurs before the first step is not transient."""


def find_restart_problem(
    times: Sequence[float],
    now: float,
    *,
    max_in_place: int,
    window_minutes: float,
    num_rounds_without_step: int = 0,
) -> str | None:
    """Return why no restart in place may follow a fault; None if it may.

    times: of the earlier restarts, in seconds; num_rounds_without_step: rounds in a row, with the
    last one, in which no rank has finished a step.

    >>> find_restart_problem([0.0], 60.0, max_in_place=2, window_minutes=60.0)
    >>> find_restart_problem([0.0], 60.0, max_in_place=1, window_minutes=60.0)
    'there were 1 restarts in the last 60 minutes (restart.max_in_place=1)'
    """
    num_recent = sum(now - each < 60 * window_minutes for each in times)
    if num_recent >= max_in_place:
        return (
            f"there were {num_recent} restarts in the last {window_minutes:g} minutes "
            f"(restart.max_in_place={max_in_place})"
        )
    if num_rounds_without_step >= MAX_ROUNDS_WITHOUT_STEP:
        return f"the last {num_rounds_without_step} starts did not finish a step"
    return None


def list_replicas(grid: Grid) -> list[tuple[int, ...]]:
    """Return the ranks of each data-parallel replica of the model.

    >>> from megalith.plan.grid import dense_grid
    >>> list_replicas(dense_grid(world=8, tp=2, pp=2))
    [(0, 1, 4, 5), (2, 3, 6, 7)]
    """
    replicas: dict[int, list[int]] = {}
    for rank in grid.ranks:
        replicas.setdefault(grid.coordinates(rank)["dp"], []).append(rank)
    return [tuple(replicas[index]) for index in sorted(replicas)]


def choose_remaining_ranks(
    replicas: Sequence[Sequence[int]], lost: Set[int], fits: Callable[[int], bool]
) -> tuple[int, ...]:
    """Return the ranks of the most whole replicas without a lost rank with which the run can
    continue, in rank order; none if it cannot.

    `fits`: whether the layout and the batch size allow a number of ranks.

    >>> choose_remaining_ranks([(0, 1), (2, 3), (4, 5)], {2}, lambda world: world == 2)
    (0, 1)
    """
    intact = [replica for replica in replicas if not lost & set(replica)]
    for count in range(len(intact), 0, -1):
        ranks = sorted(rank for replica in intact[:count] for rank in replica)
        if fits(len(ranks)):
            return tuple(ranks)
    return ()

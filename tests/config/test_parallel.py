"""Defaults of the parallelism settings."""

from megalith.config.parallel import ParallelConfig
from megalith.plan.grid import dense_problems


def test_the_defaults_fit_any_number_of_ranks() -> None:
    parallel = ParallelConfig()
    for world in (1, 2, 3, 12):
        assert (
            dense_problems(world=world, tp=parallel.tp, dp=parallel.dp, order=parallel.order) == []
        )

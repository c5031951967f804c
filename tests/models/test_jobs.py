"""Pieces of a conversion: the same results in order from any number of processes, and errors that come through."""

import os
from functools import partial

import pytest

from megalith.errors import CheckpointError
from megalith.models.jobs import done_in_order


def squared(number: int) -> int:
    return number * number


def refused(number: int) -> int:
    raise CheckpointError(f"file {number}: no space left. Free some space.")


def killed(number: int) -> int:
    os._exit(number)


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_order(workers: int) -> None:
    assert list(done_in_order([partial(squared, n) for n in range(5)], workers)) == [0, 1, 4, 9, 16]


def test_errors_of_jobs_and_deaths_of_workers_are_told() -> None:
    with pytest.raises(CheckpointError, match=r"file 1: no space left\. Free some space"):
        list(done_in_order([partial(squared, 0), partial(refused, 1)], 2))
    with pytest.raises(CheckpointError, match=r"one of 2 processes .* Use --workers 1, or half as many"):
        list(done_in_order([partial(squared, 0), partial(killed, 3)], 2))

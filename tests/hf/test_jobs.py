"""Pieces of a conversion: the same results in order from any number of threads, and errors that
come through."""

from functools import partial
from threading import Event
from time import sleep

import pytest

from megalith.errors import CheckpointError
from megalith.hf.staging import run_in_order, split_by_nbytes


def squared(number: int) -> int:
    return number * number


def noted(begun: list[int], number: int) -> int:
    begun.append(number)
    sleep(0.02)  # all of them would take ten seconds
    return number


def refused(number: int) -> int:
    raise CheckpointError(f"file {number}: no space left. Free some space.")


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_order(workers: int) -> None:
    assert list(run_in_order([partial(squared, n) for n in range(5)], workers)) == [0, 1, 4, 9, 16]


def test_several_workers_work_at_the_same_time() -> None:
    first, second = Event(), Event()

    def meet(mine: Event, other: Event) -> bool:
        mine.set()
        return other.wait(timeout=60)

    assert list(run_in_order([partial(meet, first, second), partial(meet, second, first)], 2)) == [
        True,
        True,
    ]


def test_an_error_is_raised_and_pending_jobs_are_canceled() -> None:
    begun: list[int] = []
    jobs = [
        partial(squared, 0),
        partial(refused, 1),
        *[partial(noted, begun, n) for n in range(1000)],
    ]
    with pytest.raises(CheckpointError, match=r"file 1: no space left\. Free some space"):
        list(run_in_order(jobs, 2))
    assert len(begun) < 1000
    with pytest.raises(CheckpointError, match="file 1"):
        list(run_in_order(jobs, 1))


def test_every_item_is_in_one_batch() -> None:
    sizes = [3, 1, 4, 1, 5, 9, 2, 6]
    for least in (1, 5, 100):
        by_nbytes = split_by_nbytes(sizes, int, least)
        assert [size for batch in by_nbytes for size in batch] == sizes and all(
            sum(batch) >= least for batch in by_nbytes[:-1]
        )
    assert split_by_nbytes([], int, 3) == []

"""Independent jobs of a conversion, run one after another or by several threads.

Reading, casting, hashing and writing release the GIL, so threads run them concurrently.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Done = TypeVar("Done")


def split_by_nbytes(
    items: Sequence[Item], nbytes: Callable[[Item], int], least: int
) -> list[list[Item]]:
    """Split items into lists of at least `least` bytes each, except for the last.

    >>> split_by_nbytes([3, 1, 4, 1, 5], lambda size: size, 4)
    [[3, 1], [4], [1, 5]]
    """
    lists: list[list[Item]] = []
    remaining = 0
    for item in items:
        if remaining <= 0:
            lists.append([])
            remaining = least
        lists[-1].append(item)
        remaining -= nbytes(item)
    return lists


def run_in_order(jobs: Sequence[Callable[[], Done]], workers: int) -> Iterator[Done]:
    """Yield the results of the jobs in order. After an error or an interrupt, pending jobs are
    canceled."""
    if workers == 1 or len(jobs) == 1:
        for job in jobs:
            yield job()
        return
    pool = ThreadPoolExecutor(min(workers, len(jobs)), thread_name_prefix="convert")
    try:
        for future in [pool.submit(job) for job in jobs]:
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)

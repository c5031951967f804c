"""Independent pieces of a conversion, done one after the other here or by several threads.

Reading, casting, hashing and writing all leave the interpreter free, so threads do them at the same
time.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Done = TypeVar("Done")


def batches(items: Sequence[Item], nbytes: Callable[[Item], int], least: int) -> list[list[Item]]:
    """The items in lists of at least so many bytes each, but for the last.

    >>> batches([3, 1, 4, 1, 5], lambda size: size, 4)
    [[3, 1], [4], [1, 5]]
    """
    found: list[list[Item]] = []
    room = 0
    for item in items:
        if room <= 0:
            found.append([])
            room = least
        found[-1].append(item)
        room -= nbytes(item)
    return found


def done_in_order(jobs: Sequence[Callable[[], Done]], workers: int) -> Iterator[Done]:
    """What every job gives, in order. After an error, or when interrupted, those that have not
    begun never do."""
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

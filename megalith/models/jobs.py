"""Independent pieces of a conversion, done one after the other here or by several processes."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

import torch

from megalith.errors import CheckpointError

Done = TypeVar("Done")


def done_in_order(jobs: Sequence[Callable[[], Done]], workers: int) -> Iterator[Done]:
    """What every job gives, in order. With several workers jobs must be picklable, as `partial`s of functions are.

    Raises:
        CheckpointError: a worker died; whatever a job raises.
    """
    if workers == 1 or len(jobs) == 1:
        for job in jobs:
            yield job()
        return
    pool = ProcessPoolExecutor(min(workers, len(jobs)), mp_context=get_context("spawn"), initializer=_one_thread)
    try:
        for future in [pool.submit(job) for job in jobs]:
            yield future.result()
    except BrokenProcessPool as error:
        raise CheckpointError(
            f"one of {workers} processes that convert ended without a word: perhaps there was not enough memory. "
            f"Use --workers 1, or half as many."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _one_thread() -> None:
    torch.set_num_threads(1)

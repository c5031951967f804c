"""The loops over millions of documents and samples, written once in plain Python and compiled by
numba for long inputs.

The plain function is the definition; the compiled one is the same source, tested to give the same
arrays. Nothing is compiled for short inputs: importing numba takes longer than running them.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

P = ParamSpec("P")
R = TypeVar("R")

_WORTH_COMPILING = (
    50_000  # rounds that plain Python does in the half second that importing numba takes: measured
)


def loop_for(function: Callable[P, R], *, rounds: int) -> Callable[P, R]:
    """The function itself for a short loop, its compiled form for a long one."""
    return compiled(function) if rounds >= _WORTH_COMPILING else function


@cache
def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Machine code for one of the loops below, kept on disk between runs; it releases the
    interpreter lock."""
    from numba import njit  # half a second: only when a long loop needs it

    result: Callable[P, R] = njit(cache=True, nogil=True)(function)
    return result


def fill_sample_index(
    lengths: NDArray[np.int32],
    documents: NDArray[np.int32],
    seq_len: int,
    extra: int,
    index: NDArray[Any],
) -> None:
    """Write where each sample starts, as rows (position in `documents`, offset), and where the last
    one ends.

    A sample takes seq_len + extra tokens, and the next starts `extra` tokens before its end. The
    last window may be short: its end is then the end of the last document.
    """
    position = 0
    offset = 0
    index[0, 0] = 0
    index[0, 1] = 0
    last = len(documents) - 1
    for row in range(1, len(index)):
        need = seq_len + extra
        while need > 0:
            length = lengths[documents[position]]
            need -= length - offset
            if need <= 0:
                offset = length + need - extra
            elif position == last:
                offset = length - extra
                need = 0
            else:
                position += 1
                offset = 0
        index[row, 0] = position
        index[row, 1] = offset


def fill_weighted_order(
    weights: NDArray[np.float64],
    counts: NDArray[np.int64],
    member: NDArray[np.int16],
    sample: NDArray[np.int64],
) -> None:
    """Write which member each sample of a blend comes from: the one furthest behind its share, the
    first of equals.

    `weights` [m] sum to 1; `counts` [m], zeros at the start, ends as the samples taken from each.
    """
    for i in range(len(member)):
        total = float(max(i, 1))
        best = 0
        best_gap = weights[0] * total - counts[0]
        for m in range(1, len(weights)):
            gap = weights[m] * total - counts[m]
            if gap > best_gap:
                best = m
                best_gap = gap
        member[i] = best
        sample[i] = counts[best]
        counts[best] += 1


def fill_exhaustive_order(
    sizes: NDArray[np.int64],
    counts: NDArray[np.int64],
    member: NDArray[np.int16],
    sample: NDArray[np.int64],
) -> None:
    """Write an order that uses every sample of every member once, keeping the shares even until
    members run out."""
    total_size = len(member)
    for i in range(total_size):
        total = float(max(i, 1))
        best = -1
        best_gap = 0.0
        for m in range(len(sizes)):
            if counts[m] < sizes[m]:
                gap = sizes[m] / total_size * total - counts[m]
                if best < 0 or gap > best_gap:
                    best = m
                    best_gap = gap
        member[i] = best
        sample[i] = counts[best]
        counts[best] += 1

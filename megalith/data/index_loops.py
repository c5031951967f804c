"""Index-building loops over millions of documents and samples, compiled by numba for long inputs.

The plain Python function is the definition; tests compare its arrays with those of the compiled
one. Short inputs are not compiled, because importing numba takes longer than running them.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

P = ParamSpec("P")
R = TypeVar("R")

_MIN_COMPILED_ITERATIONS = (
    50_000  # measured: plain Python runs these while numba is imported (0.5 s)
)


def compile_if_long(function: Callable[P, R], *, rounds: int) -> Callable[P, R]:
    """Return the function itself for a short loop, and its compiled form for a long one."""
    return compiled(function) if rounds >= _MIN_COMPILED_ITERATIONS else function


@cache
def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile one of the loops below, cached on disk; it releases the GIL."""
    from numba import njit  # half a second: only when a long loop needs it

    result: Callable[P, R] = njit(cache=True, nogil=True)(function)
    return result


def compute_sample_index(
    lengths: NDArray[np.int32],
    documents: NDArray[np.int32],
    seq_len: int,
    extra: int,
    index: NDArray[Any],
) -> None:
    """Write the start of each sample to `index` as (position in `documents`, offset), and the end
    of the last one.

    A sample has seq_len + extra tokens, and the next one starts `extra` tokens before its end. The
    last window may be short and end at the end of the last document.
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


def compute_weighted_order(
    weights: NDArray[np.float64],
    counts: NDArray[np.int64],
    member: NDArray[np.int16],
    sample: NDArray[np.int64],
) -> None:
    """Write the member and sample index of each sample of a blend: the member furthest behind its
    share, ties to the first.

    `weights` [m] sum to 1; `counts` [m], initially zero, are the number of samples taken per
    member.
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


def compute_exhaustive_order(
    sizes: NDArray[np.int64],
    counts: NDArray[np.int64],
    member: NDArray[np.int16],
    sample: NDArray[np.int64],
) -> None:
    """Write an order of every sample of every member once, in proportion to the member sizes."""
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

"""Numba loops of AdamW's update for CPUs: one pass over gradient, states and weights.

All slots of a call are divided into blocks of `BLOCK_NUMEL` elements, and each thread updates its
share of the blocks. The innermost loops cover one block: its second pass, the rounding, reads from
the cache. Elements do not depend on each other, so results do not depend on threads or slices.

Products and sums are rounded as in torch's fused kernel, so that results are bitwise equal to it
(see kernels/adamw.py). Hence no fast-math flags: a sum may be fused with a product only where torch
does so.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numba import carray, njit, types  # type: ignore[attr-defined]  # carray is public, but not declared
from numba.extending import intrinsic

from megalith.kernels.adamw import BLOCK_NUMEL
from megalith.kernels.cpu_numba import (
    Array,
    Block,
    Value,
    array_at,
    count,
    float_pointer,
    longs,
    narrow,
    number,
    share,
    thread_share,
    wide,
)

P = ParamSpec("P")
R = TypeVar("R")


def _emit_fma(
    typing: Any, a: Any, b: Any, c: Any
) -> Any:  # numba's protocol: a signature, and a code generator
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), emit


# Any: numba passes other arguments than it declares.
_fma: Any = intrinsic(_emit_fma)  # a b + c, rounded once


def _exact(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function that loops may call, without fast-math flags."""
    # an explicit option: numba would otherwise compile it with the flags of its caller
    result: Callable[P, R] = njit(nogil=True, error_model="numpy", fastmath=False)(function)
    return result


@_exact
def _scale(g: Value, p: Value, divisor: Value, l2: Value, is_coupled: Any) -> Any:
    """Return the gradient divided by `divisor`, with weight decay if it is coupled (Adam)."""
    x = g / divisor
    return _fma(p, l2, x) if is_coupled else x


@_exact
def _update_mean(x: Value, m: Value, lerp: Value, is_near: Any) -> Any:
    """Return the first moment, interpolated from the nearer end; `lerp`: 1 - beta1, or -beta1."""
    return _fma(lerp, x - m, m if is_near else x)


@_exact
def _update_square(x: Value, v: Value, beta2: Value, rest: Value) -> Any:
    """Return the second moment; `rest`: 1 - beta2."""
    return _fma(rest * x, x, v * beta2)


@_exact
def _update_weight(
    p: Value, m: Value, v: Value, decay: Value, root: Value, eps: Value, step: Value
) -> Any:
    """Return the weight; `root` of the bias correction of v, `step`: negative step size."""
    return p * decay + step * m / (np.sqrt(v) / root + eps)


@_exact
def _update_wide(g: Array, p: Array, m: Array, v: Array, block: Block) -> None:
    """Update one block of fp32 weights and states."""
    is_coupled, is_near = count(block, 4) != 0, count(block, 5) != 0
    divisor, l2, lerp = number(block, 6), number(block, 7), number(block, 8)
    beta2, rest, decay = number(block, 9), number(block, 10), number(block, 11)
    root, eps, step = number(block, 12), number(block, 13), number(block, 14)
    for i in range(len(g)):
        x = _scale(g[i], p[i], divisor, l2, is_coupled)
        mean = _update_mean(x, m[i], lerp, is_near)
        square = _update_square(x, v[i], beta2, rest)
        m[i] = mean
        v[i] = square
        p[i] = _update_weight(p[i], mean, square, decay, root, eps, step)


@_exact
def _join(high: Value, low: Value) -> Any:
    """Return the fp32 master weight of a bf16 weight and its remainder, without branches."""
    low_bits = np.uint32(low)
    upper = np.uint32(np.uint32(high) - np.uint32(low_bits >> np.uint32(15)))
    return np.uint32(np.uint32(upper << np.uint32(16)) | low_bits).view(np.float32)


@_exact
def _update_narrow(
    g: Array, w: Array, low: Array, m: Array, v: Array, x: Array, block: Block
) -> None:
    """Update one block of bf16 weights, remainders and bf16 states; x: fp32 scratch memory.

    No loop writes more than two arrays, and the moments are computed twice, because LLVM vectorizes
    only loops with at most eight comparisons of addresses for overlap (its default).
    """
    is_coupled, is_near = count(block, 4) != 0, count(block, 5) != 0
    divisor, l2, lerp = number(block, 6), number(block, 7), number(block, 8)
    beta2, rest, decay = number(block, 9), number(block, 10), number(block, 11)
    root, eps, step = number(block, 12), number(block, 13), number(block, 14)
    for i in range(len(g)):
        x[i] = _scale(g[i], _join(w[i], low[i]), divisor, l2, is_coupled)
    for i in range(len(g)):
        mean = _update_mean(x[i], wide(m[i]), lerp, is_near)
        square = _update_square(x[i], wide(v[i]), beta2, rest)
        p = _update_weight(_join(w[i], low[i]), mean, square, decay, root, eps, step)
        is_nan = p != p
        bits = np.float32(p).view(np.uint32)
        high = np.uint32(np.uint32(bits + np.uint32(0x8000)) >> np.uint32(16))
        w[i] = np.uint16(np.uint32(0x7FC0) if is_nan else high)
        low[i] = np.uint16(np.uint32(0) if is_nan else bits)
    for i in range(len(g)):
        m[i] = narrow(_update_mean(x[i], wide(m[i]), lerp, is_near), m)
        v[i] = narrow(_update_square(x[i], wide(v[i]), beta2, rest), v)


def adamw(block: Block) -> None:
    """slots, blocks, table int64 [slots, 7], rounds, is_coupled, is_near, divisor, l2, lerp, beta2,
    rest, decay, root, eps, step -> weights, states and rounded weights, in place.

    Rows of the table: one past the last block of the slot, elements, and the addresses of gradient,
    master weights, first moment, second moment (fp32) and of the weights, which are written if
    `rounds` is set.
    """
    slots, blocks, rounds = count(block, 0), count(block, 1), count(block, 3)
    table = longs(block, 2, (slots, 7))
    first, last = share(blocks)
    slot = np.int64(0)
    for b in range(first, last):
        while table[slot, 0] <= b:
            slot += 1
        begin = table[slot - 1, 0] if slot > 0 else np.int64(0)
        start = (b - begin) * BLOCK_NUMEL
        size = min(np.int64(BLOCK_NUMEL), table[slot, 1] - start)
        g = carray(float_pointer(table[slot, 2] + 4 * start), (size,))
        p = carray(float_pointer(table[slot, 3] + 4 * start), (size,))
        m = carray(float_pointer(table[slot, 4] + 4 * start), (size,))
        v = carray(float_pointer(table[slot, 5] + 4 * start), (size,))
        _update_wide(g, p, m, v, block)
        if rounds:
            w = array_at(table[slot, 6] + 2 * start, block, (size,))
            for i in range(len(w)):
                w[i] = narrow(p[i], w)


def adamw_remainder(block: Block) -> None:
    """As `adamw`, for bf16 moments and master weights as bf16 weights and int16 remainders.

    Rows of the table: one past the last block of the slot, elements, and the addresses of gradient
    (fp32), weights, first moment, second moment (bf16) and remainders. Argument 3: scratch fp32
    [threads, 1024].
    """
    slots, blocks = count(block, 0), count(block, 1)
    table = longs(block, 2, (slots, 7))
    thread, _ = thread_share()
    scratch = count(block, 3) + 4 * BLOCK_NUMEL * thread
    first, last = share(blocks)
    slot = np.int64(0)
    for b in range(first, last):
        while table[slot, 0] <= b:
            slot += 1
        begin = table[slot - 1, 0] if slot > 0 else np.int64(0)
        start = (b - begin) * BLOCK_NUMEL
        size = min(np.int64(BLOCK_NUMEL), table[slot, 1] - start)
        g = carray(float_pointer(table[slot, 2] + 4 * start), (size,))
        w = array_at(table[slot, 3] + 2 * start, block, (size,))
        m = array_at(table[slot, 4] + 2 * start, block, (size,))
        v = array_at(table[slot, 5] + 2 * start, block, (size,))
        low = array_at(table[slot, 6] + 2 * start, block, (size,))
        _update_narrow(g, w, low, m, v, carray(float_pointer(scratch), (size,)), block)

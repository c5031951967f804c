"""Numba loops of memory-bound operations for CPUs, each a single pass over memory; compiled on
first use and cached.

Each loop supports fp32 and bf16; it computes in fp32 and rounds where the torch version does. A
loop receives a block of 8-byte arguments (`cpu.run`) and processes its thread's share of the rows.
Importing this module imports numba, which takes half a second, so it is imported on first use.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast

import llvmlite.binding
import numpy as np
import torch
from numba import carray, cfunc, njit, types  # type: ignore[attr-defined]  # carray is public, but not declared
from numba.core.event import Listener, install_listener
from numba.extending import intrinsic, overload

from megalith.kernels.cpu_threads import Loop, LoopFunction, openmp, report_compilation

# Sums may be reordered, so that they use the whole width of the vector unit; infinities and NaN
# keep their meaning.
FAST = {"contract", "reassoc", "nsz", "arcp"}
# inside a loop: an array view of an address; elements are fp32, or uint16 that hold bf16
Array = Any
Block = Any  # inside a loop: the arguments
Value = Any  # inside a loop: one fp32 or uint16

P = ParamSpec("P")
R = TypeVar("R")

_ELEMENTS = {
    torch.float32: types.float32,
    torch.bfloat16: types.uint16,
    torch.int8: types.int8,
    torch.float8_e4m3fn: types.uint8,
}
_INTEGERS = types.CPointer(types.int64)
_thread_num: Any = types.ExternalFunction("megalith_omp_thread_num", types.int32())
_num_threads: Any = types.ExternalFunction("megalith_omp_num_threads", types.int32())


@cache
def address(loop: Loop | LoopFunction, dtype: torch.dtype) -> int:
    """Return the address of a loop's machine code for tensors of `dtype`; compiles it on first
    use."""
    library = openmp()
    assert library is not None
    llvmlite.binding.add_symbol("megalith_omp_thread_num", library.thread_num)
    llvmlite.binding.add_symbol("megalith_omp_num_threads", library.num_threads)
    try:
        return _compile(loop, dtype, keep=True)
    except RuntimeError as problem:  # numba has no writable cache folder
        if "cannot cache" not in str(problem):
            raise
        return _compile(loop, dtype, keep=False)


def _compile(loop: Loop | LoopFunction, dtype: torch.dtype, *, keep: bool) -> int:
    # the type of the block determines the type of a tensor's elements
    signature = types.void(types.CPointer(_ELEMENTS[dtype]))
    with install_listener("numba:run_pass", _FirstPass(cached=keep)):
        compiled: Any = cfunc(signature, cache=keep, error_model="numpy", fastmath=FAST)(
            _copy_per_dtype(_find_loop(loop), dtype)
        )
    return int(compiled.address)


def _find_loop(loop: Loop | LoopFunction) -> FunctionType:
    """Return the Python function of a loop."""
    return cast(FunctionType, globals()[loop] if isinstance(loop, str) else loop)


class _FirstPass(Listener):
    """Reports the compilation of a loop when its first compiler pass starts; cached code has
    none."""

    def __init__(self, *, cached: bool) -> None:
        self._cached = cached
        self._reported = False

    def on_start(self, event: Any) -> None:  # numba's own
        if not self._reported:
            self._reported = True
            report_compilation(cached=self._cached)

    def on_end(self, event: Any) -> None:
        """Nothing to do."""


def _copy_per_dtype(loop: FunctionType, dtype: torch.dtype) -> FunctionType:
    """Return the same function under a separate name for each dtype and kind of processor.

    numba numbers the variants of a function in an index file that it does not lock, and does not
    check whether the code under a number is the requested one: processes that compile two variants
    concurrently, also on two machines with a shared home directory, could assign both the same
    number, and one would run the other's code. With separate names each function has one variant.
    """
    processor = (
        llvmlite.binding.get_host_cpu_name() + llvmlite.binding.get_host_cpu_features().flatten()
    )
    twin = FunctionType(loop.__code__, loop.__globals__, loop.__name__)
    twin.__module__, twin.__doc__ = loop.__module__, loop.__doc__
    element = str(dtype).removeprefix("torch.")
    twin.__qualname__ = (
        f"{loop.__name__}_{element}_{hashlib.sha256(processor.encode()).hexdigest()[:8]}"
    )
    return twin


# --- building blocks of the loops


def part(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function that loops may call."""
    # Explicit options: numba would otherwise compile it with those of the first loop that calls it,
    # and reuse that for the others.
    result: Callable[P, R] = njit(nogil=True, error_model="numpy", fastmath=FAST)(function)
    return result


def _read_block(
    typing: Any, block: Any
) -> Any:  # numba's protocol: a signature, and a code generator
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(_INTEGERS))

    return _INTEGERS(block), emit


def _point_to_elements(typing: Any, integer: Any, block: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return block(types.int64, block), emit


def _point_to_fp32(typing: Any, integer: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(types.int64), emit


def _point_to_int64(typing: Any, integer: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return _INTEGERS(types.int64), emit


# Any: numba passes other arguments than it declares.
_integers: Any = intrinsic(_read_block)  # a block, as int64
# an address, as a pointer to the block's element type
_elements: Any = intrinsic(_point_to_elements)
_floats: Any = intrinsic(_point_to_fp32)  # an address, as a pointer to fp32
_longs: Any = intrinsic(_point_to_int64)  # an address, as a pointer to int64


@part
def count(block: Block, index: int) -> Any:
    """Return argument `index`, an integer."""
    return carray(_integers(block), (index + 1,))[index]


@part
def number(block: Block, index: int) -> Any:
    """Return argument `index`, a double, as fp32."""
    return np.float32(np.int64(count(block, index)).view(np.float64))


@part
def data(block: Block, index: int, shape: Any) -> Array:
    """Return argument `index`, a tensor of the dtype the loop is compiled for."""
    return carray(_elements(count(block, index), block), shape)


@part
def wides(block: Block, index: int, shape: Any) -> Array:
    """Return argument `index`, an fp32 tensor."""
    return carray(_floats(count(block, index)), shape)


@part
def longs(block: Block, index: int, shape: Any) -> Array:
    """Return argument `index`, an int64 tensor."""
    return carray(_longs(count(block, index)), shape)


@part
def array_at(address: Any, block: Block, shape: Any) -> Array:
    """Return the tensor at an address, of the dtype the loop is compiled for."""
    return carray(_elements(address, block), shape)


@part
def float_pointer(address: Any) -> Any:
    """Return an address as a pointer to fp32."""
    return _floats(address)


@part
def thread_share() -> Any:
    """Return the number of this thread, and how many there are."""
    return np.int64(_thread_num()), np.int64(_num_threads())


@part
def share(rows: Any) -> Any:
    """Return this thread's share of `rows`: the first and one past the last."""
    thread, threads = np.int64(_thread_num()), np.int64(_num_threads())
    return rows * thread // threads, rows * (thread + 1) // threads


def wide(value: Value) -> Any:
    """Convert an element to fp32."""


@overload(wide)
def _wide(value: Any) -> Any:
    def of_fp32(value: Any) -> Any:
        return value

    def of_bf16(value: Any) -> Any:
        return np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)

    def of_int8(value: Any) -> Any:
        return np.float32(value)

    return {types.float32: of_fp32, types.int8: of_int8}.get(value, of_bf16)


def narrow(value: Any, like: Array) -> Value:
    """Round fp32 to an element of `like`, to nearest, ties to even."""


@overload(narrow)
def _narrow(value: Any, like: Any) -> Any:
    def to_fp32(value: Any, like: Any) -> Any:
        return np.float32(value)

    def to_bf16(value: Any, like: Any) -> Any:
        bits = np.float32(value).view(np.uint32)
        odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
        rounded = np.uint32(bits + np.uint32(0x7FFF) + odd)
        quiet = np.uint32(bits | np.uint32(0x400000))  # a NaN must not be rounded up to infinity
        return np.uint16(np.uint32(quiet if value != value else rounded) >> np.uint32(16))

    return to_fp32 if like.dtype == types.float32 else to_bf16


@part
def exp(x: Any) -> Any:
    """exp of an fp32 number with an error of about 1e-7 (relative, plus 3e-8 |x|); 1e-38 below -87,
    never infinite, NaN for NaN.

    exp(x) = 2^n exp(r), where n is the integer nearest to x / ln 2; |r| is at most 0.35, for which
    eight terms of the series suffice.
    """
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    x = np.float32(88.0) if x > np.float32(88.0) else x
    n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    r = x - n * np.float32(0.6931471805599453)
    series = np.float32(1 / 5040)
    series = series * r + np.float32(1 / 720)
    series = series * r + np.float32(1 / 120)
    series = series * r + np.float32(1 / 24)
    series = series * r + np.float32(1 / 6)
    series = series * r + np.float32(1 / 2)
    series = series * r + np.float32(1)
    series = series * r + np.float32(1)
    return series * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@part
def within(x: Any, limit: Any) -> Any:
    """Clamp x to [-limit, limit]; NaN stays NaN."""
    x = limit if x > limit else x
    return -limit if x < -limit else x


@part
def row_max(row: Array) -> Any:
    """Return the largest element of a row in fp32; NaN or the largest number if there is a NaN.

    Elements are compared as integers in the order of the floats, because vector units have no float
    maximum that propagates NaN.
    """
    most = np.int32(-0x7FFFFFFF)
    for j in range(len(row)):
        bits = np.float32(wide(row[j])).view(np.int32)
        most = max(
            most, np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        )
    return np.int32(most ^ np.int32(np.int32(most >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(
        np.float32
    )


# The loops. Arguments in the order of the block. Arrays are shaped so that every innermost index is
# the loop counter: numba checks an index with an offset for negative values, which prevents
# vectorization (measured: 3 to 5 times slower).


def rms_norm(block: Block) -> None:
    """rows, h, eps, twice, x [rows, h], weight fp32 [h] -> y [rows, h], scale fp32 [rows].

    `twice`: also round before the multiplication by the weight.
    """
    rows, h, eps, twice = count(block, 0), count(block, 1), number(block, 2), count(block, 3)
    x, weight, y = data(block, 4, (rows, h)), wides(block, 5, (h,)), data(block, 6, (rows, h))
    scale = wides(block, 7, (rows,))
    first, last = share(rows)
    for i in range(first, last):
        squares = np.float32(0)
        for j in range(h):
            value = wide(x[i, j])
            squares += value * value
        s = np.float32(1) / np.sqrt(squares / np.float32(h) + eps)
        scale[i] = s
        if twice:
            for j in range(h):
                y[i, j] = narrow(wide(narrow(wide(x[i, j]) * s, y)) * weight[j], y)
        else:
            for j in range(h):
                y[i, j] = narrow(wide(x[i, j]) * s * weight[j], y)


def rms_norm_backward(block: Block) -> None:
    """rows, h, adds, dy [rows, h], x, weight fp32 [h], scale fp32 [rows], dsum [rows, h] if adds ->
    dx, dweight.

    dweight is fp32 [threads, h] and must be 0 initially. With `adds`, dx = gradient through the
    norm + dsum.
    """
    rows, h, adds = count(block, 0), count(block, 1), count(block, 2)
    dy, x = data(block, 3, (rows, h)), data(block, 4, (rows, h))
    weight, scale = wides(block, 5, (h,)), wides(block, 6, (rows,))
    dsum, dx = data(block, 7, (rows, h)), data(block, 8, (rows, h))
    dweight = wides(block, 9, (np.int64(_num_threads()), h))[np.int64(_thread_num())]
    first, last = share(rows)
    for i in range(first, last):
        s, along = scale[i], np.float32(0)
        for j in range(h):
            product = wide(dy[i, j]) * wide(x[i, j])
            along += product * weight[j]
            dweight[j] += product * s
        along *= s * s * s / np.float32(h)
        if adds:
            for j in range(h):
                through = wide(dy[i, j]) * weight[j] * s - wide(x[i, j]) * along
                dx[i, j] = narrow(through + wide(dsum[i, j]), dx)
        else:
            for j in range(h):
                dx[i, j] = narrow(wide(dy[i, j]) * weight[j] * s - wide(x[i, j]) * along, dx)


def swiglu(block: Block) -> None:
    """rows, f, gate_up [rows, 2, f] -> y [rows, f]."""
    rows, f = count(block, 0), count(block, 1)
    gate_up, y = data(block, 2, (rows, 2, f)), data(block, 3, (rows, f))
    first, last = share(rows)
    for i in range(first, last):
        for j in range(f):
            gate = wide(gate_up[i, 0, j])
            y[i, j] = narrow(gate / (np.float32(1) + exp(-gate)) * wide(gate_up[i, 1, j]), y)


def swiglu_backward(block: Block) -> None:
    """rows, f, dy [rows, f], gate_up [rows, 2, f] -> d gate_up."""
    rows, f = count(block, 0), count(block, 1)
    dy, gate_up, out = (
        data(block, 2, (rows, f)),
        data(block, 3, (rows, 2, f)),
        data(block, 4, (rows, 2, f)),
    )
    first, last = share(rows)
    for i in range(first, last):
        for j in range(f):
            d, gate, up = wide(dy[i, j]), wide(gate_up[i, 0, j]), wide(gate_up[i, 1, j])
            sigmoid = np.float32(1) / (np.float32(1) + exp(-gate))
            out[i, 0, j] = narrow(
                d * up * sigmoid * (np.float32(1) + gate * (np.float32(1) - sigmoid)), out
            )
            out[i, 1, j] = narrow(d * gate * sigmoid, out)


def gated(block: Block) -> None:
    """rows, f, a, b, clamp, offset, gate_up [rows, 2, f] -> y [rows, f].

    y = g * sigmoid(a g + b g^3) * (u + offset), where g is the gate, clamped to at most clamp, and
    u is up, clamped to [-clamp, clamp].
    """
    rows, f, a, b = count(block, 0), count(block, 1), number(block, 2), number(block, 3)
    clamp, offset = number(block, 4), number(block, 5)
    gate_up, y = data(block, 6, (rows, 2, f)), data(block, 7, (rows, f))
    first, last = share(rows)
    for i in range(first, last):
        for j in range(f):
            g, u = wide(gate_up[i, 0, j]), wide(gate_up[i, 1, j])
            g = clamp if g > clamp else g
            u = within(u, clamp)
            c = within(g, np.float32(100))
            y[i, j] = narrow(g / (np.float32(1) + exp(-(a + b * c * c) * c)) * (u + offset), y)


def gated_backward(block: Block) -> None:
    """rows, f, a, b, clamp, offset, dy [rows, f], gate_up [rows, 2, f] -> d gate_up; 0 where
    `gated` clamps."""
    rows, f, a, b = count(block, 0), count(block, 1), number(block, 2), number(block, 3)
    clamp, offset = number(block, 4), number(block, 5)
    dy, gate_up, out = (
        data(block, 6, (rows, f)),
        data(block, 7, (rows, 2, f)),
        data(block, 8, (rows, 2, f)),
    )
    zero, one = np.float32(0), np.float32(1)
    first, last = share(rows)
    for i in range(first, last):
        for j in range(f):
            d, gate, up = wide(dy[i, j]), wide(gate_up[i, 0, j]), wide(gate_up[i, 1, j])
            g = clamp if gate > clamp else gate
            u, c = within(up, clamp), within(g, np.float32(100))  # beyond 100, sigmoid is 0 or 1
            sigmoid = one / (one + exp(-(a + b * c * c) * c))
            slope = sigmoid * (one + c * (a + np.float32(3) * b * c * c) * (one - sigmoid))
            out[i, 0, j] = narrow(zero if gate > clamp else d * (u + offset) * slope, out)
            out[i, 1, j] = narrow(zero if abs(up) > clamp else d * g * sigmoid, out)


def weighted_gated(block: Block) -> None:
    """rows, f, a, b, clamp, offset, weights fp32 [rows], gate_up [rows, 2, f] -> y [rows, f]:
    `gated` * weight."""
    rows, f, a, b = count(block, 0), count(block, 1), number(block, 2), number(block, 3)
    clamp, offset, weights = number(block, 4), number(block, 5), wides(block, 6, (rows,))
    gate_up, y = data(block, 7, (rows, 2, f)), data(block, 8, (rows, f))
    first, last = share(rows)
    for i in range(first, last):
        w = weights[i]
        for j in range(f):
            g, u = wide(gate_up[i, 0, j]), wide(gate_up[i, 1, j])
            g = clamp if g > clamp else g
            u = within(u, clamp)
            c = within(g, np.float32(100))
            y[i, j] = narrow(g / (np.float32(1) + exp(-(a + b * c * c) * c)) * (u + offset) * w, y)


def weighted_gated_backward(block: Block) -> None:
    """rows, f, a, b, clamp, offset, weights fp32 [rows], dy [rows, f], gate_up [rows, 2, f] -> d
    gate_up, dw [rows].

    dw is fp32: each row's sum of dy times the output of `gated`.
    """
    rows, f, a, b = count(block, 0), count(block, 1), number(block, 2), number(block, 3)
    clamp, offset, weights = number(block, 4), number(block, 5), wides(block, 6, (rows,))
    dy, gate_up, out = (
        data(block, 7, (rows, f)),
        data(block, 8, (rows, 2, f)),
        data(block, 9, (rows, 2, f)),
    )
    dw = wides(block, 10, (rows,))
    zero, one = np.float32(0), np.float32(1)
    first, last = share(rows)
    for i in range(first, last):
        w, total = weights[i], zero
        for j in range(f):
            d, gate, up = wide(dy[i, j]), wide(gate_up[i, 0, j]), wide(gate_up[i, 1, j])
            g = clamp if gate > clamp else gate
            # beyond 100, sigmoid is 0 or 1
            u, c = (
                within(up, clamp) + offset,
                within(g, np.float32(100)),
            )
            sigmoid = one / (one + exp(-(a + b * c * c) * c))
            slope = sigmoid * (one + c * (a + np.float32(3) * b * c * c) * (one - sigmoid))
            total += d * g * sigmoid * u
            d *= w
            out[i, 0, j] = narrow(zero if gate > clamp else d * u * slope, out)
            out[i, 1, j] = narrow(zero if abs(up) > clamp else d * g * sigmoid, out)
        dw[i] = total


def weighted_squared_relu(block: Block) -> None:
    """rows, f, weights fp32 [rows], x [rows, f] -> y [rows, f]: weight * max(x, 0)^2."""
    rows, f, weights = count(block, 0), count(block, 1), wides(block, 2, (count(block, 0),))
    x, y = data(block, 3, (rows, f)), data(block, 4, (rows, f))
    first, last = share(rows)
    for i in range(first, last):
        w = weights[i]
        for j in range(f):
            value = wide(x[i, j])
            value = np.float32(0) if value < np.float32(0) else value  # NaN stays
            y[i, j] = narrow(value * value * w, y)


def weighted_squared_relu_backward(block: Block) -> None:
    """rows, f, weights fp32 [rows], dy [rows, f], x -> dx [rows, f], dw fp32 [rows]."""
    rows, f, weights = count(block, 0), count(block, 1), wides(block, 2, (count(block, 0),))
    dy, x, dx = data(block, 3, (rows, f)), data(block, 4, (rows, f)), data(block, 5, (rows, f))
    dw = wides(block, 6, (rows,))
    first, last = share(rows)
    for i in range(first, last):
        w, total = np.float32(2) * weights[i], np.float32(0)
        for j in range(f):
            d, value = wide(dy[i, j]), wide(x[i, j])
            value = np.float32(0) if value < np.float32(0) else value
            total += d * value * value
            dx[i, j] = narrow(d * value * w, dx)
        dw[i] = total


def dropout(block: Block) -> None:
    """rows, h, first, threshold, factor, hashes int64 [rows], x [rows, h] -> y [rows, h].

    y = factor * x, or 0 where a 32-bit hash of the row's hash and the feature number (counted from
    `first`), as a signed integer, is below the threshold. The mixer is that of kernels/dropout.py.
    """
    rows, h, first_feature, threshold = (
        count(block, 0),
        count(block, 1),
        count(block, 2),
        np.int32(count(block, 3)),
    )
    factor, hashes = number(block, 4), longs(block, 5, (rows,))
    x, y = data(block, 6, (rows, h)), data(block, 7, (rows, h))
    step = np.uint32(0x9E3779B9)
    first, last = share(rows)
    for i in range(first, last):
        high = np.uint32(np.uint64(hashes[i]) >> np.uint64(32))
        start = np.uint32(np.uint32(hashes[i]) + np.uint32(np.uint32(first_feature) * step))
        for j in range(h):
            z = np.uint32(start + np.uint32(np.uint32(j) * step))
            z = np.uint32(np.uint32(z ^ np.uint32(z >> np.uint32(16))) * np.uint32(0x85EBCA6B))
            z = np.uint32(z ^ high)
            z = np.uint32(np.uint32(z ^ np.uint32(z >> np.uint32(15))) * np.uint32(0xC2B2AE35))
            z = np.uint32(z ^ np.uint32(z >> np.uint32(16)))
            kept = wide(x[i, j]) * factor
            y[i, j] = narrow(np.float32(0) if z.view(np.int32) < threshold else kept, y)


def rope(block: Block) -> None:
    """rows, n, d, row stride of x, head stride of x, sign, x, cos [rows, d / 2], sin -> y [rows, n,
    d].

    sign 1 rotates by the tables' angles, -1 rotates back.
    """
    rows, n, d = count(block, 0), count(block, 1), count(block, 2)
    row_stride, head_stride, sign = count(block, 3), count(block, 4), np.float32(count(block, 5))
    half = d // 2
    x = data(block, 6, (rows * row_stride + n * head_stride,))
    cos, sin = data(block, 7, (rows, half)), data(block, 8, (rows, half))
    y = data(block, 9, (rows, n, 2, half))
    first, last = share(rows)
    for i in range(first, last):
        for head in range(n):
            start = i * row_stride + head * head_stride
            x1, x2 = x[start : start + half], x[start + half : start + d]
            for j in range(half):
                a, b = wide(x1[j]), wide(x2[j])
                c, s = wide(cos[i, j]), wide(sin[i, j]) * sign
                y[i, head, 0, j] = narrow(a * c - b * s, y)
                y[i, head, 1, j] = narrow(b * c + a * s, y)


def rope_part(block: Block) -> None:
    """rows, n, d, pairs, row stride of x, head stride of x, sign, x, cos [rows, pairs], sin -> y
    [rows, n, d].

    As `rope`, but only the first 2 * pairs features are rotated; the rest is copied.
    """
    rows, n, d, pairs = count(block, 0), count(block, 1), count(block, 2), count(block, 3)
    row_stride, head_stride, sign = count(block, 4), count(block, 5), np.float32(count(block, 6))
    x, y = data(block, 7, (rows * row_stride + n * head_stride,)), data(block, 10, (rows * n * d,))
    cos, sin = data(block, 8, (rows, pairs)), data(block, 9, (rows, pairs))
    first, last = share(rows)
    for i in range(first, last):
        for head in range(n):
            start, out = i * row_stride + head * head_stride, (i * n + head) * d
            x1, x2, rest = (
                x[start : start + pairs],
                x[start + pairs : start + 2 * pairs],
                x[start + 2 * pairs : start + d],
            )
            y1, y2, same = (
                y[out : out + pairs],
                y[out + pairs : out + 2 * pairs],
                y[out + 2 * pairs : out + d],
            )
            for j in range(pairs):
                a, b = wide(x1[j]), wide(x2[j])
                c, s = wide(cos[i, j]), wide(sin[i, j]) * sign
                y1[j] = narrow(a * c - b * s, y)
                y2[j] = narrow(b * c + a * s, y)
            for j in range(len(same)):
                same[j] = rest[j]


def rope_neighbors(block: Block) -> None:
    """As `rope_part`, with interleaved pairs: features 2 j and 2 j + 1."""
    rows, n, d, pairs = count(block, 0), count(block, 1), count(block, 2), count(block, 3)
    row_stride, head_stride, sign = count(block, 4), count(block, 5), np.float32(count(block, 6))
    x, y = data(block, 7, (rows * row_stride + n * head_stride,)), data(block, 10, (rows * n * d,))
    cos, sin = data(block, 8, (rows, pairs)), data(block, 9, (rows, pairs))
    first, last = share(rows)
    for i in range(first, last):
        for head in range(n):
            start, out = i * row_stride + head * head_stride, (i * n + head) * d
            rotated_x, rotated_y = x[start : start + 2 * pairs], y[out : out + 2 * pairs]
            two, both = rotated_x.reshape((pairs, 2)), rotated_y.reshape((pairs, 2))
            rest, same = x[start + 2 * pairs : start + d], y[out + 2 * pairs : out + d]
            for j in range(pairs):
                a, b = wide(two[j, 0]), wide(two[j, 1])
                c, s = wide(cos[i, j]), wide(sin[i, j]) * sign
                both[j, 0] = narrow(a * c - b * s, y)
                both[j, 1] = narrow(b * c + a * s, y)
            for j in range(len(same)):
                same[j] = rest[j]


def row_sums(block: Block) -> None:
    """rows, v, logits [rows, v] -> largest fp32 [rows], sums fp32 [rows]: each row's sum of
    exp(logit - largest)."""
    rows, v = count(block, 0), count(block, 1)
    logits = data(block, 2, (rows, v))
    largest, sums = wides(block, 3, (rows,)), wides(block, 4, (rows,))
    first, last = share(rows)
    for i in range(first, last):
        top = row_max(logits[i])
        total = np.float32(0)
        for j in range(v):
            total += exp(wide(logits[i, j]) - top)
        largest[i] = top
        sums[i] = total


def logit_gradients(block: Block) -> None:
    """rows, v, largest fp32 [rows], factor fp32 [rows], logits [rows, v] -> factor * exp(logit -
    largest), in place."""
    rows, v = count(block, 0), count(block, 1)
    largest, factor = wides(block, 2, (rows,)), wides(block, 3, (rows,))
    logits = data(block, 4, (rows, v))
    first, last = share(rows)
    for i in range(first, last):
        top, f = largest[i], factor[i]
        for j in range(v):
            logits[i, j] = narrow(exp(wide(logits[i, j]) - top) * f, logits)


@part
def unseen(row: Array, start: Any, stop: Any) -> None:
    """Set elements before `start` and from `stop` on to 0."""
    before, after = row[:start], row[stop:]
    for j in range(len(before)):
        before[j] = narrow(np.float32(0), before)
    for j in range(len(after)):
        after[j] = narrow(np.float32(0), after)


def visible_softmax(block: Block) -> None:
    """rows, keys, queries, scores fp32 [rows, keys], visible int64 [queries, 2] -> p [rows, keys].

    Softmax of each row over the keys that its query sees; `visible[i % queries]` is the first of
    them and one past the last; 0 elsewhere. Overwrites the scores; p may share their memory.
    """
    rows, keys, queries = count(block, 0), count(block, 1), count(block, 2)
    scores, visible = wides(block, 3, (rows, keys)), longs(block, 4, (queries, 2))
    p = data(block, 5, (rows, keys))
    first, last = share(rows)
    for i in range(first, last):
        start, stop = visible[i % queries, 0], visible[i % queries, 1]
        visible_scores, out = scores[i, start:stop], p[i, start:stop]
        top, total = row_max(visible_scores), np.float32(0)
        for j in range(len(visible_scores)):
            e = exp(visible_scores[j] - top)
            visible_scores[j] = e
            total += e
        factor = np.float32(1) / total
        for j in range(len(visible_scores)):
            out[j] = narrow(visible_scores[j] * factor, out)
        unseen(p[i], start, stop)


def visible_exp(block: Block) -> None:
    """rows, keys, queries, known, largest fp32 [rows], total fp32 [rows], scores fp32 [rows, keys],
    visible int64 [queries, 2] -> p [rows, keys].

    exp(score - largest) of the keys that each row's query sees; `visible[i % queries]` is the first
    of them and one past the last; 0 elsewhere. Unless `known`, writes largest (of the visible
    scores, or the lowest fp32 number without any) and total, the sum over the keys. Scores become p
    before rounding; p may share their memory.
    """
    rows, keys, queries, known = count(block, 0), count(block, 1), count(block, 2), count(block, 3)
    largest, total = wides(block, 4, (rows,)), wides(block, 5, (rows,))
    scores, visible = wides(block, 6, (rows, keys)), longs(block, 7, (queries, 2))
    p = data(block, 8, (rows, keys))
    first, last = share(rows)
    for i in range(first, last):
        start, stop = visible[i % queries, 0], visible[i % queries, 1]
        visible_scores, out = scores[i, start:stop], p[i, start:stop]
        if not known:
            largest[i] = (
                row_max(visible_scores) if stop > start else np.float32(-3.4028234663852886e38)
            )
        top, row_total = largest[i], np.float32(0)
        for j in range(len(visible_scores)):
            e = exp(visible_scores[j] - top)
            visible_scores[j] = e
            row_total += e
        if not known:
            total[i] = row_total
        for j in range(len(visible_scores)):
            out[j] = narrow(visible_scores[j], out)
        unseen(scores[i], start, stop)
        unseen(p[i], start, stop)


# --- sampling (kernels/sampling.py)


@part
def mix_64(z: Any) -> Any:
    """Return the 64-bit hash of a state: the mixer of kernels/dropout.py."""
    z = np.uint64((z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9))
    z = np.uint64((z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB))
    return np.uint64(z ^ (z >> np.uint64(31)))


@part
def gumbel_bound(z: Any) -> Any:
    """Return an upper bound of the Gumbel noise of a hash, in fp32, exact to 1e-4; at most 0.06
    too large for noise above 4.

    The noise of the uniform number 1 - w is at most -ln w. The bits of a float, read as an integer,
    are 2^23 times a lower bound of its log2, plus the exponent's bias.
    """
    w = np.float32(np.int32(z >> np.uint64(33)))  # 2^31 w, rounded
    return np.float32(109.51733) - np.float32(w.view(np.int32)) * np.float32(8.262958e-08)


@part
def find_largest(row: Array) -> Any:
    """Return the largest number of a row, its first index (-1 if all are -inf), the number of -inf,
    and the number of NaN and infinity."""
    tile_size = 1024
    top, at = np.float32(-np.inf), np.int64(-1)
    num_masked, num_invalid = np.int64(0), np.int64(0)
    for start in range(0, len(row), tile_size):
        tile = row[start : min(start + tile_size, len(row))]
        masked, nonfinite = np.int32(0), np.int32(0)
        for j in range(len(tile)):
            bits = np.float32(wide(tile[j])).view(np.int32)
            masked += np.int32(bits == np.int32(-0x800000))
            nonfinite += np.int32(np.int32(bits & np.int32(0x7FFFFFFF)) >= np.int32(0x7F800000))
        num_masked += masked
        num_invalid += nonfinite - masked
        largest = row_max(tile)
        if largest > top:
            top, at = largest, np.int64(start)
    if at >= 0:
        while np.float32(wide(row[at])) != top:
            at += 1
    return top, at, num_masked, num_invalid


@part
def gumbel_noise(z: Any) -> Any:
    """Return the Gumbel noise of a hash, in float64."""
    w = (np.float64(np.int64(z >> np.uint64(12))) + 0.5) * 2.0**-52
    return -np.log(-np.log(1.0 - w))


def gumbel_argmax(block: Block) -> None:
    """rows, v, stride, first, keys int64 [rows], temperatures float64 [rows], logits [rows, stride]
    -> values float64 [rows], ids int64 [rows], masked int64 [rows].

    See `kernels/sampling.gumbel_argmax`. A tile of the row is searched only if the bound of a token
    in it is above the best value so far, so few logarithms are computed; the token with the largest
    logit is tried first.
    """
    rows, v, stride = count(block, 0), count(block, 1), count(block, 2)
    first_token, keys = np.uint64(count(block, 3)), longs(block, 4, (rows,))
    temperatures, logits = longs(block, 5, (rows,)), data(block, 6, (rows, stride))
    values, ids, masked = (
        longs(block, 7, (rows,)),
        longs(block, 8, (rows,)),
        longs(block, 9, (rows,)),
    )
    step, tile_size = np.uint64(0x9E3779B97F4A7C15), 128
    first, last = share(rows)
    for i in range(first, last):
        row, temperature = logits[i, :v], np.int64(temperatures[i]).view(np.float64)
        top, at, num_masked, num_invalid = find_largest(row)
        best, start = np.float64(top), np.uint64(np.uint64(keys[i]) + first_token * step)
        if num_invalid == 0 and at >= 0 and temperature > 0:
            scaled_top, inverse = best / temperature, np.float32(1 / temperature)
            best = scaled_top + gumbel_noise(mix_64(start + np.uint64(at) * step))
            slack = 1e-4 + 4e-15 * abs(scaled_top)
            limit = np.float32(best - scaled_top - slack)
            for begin in range(0, v, tile_size):
                tile, state = (
                    row[begin : min(begin + tile_size, v)],
                    start + np.uint64(begin) * step,
                )
                candidates = np.int32(0)
                for j in range(len(tile)):
                    bound = gumbel_bound(mix_64(state + np.uint64(j) * step))
                    near = (wide(tile[j]) - top) * inverse + bound
                    candidates += np.int32(near > limit)
                if candidates > 0:
                    for j in range(len(tile)):
                        z = mix_64(state + np.uint64(j) * step)
                        if (wide(tile[j]) - top) * inverse + gumbel_bound(z) > limit:
                            value = np.float64(wide(tile[j])) / temperature + gumbel_noise(z)
                            if value > best or (value == best and begin + j < at):
                                best, at = value, begin + j
                                limit = np.float32(best - scaled_top - slack)
        values[i] = np.float64(best).view(np.int64)
        ids[i] = np.int64(first_token) + at if at >= 0 else -1
        if num_invalid > 0:
            values[i] = np.int64(0x7FF8000000000000)  # NaN
            ids[i] = -1
        masked[i] = num_masked

"""Triton kernel of rotary position embedding: a program rotates some heads of one token."""

from typing import Any

import triton  # lint: allow optional-import: callers import this module inside functions
import triton.language as tl  # lint: allow optional-import: as above
from torch import Tensor

from megalith.kernels.triton.launch import TILE, next_power_of_two

Pointer = Any  # in a kernel: address of a tensor
Count = Any  # in a kernel: an integer


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, sign: int, interleaved: bool) -> Tensor:
    """Rotate by the tables' angles (sign 1) or back (sign -1): x [t, n, d], any strides; cos, sin
    [t, pairs]."""
    x = x if x.stride(2) == 1 else x.contiguous()
    (t, n, d), pairs = x.shape, cos.shape[1]
    y, columns = x.new_empty(x.shape), next_power_of_two(max(pairs, d - 2 * pairs))
    heads = min(next_power_of_two(n), max(1, TILE // columns))
    _rotate[(t, -(-n // heads))](
        x,
        cos.contiguous(),
        sin.contiguous(),
        y,
        n,
        d,
        pairs,
        x.stride(0),
        x.stride(1),
        float(sign),
        INTERLEAVED=interleaved,
        RESTS=d > 2 * pairs,
        HEADS=heads,
        COLUMNS=columns,
    )
    return y


@triton.jit
def _rotate(
    x_at: "Pointer",
    cos_at: "Pointer",
    sin_at: "Pointer",
    y_at: "Pointer",
    n: "Count",
    d: "Count",
    pairs: "Count",
    token_stride: "Count",
    head_stride: "Count",
    sign: "Any",
    INTERLEAVED: tl.constexpr,
    RESTS: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, COLUMNS)
    x_at += token * token_stride + heads[:, None] * head_stride
    y_at += token * n * d + heads[:, None] * d
    cos = tl.load(cos_at + token * pairs + columns, columns < pairs, 0.0).to(tl.float32)[None, :]
    sin = (
        tl.load(sin_at + token * pairs + columns, columns < pairs, 0.0).to(tl.float32)[None, :]
        * sign
    )
    if INTERLEAVED:
        first, second = 2 * columns, 2 * columns + 1
    else:
        first, second = columns, columns + pairs
    inside = (heads < n)[:, None] & (columns < pairs)[None, :]
    a = tl.load(x_at + first[None, :], inside, 0.0).to(tl.float32)
    b = tl.load(x_at + second[None, :], inside, 0.0).to(tl.float32)
    tl.store(y_at + first[None, :], (a * cos - b * sin).to(y_at.dtype.element_ty), inside)
    tl.store(y_at + second[None, :], (b * cos + a * sin).to(y_at.dtype.element_ty), inside)
    if RESTS:
        rest = 2 * pairs + columns
        inside = (heads < n)[:, None] & (rest < d)[None, :]
        tl.store(y_at + rest[None, :], tl.load(x_at + rest[None, :], inside, 0.0), inside)

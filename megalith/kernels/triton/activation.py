"""Triton kernels of gated and weighted activations; backward recomputes the activation.

One kernel covers all variants: with or without a gate, weighted or not. Compile-time constants
select the variant.
"""

from typing import Any

import torch
import triton  # lint: allow optional-import: callers import this module inside functions
import triton.language as tl  # lint: allow optional-import: as above
from torch import Tensor

from megalith.config.model import Activation
from megalith.kernels.triton.launch import partial_row_tile

Pointer = Any  # in a kernel: address of a tensor
Count = Any  # in a kernel: an integer
Tensors = Any  # in a kernel: a block of values

Limits = tuple[float, float]
"""(clamp, up_offset): see `GatedActivation`."""

CUBES = {
    "silu": (1.0, 0.0),
    "quick_gelu": (1.702, 0.0),
    "gelu_tanh": (1.5957691216057308, 0.07135481627),
}
"""(a, b) of activations of the form x * sigmoid(a x + b x^3); a test compares them with
kernels/activation.py."""


def forward(
    x: Tensor, activation: Activation, limits: Limits | None, weights: Tensor | None
) -> Tensor:
    """Apply the activation: x [t, 2 f], the gate first, or, without limits, x [t, f] without a
    gate; weights [t] or None -> [t, f]."""
    x = x.contiguous()
    t, f = x.shape[0], x.shape[1] // (1 if limits is None else 2)
    y, tile = x.new_empty(t, f), partial_row_tile(f)
    _forward[(tile.programs(t),)](
        x,
        x if weights is None else weights.contiguous(),
        y,
        t,
        f,
        *(limits or (0.0, 0.0)),
        **_kind(activation, limits, weights),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.warps,
    )
    return y


def backward(
    dy: Tensor, x: Tensor, activation: Activation, limits: Limits | None, weights: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """dy [t, f] -> dx like x and, with weights, their gradient [t] in fp32."""
    dy, x = dy.contiguous(), x.contiguous()
    (t, f), dx = dy.shape, torch.empty_like(x)
    dweights, tile = (
        None if weights is None else x.new_empty(t, dtype=torch.float32),
        partial_row_tile(dy.shape[1]),
    )
    _backward[(tile.programs(t),)](
        dy,
        x,
        x if weights is None else weights.contiguous(),
        dx,
        x if dweights is None else dweights,
        t,
        f,
        *(limits or (0.0, 0.0)),
        **_kind(activation, limits, weights),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.warps,
    )
    return dx, dweights


def _kind(
    activation: Activation, limits: Limits | None, weights: Tensor | None
) -> dict[str, Any]:  # as Triton takes it
    a, b = CUBES.get(activation, (0.0, 0.0))
    return {
        "KIND": activation,
        "A": a,
        "B": b,
        "GATED": limits is not None,
        "WEIGHTED": weights is not None,
    }


@triton.jit
def _sigmoid(x: "Tensors", A: tl.constexpr, B: tl.constexpr) -> "Tensors":
    return 1.0 / (1.0 + tl.exp(-(A + B * x * x) * x))


@triton.jit
def _within(x: "Tensors", limit: "Any") -> "Tensors":
    """Clamp to [-limit, limit]; NaN stays NaN, unlike with minimum and maximum."""
    x = tl.where(x > limit, limit, x)
    return tl.where(x < -limit, -limit, x)


@triton.jit
def _value(x: "Tensors", KIND: tl.constexpr, A: tl.constexpr, B: tl.constexpr) -> "Tensors":
    if KIND == "gelu":
        y = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "relu":
        y = tl.where(x < 0.0, 0.0, x)
    elif KIND == "squared_relu":
        y = tl.where(x < 0.0, 0.0, x * x)
    else:
        y = x * _sigmoid(_within(x, 100.0), A, B)  # beyond 100 it is 0 or 1
    return y


@triton.jit
def _slope(x: "Tensors", KIND: tl.constexpr, A: tl.constexpr, B: tl.constexpr) -> "Tensors":
    if KIND == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        y = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * density
    elif KIND == "relu":
        y = tl.where(x > 0.0, 1.0, 0.0)
    elif KIND == "squared_relu":
        y = tl.where(x < 0.0, 0.0, 2.0 * x)
    else:
        x = _within(x, 100.0)
        sigmoid = _sigmoid(x, A, B)
        y = sigmoid * (1.0 + x * (A + 3.0 * B * x * x) * (1.0 - sigmoid))
    return y


@triton.jit
def _forward(
    x_at: "Pointer",
    weights_at: "Pointer",
    y_at: "Pointer",
    t: "Count",
    f: "Count",
    clamp: "Any",
    offset: "Any",
    KIND: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    for start in range(0, f, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = (rows < t)[:, None] & (columns < f)[None, :]
        if GATED:
            place = rows[:, None] * (2 * f) + columns[None, :]
            gate = tl.load(x_at + place, inside, 0.0).to(tl.float32)
            up = tl.load(x_at + place + f, inside, 0.0).to(tl.float32)
            y = _value(tl.where(gate > clamp, clamp, gate), KIND, A, B) * (
                _within(up, clamp) + offset
            )
        else:
            y = _value(
                tl.load(x_at + rows[:, None] * f + columns[None, :], inside, 0.0).to(tl.float32),
                KIND,
                A,
                B,
            )
        if WEIGHTED:
            y *= tl.load(weights_at + rows, rows < t, 0.0).to(tl.float32)[:, None]
        tl.store(y_at + rows[:, None] * f + columns[None, :], y.to(y_at.dtype.element_ty), inside)


@triton.jit
def _backward(
    dy_at: "Pointer",
    x_at: "Pointer",
    weights_at: "Pointer",
    dx_at: "Pointer",
    dweights_at: "Pointer",
    t: "Count",
    f: "Count",
    clamp: "Any",
    offset: "Any",
    KIND: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dweights = tl.zeros((ROWS,), tl.float32)
    for start in range(0, f, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = (rows < t)[:, None] & (columns < f)[None, :]
        narrow = rows[:, None] * f + columns[None, :]
        dy = tl.load(dy_at + narrow, inside, 0.0).to(tl.float32)
        if GATED:
            place = rows[:, None] * (2 * f) + columns[None, :]
            gate = tl.load(x_at + place, inside, 0.0).to(tl.float32)
            up = tl.load(x_at + place + f, inside, 0.0).to(tl.float32)
            limited, factor = tl.where(gate > clamp, clamp, gate), _within(up, clamp) + offset
            value = _value(limited, KIND, A, B)
            if WEIGHTED:
                dweights += tl.sum(dy * value * factor, 1)
                dy *= tl.load(weights_at + rows, rows < t, 0.0).to(tl.float32)[:, None]
            dgate = tl.where(gate > clamp, 0.0, dy * factor * _slope(limited, KIND, A, B))
            dup = tl.where(tl.abs(up) > clamp, 0.0, dy * value)
            tl.store(dx_at + place, dgate.to(dx_at.dtype.element_ty), inside)
            tl.store(dx_at + place + f, dup.to(dx_at.dtype.element_ty), inside)
        else:
            x = tl.load(x_at + narrow, inside, 0.0).to(tl.float32)
            if WEIGHTED:
                dweights += tl.sum(dy * _value(x, KIND, A, B), 1)
                dy *= tl.load(weights_at + rows, rows < t, 0.0).to(tl.float32)[:, None]
            tl.store(
                dx_at + narrow, (dy * _slope(x, KIND, A, B)).to(dx_at.dtype.element_ty), inside
            )
    if WEIGHTED:
        tl.store(dweights_at + rows, dweights, rows < t)

"""Triton kernels of a layer's operations between its matmuls: RMSNorm and LayerNorm with a fused
residual addition, rotary position embedding, gated and weighted activations.
"""

from typing import Any

import torch
import triton  # lint: allow optional-import: callers import this module inside functions
import triton.language as tl  # lint: allow optional-import: as above
from torch import Tensor

from megalith.config.model import Activation
from megalith.kernels.triton.launch import TILE, next_power_of_two, partial_row_tile, whole_row_tile

PROGRAMS = 256
"""Maximum number of programs in backward: about two per streaming multiprocessor of a large GPU;
their partial sums are added afterwards."""

Pointer = Any  # in a kernel: address of a tensor
Count = Any  # in a kernel: an integer


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    residual: Tensor | None = None,
    twice: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return (total, y, scale, mean): the norm's input and output [t, h], and each row's factor and
    mean [t, 1] in fp32.

    x [t, h], weight [h]. total is residual + x, or x. Without a bias it is an RMSNorm, and mean is
    None. `twice`: also round before the multiplication by the weight.
    """
    x = x.contiguous()
    (t, h), tile = x.shape, whole_row_tile(x.shape[1])
    y, scale = torch.empty_like(x), x.new_empty(t, 1, dtype=torch.float32)
    mean = None if bias is None else torch.empty_like(scale)
    total = x if residual is None else torch.empty_like(x)
    added = x if residual is None else residual.contiguous()
    _norm[(tile.programs(t),)](
        x,
        added,
        weight.contiguous(),
        _or(bias, x),
        total,
        y,
        scale,
        _or(mean, x),
        t,
        h,
        eps,
        ADDS=residual is not None,
        CENTERED=bias is not None,
        TWICE=twice,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.warps,
    )
    return total, y, scale, mean


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor, mean: Tensor | None, dtotal: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return dx [t, h], with dtotal [t, h] added if given, dweight [h] and, with a mean, dbias [h];
    the last two in fp32."""
    dy, x = dy.contiguous(), x.contiguous()
    (t, h), tile, dx = x.shape, whole_row_tile(x.shape[1]), torch.empty_like(x)
    programs = min(PROGRAMS, tile.programs(t))
    dweight = x.new_empty(programs, h, dtype=torch.float32)
    dbias = None if mean is None else torch.empty_like(dweight)
    added = x if dtotal is None else dtotal.contiguous()
    _norm_backward[(programs,)](
        dy,
        x,
        weight.contiguous(),
        scale,
        _or(mean, x),
        added,
        dx,
        dweight,
        _or(dbias, x),
        t,
        h,
        ADDS=dtotal is not None,
        CENTERED=mean is not None,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.warps,
    )
    return dx, dweight.sum(0), None if dbias is None else dbias.sum(0)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return the tensor, or a placeholder that the kernel does not access."""
    return other if tensor is None else tensor


@triton.jit
def _norm(
    x_at: "Pointer",
    residual_at: "Pointer",
    weight_at: "Pointer",
    bias_at: "Pointer",
    total_at: "Pointer",
    y_at: "Pointer",
    scale_at: "Pointer",
    mean_at: "Pointer",
    t: "Count",
    h: "Count",
    eps: "Any",
    ADDS: tl.constexpr,
    CENTERED: tl.constexpr,
    TWICE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = (rows < t)[:, None] & (columns < h)[None, :]
    place = rows[:, None] * h + columns[None, :]
    x = tl.load(x_at + place, inside, 0.0).to(tl.float32)
    if ADDS:
        x += tl.load(residual_at + place, inside, 0.0).to(tl.float32)
        total = x.to(total_at.dtype.element_ty)
        tl.store(total_at + place, total, inside)
        x = total.to(tl.float32)  # normalize the rounded sum, which the next layers read
    if CENTERED:
        mean = tl.sum(x, 1) / h
        tl.store(mean_at + rows, mean, rows < t)
        x = tl.where(inside, x - mean[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / h + eps)
    tl.store(scale_at + rows, scale, rows < t)
    y = x * scale[:, None]
    if TWICE:
        y = y.to(y_at.dtype.element_ty).to(tl.float32)
    y *= tl.load(weight_at + columns, columns < h, 0.0).to(tl.float32)[None, :]
    if CENTERED:
        y += tl.load(bias_at + columns, columns < h, 0.0).to(tl.float32)[None, :]
    tl.store(y_at + place, y.to(y_at.dtype.element_ty), inside)


@triton.jit
def _norm_backward(
    dy_at: "Pointer",
    x_at: "Pointer",
    weight_at: "Pointer",
    scale_at: "Pointer",
    mean_at: "Pointer",
    dtotal_at: "Pointer",
    dx_at: "Pointer",
    dweight_at: "Pointer",
    dbias_at: "Pointer",
    t: "Count",
    h: "Count",
    ADDS: tl.constexpr,
    CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    weight = tl.load(weight_at + columns, columns < h, 0.0).to(tl.float32)[None, :]
    dweight = tl.zeros((COLUMNS,), tl.float32)
    dbias = tl.zeros((COLUMNS,), tl.float32)
    for first in range(program * ROWS, t, tl.num_programs(0) * ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = (rows < t)[:, None] & (columns < h)[None, :]
        place = rows[:, None] * h + columns[None, :]
        dy = tl.load(dy_at + place, inside, 0.0).to(tl.float32)
        normed = tl.load(x_at + place, inside, 0.0).to(tl.float32)
        scale = tl.load(scale_at + rows, rows < t, 0.0)[:, None]
        if CENTERED:
            normed = tl.where(inside, normed - tl.load(mean_at + rows, rows < t, 0.0)[:, None], 0.0)
        normed *= scale
        dweight += tl.sum(dy * normed, 0)
        dbias += tl.sum(dy, 0)
        dy *= weight
        # minus the component along the row
        dx = dy - normed * (tl.sum(dy * normed, 1) / h)[:, None]
        if CENTERED:
            dx -= (tl.sum(dy, 1) / h)[:, None]  # minus the mean
        dx *= scale
        if ADDS:
            dx += tl.load(dtotal_at + place, inside, 0.0).to(tl.float32)
        tl.store(dx_at + place, dx.to(dx_at.dtype.element_ty), inside)
    tl.store(dweight_at + program * h + columns, dweight, columns < h)
    if CENTERED:
        tl.store(dbias_at + program * h + columns, dbias, columns < h)


# --- rotary position embedding: a program rotates some heads of one token


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


# --- gated and weighted activations; backward recomputes the activation
#
# One kernel covers all variants: with or without a gate, weighted or not. Compile-time constants
# select the variant.

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


def activation_forward(
    x: Tensor, activation: Activation, limits: Limits | None, weights: Tensor | None
) -> Tensor:
    """Apply the activation: x [t, 2 f], the gate first, or, without limits, x [t, f] without a
    gate; weights [t] or None -> [t, f]."""
    x = x.contiguous()
    t, f = x.shape[0], x.shape[1] // (1 if limits is None else 2)
    y, tile = x.new_empty(t, f), partial_row_tile(f)
    _activation_forward[(tile.programs(t),)](
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


def activation_backward(
    dy: Tensor, x: Tensor, activation: Activation, limits: Limits | None, weights: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """dy [t, f] -> dx like x and, with weights, their gradient [t] in fp32."""
    dy, x = dy.contiguous(), x.contiguous()
    (t, f), dx = dy.shape, torch.empty_like(x)
    dweights, tile = (
        None if weights is None else x.new_empty(t, dtype=torch.float32),
        partial_row_tile(dy.shape[1]),
    )
    _activation_backward[(tile.programs(t),)](
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
def _activation_forward(
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
def _activation_backward(
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

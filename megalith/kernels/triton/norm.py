"""Triton kernels of RMSNorm and LayerNorm with a fused residual addition: one pass forward, one
backward.

A program processes entire rows. Backward uses few programs with many rows each, which sum their
part of the weight's gradient; the parts are summed afterwards.
"""

from typing import Any

import torch
import triton  # lint: allow optional-import: callers import this module inside functions
import triton.language as tl  # lint: allow optional-import: as above
from torch import Tensor

from megalith.kernels.triton.launch import whole_row_tile

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

"""RMSNorm and LayerNorm on GPUs, with the residual addition before them: one pass forward, one
backward.

A program takes whole rows. In backward there are only a few programs, each with many rows, of which
it sums its part of the weight's gradient; the parts are added up afterwards.
"""

from typing import Any

import torch
import triton  # lint: allow optional-import: what needs this file imports it inside a function
import triton.language as tl  # lint: allow optional-import: as above
from torch import Tensor

from megalith.kernels.gpu import whole_rows

PROGRAMS = 256
"""At most so many in backward: about two for each processor of a large GPU, and a sum of so many
rows afterwards."""

Pointer = Any  # inside a program: where a tensor begins
Count = Any  # inside a program: an integer


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    residual: Tensor | None = None,
    twice: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(total, y, scale, mean): what is normed [t, h], normed, and each row's factor and mean [t, 1]
    in fp32.

    x [t, h], weight [h]. total is residual + x, or x. RMSNorm without a bias, and then there is no
    mean. `twice`: rounded before the multiplication with the weight, too.
    """
    x = x.contiguous()
    (t, h), tile = x.shape, whole_rows(x.shape[1])
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
        CENTRED=bias is not None,
        TWICE=twice,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.warps,
    )
    return total, y, scale, mean


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor, mean: Tensor | None, dtotal: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx [t, h], with dtotal [t, h] added if there is one, dweight [h] and, with a mean, dbias [h];
    these in fp32."""
    dy, x = dy.contiguous(), x.contiguous()
    (t, h), tile, dx = x.shape, whole_rows(x.shape[1]), torch.empty_like(x)
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
        CENTRED=mean is not None,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.warps,
    )
    return dx, dweight.sum(0), None if dbias is None else dbias.sum(0)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """The tensor, or another one in its place, which the program does not touch."""
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
    CENTRED: tl.constexpr,
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
        x = total.to(tl.float32)  # what others read of it is what is normed
    if CENTRED:
        mean = tl.sum(x, 1) / h
        tl.store(mean_at + rows, mean, rows < t)
        x = tl.where(inside, x - mean[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / h + eps)
    tl.store(scale_at + rows, scale, rows < t)
    y = x * scale[:, None]
    if TWICE:
        y = y.to(y_at.dtype.element_ty).to(tl.float32)
    y *= tl.load(weight_at + columns, columns < h, 0.0).to(tl.float32)[None, :]
    if CENTRED:
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
    CENTRED: tl.constexpr,
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
        if CENTRED:
            normed = tl.where(inside, normed - tl.load(mean_at + rows, rows < t, 0.0)[:, None], 0.0)
        normed *= scale
        dweight += tl.sum(dy * normed, 0)
        dbias += tl.sum(dy, 0)
        dy *= weight
        dx = dy - normed * (tl.sum(dy * normed, 1) / h)[:, None]  # less what only stretches the row
        if CENTRED:
            dx -= (tl.sum(dy, 1) / h)[:, None]  # less what only shifts it
        dx *= scale
        if ADDS:
            dx += tl.load(dtotal_at + place, inside, 0.0).to(tl.float32)
        tl.store(dx_at + place, dx.to(dx_at.dtype.element_ty), inside)
    tl.store(dweight_at + program * h + columns, dweight, columns < h)
    if CENTRED:
        tl.store(dbias_at + program * h + columns, dbias, columns < h)

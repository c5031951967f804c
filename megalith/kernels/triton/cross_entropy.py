"""Triton kernels of cross entropy on a chunk of logits: each row's sum of exponentials, and the
gradient in place.

With a vocabulary-parallel head each rank processes its own columns; the reduced values of a row
(largest logit, sum of exponentials) are inputs.
"""

from typing import Any

import torch
import triton  # lint: allow optional-import: callers import this module inside functions
import triton.language as tl  # lint: allow optional-import: as above
from torch import Tensor

from megalith.kernels.triton.launch import partial_row_tile

Pointer = Any  # in a kernel: address of a tensor
Count = Any  # in a kernel: an integer


def row_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each row of [c, v] and the sum of exp(logit - largest): [c] each,
    in fp32, in one pass."""
    logits = logits.contiguous()
    (c, v), tile = logits.shape, partial_row_tile(logits.shape[1])
    largest, total = logits.new_empty(2, c, dtype=torch.float32)
    _row_sums[(tile.programs(c),)](
        logits, largest, total, c, v, ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps
    )
    return largest, total


def gradient_(
    logits: Tensor,
    largest: Tensor,
    factor: Tensor,
    label: Tensor,
    at_label: Tensor,
    even: Tensor | None = None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Compute factor * exp(logit - largest) - even, but `at_label` in column `label`, times the
    derivative of the logit transform; in place.

    logits [c, v]; largest, factor, at_label, even [c] in fp32; label [c] int64, negative if it is
    not in these columns.
    """
    (c, v), tile = logits.shape, partial_row_tile(logits.shape[1])
    assert logits.is_contiguous()
    _gradient[(tile.programs(c), -(-v // tile.columns))](
        logits,
        largest.contiguous(),
        factor.contiguous(),
        label.contiguous(),
        at_label.contiguous(),
        factor if even is None else even.contiguous(),
        c,
        v,
        scale,
        1.0 if softcap is None else softcap,
        CAPPED=softcap is not None,
        EVEN=even is not None,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.warps,
    )
    return logits


@triton.jit
def _row_sums(
    logits_at: "Pointer",
    largest_at: "Pointer",
    total_at: "Pointer",
    c: "Count",
    v: "Count",
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lowest = -3.4028234663852886e38  # finite, so that a row of -inf sums to 0 instead of NaN
    largest, total = tl.full((ROWS,), lowest, tl.float32), tl.zeros((ROWS,), tl.float32)
    for start in range(0, v, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = (rows < c)[:, None] & (columns < v)[None, :]
        logits = tl.load(
            logits_at + rows[:, None] * v + columns[None, :], inside, float("-inf")
        ).to(tl.float32)
        new_largest = tl.maximum(largest, tl.max(logits, 1))
        total = total * tl.exp(largest - new_largest) + tl.sum(
            tl.exp(logits - new_largest[:, None]), 1
        )
        largest = new_largest
    tl.store(largest_at + rows, largest, rows < c)
    tl.store(total_at + rows, total, rows < c)


@triton.jit
def _gradient(
    logits_at: "Pointer",
    largest_at: "Pointer",
    factor_at: "Pointer",
    label_at: "Pointer",
    at_label_at: "Pointer",
    even_at: "Pointer",
    c: "Count",
    v: "Count",
    scale: "Any",
    cap: "Any",
    CAPPED: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < c)[:, None] & (columns < v)[None, :]
    place = rows[:, None] * v + columns[None, :]
    logits = tl.load(logits_at + place, inside, 0.0).to(tl.float32)
    largest = tl.load(largest_at + rows, rows < c, 0.0)[:, None]
    factor = tl.load(factor_at + rows, rows < c, 0.0)[:, None]
    label = tl.load(label_at + rows, rows < c, -1)[:, None]
    at_label = tl.load(at_label_at + rows, rows < c, 0.0)[:, None]
    gradient = factor * tl.exp(logits - largest)
    if EVEN:
        gradient -= tl.load(even_at + rows, rows < c, 0.0)[:, None]
    gradient = tl.where(columns[None, :] == label, at_label, gradient)
    if CAPPED:
        share = logits / cap
        slope = 1.0 - share * share
        gradient *= tl.where(slope < 0.0, 0.0, slope)
    tl.store(logits_at + place, (gradient * scale).to(logits_at.dtype.element_ty), inside)

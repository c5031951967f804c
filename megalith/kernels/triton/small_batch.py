"""Triton kernels of small-batch matmuls: `y = x @ w.T` of few rows, reading each weight once for up
to 32 rows.

A program multiplies a tile of outputs by 16 rows, or twice by 16, in a part of the inputs; a second
kernel adds the parts in order, without atomic additions. Tiles and parts depend on the matrix only,
and each row of x is a column of a matmul of the same shape, so every output has the same bits for
every number of rows and every index of its row.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton  # lint: allow optional-import: callers import this module inside functions
import triton.language as tl  # lint: allow optional-import: as above
from torch import Tensor

from megalith.kernels.triton.paged_attention import operand_type
from megalith.kernels.triton.ragged import count_tiles, find_tile

ROWS = tl.constexpr(16)
"""Rows of x per matmul, the fewest that a tensor core takes."""

MIN_PROGRAMS = 256
"""Programs below which the inputs are divided: about two per streaming multiprocessor of a large
GPU. Heuristic, not measured."""

MAX_PARTS = 16
"""Largest number of parts of the inputs: heuristic, bounds the sums that are stored."""

MIN_STEPS = 4
"""Smallest number of steps of a part: heuristic, so that loads overlap with matmuls."""

Pointer = Any  # in a kernel: address of a tensor
Count = Any  # in a kernel: an integer
Tensors = Any  # in a kernel: a block of values


class Tile(NamedTuple):
    """Tile of weights of a program, powers of two."""

    outputs: int
    row_bytes: int
    """Bytes of the inputs of a row."""

    warps: int
    stages: int
    """Tiles that are loaded ahead."""


TILES = (Tile(64, 256, 4, 3), Tile(32, 256, 4, 3), Tile(128, 128, 4, 3), Tile(16, 512, 4, 3))
"""Tiles among which `measure_limits` chooses the fastest on this machine; the first is the
default."""


class MatmulSizes(NamedTuple):
    """Sizes and strides of the matmul kernel."""

    tokens: int
    experts: int
    outputs: int
    inputs: int
    steps: int
    """Steps of a part of the inputs."""

    x_stride: int
    w_stride: int


def multiply(
    x: Tensor, w: Tensor, scales: Tensor | None, counts: Sequence[int] | None, tile: int
) -> Tensor:
    """Return `x @ w.T`, or each expert's rows times its matrix: `small_batch_linear` and
    `small_batch_grouped_linear` in kernels/linear_small_batch.py. `tile`: index in `TILES`."""
    experts = 1 if counts is None else len(counts)
    t, outputs, inputs = x.shape[0], w.shape[0] // max(1, experts), w.shape[1]
    y = x.new_empty(t, outputs)
    if y.numel() == 0 or inputs == 0:
        return y.zero_()
    x = x if x.stride(1) == 1 else x.contiguous()
    config = TILES[tile]
    size = max(16, config.row_bytes // w.element_size())
    parts, steps = divide_inputs(outputs, inputs, config.outputs, size)
    groups = 2 if (t if counts is None else max(counts)) > ROWS.value else 1
    starts, blocks = x, -(-t // (groups * ROWS.value))
    if counts is not None:
        starts = torch.tensor([0, *counts]).cumsum(0).to(x.device, torch.int32)
        blocks = count_tiles(t, experts, groups * ROWS.value)
    sums = y if parts == 1 else y.new_empty(parts, t, outputs, dtype=torch.float32)
    sizes = MatmulSizes(t, experts, outputs, inputs, steps, x.stride(0), w.stride(0))
    _multiply[(-(-outputs // config.outputs), parts, blocks)](
        x,
        w,
        x if scales is None else scales,
        starts,
        sums,
        sizes,
        OUTPUTS=config.outputs,
        INPUTS=size,
        GROUPS=groups,
        IS_GROUPED=counts is not None,
        IS_INT8=scales is not None,
        IS_SPLIT=parts > 1,
        OPERAND=operand_type(x),
        num_warps=config.warps,
        num_stages=config.stages,
    )
    if parts > 1:
        scaled = scales is not None
        _add_parts[(t, -(-outputs // 1024))](
            sums,
            scales if scaled else x,
            starts,
            y,
            sizes,
            parts,
            IS_GROUPED=counts is not None,
            IS_INT8=scaled,
        )
    return y


def divide_inputs(outputs: int, inputs: int, tile_outputs: int, size: int) -> tuple[int, int]:
    """Return the number of parts of the inputs, and the steps of `size` inputs of each: enough for
    `MIN_PROGRAMS`, if the parts are not too short."""
    total, programs, parts = -(-inputs // size), -(-outputs // tile_outputs), 1
    while parts < MAX_PARTS and parts * programs < MIN_PROGRAMS and total >= 2 * parts * MIN_STEPS:
        parts *= 2
    steps = -(-total // parts)
    return -(-total // steps), steps


@triton.jit
def _multiply(
    x_at: "Pointer",
    w_at: "Pointer",
    scales_at: "Pointer",
    starts_at: "Pointer",
    sums_at: "Pointer",
    sizes: "MatmulSizes",
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    IS_INT8: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    OPERAND: tl.constexpr,
) -> None:
    """Write the sums over a part of the inputs, [parts, t, o] in fp32, or the outputs."""
    size: tl.constexpr = GROUPS * ROWS
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    part, first, end = tl.program_id(1), tl.program_id(2) * size, sizes.tokens
    first_output = part.to(tl.int64) * 0
    if IS_GROUPED:
        chunk: tl.constexpr = 256
        expert, begin, first = find_tile(tl.program_id(2), starts_at, sizes.experts, size, chunk)
        is_expert = expert < sizes.experts
        end = tl.where(is_expert, tl.load(starts_at + expert + 1, is_expert, 0), 0)
        first += begin
        first_output = expert.to(tl.int64) * sizes.outputs
    if first < end:
        is_output = output < sizes.outputs
        row = first + tl.arange(0, ROWS)
        more = row + ROWS
        x_place = row.to(tl.int64) * sizes.x_stride
        w_place = (first_output + output) * sizes.w_stride
        y = tl.zeros((OUTPUTS, ROWS), tl.float32)
        y_more = tl.zeros((OUTPUTS, ROWS), tl.float32)
        last = tl.minimum((part + 1) * sizes.steps * INPUTS, sizes.inputs)
        for start in range(part * sizes.steps * INPUTS, last, INPUTS):
            column = start + tl.arange(0, INPUTS)
            is_input = column < sizes.inputs
            w = tl.load(
                w_at + w_place[:, None] + column[None, :],
                is_output[:, None] & is_input[None, :],
                0.0,
            )
            if IS_INT8:
                w = w.to(tl.float32)
            w = w.to(OPERAND)
            at = x_at + x_place[None, :] + column[:, None]
            x = tl.load(at, is_input[:, None] & (row < end)[None, :], 0.0).to(OPERAND)
            y = tl.dot(w, x, y, input_precision="ieee")
            if GROUPS == 2:
                at += ROWS * sizes.x_stride
                x = tl.load(at, is_input[:, None] & (more < end)[None, :], 0.0).to(OPERAND)
                y_more = tl.dot(w, x, y_more, input_precision="ieee")
        if IS_INT8 and not IS_SPLIT:
            scale = tl.load(scales_at + first_output + output, is_output, 0.0)
            y *= scale[:, None]
            y_more *= scale[:, None]
        y_place = (part.to(tl.int64) * sizes.tokens + row) * sizes.outputs
        place = sums_at + y_place[None, :] + output[:, None]
        inside = is_output[:, None] & (row < end)[None, :]
        tl.store(place, y.to(sums_at.dtype.element_ty), inside)
        if GROUPS == 2:
            place += ROWS * sizes.outputs
            inside = is_output[:, None] & (more < end)[None, :]
            tl.store(place, y_more.to(sums_at.dtype.element_ty), inside)


@triton.jit
def _add_parts(
    sums_at: "Pointer",
    scales_at: "Pointer",
    starts_at: "Pointer",
    y_at: "Pointer",
    sizes: "MatmulSizes",
    parts: "Count",
    IS_GROUPED: tl.constexpr,
    IS_INT8: tl.constexpr,
) -> None:
    """Write the outputs of one row: the sums of all parts, in order."""
    size: tl.constexpr = 1024
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * size + tl.arange(0, size)
    is_output = output < sizes.outputs
    place = sums_at + row * sizes.outputs + output
    total = tl.zeros((size,), tl.float32)
    stride = (row * 0 + sizes.tokens) * sizes.outputs
    for _ in range(0, parts):
        total += tl.load(place, is_output, 0.0)
        place += stride
    if IS_INT8:
        first_output = row * 0
        if IS_GROUPED:
            # the expert of this row: tiles of one row
            chunk: tl.constexpr = 256
            for first in range(0, sizes.experts, chunk):
                expert = 1 + first + tl.arange(0, chunk)
                end = tl.load(starts_at + expert, expert <= sizes.experts, 2147483647)
                first_output += tl.sum((end <= row).to(tl.int32), 0) * sizes.outputs
        scale = tl.load(scales_at + first_output + output, is_output, 0.0)
        total *= scale
    tl.store(y_at + row * sizes.outputs + output, total.to(y_at.dtype.element_ty), is_output)

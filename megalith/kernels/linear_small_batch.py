"""Small-batch matmuls: `y = x @ w.T` of few rows, reading each weight once for all rows, by a
compiled loop on CPUs and by Triton kernels on GPUs (kernels/triton/small_batch.py).

Decoding multiplies every weight matrix by a few rows, which is limited by memory bandwidth; torch
is far from it between 2 and 16 rows. The inference engine selects, for its thread, up to how many
rows the compiled kernel is used instead of torch (`small_batch_matmul`). Without that, or outside
of `torch.inference_mode`, nothing changes, so training is not affected.

Every output of the kernel has the same bits for every number of rows and every index of its row.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.kernels import cpu_threads
from megalith.kernels.linear import small_batch_kernel
from megalith.kernels.triton import launch

MAX_MEASURED_ROWS = 32
"""Largest number of rows that is measured: above, torch's matmuls are limited by arithmetic."""

ANY_ROWS = 1 << 62
"""A limit that no matmul exceeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallBatchLimits:
    """Largest number of rows for which the kernel is used, by dtype of the weights; 0: never."""

    fp32: int
    bf16: int
    int8: int
    fp16: int = 0
    """On GPUs only."""

    tile: int = 0
    """Index of the tile size of the Triton kernel, the same for all shapes and ranks."""

    def of(self, dtype: torch.dtype) -> int:
        """Return the limit for weights of a dtype; 0 if the kernel does not support it."""
        limits = {
            torch.float32: self.fp32,
            torch.bfloat16: self.bf16,
            torch.float16: self.fp16,
            torch.int8: self.int8,
        }
        return limits.get(dtype, 0)


NO_ROW_COUNTS = SmallBatchLimits(fp32=0, bf16=0, int8=0)
"""torch's matmuls for every number of rows."""
ALL_ROW_COUNTS = SmallBatchLimits(fp32=ANY_ROWS, bf16=ANY_ROWS, int8=ANY_ROWS, fp16=ANY_ROWS)
"""The kernel for every number of rows."""


class LimitedSmallBatchKernel:
    """The kernel up to a number of rows; a `SmallBatchKernel` of `kernels/linear.py`."""

    def __init__(self, limits: SmallBatchLimits) -> None:
        dtypes = torch.float32, torch.bfloat16, torch.float16, torch.int8
        self._largest = {dtype: rows for dtype in dtypes if (rows := limits.of(dtype)) > 0}
        self._tile = limits.tile

    def should_use(self, x: Tensor, w: Tensor, rows: int) -> bool:
        """Return whether `x @ w.T` with at most `rows` rows per weight matrix is within the limits
        and supported."""
        return rows <= self._largest.get(w.dtype, 0) and can_use(x, w)

    def linear(self, x: Tensor, w: Tensor, scales: Tensor | None = None) -> Tensor:
        """Return `small_batch_linear`."""
        return small_batch_linear(x, w, scales, tile=self._tile)

    def grouped_linear(
        self, x: Tensor, w: Tensor, counts: Sequence[int], scales: Tensor | None = None
    ) -> Tensor:
        """Return `small_batch_grouped_linear`."""
        return small_batch_grouped_linear(x, w, counts, scales, tile=self._tile)


@contextmanager
def small_batch_matmul(limits: SmallBatchLimits) -> Iterator[None]:
    """Compute matmuls of few rows by the kernel inside a `with` block, in this thread and in
    `torch.inference_mode`."""
    with small_batch_kernel(None if limits == NO_ROW_COUNTS else LimitedSmallBatchKernel(limits)):
        yield


def can_use(x: Tensor, w: Tensor) -> bool:
    """Return whether a kernel supports x [t, i] and w [o, i]: of one dtype, fp32 or bf16 on CPUs,
    also fp16 on GPUs with Triton, or w int8 and x any of these; w has contiguous rows."""
    if launch.can_use(x):
        return (
            w.dtype in (x.dtype, torch.int8)
            and w.device == x.device
            and x.dim() == w.dim() == 2
            and w.stride(1) == 1
        )
    matches = x.dtype == w.dtype if w.dtype != torch.int8 else x.dtype in cpu_threads.DTYPES
    return (
        matches
        and w.dtype in (*cpu_threads.DTYPES, torch.int8)
        and x.device.type == w.device.type == "cpu"
        and x.dim() == w.dim() == 2
        and (w.stride(1) == 1 or w.shape[1] == 1)
        and not torch.compiler.is_compiling()
        and cpu_threads.openmp() is not None
    )


def small_batch_linear(
    x: Tensor, w: Tensor, scales: Tensor | None = None, *, tile: int = 0
) -> Tensor:
    """Return `x @ w.T`, for int8 weights times the scale of each output.

    x [t, i] as `can_use` says, any strides; w [o, i] of x's dtype or int8, with contiguous rows at
    any distance; scales fp32 [o] -> [t, o] in x's dtype, summed in fp32. `tile`: that of
    `SmallBatchLimits`. Computed without gradients.
    """
    assert (scales is not None) == (w.dtype == torch.int8), (w.dtype, scales)
    if launch.can_use(x):
        return _multiply_by_triton(x, w, scales, None, tile)
    return _multiply(x, w, scales, _bounds(x.shape[0]), experts=1, most_rows=x.shape[0])


def small_batch_grouped_linear(
    x: Tensor, w: Tensor, counts: Sequence[int], scales: Tensor | None = None, *, tile: int = 0
) -> Tensor:
    """Return each expert's rows times its matrix: x [r, i], sorted by expert, w [e o, i], counts
    [e], scales fp32 [e o] for int8 weights -> [r, o]. Otherwise like `small_batch_linear`."""
    assert (scales is not None) == (w.dtype == torch.int8), (w.dtype, scales)
    if launch.can_use(x):
        return _multiply_by_triton(x, w, scales, counts, tile)
    bounds = torch.tensor([0, *counts]).cumsum(0)
    return _multiply(x, w, scales, bounds, experts=len(counts), most_rows=max(counts, default=0))


@cache  # never freed: recorded calls have its address
def _bounds(rows: int) -> Tensor:
    return torch.tensor([0, rows])


class _Loop(NamedTuple):
    """The compiled loop, and what its caller needs to know of its tiles."""

    function: cpu_threads.LoopFunction
    rows: int
    outputs: int
    multiplies_bf16: bool


@cache
def _load_loop() -> _Loop:
    from megalith.kernels import cpu_small_batch as loops  # importing numba takes half a second

    return _Loop(loops.small_batch_matmul, loops.TILE_ROWS, loops.TILE_OUTPUTS, loops.HAS_BF16_DOT)


def _multiply_by_triton(
    x: Tensor, w: Tensor, scales: Tensor | None, counts: Sequence[int] | None, tile: int
) -> Tensor:
    from megalith.kernels.triton.small_batch import multiply

    return multiply(x, w, scales, counts, tile)


def _multiply(
    x: Tensor,
    w: Tensor,
    scales: Tensor | None,
    bounds: Tensor,
    *,
    experts: int,
    most_rows: int,
) -> Tensor:
    loop = _load_loop()
    outputs, inputs = w.shape[0] // max(experts, 1), w.shape[1]
    y = x.new_empty(x.shape[0], outputs)
    if y.numel() == 0 or inputs == 0:
        return y.zero_()
    dots = loop.multiplies_bf16 and w.dtype == torch.bfloat16
    operand = x if dots else x.float()
    if operand.stride(1) != 1:
        operand = operand.contiguous()
    widens = most_rows > loop.rows and w.dtype != torch.float32 and not dots
    work = outputs * inputs
    scratch_size = cpu_threads.num_threads(work) * loop.outputs * inputs if widens else 0
    scratch = x.new_empty(scratch_size, dtype=torch.float32)
    block = (
        *(experts, outputs, inputs, w.element_size(), int(widens), int(y.dtype != torch.float32)),
        *(operand.stride(0) * operand.element_size(), w.stride(0) * w.element_size()),
        *(bounds.data_ptr(), operand.data_ptr(), w.data_ptr()),
        *(0 if scales is None else scales.data_ptr(), scratch.data_ptr(), y.data_ptr()),
    )
    tensors = (operand, w, scratch, y, *(() if scales is None else (scales,)))
    cpu_threads.launch(loop.function, w.dtype, block, elements=work, tensors=tensors)
    return y

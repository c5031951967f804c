"""Dispatch of the Triton kernels in `kernels/triton/`, and their tile sizes.

Only those modules import Triton, and they are imported on first use. Each kernel needs one pass
over memory where torch needs several; both give the same values up to the last bit or two of the
dtype.
"""

from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

WIDEST = 1 << 16
"""Largest number of features of a row that one program holds; norms of wider rows use torch."""

TILE = 1 << 11
"""Elements per program of four warps: 16 for each thread. Heuristic, not measured."""


@cache
def has_triton() -> bool:
    """Return whether Triton is installed; torch's CUDA builds for Linux include it."""
    return find_spec("triton") is not None


def can_use(*tensors: Tensor) -> bool:
    """Return whether the Triton kernels support these tensors: on a GPU, in 16 or 32 bits, the
    first not empty."""
    first = tensors[0]
    return (
        first.device.type == "cuda"  # lint: allow cuda-literal: Triton programs run nowhere else
        and all(
            tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) for tensor in tensors
        )
        and first.numel() > 0
        and not torch.compiler.is_compiling()
        and has_triton()
    )


class ProgramTile(NamedTuple):
    """Tile of a Triton program: sizes are powers of two, as Triton requires."""

    rows: int
    columns: int
    warps: int
    """Number of warps (groups of 32 threads)."""

    def programs(self, rows: int) -> int:
        """Return the number of programs that cover `rows` rows."""
        return -(-rows // self.rows)


def whole_row_tile(width: int) -> ProgramTile:
    """Return a tile of entire rows of `width` features: several rows if they are short.

    >>> whole_row_tile(100), whole_row_tile(5000)
    (ProgramTile(rows=16, columns=128, warps=4), ProgramTile(rows=1, columns=8192, warps=16))
    """
    columns = next_power_of_two(width)
    return ProgramTile(max(1, TILE // columns), columns, min(16, max(4, 4 * columns // TILE)))


def partial_row_tile(width: int) -> ProgramTile:
    """Return a tile that covers at most `TILE` columns of a wide row."""
    columns = min(next_power_of_two(width), TILE)
    return ProgramTile(TILE // columns, columns, 4)


def next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below `number`.

    >>> [next_power_of_two(number) for number in (1, 2, 3, 64, 65)]
    [1, 2, 4, 64, 128]
    """
    return 1 << (number - 1).bit_length()

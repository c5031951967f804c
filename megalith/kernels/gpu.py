"""The Triton programs of `kernels/triton_*.py`: when they serve, and how much of a matrix one of
them takes at once.

Triton is imported by those files alone, which are imported when one of them is first needed. Each
does in one pass over memory what torch does in several; both give the same values to the last bit
or two of the dtype.
"""

from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

WIDEST = 1 << 16
"""Features of a row that a program can hold whole; norms of wider ones are left to torch."""

TILE = 1 << 11
"""Elements that a program of four warps takes at once: 16 for each thread. A guess, no GPU was at
hand."""


@cache
def has_triton() -> bool:
    """Whether Triton is installed; torch's CUDA builds for Linux bring it along."""
    return find_spec("triton") is not None


def takes(*tensors: Tensor) -> bool:
    """Whether the Triton programs work on these: on a GPU, of 16 or 32 bits, the first not
    empty."""
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
    """What a program takes at once: powers of two, as Triton wants them."""

    rows: int
    columns: int
    warps: int
    """Groups of 32 threads that share the work."""

    def programs(self, rows: int) -> int:
        """How many there are when each takes its rows once."""
        return -(-rows // self.rows)


def whole_rows(width: int) -> ProgramTile:
    """Rows of `width` features, all of each: several where they are short.

    >>> whole_rows(100), whole_rows(5000)
    (Tile(rows=16, columns=128, warps=4), Tile(rows=1, columns=8192, warps=16))
    """
    columns = power_of_two(width)
    return ProgramTile(max(1, TILE // columns), columns, min(16, max(4, 4 * columns // TILE)))


def part_of_rows(width: int) -> ProgramTile:
    """The same, but no more of a wide row than a program of four warps takes."""
    columns = min(power_of_two(width), TILE)
    return ProgramTile(TILE // columns, columns, 4)


def power_of_two(number: int) -> int:
    """The smallest one that is not below.

    >>> [power_of_two(number) for number in (1, 2, 3, 64, 65)]
    [1, 2, 4, 64, 128]
    """
    return 1 << (number - 1).bit_length()

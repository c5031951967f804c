"""Assignment of Triton programs to rows of different lengths on the device, so that the grid
depends on the shapes of tensors only."""

from typing import Any

import triton  # lint: allow optional-import: callers import this module inside functions
import triton.language as tl  # lint: allow optional-import: as above

Pointer = Any  # in a kernel: address of a tensor
Count = Any  # in a kernel: an integer


def count_tiles(num_items: int, num_rows: int, size: int) -> int:
    """Return the number of tiles of `size` items that suffice for any division of the items into
    rows: some of them are empty."""
    return num_items // size + num_rows + 1


@triton.jit
def find_tile(
    tile: "Count", starts_at: "Pointer", rows: "Count", SIZE: tl.constexpr, CHUNK: tl.constexpr
) -> "tuple[Count, Count, Count]":
    """Return the row of a tile, the first item of the row, and the first item of the tile in the
    row.

    starts_at: int32 [rows + 1], the first item of each row and the end. The tiles of row r start at
    number starts[r] // SIZE + r. Row number `rows` has the items after the end. A tile whose first
    item is not below the length of its row is empty.
    """
    count = tile * 0
    for first in range(0, rows + 1, CHUNK):
        number = first + tl.arange(0, CHUNK)
        start = tl.load(starts_at + number, number <= rows, 0)
        begins = (number <= rows) & (start // SIZE + number <= tile)
        count += tl.sum(begins.to(tl.int32), 0)
    row = count - 1
    start = tl.load(starts_at + row)
    return row, start, (tile - start // SIZE - row) * SIZE

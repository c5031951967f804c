"""Masks of rows: from what a dataset says of each row to what tokens carry of each document."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from megalith.data.sample import Row, RowMask, Sample
from megalith.errors import DataError
from megalith.kernels.masks import with_masks, with_padding
from megalith.kernels.tokens import Tokens

Seen = NDArray[np.bool_]


def masks_of_rows(rows: Sequence[Row], *, padding: bool) -> list[RowMask | None]:
    """What rows say of their tokens; with `padding` no token sees that at the end of a row of text."""
    found = []
    for row in rows:
        mask = row.mask
        if padding and isinstance(row, Sample) and row.num_valid < len(row.ids) - 1:
            text = row.valid[:-1]
            mask = RowMask(text) if mask is None else mask._replace(seen=mask.seen & text)
        found.append(mask)
    return found


def with_row_masks(tokens: Tokens, rows: Sequence[RowMask | None], lengths: Sequence[int]) -> Tokens:
    """The tokens of rows, whose documents have these lengths as they were read, with the masks of the rows.

    Raises:
        DataError: a mask has not the shape of its row, or masks of several kinds are in one microbatch.
    """
    if all(row is None for row in rows):
        return tokens
    size, device = sum(lengths) // len(rows), tokens.positions.device
    _check(rows, size)
    if any(row is not None and row.seen.ndim == 1 for row in rows):
        text = [row.seen if row is not None and row.seen.ndim == 1 else np.ones(size, np.bool_) for row in rows]
        tokens = with_padding(tokens, torch.from_numpy(np.concatenate(text)).to(device))
    masks, end = list[torch.Tensor | None](), 0
    for length in lengths:
        row, start, end = rows[min(end // size, len(rows) - 1)], end % size, end + length
        if row is None or row.seen.ndim == 1:
            masks.append(None)
        else:
            own = np.ascontiguousarray(row.seen[start : start + length, start : start + length])
            masks.append(torch.from_numpy(own).to(device))
    return with_masks(tokens, masks, alone=any(row is not None and row.alone for row in rows))


def joined_masks(rows: Sequence[RowMask | None], lengths: Sequence[int], size: int) -> RowMask | None:
    """Masks of short rows of these lengths as that of one row of `size` tokens, in which they follow one another.

    Filler behind them sees nothing and is seen by none.

    Raises:
        DataError: masks of several kinds are to be joined.
    """
    if all(row is None for row in rows):
        return None
    for row, length in zip(rows, lengths, strict=True):
        _check([row], length)
    alone = _alone(rows)
    whole, end = np.zeros((size, size), np.bool_), 0
    for row, length in zip(rows, lengths, strict=True):
        own = slice(end, end + length)
        whole[own, own] = True if row is None else row.seen  # padding is the same for all queries
        end += length
    return RowMask(whole, alone)


def _check(rows: Sequence[RowMask | None], size: int) -> None:
    for number, row in enumerate(rows):
        if row is not None and row.seen.shape not in ((size,), (size, size)):
            raise DataError(
                f"the mask of row {number} is {list(row.seen.shape)}: a row of {size} tokens must have "
                f"[{size}, {size}], or [{size}] for padding. Pass one of such a shape."
            )
        if row is not None and row.seen.dtype != np.bool_:
            raise DataError(
                f"the mask of row {number} is {row.seen.dtype}: expected bool, True where a token may be seen. Use "
                f"seen.astype(bool)."
            )
    _alone(rows)


def _alone(rows: Sequence[RowMask | None]) -> bool:
    """Whether masks take the place of causality."""
    kinds = {row is not None and row.alone for row in rows}
    padding = [number for number, row in enumerate(rows) if row is not None and row.alone and row.seen.ndim == 1]
    if len(kinds) > 1 or padding:
        raise DataError(
            f"rows of one microbatch have alone={[row is not None and row.alone for row in rows]}: masks that take the "
            f"place of causality must be in all of its rows, and of all pairs. Use np.tril(np.ones((s, s), bool)) for "
            f"rows of s tokens that are causal."
        )
    return kinds == {True}

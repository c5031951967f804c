"""Masks of rows: from what a dataset says of each row to what tokens carry of each document."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from megalith.data.sample import Row, RowMask, Sample
from megalith.errors import DataError
from megalith.kernels.masks import with_masks, with_padding
from megalith.kernels.tokens import PackedSeqParams

RowMaskKind = NDArray[np.bool_]


def masks_of_rows(rows: Sequence[Row], *, padding: bool) -> list[RowMask | None]:
    """What rows say of their tokens; with `padding` no token sees that at the end of a row of text.

    In rows of which nothing is read, and so nothing learned, nothing more is hidden: they need no
    way that knows masks.
    """
    found = []
    for row in rows:
        mask = row.mask
        if padding and isinstance(row, Sample) and 0 < row.num_valid < len(row.ids) - 1:
            text = row.valid[:-1]
            if mask is None or mask.seen.ndim == 1:
                mask = RowMask(text if mask is None else mask.seen & text)
            else:
                mask = mask._replace(text=text if mask.text is None else mask.text & text)
        found.append(mask)
    return found


def _text(row: RowMask | None) -> RowMaskKind | None:
    """What of a row is no padding: [s]; None: all."""
    if row is None:
        return None
    return row.seen if row.seen.ndim == 1 else row.text


def _texts(rows: Sequence[RowMask | None], lengths: Sequence[int]) -> RowMaskKind | None:
    """The same of rows of these lengths, one after the other."""
    texts = [_text(row) for row in rows]
    if all(text is None for text in texts):
        return None
    return np.concatenate(
        [
            np.ones(length, np.bool_) if text is None else text
            for text, length in zip(texts, lengths, strict=True)
        ]
    )


def with_row_masks(
    tokens: PackedSeqParams, rows: Sequence[RowMask | None], lengths: Sequence[int]
) -> PackedSeqParams:
    """The tokens of rows, whose documents have these lengths as they were read, with the masks of
    the rows.

    Raises:
        DataError: a mask has not the shape of its row, or masks of several kinds are in one
        microbatch.
    """
    if all(row is None for row in rows):
        return tokens
    size, device = sum(lengths) // len(rows), tokens.position_ids.device
    _check(rows, size)
    if (text := _texts(rows, [size] * len(rows))) is not None:
        tokens = with_padding(tokens, torch.from_numpy(text).to(device))
    masks, end = list[torch.Tensor | None](), 0
    for length in lengths:
        row, start, end = rows[min(end // size, len(rows) - 1)], end % size, end + length
        if row is None or row.seen.ndim == 1:
            masks.append(None)
        else:
            own = np.ascontiguousarray(row.seen[start : start + length, start : start + length])
            masks.append(torch.from_numpy(own).to(device))
    return with_masks(tokens, masks, alone=any(row is not None and row.alone for row in rows))


def joined_masks(
    rows: Sequence[RowMask | None], lengths: Sequence[int], size: int
) -> RowMask | None:
    """Masks of short rows of these lengths as that of one row of `size` tokens, in which they
    follow one another.

    Filler behind them sees nothing and is seen by none.

    Raises:
        DataError: masks of several kinds are to be joined.
    """
    if all(row is None for row in rows):
        return None
    for row, length in zip(rows, lengths, strict=True):
        _check([row], length)
    alone, text = _alone(rows), _texts(rows, lengths)
    text = None if text is None else np.pad(text, (0, size - len(text)))
    if text is not None and all(row is None or row.seen.ndim == 1 for row in rows):
        return RowMask(text)
    whole, end = np.zeros((size, size), np.bool_), 0
    for row, length in zip(rows, lengths, strict=True):
        own = slice(end, end + length)
        whole[own, own] = True if row is None else row.seen  # padding is the same for all queries
        end += length
    return RowMask(whole, alone, text)


def _check(rows: Sequence[RowMask | None], size: int) -> None:
    for number, row in enumerate(rows):
        if row is not None and row.seen.shape not in ((size,), (size, size)):
            raise DataError(
                f"the mask of row {number} is {list(row.seen.shape)}: a row of {size} tokens must "
                f"have [{size}, {size}], or [{size}] for padding. Pass one of such a shape."
            )
        if row is not None and row.text is not None and row.text.shape != (size,):
            raise DataError(
                f"the padding of row {number} is {list(row.text.shape)}: a row of {size} tokens "
                f"must have [{size}]. "
                f"Pass one of that shape."
            )
        if row is not None and row.seen.dtype != np.bool_:
            raise DataError(
                f"the mask of row {number} is {row.seen.dtype}: expected bool, True where a token "
                "may be seen. Use "
                f"seen.astype(bool)."
            )
    _alone(rows)


def _alone(rows: Sequence[RowMask | None]) -> bool:
    """Whether masks take the place of causality."""
    kinds = {row is not None and row.alone for row in rows}
    padding = [
        number
        for number, row in enumerate(rows)
        if row is not None and row.alone and row.seen.ndim == 1
    ]
    if len(kinds) > 1 or padding:
        raise DataError(
            f"rows of one microbatch have alone={[row is not None and row.alone for row in rows]}: "
            "masks that take the "
            "place of causality must be in all of its rows, and of all pairs. Use "
            "np.tril(np.ones((s, s), bool)) for "
            f"rows of s tokens that are causal."
        )
    return kinds == {True}

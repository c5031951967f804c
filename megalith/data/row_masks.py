"""Attention masks of rows: converts the masks of dataset rows to the per-document masks of the
tokens."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from megalith.data.sample import Row, RowMask, Sample
from megalith.errors import DataError
from megalith.kernels.masks import with_masks, with_padding
from megalith.kernels.tokens import PackedSeqParams

RowMaskKind = NDArray[np.bool_]


def row_masks(rows: Sequence[Row], *, padding: bool) -> list[RowMask | None]:
    """Return the attention mask of each row; with `padding`, padding of unpacked rows is masked.

    Rows without input tokens get no further mask, so that they run on backends without mask
    support.
    """
    masks = []
    for row in rows:
        mask = row.mask
        if padding and isinstance(row, Sample) and 0 < row.num_valid < len(row.ids) - 1:
            text = row.valid[:-1]
            if mask is None or mask.seen.ndim == 1:
                mask = RowMask(text if mask is None else mask.seen & text)
            else:
                mask = mask._replace(text=text if mask.text is None else mask.text & text)
        masks.append(mask)
    return masks


def _non_padding(row: RowMask | None) -> RowMaskKind | None:
    """Return bool [s], False for padding; None: no padding."""
    if row is None:
        return None
    return row.seen if row.seen.ndim == 1 else row.text


def _concat_non_padding(
    rows: Sequence[RowMask | None], lengths: Sequence[int]
) -> RowMaskKind | None:
    """Return the same for several rows of these lengths, concatenated."""
    texts = [_non_padding(row) for row in rows]
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
    """Add the masks of rows to the tokens, whose documents have these lengths.

    Raises:
        DataError: a mask does not have the shape of its row, or one microbatch has several kinds
            of masks.
    """
    if all(row is None for row in rows):
        return tokens
    size, device = sum(lengths) // len(rows), tokens.position_ids.device
    _check(rows, size)
    if (text := _concat_non_padding(rows, [size] * len(rows))) is not None:
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


def join_masks(rows: Sequence[RowMask | None], lengths: Sequence[int], size: int) -> RowMask | None:
    """Return the block-diagonal mask of short rows that are concatenated to one row of `size`
    tokens.

    Padding at the end attends to nothing and is attended to by nothing.

    Raises:
        DataError: the rows have several kinds of masks.
    """
    if all(row is None for row in rows):
        return None
    for row, length in zip(rows, lengths, strict=True):
        _check([row], length)
    alone, text = _alone(rows), _concat_non_padding(rows, lengths)
    text = None if text is None else np.pad(text, (0, size - len(text)))
    if text is not None and all(row is None or row.seen.ndim == 1 for row in rows):
        return RowMask(text)
    whole, end = np.zeros((size, size), np.bool_), 0
    for row, length in zip(rows, lengths, strict=True):
        own = slice(end, end + length)
        whole[own, own] = (
            True if row is None else row.seen
        )  # a padding mask is the same for all queries
        end += length
    return RowMask(whole, alone, text)


def _check(rows: Sequence[RowMask | None], size: int) -> None:
    for number, row in enumerate(rows):
        if row is not None and row.seen.shape not in ((size,), (size, size)):
            raise DataError(
                f"the mask of row {number} has shape {list(row.seen.shape)}: a row of {size} "
                "tokens "
                f"needs [{size}, {size}], or [{size}] for padding. Pass a mask of that shape."
            )
        if row is not None and row.text is not None and row.text.shape != (size,):
            raise DataError(
                f"the padding mask of row {number} has shape {list(row.text.shape)}: a row of "
                f"{size} "
                f"tokens needs [{size}]. Pass a mask of that shape."
            )
        if row is not None and row.seen.dtype != np.bool_:
            raise DataError(
                f"the mask of row {number} has dtype {row.seen.dtype}: expected bool, True where a "
                "token may be attended to. Use seen.astype(bool)."
            )
    _alone(rows)


def _alone(rows: Sequence[RowMask | None]) -> bool:
    """Return whether the masks replace the causal mask."""
    kinds = {row is not None and row.alone for row in rows}
    padding = [
        number
        for number, row in enumerate(rows)
        if row is not None and row.alone and row.seen.ndim == 1
    ]
    if len(kinds) > 1 or padding:
        raise DataError(
            f"rows of one microbatch have alone={[row is not None and row.alone for row in rows]}: "
            "masks that replace the causal mask need shape [s, s] in every row of the microbatch. "
            "Use "
            "np.tril(np.ones((s, s), bool)) for causal rows of s tokens."
        )
    return kinds == {True}

"""Sequence packing: b rows of s tokens form t = b · s tokens, which are split into documents.

Attention does not cross documents and positions restart at 0 in each. Every row starts a document.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megalith.errors import PlanError


@dataclass(frozen=True, slots=True, eq=False)  # arrays do not compare to one truth value
class PackedLayout:
    """Document boundaries of t packed tokens."""

    cu: NDArray[np.int32]
    """[documents + 1]: cumulative lengths (cu_seqlens), from 0 to t; nondecreasing."""

    positions: NDArray[np.int64]
    """[t]: position of each token in its document."""

    document: NDArray[np.int32]
    """[t]: document index of each token."""

    max_length: int
    """Tokens of the longest document; 0 without tokens."""

    uniform: int | None
    """Length of every document if all are equal, else None."""

    @property
    def num_documents(self) -> int:
        """Number of documents in the batch."""
        return len(self.cu) - 1

    @property
    def lengths(self) -> NDArray[np.int32]:
        """[documents]: tokens of each document."""
        return np.diff(self.cu)


def documents_of_rows(rows: int, length: int) -> PackedLayout:
    """Return the layout in which every row of `length` tokens is one document.

    Raises:
        PlanError: a row without tokens, or a negative count.
    """
    if rows < 0 or length < 1:
        raise PlanError(
            f"rows={rows}, length={length}: rows must be at least 0 and length at least 1."
        )
    return _layout(np.arange(0, rows * length + 1, length))


def documents_from_eod(ids: NDArray[np.integer], eod: int) -> PackedLayout:
    """Return the layout in which documents start after each end-of-document token and at each row;
    ids [b, s].

    The end-of-document token is the last of its document. Two of them in a row make a document of
    one token.

    Raises:
        PlanError: `ids` is not a batch of rows with at least one token each.
    """
    _check_rows(ids)
    starts = np.ones(ids.shape, dtype=bool)
    starts[:, 1:] = ids[:, :-1] == eod
    return _layout(np.append(np.flatnonzero(starts), ids.size))


def labels_inside_documents(ids: NDArray[np.integer], eod: int) -> NDArray[np.bool_]:
    """Return the loss mask [b, s]: True if the label belongs to the same document as the input
    token.

    The token after an end-of-document token belongs to another document. The last token of a row is
    True, since its label is the next token of the text.

    Raises:
        PlanError: `ids` is not a batch of rows with at least one token each.
    """
    _check_rows(ids)
    inside: NDArray[np.bool_] = ids != eod
    return inside


def shift_tokens_within_documents(lengths: Sequence[int], distance: int) -> NDArray[np.int64]:
    """Return [t]: the index of the token `distance` positions later in the same document; -1 past
    its end.

    >>> shift_tokens_within_documents([3, 1, 4], 2).tolist()
    [2, -1, -1, -1, 6, 7, -1, -1]
    """
    ends = np.repeat(np.cumsum(lengths), lengths)
    shifted = np.arange(len(ends), dtype=np.int64) + distance
    return np.where(shifted < ends, shifted, -1)


def pad_documents(cu: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """Return cumulative lengths of `count` documents, padded with empty ones, so that shapes stay
    constant.

    >>> pad_documents(np.array([0, 3, 5], dtype=np.int32), 4).tolist()
    [0, 3, 5, 5, 5]

    Raises:
        PlanError: there are more documents than `count`.
    """
    documents = len(cu) - 1
    if documents > count:
        raise PlanError(
            f"count={count} is too small for {documents} documents. Use at least {documents}."
        )
    return np.concatenate([cu, np.full(count - documents, cu[-1], dtype=np.int32)])


def _layout(cu: NDArray[np.integer]) -> PackedLayout:
    total = int(cu[-1])
    if total > np.iinfo(np.int32).max:
        raise PlanError(
            f"{total} tokens in one microbatch are too many. Set train.micro_batch_size lower."
        )
    lengths = np.diff(cu)
    document = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    same = len(lengths) > 0 and bool((lengths == lengths[0]).all())
    return PackedLayout(
        cu=cu.astype(np.int32),
        positions=np.arange(total, dtype=np.int64) - cu[document],
        document=document,
        max_length=int(lengths.max(initial=0)),
        uniform=int(lengths[0]) if same else None,
    )


def _check_rows(ids: NDArray[np.integer]) -> None:
    if ids.ndim != 2 or ids.shape[1] < 1:
        raise PlanError(
            f"ids has shape {list(ids.shape)}. Pass token ids as [rows, tokens] with at least one "
            "token."
        )

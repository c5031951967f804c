"""Documents in a batch: b rows of s tokens lie one after the other as t = b · s tokens, and are cut
into documents.

Attention stays inside a document and positions start again at 0 in each. A row always starts a
document.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megalith.errors import PlanError


@dataclass(frozen=True, slots=True, eq=False)  # arrays do not compare to one truth value
class PackedLayout:
    """Where the documents of t packed tokens begin and end."""

    cu: NDArray[np.int32]
    """[documents + 1]: where each document starts, then t; begins with 0 and never falls."""

    positions: NDArray[np.int64]
    """[t]: place of each token within its document."""

    document: NDArray[np.int32]
    """[t]: number of the document a token belongs to."""

    max_length: int
    """PackedSeqParams of the longest document; 0 without tokens."""

    uniform: int | None
    """Length of every document when all have the same, else None."""

    @property
    def num_documents(self) -> int:
        """Documents in the batch."""
        return len(self.cu) - 1

    @property
    def lengths(self) -> NDArray[np.int32]:
        """[documents]: tokens of each document."""
        return np.diff(self.cu)


def documents_of_rows(rows: int, length: int) -> PackedLayout:
    """Every row of `length` tokens is one document.

    Raises:
        PlanError: a row without tokens, or a negative count.
    """
    if rows < 0 or length < 1:
        raise PlanError(
            f"rows={rows}, length={length}: rows must be at least 0 and length at least 1."
        )
    return _layout(np.arange(0, rows * length + 1, length))


def documents_from_eod(ids: NDArray[np.integer], eod: int) -> PackedLayout:
    """A new document starts after each end-of-document token and at each row; ids [b, s].

    The end-of-document token is the last of its document. Two in a row make a document of one
    token.

    Raises:
        PlanError: `ids` is not a batch of rows with at least one token each.
    """
    _check_rows(ids)
    starts = np.ones(ids.shape, dtype=bool)
    starts[:, 1:] = ids[:, :-1] == eod
    return _layout(np.append(np.flatnonzero(starts), ids.size))


def labels_inside_documents(ids: NDArray[np.integer], eod: int) -> NDArray[np.bool_]:
    """[b, s]: True where the token to be predicted belongs to the document of the token it is
    predicted from.

    After an end-of-document token comes another document, of which nothing is known; the last token
    of a row counts like any other, since its label is the text's next token.

    Raises:
        PlanError: `ids` is not a batch of rows with at least one token each.
    """
    _check_rows(ids)
    inside: NDArray[np.bool_] = ids != eod
    return inside


def shift_tokens_within_documents(lengths: Sequence[int], distance: int) -> NDArray[np.int64]:
    """[t]: number of the token `distance` places further on in the same document, and -1 where the
    document ends first.

    >>> shift_tokens_within_documents([3, 1, 4], 2).tolist()
    [2, -1, -1, -1, 6, 7, -1, -1]
    """
    ends = np.repeat(np.cumsum(lengths), lengths)
    found = np.arange(len(ends), dtype=np.int64) + distance
    return np.where(found < ends, found, -1)


def pad_documents(cu: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """Prefix sums of `count` documents, the added ones empty at the end, so that shapes do not
    change between steps.

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
    """Everything that follows from the prefix sums."""
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

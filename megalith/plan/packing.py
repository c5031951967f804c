"""Sequence packing: b rows of s tokens form t = b · s tokens, which are split into documents; bin
packing of documents into rows.

Attention does not cross documents and positions restart at 0 in each. Every row starts a document.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


def plan_row_documents(rows: int, length: int) -> PackedLayout:
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


# --- bin packing: which documents share a row of a fixed length; a pure function of the lengths


class PackedDocuments(NamedTuple):
    """Rows of whole documents, as the result of bin packing."""

    documents: NDArray[np.int64]
    """Document indices, row after row."""

    starts: NDArray[np.int64]
    """[rows + 1]: where each row begins in `documents`."""

    def row(self, number: int) -> NDArray[np.int64]:
        """Return the documents of one row, in order."""
        return self.documents[self.starts[number] : self.starts[number + 1]]

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.starts) - 1


def pack_in_order(lengths: Sequence[int], room: int) -> PackedDocuments:
    """Pack documents in order (next fit); a new row starts when the next document does not fit.

    >>> [row.tolist() for row in map(pack_in_order([3, 5, 1, 4], 6).row, range(3))]
    [[0], [1, 2], [3]]

    Raises:
        PlanError: a document is longer than a row.
    """
    _check_lengths(lengths, room)
    rows: list[list[int]] = []
    left = 0
    for number, length in enumerate(lengths):
        if not rows or length > left:
            rows.append([])
            left = room
        rows[-1].append(number)
        left -= length
    return _concatenate_rows(rows)


def pack_best_fit_decreasing(lengths: Sequence[int], room: int) -> PackedDocuments:
    """Pack documents by best-fit decreasing: longest first, into the row with the least remaining
    space.

    Of equal lengths the earlier document comes first; rows are sorted by their first document. At
    most 11/9 of the optimal number of rows, plus 4. Source: Johnson et al. 1974, "Worst-case
    performance bounds for simple one-dimensional packing algorithms".

    >>> [row.tolist() for row in map(pack_best_fit_decreasing([3, 5, 1, 4], 7).row, range(2))]
    [[0, 3], [1, 2]]

    Raises:
        PlanError: a document is longer than a row.
    """
    _check_lengths(lengths, room)
    rows: list[list[int]] = []
    spaces: list[int] = []  # distinct remaining spaces, ascending
    rows_by_space: dict[int, list[int]] = {}  # rows by remaining space, newest last
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        position = bisect_left(spaces, lengths[number])
        if position == len(spaces):
            rows.append([number])
            row, left = len(rows) - 1, room
        else:
            left = spaces[position]
            row = rows_by_space[left].pop()
            rows[row].append(number)
            if not rows_by_space[left]:
                del rows_by_space[left], spaces[position]
        left -= lengths[number]
        if left > 0:
            if left not in rows_by_space:
                insort(spaces, left)
            rows_by_space.setdefault(left, []).append(row)
    return _concatenate_rows(sorted((sorted(row) for row in rows), key=lambda row: row[0]))


def pack_first_fit_decreasing(lengths: Sequence[int], room: int) -> PackedDocuments:
    """Pack documents by first-fit decreasing: longest first, into the first row with enough space.

    Of equal lengths the earlier document comes first; rows are in the order of creation. At most
    11/9 of the optimal number of rows, plus 4. Source: Johnson 1973, "Near-optimal bin packing
    algorithms".

    >>> [row.tolist() for row in map(pack_first_fit_decreasing([3, 5, 1, 4], 7).row, range(2))]
    [[1, 2], [0, 3]]

    Raises:
        PlanError: a document is longer than a row.
    """
    _check_lengths(lengths, room)
    size = 1 << max(len(lengths) - 1, 0).bit_length()
    # segment tree: largest remaining space of the rows below a node
    max_space = [room] * (2 * size)
    rows: list[list[int]] = [[] for _ in lengths]
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        node = 1
        while node < size:
            node = 2 * node if max_space[2 * node] >= lengths[number] else 2 * node + 1
        rows[node - size].append(number)
        max_space[node] -= lengths[number]
        while node := node // 2:
            max_space[node] = max(max_space[2 * node], max_space[2 * node + 1])
    return _concatenate_rows([sorted(row) for row in rows if row])


def pack_one_per_row(lengths: Sequence[int]) -> PackedDocuments:
    """Place every document in a row of its own.

    >>> pack_one_per_row([3, 5]).starts.tolist()
    [0, 1, 2]
    """
    return _concatenate_rows([[number] for number in range(len(lengths))])


def pack_by_group(lengths: Sequence[int], groups: Sequence[Hashable], room: int) -> PackedDocuments:
    """Pack adjacent documents of the same group into rows that hold no other group.

    >>> [row.tolist() for row in map(pack_by_group([3, 2, 1], [7, 7, 9], 6).row, range(2))]
    [[0, 1], [2]]

    Raises:
        PlanError: a document is longer than a row.
    """
    _check_lengths(lengths, room)
    rows: list[list[int]] = []
    left = 0
    current: Hashable = None
    for number, (length, group) in enumerate(zip(lengths, groups, strict=True)):
        if group != current or length > left:
            rows.append([])
            left, current = room, group
        rows[-1].append(number)
        left -= length
    return _concatenate_rows(rows)


def _check_lengths(lengths: Sequence[int], room: int) -> None:
    if len(lengths) and not (min(lengths) >= 1 and max(lengths) <= room):
        raise PlanError(
            f"lengths from {min(lengths)} to {max(lengths)} do not fit rows of {room} tokens. "
            f"Use lengths of 1 to {room}."
        )


def _concatenate_rows(rows: Sequence[Sequence[int]]) -> PackedDocuments:
    documents = np.array([number for row in rows for number in row], dtype=np.int64)
    starts = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    return PackedDocuments(documents, starts)

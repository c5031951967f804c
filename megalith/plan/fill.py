"""Bin packing: which documents share a row of a fixed length; a pure function of the lengths."""

from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalith.errors import PlanError


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
    max_space = [room] * (
        2 * size
    )  # segment tree: largest remaining space of the rows below a node
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

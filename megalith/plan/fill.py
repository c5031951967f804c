"""Filling rows: which documents share a row of a fixed length. Numbers in, numbers out."""

from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalith.errors import PlanError


class PackedDocuments(NamedTuple):
    """Rows of whole documents."""

    documents: NDArray[np.int64]
    """Numbers of all documents, row after row."""

    starts: NDArray[np.int64]
    """[rows + 1]: where each row begins in `documents`."""

    def row(self, number: int) -> NDArray[np.int64]:
        """The documents of one row, in order."""
        return self.documents[self.starts[number] : self.starts[number + 1]]

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self.starts) - 1


def fill_in_order(lengths: Sequence[int], room: int) -> PackedDocuments:
    """Documents one after the other; a row ends where the next does not fit.

    >>> [row.tolist() for row in map(fill_in_order([3, 5, 1, 4], 6).row, range(3))]
    [[0], [1, 2], [3]]

    Raises:
        PlanError: a document is longer than a row.
    """
    _check(lengths, room)
    rows: list[list[int]] = []
    left = 0
    for number, length in enumerate(lengths):
        if not rows or length > left:
            rows.append([])
            left = room
        rows[-1].append(number)
        left -= length
    return _joined(rows)


def fill_best(lengths: Sequence[int], room: int) -> PackedDocuments:
    """Longest first, each into the row that it leaves the least room in; of equal lengths the
    earlier one first.

    Source: Johnson et al. 1974, "Worst-case performance bounds for simple one-dimensional packing
    algorithms": never more than 11/9 of the fewest rows possible, and 4. Rows come in the order of
    their first documents.

    >>> [row.tolist() for row in map(fill_best([3, 5, 1, 4], 7).row, range(2))]
    [[0, 3], [1, 2]]

    Raises:
        PlanError: a document is longer than a row.
    """
    _check(lengths, room)
    rows: list[list[int]] = []
    rooms: list[int] = []  # kinds of room that rows have left, ascending
    with_room: dict[int, list[int]] = {}  # rows by the room they have left, the newest last
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect_left(rooms, lengths[number])
        if place == len(rooms):
            rows.append([number])
            row, left = len(rows) - 1, room
        else:
            left = rooms[place]
            row = with_room[left].pop()
            rows[row].append(number)
            if not with_room[left]:
                del with_room[left], rooms[place]
        left -= lengths[number]
        if left > 0:
            if left not in with_room:
                insort(rooms, left)
            with_room.setdefault(left, []).append(row)
    return _joined(sorted((sorted(row) for row in rows), key=lambda row: row[0]))


def fill_first(lengths: Sequence[int], room: int) -> PackedDocuments:
    """Longest first, each into the first row that has room for it; of equal lengths the earlier one
    first.

    Source: Johnson 1973, "Near-optimal bin packing algorithms": never more than 11/9 of the fewest
    rows possible, and
    4. Rows come in the order in which they were begun.

    >>> [row.tolist() for row in map(fill_first([3, 5, 1, 4], 7).row, range(2))]
    [[1, 2], [0, 3]]

    Raises:
        PlanError: a document is longer than a row.
    """
    _check(lengths, room)
    size = 1 << max(len(lengths) - 1, 0).bit_length()
    most = [room] * (2 * size)  # a tree: the most room that any row below a node has
    rows: list[list[int]] = [[] for _ in lengths]
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        node = 1
        while node < size:
            node = 2 * node if most[2 * node] >= lengths[number] else 2 * node + 1
        rows[node - size].append(number)
        most[node] -= lengths[number]
        while node := node // 2:
            most[node] = max(most[2 * node], most[2 * node + 1])
    return _joined([sorted(row) for row in rows if row])


def fill_apart(lengths: Sequence[int]) -> PackedDocuments:
    """Every document by itself.

    >>> fill_apart([3, 5]).starts.tolist()
    [0, 1, 2]
    """
    return _joined([[number] for number in range(len(lengths))])


def fill_by_group(lengths: Sequence[int], groups: Sequence[Hashable], room: int) -> PackedDocuments:
    """Neighbors of one group share rows of their own: one, or as many as they need.

    >>> [row.tolist() for row in map(fill_by_group([3, 2, 1], [7, 7, 9], 6).row, range(2))]
    [[0, 1], [2]]

    Raises:
        PlanError: a document is longer than a row.
    """
    _check(lengths, room)
    rows: list[list[int]] = []
    left = 0
    current: Hashable = None
    for number, (length, group) in enumerate(zip(lengths, groups, strict=True)):
        if group != current or length > left:
            rows.append([])
            left, current = room, group
        rows[-1].append(number)
        left -= length
    return _joined(rows)


def _check(lengths: Sequence[int], room: int) -> None:
    if len(lengths) and not (min(lengths) >= 1 and max(lengths) <= room):
        raise PlanError(
            f"lengths from {min(lengths)} to {max(lengths)} do not fit rows of {room} tokens. "
            f"Use lengths of 1 to {room}."
        )


def _joined(rows: Sequence[Sequence[int]]) -> PackedDocuments:
    documents = np.array([number for row in rows for number in row], dtype=np.int64)
    starts = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    return PackedDocuments(documents, starts)

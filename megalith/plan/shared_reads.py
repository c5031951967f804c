"""Which rank reads each stored box of a checkpoint, if several ranks need it, and in which rounds
the boxes are sent to the others; no torch."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class SharedRead(NamedTuple):
    """A stored box that one rank reads and sends to others."""

    box: int
    """Number of the box in the checkpoint."""

    reader: int
    receivers: tuple[int, ...]


class ReadPlan(NamedTuple):
    """How the ranks read the boxes of a checkpoint, each once."""

    own: tuple[tuple[int, ...], ...]
    """Boxes that only one rank needs, for each rank."""

    rounds: tuple[tuple[SharedRead, ...], ...]
    """Boxes that are read and sent together, the largest first."""


def plan_shared_reads(
    needed: Sequence[Sequence[int]], nbytes: Mapping[int, int], *, buffer_nbytes: int
) -> ReadPlan:
    """Return the reads after which every rank has the boxes that it needs.

    needed: numbers of the boxes that each rank needs; nbytes: bytes of each box. A box is read by
    the rank that needs it and has the fewest bytes to read so far. In a round, a rank reads or
    receives at most `buffer_nbytes`, or one larger box.

    >>> plan_shared_reads([[0, 1, 2], [1, 2]], {0: 9, 1: 4, 2: 8}, buffer_nbytes=8)
    ReadPlan(own=((0,), ()), rounds=((SharedRead(box=2, reader=1, receivers=(0,)),), \
(SharedRead(box=1, reader=1, receivers=(0,)),)))
    """
    ranks_by_box: dict[int, list[int]] = {}
    for rank, boxes in enumerate(needed):
        for box in boxes:
            ranks_by_box.setdefault(box, []).append(rank)
    own = tuple(tuple(box for box in boxes if len(ranks_by_box[box]) == 1) for boxes in needed)
    bytes_read = [sum(nbytes[box] for box in boxes) for boxes in own]
    shared = (box for box, ranks in ranks_by_box.items() if len(ranks) > 1)
    reads = []
    for box in sorted(shared, key=lambda each: (-nbytes[each], each)):
        reader = min(ranks_by_box[box], key=lambda rank: (bytes_read[rank], rank))
        bytes_read[reader] += nbytes[box]
        receivers = tuple(rank for rank in ranks_by_box[box] if rank != reader)
        reads.append(SharedRead(box, reader, receivers))
    return ReadPlan(own, _split_rounds(reads, nbytes, buffer_nbytes))


def _split_rounds(
    reads: Sequence[SharedRead], nbytes: Mapping[int, int], buffer_nbytes: int
) -> tuple[tuple[SharedRead, ...], ...]:
    """Split reads into rounds in which no rank has more than `buffer_nbytes`, in order."""
    rounds: list[list[SharedRead]] = []
    in_round: dict[int, int] = {}  # bytes of each rank in the last round
    for read in reads:
        ranks, size = (read.reader, *read.receivers), nbytes[read.box]
        if not rounds or any(in_round.get(r, 0) + size > buffer_nbytes for r in ranks):
            rounds.append([])
            in_round = {}
        rounds[-1].append(read)
        for rank in ranks:
            in_round[rank] = in_round.get(rank, 0) + size
    return tuple(map(tuple, rounds))

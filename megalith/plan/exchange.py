"""How many rows each rank sends to each other rank, when tokens go to the ranks that hold their
experts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

Table = Sequence[Sequence[Sequence[int]]]
"""[etp][ep][experts]: by the rank that a row comes from, how many rows for each expert."""


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """What one rank sends and receives, in rows."""

    sent: tuple[int, ...]
    """To each rank along ep, which has the experts that follow those of the rank before it."""

    received: tuple[int, ...]
    """From each rank along ep."""

    gathered: tuple[int, ...]
    """What each rank along etp received, which all of them then share."""

    chunks: tuple[int, ...]
    """Rows as they lie then: by rank along etp, by rank along ep that sent them, by expert."""

    counts: tuple[int, ...]
    """Rows of each of my experts."""


def plan_exchange(table: Table, *, ep_rank: int, etp_rank: int) -> ExchangePlan:
    """The plan of one rank, when all ranks along ep and etp have told how many rows they have for
    each expert.

    >>> plan_exchange([[[5, 1], [2, 3]]], ep_rank=0, etp_rank=0)  # two ranks with an expert each
    ExchangePlan(sent=(5, 1), received=(5, 2), gathered=(7,), chunks=(5, 2), counts=(7,))
    """
    ranks = len(table[0])
    each = len(table[0][0]) // ranks
    mine = slice(ep_rank * each, (ep_rank + 1) * each)
    arriving = [[list(row[mine]) for row in rows] for rows in table]
    own = table[etp_rank][ep_rank]
    chunks = [list(chunk) for chunk in chain.from_iterable(arriving)]
    return ExchangePlan(
        sent=tuple(sum(own[rank * each : (rank + 1) * each]) for rank in range(ranks)),
        received=tuple(sum(row) for row in arriving[etp_rank]),
        gathered=tuple(sum(map(sum, rows)) for rows in arriving),
        chunks=tuple(chain.from_iterable(chunks)),
        counts=tuple(map(sum, zip(*chunks, strict=True))),
    )

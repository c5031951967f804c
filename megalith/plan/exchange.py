"""Plan the all-to-all of tokens to experts: how many rows each rank sends to each other rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

Table = Sequence[Sequence[Sequence[int]]]
"""[etp][ep][experts]: rows for each expert, by the source rank."""


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """Rows that one rank sends and receives in the dispatch to experts."""

    sent: tuple[int, ...]
    """Rows to each rank along ep; experts are assigned to ranks in contiguous blocks."""

    received: tuple[int, ...]
    """From each rank along ep."""

    gathered: tuple[int, ...]
    """Rows that each rank along etp received, which are all-gathered over etp."""

    chunks: tuple[int, ...]
    """Rows in the order in which they are stored after the exchange: by rank along etp, by source
    rank along ep, by expert."""

    counts: tuple[int, ...]
    """Rows of each local expert."""


def plan_exchange(table: Table, *, ep_rank: int, etp_rank: int) -> ExchangePlan:
    """Return the exchange plan of one rank, from the number of rows per expert of all ranks along
    ep and etp.

    >>> plan_exchange([[[5, 1], [2, 3]]], ep_rank=0, etp_rank=0)  # two ranks with an expert each
    ExchangePlan(sent=(5, 1), received=(5, 2), gathered=(7,), chunks=(5, 2), counts=(7,))
    """
    ranks = len(table[0])
    experts_per_rank = len(table[0][0]) // ranks
    local_experts = slice(ep_rank * experts_per_rank, (ep_rank + 1) * experts_per_rank)
    received_rows = [[list(row[local_experts]) for row in rows] for rows in table]
    sent_rows = table[etp_rank][ep_rank]
    chunks = [list(chunk) for chunk in chain.from_iterable(received_rows)]
    return ExchangePlan(
        sent=tuple(
            sum(sent_rows[rank * experts_per_rank : (rank + 1) * experts_per_rank])
            for rank in range(ranks)
        ),
        received=tuple(sum(row) for row in received_rows[etp_rank]),
        gathered=tuple(sum(map(sum, rows)) for rows in received_rows),
        chunks=tuple(chain.from_iterable(chunks)),
        counts=tuple(map(sum, zip(*chunks, strict=True))),
    )

"""Plan the dispatch of tokens to experts: the token dispatchers, and the rows that each rank sends
to each other rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from itertools import chain

from megalith.errors import did_you_mean

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


# Token dispatchers: the built-in ones, and those of installed packages.
#
# A package provides a dispatcher as an entry point of the group `megalith.transports`: the entry
# point's name is the value of `parallel.dispatcher`, and its object is a `Transport` of
# parallel/expert.py.

GROUP = "megalith.transports"

BUILT_IN = ("alltoall", "allgather", "reference")
"""Names of the built-in dispatchers, which a package cannot use."""


def installed_transports() -> Mapping[str, EntryPoint]:
    """Return the dispatchers of other packages by name, without importing them."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in BUILT_IN}


def transport_problems(name: str) -> list[str]:
    """Return an error text if no token dispatcher has this name, else an empty list."""
    if name in BUILT_IN:
        return []
    known = (*BUILT_IN, *sorted(installed_transports()))
    if name in known:
        return []
    return [
        f"parallel.dispatcher={name} is not a known token dispatcher."
        f"{did_you_mean(name, known)} Use one of "
        f"{', '.join(known)}, or install the package that provides it."
    ]

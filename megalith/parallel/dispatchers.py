"""Token dispatchers of other packages (entry points), and a reference dispatcher.

The reference uses one group of all ranks that hold experts. A row goes to each rank that has a part
of its expert, and each rank returns its part of the output to the row's source, so that no
communication along etp is left.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megalith.config.parallel import DispatcherName
from megalith.errors import ConfigError
from megalith.kernels.grouped_linear import Groups
from megalith.kernels.permute import (
    RowPermutation,
    expert_major,
    invert_chunk_order,
    permute,
    permute_choices,
    sort_chunks,
    unpermute,
)
from megalith.kernels.permute import weights_of_rows as weights_of
from megalith.kernels.routing import DROPPED_CHOICE, Choice
from megalith.parallel.collectives import OverlapFn, all_gather_no_grad, all_to_all, no_overlap
from megalith.parallel.expert import (
    CompletedDispatch,
    DispatchedTokens,
    Dispatcher,
    ExpertCapacity,
    PendingDispatch,
    build_dispatcher,
    counts_to_list,
    ep_etp_strides,
)
from megalith.parallel.group import Group
from megalith.parallel.mesh import Mesh
from megalith.plan.dispatch import BUILT_IN, installed_transports


class Transport(Protocol):
    """Creates a token dispatcher; the type of an entry point of the group `megalith.transports`."""

    def __call__(
        self, *, num_experts: int, ep: Group, etp: Group, both: Group, drops_tokens: bool
    ) -> Dispatcher:
        """Return a dispatcher for `num_experts` experts, in order: rank r along `ep` has the r-th
        part of them, and ranks along `etp` a part of each. `both`: the ranks that together hold
        every expert once, more than one.

        `drops_tokens`: choices may be -1, for tokens that were dropped.
        """


def build_transport(
    name: DispatcherName,
    mesh: Mesh,
    num_experts: int,
    *,
    drops_tokens: bool = False,
    room: ExpertCapacity | None = None,
    overlap_fn: OverlapFn = no_overlap,
) -> Dispatcher:
    """Return the token dispatcher of that name, built in or from another package: see
    `build_dispatcher`.

    The built-in `alltoall` calls `overlap_fn` while its messages are in flight.

    Raises:
        ConfigError: the package that provides it cannot be loaded.
    """
    ep, etp, both = mesh.over("ep"), mesh.over("etp"), mesh.over("ep", "etp")
    if both.size == 1 or name in ("alltoall", "allgather"):
        return build_dispatcher(
            name, mesh, num_experts, drops_tokens=drops_tokens, room=room, overlap_fn=overlap_fn
        )
    assert room is None, "only alltoall pads rows to a capacity: rules/moe.py rejects the others"
    make = ReferenceDispatcher if name in BUILT_IN else load_transport(name)
    return make(num_experts=num_experts, ep=ep, etp=etp, both=both, drops_tokens=drops_tokens)


def load_transport(name: str) -> Transport:
    """Load the dispatcher that an installed package provides under that name.

    Raises:
        ConfigError: no package provides it, or its code does not load.
    """
    point = installed_transports().get(name)
    if point is None:
        raise ConfigError(
            f"parallel.dispatcher={name}: no installed package provides it. Use one of {BUILT_IN}."
        )
    try:
        transport: Transport = point.load()
    except Exception as error:  # another package's code may fail in any way
        raise ConfigError(
            f"parallel.dispatcher={name}: {point.value} does not load ({type(error).__name__}: "
            f"{error}). Install its dependencies, or set parallel.dispatcher=alltoall."
        ) from error
    return transport


# --- reference dispatcher


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceDispatcher:
    """Token dispatcher with one all-to-all over all ranks that hold experts, which sends a copy of
    each row to every rank along etp.

    It moves etp times as much as `AllToAllDispatcher`, along ep too; for tests only.
    """

    num_experts: int
    ep: Group
    etp: Group
    both: Group
    drops_tokens: bool

    def __call__(self, x: Tensor, choice: Choice) -> PendingDispatch:
        """Exchange counts, rows and their weights."""
        experts_per_rank, ranks, local_rank = (
            self.num_experts // self.ep.size,
            self.both.size,
            self.both.rank,
        )
        places = self.places(choice.experts, experts_per_rank)
        known = None if self.drops_tokens and not x.is_meta else places.numel()
        order = permute_choices(places, ranks * experts_per_rank, num_rows=known)
        sent = self._counts(order)
        own = slice(local_rank * experts_per_rank, (local_rank + 1) * experts_per_rank)
        chunks = [count for row in sent for count in row[own]]
        combiner = ReferenceCombiner(
            self.both,
            order,
            chunks,
            expert_major(ranks=ranks, experts=experts_per_rank),
            [
                sum(sent[local_rank][rank * experts_per_rank : (rank + 1) * experts_per_rank])
                for rank in range(ranks)
            ],
            [sum(row[own]) for row in sent],
        )
        copies = choice.weights.repeat_interleave(self.etp.size, dim=1)
        counts = tuple(sum(chunks[expert::experts_per_rank]) for expert in range(experts_per_rank))
        return CompletedDispatch(
            DispatchedTokens(
                combiner.dispatch(permute(x, order)),
                combiner.dispatch(weights_of(copies, order)),
                Groups(counts),
            ),
            combiner,
        )

    def places(self, experts: Tensor, experts_per_rank: int) -> Tensor:
        """Return the target of choices [t, k]: [t, k etp], the number of the local expert and of
        its group member in one integer."""
        along_ep, along_etp = ep_etp_strides(self.ep, self.etp)
        copies = torch.arange(self.etp.size, device=experts.device) * along_etp * experts_per_rank
        first = (
            experts // experts_per_rank * along_ep * experts_per_rank + experts % experts_per_rank
        )
        spread = (first.unsqueeze(2) + copies).flatten(1)
        return torch.where(
            experts.repeat_interleave(self.etp.size, dim=1) >= 0, spread, DROPPED_CHOICE
        )

    def _counts(self, order: RowPermutation) -> list[Sequence[int]]:
        """Return, by sending rank, the number of rows for each expert of each member, on the
        host."""
        if order.counts.is_meta:
            return [counts_to_list(order.counts, len(order.choices))] * self.both.size
        counts: list[Sequence[int]] = (
            all_gather_no_grad(order.counts, self.both).view(self.both.size, -1).tolist()
        )
        return counts


@dataclass(frozen=True, slots=True)
class ReferenceCombiner:
    """Combiner of a `ReferenceDispatcher`."""

    both: Group
    order: RowPermutation
    chunks: list[int]
    """Sizes of the received chunks, by sending rank and expert."""

    sorting: list[int]
    """Order of the chunks that sorts them by expert."""

    sent: list[int]
    received: list[int]

    def dispatch(self, rows: Tensor) -> Tensor:
        """Rows in `order` -> rows of the local experts, sorted by expert."""
        rows = all_to_all(rows, self.both, send=self.sent, receive=self.received)
        return sort_chunks(rows, self.chunks, self.sorting)

    def combine(self, rows: Tensor) -> Tensor:
        """Run the inverse exchange; the outputs of a token, and the parts of each, are one sum."""
        rows = sort_chunks(rows, *invert_chunk_order(self.chunks, self.sorting))
        return unpermute(
            all_to_all(rows, self.both, send=self.received, receive=self.sent), self.order
        )

"""Expert parallelism: token dispatchers, which send tokens to the ranks that hold their experts and
combine the expert outputs.

Experts lie on their own grid over the same ranks: ep shards the experts, etp shards the inner
features of each, and along edp ranks hold the same experts. Every rank dispatches its own tokens.
Source: Lepikhin et al. 2020, arXiv:2006.16668; the two grids: Liu et al. 2025, arXiv:2504.14960.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial as partial_of
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megalith.config.parallel import DispatcherName
from megalith.errors import ConfigError
from megalith.kernels.grouped_linear import Groups, build_groups, equal_groups
from megalith.kernels.linear import derive_recompute
from megalith.kernels.routing import (
    DROPPED_CHOICE,
    Choice,
    RowPermutation,
    expert_capacity,
    expert_major,
    gather_row_weights,
    gather_rows,
    invert_chunk_order,
    permute,
    permute_choices,
    permute_choices_padded,
    sort_choices,
    sort_chunks,
    unpermute,
)
from megalith.kernels.routing import gather_row_weights as weights_key
from megalith.parallel.collectives import (
    AsyncAllToAll,
    OverlapFn,
    all_gather,
    all_gather_no_grad,
    all_to_all,
    mark_partial,
    no_overlap,
    reduce_scatter,
    start_all_to_all,
    wait_all_to_all,
)
from megalith.parallel.group import Group
from megalith.parallel.mesh import Mesh
from megalith.plan.layers.moe import (
    BUILT_IN,
    ExchangePlan,
    Table,
    installed_transports,
    plan_exchange,
)
from megalith.plan.shards import split_evenly


class DispatchedTokens(NamedTuple):
    """Tokens dispatched to the experts of this rank."""

    rows: Tensor
    """[r, d]: tokens, sorted by expert; recomputed from the tokens if no message lies between."""

    weights: Tensor
    """[r]: routing weight of each row."""

    groups: Groups
    """Number of rows of each local expert."""


class Combiner(Protocol):
    """Combines expert outputs, by the inverse of one dispatch."""

    def combine(self, rows: Tensor) -> Tensor:
        """Expert outputs [r, d], partial sums over etp -> the sum of each token's expert outputs
        [t, d]. Collective."""


class PendingDispatch(Protocol):
    """A dispatch that has been started."""

    def wait(self) -> tuple[DispatchedTokens, Combiner]:
        """Wait for the dispatched tokens; return them and their combiner. Collective."""


class Dispatcher(Protocol):
    """Token dispatcher: sends tokens to their experts."""

    def __call__(self, x: Tensor, choice: Choice) -> PendingDispatch:
        """Start dispatching tokens x [t, h] to their chosen experts [t, k]. Collective."""


@dataclass(frozen=True, slots=True)
class ExpertCapacity:
    """Expert capacity to which each expert's rows are padded, whatever the tokens choose."""

    factor: float
    """Capacity factor."""

    top_k: int
    experts: int

    sharing: int
    """Number of ranks that share a microbatch, and so the capacity."""

    def row_limit(self, tokens: int) -> int:
        """Return the capacity for a rank's number of tokens, of which none goes to an expert
        twice."""
        return min(
            tokens, expert_capacity(self.factor, tokens * self.sharing, self.top_k, self.experts)
        )


def build_dispatcher(
    name: DispatcherName,
    mesh: Mesh,
    num_experts: int,
    *,
    drops_tokens: bool = False,
    room: ExpertCapacity | None = None,
    overlap_fn: OverlapFn = no_overlap,
) -> Dispatcher:
    """Return the token dispatcher of that name; a local one if one rank holds all experts
    completely. `drops_tokens`: token dropping, so that the number of rows is known only after
    routing, unless rows are padded to the capacity `room`. `overlap_fn`: called while messages of
    an all-to-all are in flight."""
    ep, etp, both = mesh.over("ep"), mesh.over("etp"), mesh.over("ep", "etp")
    if both.size == 1:
        return LocalDispatcher(num_experts, drops_tokens, room)
    if name == "alltoall":
        return AllToAllDispatcher(num_experts, room, ep, etp, both, overlap_fn)
    assert room is None, "an all-gather does not pad rows to a capacity"
    return AllGatherDispatcher(num_experts, ep, both)


# --- local experts


@dataclass(frozen=True, slots=True)
class LocalDispatcher:
    """Token dispatcher for a rank that holds all experts."""

    num_experts: int
    drops_tokens: bool
    room: ExpertCapacity | None = None

    def __call__(self, x: Tensor, choice: Choice) -> PendingDispatch:
        """Sort rows by expert without a message."""
        order, t = (
            order_rows(choice, self.num_experts, self.drops_tokens, self.room),
            len(choice.experts),
        )
        groups = (
            local_expert_groups(order)
            if self.room is None
            else equal_groups(self.num_experts, self.room.row_limit(t))
        )
        rows = derive_recompute(x, permute(x, order), partial_of(gather_rows, order=order))
        return CompletedDispatch(
            DispatchedTokens(rows, gather_row_weights(choice.weights, order), groups),
            LocalCombiner(order),
        )


@dataclass(frozen=True, slots=True)
class CompletedDispatch:
    """A dispatch without pending messages."""

    tokens: DispatchedTokens
    combiner: Combiner

    def wait(self) -> tuple[DispatchedTokens, Combiner]:
        """Return at once."""
        return self.tokens, self.combiner


@dataclass(frozen=True, slots=True)
class LocalCombiner:
    """Combiner of `LocalDispatcher`."""

    order: RowPermutation

    def combine(self, rows: Tensor) -> Tensor:
        """Sum the expert outputs of each token."""
        return unpermute(rows, self.order)


# --- all-to-all


@dataclass(frozen=True, slots=True)
class AllToAllDispatcher:
    """All-to-all token dispatcher: each row goes to the rank that has its expert; the ranks along
    etp then all-gather what they received."""

    num_experts: int
    room: ExpertCapacity | None
    ep: Group
    etp: Group

    both: Group
    """Ranks that together hold every expert once."""

    overlap_fn: OverlapFn = no_overlap
    """Called while rows are in flight."""

    def __call__(self, x: Tensor, choice: Choice) -> PendingDispatch:
        """Start two messages (two more in combine) and, unless rows are padded to a capacity,
        exchange the counts; along etp, two all-gathers and a reduce-scatter in combine."""
        # without a capacity, the counts give the number of rows; they need a device sync anyway
        if self.room is None:
            sort = sort_choices(choice.experts, self.num_experts)
            table = all_gather_counts(
                sort.counts, choice.experts.numel(), self.ep, self.etp, self.both
            )
            rows = sum(table[self.etp.rank][self.ep.rank])
            order = permute_choices(choice.experts, self.num_experts, num_rows=rows, sort=sort)
        else:  # all ranks have equally many tokens
            order = permute_choices_padded(
                choice.experts, self.num_experts, capacity=self.room.row_limit(len(x))
            )
            table = [
                [[self.room.row_limit(len(x))] * self.num_experts] * self.ep.size
            ] * self.etp.size
        combiner = AllToAllCombiner(
            self, order, plan_exchange(table, ep_rank=self.ep.rank, etp_rank=self.etp.rank)
        )
        groups = Groups(combiner.plan.counts, equal=self.room is not None)
        groups = groups.known_on(x.device)  # now, right after a device sync
        # Rows last: backward then waits for their message first, after calling overlap_fn.
        second = AsyncAllToAll(self.ep, combiner.plan.sent, combiner.plan.received)
        weights = start_all_to_all(gather_row_weights(choice.weights, order), second)
        first = AsyncAllToAll(self.ep, combiner.plan.sent, combiner.plan.received, self.overlap_fn)
        return PendingAllToAll(
            combiner, start_all_to_all(permute(x, order), first), weights, groups, first, second
        )


@dataclass(frozen=True, slots=True)
class PendingAllToAll:
    """Rows and their weights in flight to the experts of this rank."""

    combiner: "AllToAllCombiner"
    rows: Tensor
    weights: Tensor
    groups: Groups
    first: AsyncAllToAll
    """Exchange of the rows."""

    second: AsyncAllToAll
    """Exchange of the weights."""

    def wait(self) -> tuple[DispatchedTokens, Combiner]:
        """Wait for rows and weights, and sort them by expert."""
        rows = self.combiner.gather_etp(wait_all_to_all(self.rows, self.first))
        return DispatchedTokens(
            rows, self.combiner.gather_etp(wait_all_to_all(self.weights, self.second)), self.groups
        ), self.combiner


@dataclass(frozen=True, slots=True)
class AllToAllCombiner:
    """Combiner of one `AllToAllDispatcher` call."""

    dispatcher: AllToAllDispatcher
    order: RowPermutation
    plan: ExchangePlan

    def gather_etp(self, rows: Tensor) -> Tensor:
        """Received rows -> those of all ranks along etp, sorted by expert."""
        rows = all_gather(rows, self.dispatcher.etp, sizes=self.plan.gathered)
        return (
            rows if self._sorted() else sort_chunks(rows, self.plan.chunks, self._experts_first())
        )

    def combine(self, rows: Tensor) -> Tensor:
        """Run the inverse of the dispatch messages and sum each token's expert outputs."""
        if not self._sorted():
            rows = sort_chunks(rows, *invert_chunk_order(self.plan.chunks, self._experts_first()))
        rows = reduce_scatter(
            mark_partial(rows, self.dispatcher.etp), self.dispatcher.etp, sizes=self.plan.gathered
        )
        async_all_to_all = AsyncAllToAll(
            self.dispatcher.ep, self.plan.received, self.plan.sent, self.dispatcher.overlap_fn
        )
        return unpermute(
            wait_all_to_all(start_all_to_all(rows, async_all_to_all), async_all_to_all), self.order
        )

    def _sorted(self) -> bool:
        """Whether the received rows are already sorted by expert."""
        return self.dispatcher.both.size == 1 or len(self.plan.counts) == 1

    def _experts_first(self) -> list[int]:
        return expert_major(ranks=self.dispatcher.both.size, experts=len(self.plan.counts))


# --- all-gather


@dataclass(frozen=True, slots=True)
class AllGatherDispatcher:
    """All-gather token dispatcher: every rank gets all tokens and takes those of its experts;
    outputs are reduce-scattered.

    With few experts per rank it moves more than an all-to-all: (ep · etp - 1) · t rows, against at
    most t · k · (ep - 1) / ep, and as many again for each rank along etp.
    """

    num_experts: int
    ep: Group

    both: Group
    """Ranks that together hold every expert once."""

    def __call__(self, x: Tensor, choice: Choice) -> PendingDispatch:
        """Run three all-gathers: of tokens, choices and weights."""
        experts_per_rank = self.num_experts // self.ep.size
        chosen = all_gather_no_grad(choice.experts, self.both) - self.ep.rank * experts_per_rank
        local_experts = torch.where(
            (chosen >= 0) & (chosen < experts_per_rank), chosen, DROPPED_CHOICE
        )
        order = permute_choices(
            local_experts,
            experts_per_rank,
            num_rows=len(local_experts) if local_experts.is_meta else None,
        )
        weights = gather_row_weights(all_gather(choice.weights, self.both), order)
        rows = permute(all_gather(x, self.both), order)
        return CompletedDispatch(
            DispatchedTokens(rows, weights, local_expert_groups(order)),
            AllGatherCombiner(self, order),
        )


@dataclass(frozen=True, slots=True)
class AllGatherCombiner:
    """Combiner of an `AllGatherDispatcher`."""

    dispatcher: AllGatherDispatcher
    order: RowPermutation

    def combine(self, rows: Tensor) -> Tensor:
        """Sum over the ranks; each gets the sums of its own tokens."""
        return reduce_scatter(
            mark_partial(unpermute(rows, self.order), self.dispatcher.both), self.dispatcher.both
        )


# --- numbers of rows


def order_rows(
    choice: Choice, num_experts: int, drops_tokens: bool, room: ExpertCapacity | None = None
) -> RowPermutation:
    """Return the order of all rows by expert; dropless or padded to a capacity, their number is
    known without waiting for the device."""
    if room is not None:
        return permute_choices_padded(
            choice.experts, num_experts, capacity=room.row_limit(len(choice.experts))
        )
    known = None if drops_tokens and not choice.experts.is_meta else choice.experts.numel()
    return permute_choices(choice.experts, num_experts, num_rows=known)


def all_gather_counts(counts: Tensor, rows: int, ep: Group, etp: Group, both: Group) -> Table:
    """Return how many of its `rows` each rank has for each expert, on the host: local counts int64
    [E] -> [etp][ep][E]."""
    if counts.is_meta:
        return [[counts_to_list(counts, rows)] * ep.size] * etp.size
    all_counts = all_gather_no_grad(counts, both).view(both.size, -1).tolist()
    along_ep, along_etp = ep_etp_strides(ep, etp)
    return [
        [all_counts[ep_rank * along_ep + etp_rank * along_etp] for ep_rank in range(ep.size)]
        for etp_rank in range(etp.size)
    ]


def ep_etp_strides(ep: Group, etp: Group) -> tuple[int, int]:
    """Return the strides of ep and of etp in the group of both, which is in the order of ranks."""
    ep_is_inner = (
        ep.size > 1 and etp.size > 1 and ep.ranks[1] - ep.ranks[0] < etp.ranks[1] - etp.ranks[0]
    )
    return (1, ep.size) if ep_is_inner else (etp.size, 1)


def local_expert_groups(order: RowPermutation) -> Groups:
    """Return the row groups of an order."""
    return (
        Groups(tuple(counts_to_list(order.counts, len(order.choices))))
        if order.counts.is_meta
        else build_groups(order.counts)
    )


def counts_to_list(counts: Tensor, rows: int) -> Sequence[int]:
    """Return counts int64 [E] that add up to `rows` as integers; for a meta tensor, even counts."""
    if counts.is_meta:
        return split_evenly(rows, len(counts))
    numbers: list[int] = counts.tolist()
    return numbers


# Token dispatchers of other packages (entry points), and a reference dispatcher.
#
# The reference uses one group of all ranks that hold experts. A row goes to each rank that has a
# part of its expert, and each rank returns its part of the output to the row's source, so that no
# communication along etp is left.


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
        places = self.dispatch_targets(choice.experts, experts_per_rank)
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
                combiner.dispatch(weights_key(copies, order)),
                Groups(counts),
            ),
            combiner,
        )

    def dispatch_targets(self, experts: Tensor, experts_per_rank: int) -> Tensor:
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

"""Expert parallelism: tokens on their way to the ranks that hold their experts, and the answers on
their way back.

Experts lie on a grid of their own over the same ranks: ep divides them, etp divides the inner
features of each, and along edp ranks hold the same. A rank's tokens are its own, whatever axes of
the dense grid made them so. Source: Lepikhin et al. 2020, arXiv:2006.16668; the two grids: Liu et
al. 2025, arXiv:2504.14960.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial as partial_of
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megalith.config.parallel import DispatcherName
from megalith.kernels.grouped_linear import Groups, equal_groups, groups_of
from megalith.kernels.permute import (
    Order,
    expert_major,
    gather_rows,
    order_choices,
    order_padded,
    permute,
    sort_choices,
    sort_chunks,
    undone,
    unpermute,
    weights_of_rows,
)
from megalith.kernels.rebuilt import LayerInput, as_recomputed, output_tensor
from megalith.kernels.routing import NOWHERE, Choice, capacity_of
from megalith.parallel.autograd import (
    AsyncAllToAll,
    OverlapFn,
    all_gather,
    mark_partial,
    no_overlap,
    reduce_scatter,
    regather,
    start_all_to_all,
    wait_all_to_all,
)
from megalith.parallel.group import Group
from megalith.parallel.mesh import Mesh
from megalith.plan.exchange import ExchangePlan, Table, plan_exchange
from megalith.plan.shards import split_evenly


class DispatchedTokens(NamedTuple):
    """What arrived at the experts of this rank."""

    rows: LayerInput
    """[r, d]: tokens, expert after expert; rebuilt from the tokens where no message lies
    between."""

    weights: Tensor
    """[r]: what each answer counts."""

    groups: Groups
    """How many rows each of my experts has."""


class Combiner(Protocol):
    """How rows went, which is how their answers come back."""

    def combine(self, rows: Tensor) -> Tensor:
        """Answers [r, d], my part of a sum over etp -> the sum of each token's answers [t, d].
        Collective."""


class PendingDispatch(Protocol):
    """Rows on their way to experts, while the rank may do something else."""

    def wait(self) -> tuple[DispatchedTokens, Combiner]:
        """What my experts work on, and the way back. Collective."""


class Dispatcher(Protocol):
    """Brings tokens to their experts."""

    def __call__(self, x: LayerInput, choice: Choice) -> PendingDispatch:
        """Send my tokens x [t, d] where their choices [t, k] are. Collective."""


@dataclass(frozen=True, slots=True)
class ExpertCapacity:
    """Rows that every expert gets of a rank's tokens, whatever they chose: as many as may be taken
    of them."""

    factor: float
    """Of its capacity."""

    top_k: int
    experts: int

    sharing: int
    """Ranks that share a microbatch, and the capacity."""

    def of(self, tokens: int) -> int:
        """For so many tokens of a rank, of which none goes twice to an expert."""
        return min(
            tokens, capacity_of(self.factor, tokens * self.sharing, self.top_k, self.experts)
        )


def build_dispatcher(
    name: DispatcherName,
    mesh: Mesh,
    num_experts: int,
    *,
    drops_tokens: bool = False,
    room: ExpertCapacity | None = None,
) -> Dispatcher:
    """The dispatcher of that name; where one rank holds all experts whole, tokens stay.
    `drops_tokens`: experts may refuse choices, so that how many rows there are is known only once
    they are made; unless each has `room` for so many."""
    ep, etp, both = mesh.over("ep"), mesh.over("etp"), mesh.over("ep", "etp")
    if both.size == 1:
        return LocalDispatcher(num_experts, drops_tokens, room)
    if name == "alltoall":
        return AllToAllDispatcher(num_experts, room, ep, etp, both)
    assert room is None, "a gather takes what tokens chose"
    return AllGatherDispatcher(num_experts, ep, both)


def calling(dispatcher: Dispatcher, overlap_fn: OverlapFn) -> Dispatcher:
    """The dispatcher, which does something else while its messages travel, if they do."""
    return (
        replace(dispatcher, overlap_fn=overlap_fn)
        if isinstance(dispatcher, AllToAllDispatcher)
        else dispatcher
    )


# --- nobody else


@dataclass(frozen=True, slots=True)
class LocalDispatcher:
    """All experts are here."""

    num_experts: int
    drops_tokens: bool
    room: ExpertCapacity | None = None

    def __call__(self, x: LayerInput, choice: Choice) -> PendingDispatch:
        """No message."""
        order, t = (
            order_of(choice, self.num_experts, self.drops_tokens, self.room),
            len(choice.experts),
        )
        groups = (
            groups_here(order)
            if self.room is None
            else equal_groups(self.num_experts, self.room.of(t))
        )
        rows = as_recomputed(x).then(
            permute(output_tensor(x), order), partial_of(gather_rows, order=order)
        )
        return CompletedDispatch(
            DispatchedTokens(rows, weights_of_rows(choice.weights, order), groups),
            LocalCombiner(order),
        )


@dataclass(frozen=True, slots=True)
class CompletedDispatch:
    """Nothing is on its way any more."""

    sent: DispatchedTokens
    way: Combiner

    def wait(self) -> tuple[DispatchedTokens, Combiner]:
        """At once."""
        return self.sent, self.way


@dataclass(frozen=True, slots=True)
class LocalCombiner:
    """The way back of `LocalDispatcher`."""

    order: Order

    def combine(self, rows: Tensor) -> Tensor:
        """Added up by token."""
        return unpermute(rows, self.order)


# --- every row to the rank with its expert


@dataclass(frozen=True, slots=True)
class AllToAllDispatcher:
    """All-to-all: each row goes to the rank that has its expert; the ranks along etp then share
    what they received."""

    num_experts: int
    room: ExpertCapacity | None
    ep: Group
    etp: Group

    both: Group
    """Ranks that together hold every expert once."""

    overlap_fn: OverlapFn = no_overlap
    """What the rank does while rows are on their way."""

    def __call__(self, x: LayerInput, choice: Choice) -> PendingDispatch:
        """Two messages each way and, unless every expert has room for as many rows, one with the
        counts; along etp, two gathers there and a sum back."""
        x = output_tensor(x)
        if (
            self.room is None
        ):  # how many rows there are is told with the counts, which a GPU is waited for anyway
            sort = sort_choices(choice.experts, self.num_experts)
            table = counts_of_all(sort.counts, choice.experts.numel(), self.ep, self.etp, self.both)
            rows = sum(table[self.etp.rank][self.ep.rank])
            order = order_choices(choice.experts, self.num_experts, num_rows=rows, sort=sort)
        else:  # all ranks have equally many tokens
            order = order_padded(choice.experts, self.num_experts, capacity=self.room.of(len(x)))
            table = [[[self.room.of(len(x))] * self.num_experts] * self.ep.size] * self.etp.size
        way = AllToAllCombiner(
            self, order, plan_exchange(table, ep_rank=self.ep.rank, etp_rank=self.etp.rank)
        )
        groups = Groups(way.plan.counts, equal=self.room is not None)
        groups = groups.known_on(x.device)  # now, as a GPU has just been waited for
        # Rows last: so theirs is the message that backward waits for first, and does something else
        # before.
        second = AsyncAllToAll(self.ep, way.plan.sent, way.plan.received)
        weights = start_all_to_all(weights_of_rows(choice.weights, order), second)
        first = AsyncAllToAll(self.ep, way.plan.sent, way.plan.received, self.overlap_fn)
        return PendingAllToAll(
            way, start_all_to_all(permute(x, order), first), weights, groups, first, second
        )


@dataclass(frozen=True, slots=True)
class PendingAllToAll:
    """Rows and their weights on the way to my experts."""

    way: "AllToAllCombiner"
    rows: Tensor
    weights: Tensor
    groups: Groups
    first: AsyncAllToAll
    """Of rows."""

    second: AsyncAllToAll
    """Of weights."""

    def wait(self) -> tuple[DispatchedTokens, Combiner]:
        """Expert after expert."""
        rows = self.way.shared(wait_all_to_all(self.rows, self.first))
        return DispatchedTokens(
            rows, self.way.shared(wait_all_to_all(self.weights, self.second)), self.groups
        ), self.way


@dataclass(frozen=True, slots=True)
class AllToAllCombiner:
    """What one `AllToAllDispatcher` did, and the way back."""

    by: AllToAllDispatcher
    order: Order
    plan: ExchangePlan

    def shared(self, rows: Tensor) -> Tensor:
        """Rows as they came -> those of all ranks along etp, expert after expert."""
        rows = all_gather(rows, self.by.etp, sizes=self.plan.gathered)
        return (
            rows if self._sorted() else sort_chunks(rows, self.plan.chunks, self._experts_first())
        )

    def combine(self, rows: Tensor) -> Tensor:
        """The same messages, the other way round."""
        if not self._sorted():
            rows = sort_chunks(rows, *undone(self.plan.chunks, self._experts_first()))
        rows = reduce_scatter(
            mark_partial(rows, self.by.etp), self.by.etp, sizes=self.plan.gathered
        )
        async_all_to_all = AsyncAllToAll(
            self.by.ep, self.plan.received, self.plan.sent, self.by.overlap_fn
        )
        return unpermute(
            wait_all_to_all(start_all_to_all(rows, async_all_to_all), async_all_to_all), self.order
        )

    def _sorted(self) -> bool:
        """Whether what arrives rank after rank lies expert after expert."""
        return self.by.both.size == 1 or len(self.plan.counts) == 1

    def _experts_first(self) -> list[int]:
        return expert_major(ranks=self.by.both.size, experts=len(self.plan.counts))


# --- all tokens to every rank


@dataclass(frozen=True, slots=True)
class AllGatherDispatcher:
    """All-gather: every rank gets all tokens, and takes those of its experts; answers are summed on
    the way back.

    For few experts per rank it moves more than an exchange: (ep · etp - 1) · t rows, where that
    moves at most t · k · (ep - 1) / ep, and the same again for each rank along etp.
    """

    num_experts: int
    ep: Group

    both: Group
    """Ranks that together hold every expert once."""

    def __call__(self, x: LayerInput, choice: Choice) -> PendingDispatch:
        """Three gathers: tokens, choices and weights."""
        each = self.num_experts // self.ep.size
        chosen = regather(choice.experts, self.both) - self.ep.rank * each
        here = torch.where((chosen >= 0) & (chosen < each), chosen, NOWHERE)
        order = order_choices(here, each, num_rows=len(here) if here.is_meta else None)
        weights = weights_of_rows(all_gather(choice.weights, self.both), order)
        rows = permute(all_gather(output_tensor(x), self.both), order)
        return CompletedDispatch(
            DispatchedTokens(rows, weights, groups_here(order)), AllGatherCombiner(self, order)
        )


@dataclass(frozen=True, slots=True)
class AllGatherCombiner:
    """The way back of a `AllGatherDispatcher`."""

    by: AllGatherDispatcher
    order: Order

    def combine(self, rows: Tensor) -> Tensor:
        """A sum over the ranks, of which each gets its own tokens'."""
        return reduce_scatter(mark_partial(unpermute(rows, self.order), self.by.both), self.by.both)


# --- how many rows


def order_of(
    choice: Choice, num_experts: int, drops_tokens: bool, room: ExpertCapacity | None = None
) -> Order:
    """The order of all rows; if none may be refused, or there is room for so many, their number
    is known and no device is waited for."""
    if room is not None:
        return order_padded(choice.experts, num_experts, capacity=room.of(len(choice.experts)))
    known = None if drops_tokens and not choice.experts.is_meta else choice.experts.numel()
    return order_choices(choice.experts, num_experts, num_rows=known)


def counts_of_all(counts: Tensor, rows: int, ep: Group, etp: Group, both: Group) -> Table:
    """How many of its `rows` each rank has for each expert, on the host: my counts int64 [E] ->
    [etp][ep][E]."""
    if counts.is_meta:
        return [[on_host(counts, rows)] * ep.size] * etp.size
    every = regather(counts, both).view(both.size, -1).tolist()
    along_ep, along_etp = steps_in_both(ep, etp)
    return [
        [every[one * along_ep + other * along_etp] for one in range(ep.size)]
        for other in range(etp.size)
    ]


def steps_in_both(ep: Group, etp: Group) -> tuple[int, int]:
    """How far apart neighbors along ep, and along etp, lie in the group of both, which is in the
    order of ranks."""
    first = ep.size > 1 and etp.size > 1 and ep.ranks[1] - ep.ranks[0] < etp.ranks[1] - etp.ranks[0]
    return (1, ep.size) if first else (etp.size, 1)


def groups_here(order: Order) -> Groups:
    """The groups of rows in this order."""
    return (
        Groups(tuple(on_host(order.counts, len(order.choices))))
        if order.counts.is_meta
        else groups_of(order.counts)
    )


def on_host(counts: Tensor, rows: int) -> Sequence[int]:
    """Counts int64 [E] that add up to `rows`; a meta tensor has none, and is taken for one of even
    counts."""
    if counts.is_meta:
        return split_evenly(rows, len(counts))
    numbers: list[int] = counts.tolist()
    return numbers

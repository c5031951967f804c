"""Biases of scores by how far apart two tokens are: a number for each bucket of distances and each
head.

Near distances have a bucket each; further ones share buckets that widen with the logarithm of the
distance. Source: Raffel et al. 2020, arXiv:1910.10683, section 2.1.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.plan.context import KeyTile


def buckets_of(distances: Tensor, *, num_buckets: int, max_distance: int, causal: bool) -> Tensor:
    """Bucket of each distance, key minus query: int64, any shape -> int64.

    Unless `causal`, later keys have the second half of the buckets. Distances of `max_distance` and
    more share the last one; where the logarithm falls on a border, fp32 decides, as it does in
    transformers.
    """
    first = torch.zeros_like(distances)
    if causal:
        far = distances.clamp(max=0).neg()
    else:
        num_buckets //= 2
        first, far = (distances > 0).long() * num_buckets, distances.abs()
    exact = num_buckets // 2
    steps = (
        torch.log(far.clamp(min=1).float() / exact)
        / math.log(max_distance / exact)
        * (num_buckets - exact)
    )
    shared = (exact + steps.long()).clamp(max=num_buckets - 1)
    return first + torch.where(far < exact, far, shared)


def distance_biases(
    table: Tensor, queries: int, keys: int, *, max_distance: int, causal: bool
) -> Tensor:
    """What each score of a document gains: table [buckets, n] -> [n, queries, keys].

    Query i is token keys - queries + i. A pair's bias depends on its distance alone, so only
    queries + keys - 1 values are looked up, of which each query has a stretch.
    """
    if (
        table.is_meta
    ):  # without numbers nothing can be looked up; any sum over the table has its types
        return table.sum(0).view(-1, 1, 1).expand(-1, queries, keys)
    if queries == 0 or keys == 0:
        return table.new_zeros(table.shape[1], queries, keys)
    distances = torch.arange(1 - keys, queries, device=table.device)
    buckets = buckets_of(
        distances, num_buckets=len(table), max_distance=max_distance, causal=causal
    )
    return table[buckets].T.unfold(1, keys, 1).flip(1)


def biases_by_distance(table: Tensor, reach: int, *, max_distance: int, causal: bool) -> Tensor:
    """What scores gain at distances, key minus query, from -reach to reach: table [buckets, n] ->
    [n, 2 reach + 1]."""
    if table.is_meta:
        return table.sum(0).view(-1, 1).expand(-1, 2 * reach + 1)
    distances = torch.arange(-reach, reach + 1, device=table.device)
    buckets = buckets_of(
        distances, num_buckets=len(table), max_distance=max_distance, causal=causal
    )
    return table[buckets].T.contiguous()


@dataclass(frozen=True, slots=True)
class Distances:
    """How far apart some queries and some keys are that lie anywhere in their documents."""

    queries: Tensor
    """int64 [t_q]: numbers of the queries in the order of the text, in which documents lie one
    after the other."""

    keys: Tensor
    """int64 [t_k]: the same of the keys."""

    reach: int
    """The furthest distance that is told from further ones."""

    def of_row(self, rows: int) -> Tensor:
        """Of all pairs of one of equal rows, counted from -reach: int64 [queries, keys]."""
        return self._between(*(x[: len(x) // rows] for x in (self.queries, self.keys)))

    def of_tile(self, tile: KeyTile) -> Tensor:
        """The same of a tile's pairs; of a row alike, those of the first are asked: int64 [its
        queries, its keys]."""
        return self._between(
            self.queries[tile.start : tile.stop], self.keys[tile.first : tile.last]
        )

    def _between(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (keys - queries.unsqueeze(1)).clamp_(-self.reach, self.reach).add_(self.reach)


@dataclass(frozen=True, slots=True)
class PairBiases:
    """What scores of some queries and some keys gain, as span attention orders them."""

    values: Tensor
    """[n, 2 reach + 1], see `biases_by_distance`."""

    distances: Distances

    def of_tile(self, tile: KeyTile, heads: Tensor, shared: int) -> Tensor:
        """For a tile's scores: [heads, shared * rows, keys]; heads: key/value heads, which `shared`
        queries share."""
        values = self.values.unflatten(0, (-1, shared))[heads]
        return values[:, :, self.distances.of_tile(tile)].flatten(1, 2)

    def add_gradient(
        self, into: Tensor, dscores: Tensor, tile: KeyTile, heads: Tensor, shared: int
    ) -> None:
        """Add what a tile's dscores [heads, shared * rows, keys] contribute to that of the values,
        `into`."""
        dscores = dscores.view(len(heads), shared, -1)
        places = self.distances.of_tile(tile).view(1, 1, -1).expand_as(dscores)
        found = into.new_zeros(len(heads), shared, into.shape[1]).scatter_add_(2, places, dscores)
        into.view(-1, shared, into.shape[1]).index_add_(0, heads, found)

    def of_row(self, rows: int) -> Tensor:
        """For all pairs of one of equal rows: [n, queries, keys]."""
        if self.values.is_meta:
            return self.values.sum(1).view(-1, 1, 1)
        return self.values[:, self.distances.of_row(rows)]


def reference_biases(
    table: Tensor, queries: int, keys: int, *, max_distance: int, causal: bool
) -> Tensor:
    """The same pair by pair: the definition."""
    places = torch.arange(keys, device=table.device)
    distances = places - places[keys - queries :, None]
    buckets = buckets_of(
        distances, num_buckets=len(table), max_distance=max_distance, causal=causal
    )
    return table[buckets].permute(2, 0, 1)

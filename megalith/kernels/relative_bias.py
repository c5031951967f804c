"""Relative position bias of attention scores: a learned number for each bucket of distances and
each head.

Short distances have a bucket each; longer ones share buckets that widen with the logarithm of the
distance. Source: Raffel et al. 2020, arXiv:1910.10683, section 2.1.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.plan.context import KeyTile


def distance_buckets(
    distances: Tensor, *, num_buckets: int, max_distance: int, causal: bool
) -> Tensor:
    """Return the bucket of each distance, key minus query: int64, any shape -> int64.

    Unless `causal`, later keys use the second half of the buckets. Distances of at least
    `max_distance` share the last bucket; at bucket boundaries the logarithm is computed in fp32, as
    in transformers.
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
    """Return the bias of each score of a document: table [buckets, n] -> [n, queries, keys].

    Query i is token keys - queries + i. A pair's bias depends on its distance only, so queries +
    keys - 1 values are looked up, and each query uses a slice of them.
    """
    if (
        table.is_meta
    ):  # meta tensors have no values to look up; any sum over the table has the right types
        return table.sum(0).view(-1, 1, 1).expand(-1, queries, keys)
    if queries == 0 or keys == 0:
        return table.new_zeros(table.shape[1], queries, keys)
    distances = torch.arange(1 - keys, queries, device=table.device)
    buckets = distance_buckets(
        distances, num_buckets=len(table), max_distance=max_distance, causal=causal
    )
    return table[buckets].T.unfold(1, keys, 1).flip(1)


def biases_by_distance(table: Tensor, reach: int, *, max_distance: int, causal: bool) -> Tensor:
    """Return the bias at each distance, key minus query, from -reach to reach: table [buckets, n]
    -> [n, 2 reach + 1]."""
    if table.is_meta:
        return table.sum(0).view(-1, 1).expand(-1, 2 * reach + 1)
    distances = torch.arange(-reach, reach + 1, device=table.device)
    buckets = distance_buckets(
        distances, num_buckets=len(table), max_distance=max_distance, causal=causal
    )
    return table[buckets].T.contiguous()


@dataclass(frozen=True, slots=True)
class Distances:
    """Distances between queries and keys at arbitrary places of their documents."""

    queries: Tensor
    """int64 [t_q]: position of each query among all tokens, documents one after the other."""

    keys: Tensor
    """int64 [t_k]: position of each key among all tokens."""

    reach: int
    """The largest distance with its own index; longer ones are clamped to it."""

    def of_row(self, rows: int) -> Tensor:
        """Return the distances plus reach of all pairs of one of `rows` equal rows: int64 [queries,
        keys]."""
        return self._between(*(x[: len(x) // rows] for x in (self.queries, self.keys)))

    def of_tile(self, tile: KeyTile) -> Tensor:
        """Return the distances plus reach of a tile's pairs; with several equal rows, of the first:
        int64 [queries, keys]."""
        return self._between(
            self.queries[tile.start : tile.stop], self.keys[tile.first : tile.last]
        )

    def _between(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (keys - queries.unsqueeze(1)).clamp_(-self.reach, self.reach).add_(self.reach)


@dataclass(frozen=True, slots=True)
class PairBiases:
    """Relative position bias of queries and keys in the layout of kernels/span_attention.py."""

    values: Tensor
    """[n, 2 reach + 1], see `biases_by_distance`."""

    distances: Distances

    def of_tile(self, tile: KeyTile, heads: Tensor, shared: int) -> Tensor:
        """Return the bias of a tile's scores: [heads, shared * rows, keys]; heads: key/value heads,
        each shared by `shared` query heads."""
        values = self.values.unflatten(0, (-1, shared))[heads]
        return values[:, :, self.distances.of_tile(tile)].flatten(1, 2)

    def add_gradient(
        self, into: Tensor, dscores: Tensor, tile: KeyTile, heads: Tensor, shared: int
    ) -> None:
        """Add the contribution of a tile's dscores [heads, shared * rows, keys] to `into`, the
        gradient of `values`."""
        dscores = dscores.view(len(heads), shared, -1)
        indices = self.distances.of_tile(tile).view(1, 1, -1).expand_as(dscores)
        tile_grad = into.new_zeros(len(heads), shared, into.shape[1]).scatter_add_(
            2, indices, dscores
        )
        into.view(-1, shared, into.shape[1]).index_add_(0, heads, tile_grad)

    def of_row(self, rows: int) -> Tensor:
        """Return the bias of all pairs of one of `rows` equal rows: [n, queries, keys]."""
        if self.values.is_meta:
            return self.values.sum(1).view(-1, 1, 1)
        return self.values[:, self.distances.of_row(rows)]


def reference_biases(
    table: Tensor, queries: int, keys: int, *, max_distance: int, causal: bool
) -> Tensor:
    """Reference implementation of `distance_biases`, pair by pair."""
    places = torch.arange(keys, device=table.device)
    distances = places - places[keys - queries :, None]
    buckets = distance_buckets(
        distances, num_buckets=len(table), max_distance=max_distance, causal=causal
    )
    return table[buckets].permute(2, 0, 1)

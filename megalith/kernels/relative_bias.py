"""Biases of scores by how far apart two tokens are: a number for each bucket of distances and each head.

Near distances have a bucket each; further ones share buckets that widen with the logarithm of the distance.
Source: Raffel et al. 2020, arXiv:1910.10683, section 2.1.
"""

import math

import torch
from torch import Tensor


def buckets_of(distances: Tensor, *, num_buckets: int, max_distance: int, causal: bool) -> Tensor:
    """Bucket of each distance, key minus query: int64, any shape -> int64.

    Unless `causal`, later keys have the second half of the buckets. Distances of `max_distance` and more share the
    last one; where the logarithm falls on a border, fp32 decides, as it does in transformers.
    """
    first = torch.zeros_like(distances)
    if causal:
        far = distances.clamp(max=0).neg()
    else:
        num_buckets //= 2
        first, far = (distances > 0).long() * num_buckets, distances.abs()
    exact = num_buckets // 2
    steps = torch.log(far.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    shared = (exact + steps.long()).clamp(max=num_buckets - 1)
    return first + torch.where(far < exact, far, shared)


def distance_biases(table: Tensor, queries: int, keys: int, *, max_distance: int, causal: bool) -> Tensor:
    """What each score of a document gains: table [buckets, n] -> [n, queries, keys].

    Query i is token keys - queries + i. A pair's bias depends on its distance alone, so only queries + keys - 1 values
    are looked up, of which each query has a stretch.
    """
    if table.is_meta:  # without numbers nothing can be looked up; any sum over the table has its types
        return table.sum(0).view(-1, 1, 1).expand(-1, queries, keys)
    if queries == 0 or keys == 0:
        return table.new_zeros(table.shape[1], queries, keys)
    distances = torch.arange(1 - keys, queries, device=table.device)
    buckets = buckets_of(distances, num_buckets=len(table), max_distance=max_distance, causal=causal)
    return table[buckets].T.unfold(1, keys, 1).flip(1)


def reference_biases(table: Tensor, queries: int, keys: int, *, max_distance: int, causal: bool) -> Tensor:
    """The same pair by pair: the definition."""
    places = torch.arange(keys, device=table.device)
    distances = places - places[keys - queries :, None]
    buckets = buckets_of(distances, num_buckets=len(table), max_distance=max_distance, causal=causal)
    return table[buckets].permute(2, 0, 1)

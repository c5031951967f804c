"""Consistency of weights and their fp32 master weights in a checkpoint: equal except for
rounding."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.checkpoint.boxes import CheckpointEntry
from megalith.checkpoint.strictness import MASTER, MODEL
from megalith.plan.shards import Shard


@dataclass(frozen=True, slots=True, eq=False)
class MasterWeightPair:
    """A shard of a parameter that was loaded from its master weights."""

    shard: Shard
    wide: Tensor
    """The shard loaded from the master weights."""

    low: Tensor | None
    """The same shard loaded from the stored weights, in their dtype; None if these were not read
    yet."""

    other: Tensor | None
    """Another tensor of the shard that was loaded from the master weights: weights of a third
    dtype."""


def pair_master_weights(
    entries: Sequence[CheckpointEntry], sources: Mapping[str, str]
) -> list[MasterWeightPair]:
    """Return the shards that were loaded from master weights; `sources` is {key: stored tensor it
    was read from}."""
    weights = {(e.shard.name, e.shard.box): e for e in entries if e.role == "param"}
    master_weights = {(e.shard.name, e.shard.box): e for e in entries if e.role == "master"}
    pairs = []
    for place in dict.fromkeys([*master_weights, *weights]):
        low, wide = weights.get(place), master_weights.get(place, weights.get(place))
        if wide is None or sources[wide.key] != f"{MASTER}{wide.shard.name}":
            continue
        same = None if low is None or low is wide else _inside(low, wide.shard)
        filled = low is not None and sources[low.key] == f"{MODEL}{low.shard.name}"
        pairs.append(
            MasterWeightPair(
                wide.shard, wide.tensor.detach(), same if filled else None, None if filled else same
            )
        )
    return pairs


def _inside(entry: CheckpointEntry, shard: Shard) -> Tensor | None:
    """Return the elements of an entry that belong to `shard` of the same box; None if some are
    missing."""
    whole_box = math.prod(b - a for a, b in shard.box)
    first, last = entry.shard.flat or (0, whole_box)
    start, stop = shard.flat or (0, whole_box)
    return (
        entry.tensor.detach().view(-1)[start - first : stop - first]
        if first <= start and stop <= last
        else None
    )


@torch.no_grad()
def reconcile(weights: Tensor, master_weights: Tensor, *, prefer_weights: bool) -> float | None:
    """Overwrite the side that is not preferred, where the two differ by more than rounding.

    Both hold the same elements in the same order, `weights` in their stored dtype. Returns the
    largest difference (inf if one side is NaN), or None if nothing differs.
    """
    flat, wide = weights.view(-1), master_weights.view(-1)
    rounded = wide.to(flat.dtype)
    differ = ~((rounded == flat) | (rounded.isnan() & flat.isnan()))
    if not differ.any():
        return None
    largest = float((wide[differ].double() - flat[differ].double()).abs().max())
    if prefer_weights:
        wide.copy_(torch.where(differ, flat.to(wide.dtype), wide))
    else:
        flat.copy_(rounded)
    return largest if math.isfinite(largest) else math.inf


def describe_master_differences(
    rank_differences: Sequence[Mapping[str, float]], *, prefer_weights: bool
) -> str | None:
    """Describe all ranks' {parameter: largest difference} in one line; None if all are empty."""
    names = {name for part in rank_differences for name in part}
    if not names:
        return None
    largest = {name: max(part.get(name, 0.0) for part in rank_differences) for name in names}
    worst = min(names, key=lambda name: (-largest[name], name))
    preferred, advice = (
        ("weights", "Remove checkpoint.prefer_weights to use the master weights.")
        if prefer_weights
        else ("master weights", "Set checkpoint.prefer_weights=true to use the weights.")
    )
    return (
        f"the weights of {len(names)} parameters are not their master weights, rounded: {worst} "
        f"differs most, by {largest[worst]:.3g}. The {preferred} are used. {advice}"
    )

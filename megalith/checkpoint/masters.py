"""Weights and their fp32 master weights in one checkpoint: they must be the same numbers, apart
from rounding."""

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
    """A slice of a parameter that was filled from its master."""

    shard: Shard
    wide: Tensor
    """Filled from the master."""

    low: Tensor | None
    """The same slice filled from the stored weights, in their dtype; None: these were not read
    yet."""

    other: Tensor | None
    """A further tensor of the slice that was filled from the master, too: weights of a third
    dtype."""


def pairs_of(
    entries: Sequence[CheckpointEntry], sources: Mapping[str, str]
) -> list[MasterWeightPair]:
    """The slices among `entries` that were filled from masters; `sources` is {key: stored tensor it
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
    """The elements of an entry that are those of `shard`, a slice of the same box; None when it
    lacks some."""
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
    """Write the side that is not believed anew, where the two differ by more than rounding.

    Both hold the same elements in the same order, `weights` in their stored dtype. Returns the
    largest difference, inf where one side is no number, or None when nothing differs; then nothing
    is changed.
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


def worst_line(found: Sequence[Mapping[str, float]], *, prefer_weights: bool) -> str | None:
    """What every rank's {parameter: largest difference} comes to, in one line; None when all are
    empty."""
    names = {name for part in found for name in part}
    if not names:
        return None
    largest = {name: max(part.get(name, 0.0) for part in found) for name in names}
    worst = min(names, key=lambda name: (-largest[name], name))
    used, advice = (
        ("weights", "Remove checkpoint.prefer_weights to use the master weights.")
        if prefer_weights
        else ("masters", "Set checkpoint.prefer_weights=true to use the weights.")
    )
    return (
        f"the weights of {len(names)} parameters are not their master weights, rounded: {worst} "
        f"differs most, by {largest[worst]:.3g}. The {used} are used. {advice}"
    )

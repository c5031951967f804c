"""Entries of small models whose ranks hold parts of each tensor."""

from collections.abc import Mapping

import torch

from megalith.checkpoint.format import CheckpointEntry
from megalith.plan.shards import Shard, split_evenly


def build_split_entries(
    shapes: Mapping[str, tuple[int, ...]], rank: int, world: int, *, dim: int, step: int
) -> list[CheckpointEntry]:
    """Weights and moments of `step` (0: zeros), split along `dim`; scalars are rank 0's."""
    entries = []
    for number, (name, shape) in enumerate(shapes.items()):
        for role, offset in (("param", 0), ("exp_avg", 10)):
            seed = torch.Generator().manual_seed(100 * step + number + offset)
            full = torch.randn(shape, generator=seed) if step else torch.zeros(shape)
            shard, is_writer = Shard.full(name, shape), rank == 0
            if shape:
                axis = min(dim, len(shape) - 1)
                sizes = split_evenly(shape[axis], world)
                shard, is_writer = shard.split_dim(axis, sizes, rank, ("dp",)), True
            values = full[tuple(slice(*span) for span in shard.box)].contiguous()
            entries.append(CheckpointEntry(shard, role, values, is_writer))
    return entries

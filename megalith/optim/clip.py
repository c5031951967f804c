"""The global gradient norm, every element counted once, and the factor that keeps it below a bound."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.parallel.group import all_reduce_
from megalith.parallel.mesh import Mesh
from megalith.plan.shards import Shard, copies


def global_norm(gradients: Sequence[tuple[Shard, Tensor]], mesh: Mesh) -> Tensor:
    """L2 norm over all gradients of the model: a float64 scalar, the same on every rank.

    Gradients are whole sums already, so a slice that several tensor-parallel ranks hold counts on the first of them,
    and data-parallel ranks, which all hold the same, need no message.
    """
    mine = mesh.coordinates
    squares = [
        torch.linalg.vector_norm(gradient).double().square()
        for shard, gradient in gradients
        if all(mine[axis] == 0 for axis in ("tp_kv", "tp_copy") if axis in copies(shard))
    ]
    device = gradients[0][1].device
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
    return all_reduce_(total, mesh.tp).sqrt_()


def clip_factor(norm: Tensor, limit: float) -> Tensor | None:
    """What to multiply gradients by so that their norm is at most `limit`; None when no clipping is asked for."""
    if limit == 0:
        return None
    return torch.clamp(limit / (norm + 1e-6), max=1.0)

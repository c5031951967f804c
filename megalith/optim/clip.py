"""Gradient clipping: the global gradient norm over all shards, and the clipping factor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.parallel.mesh import Mesh
from megalith.plan.shards import Shard, is_first_replica

ROW = 64
"""Elements whose squares are summed in fp32; rows are summed in float64. Rows are counted from the
start of each shard. A shard that starts at a multiple of ROW in its parameter has the rows of the
full parameter; shards of weights that are stored contiguously for one matmul may start elsewhere,
so that the sum depends on the sharding by fp32 rounding (measured: below 1e-8 of the sum, from 5000
normal numbers on). A full matrix summed in fp32 is off by 8e-5 (4M elements; torch 2.13)."""


def first_replica_gradients(gradients: Sequence[tuple[Shard, Tensor]], mesh: Mesh) -> list[Tensor]:
    """Return the gradients of the shards of which this rank has the first replica."""
    coordinates = mesh.coordinates
    return [gradient for shard, gradient in gradients if is_first_replica(shard, coordinates)]


def sum_of_squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of all elements as a float64 scalar."""
    flat = [gradient.reshape(-1) for gradient in gradients]
    heads = [x[: x.numel() // ROW * ROW].view(-1, ROW) for x in flat if x.numel() >= ROW]
    tails = [x[x.numel() // ROW * ROW :] for x in flat if x.numel() % ROW]
    norms = [torch.linalg.vector_norm(rows, dim=1) for rows in heads]
    norms += [torch.stack(torch._foreach_norm(tails))] if tails else []
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.cat(norms).double().square_().sum()


def num_zeros(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the number of zero elements as a float64 scalar."""
    counts = [gradient.numel() - torch.count_nonzero(gradient) for gradient in gradients]
    return (
        torch.stack(counts).sum().double()
        if counts
        else torch.zeros((), dtype=torch.float64, device=device)
    )


def clip_factor(norm: Tensor, limit: float) -> Tensor | None:
    """Return the factor that limits the gradient norm to `limit`; None if clipping is off (limit
    0)."""
    if limit == 0:
        return None
    return torch.clamp(limit / (norm + 1e-6), max=1.0)

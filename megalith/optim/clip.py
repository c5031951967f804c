"""Gradient clipping by the global norm over all shards."""

from collections.abc import Sequence, Set

import torch
from torch import Tensor

from megalith.plan.shards import Shard

ROW = 64
"""Elements whose squares are summed in fp32; rows are summed in float64. Rows are counted from the
start of each shard. A shard that starts at a multiple of ROW in its parameter has the rows of the
full parameter; shards of weights that are stored contiguously for one matmul may start elsewhere,
so that the sum depends on the sharding by fp32 rounding (measured: below 1e-8 of the sum, from 5000
normal numbers on). A full matrix summed in fp32 is off by 8e-5 (4M elements; torch 2.13)."""


def first_replica_gradients(
    gradients: Sequence[tuple[Shard, Tensor]], first_replicas: Set[str]
) -> list[Tensor]:
    """Return the gradients of the shards of which this rank has the first replica."""
    return [gradient for shard, gradient in gradients if shard.name in first_replicas]


def sum_of_squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of all elements as a float64 scalar."""
    return _sum_row_norms([norms for _, norms in _compute_row_norms(gradients)], device)


def sum_of_squares_by_group(
    gradients: Sequence[Tensor], groups: Sequence[int], num_groups: int, device: torch.device
) -> Tensor:
    """Return the sum of squares of the elements of each group as float64 [num_groups].

    groups: number of the group of each gradient.
    """
    rows = _compute_row_norms(gradients)
    sums = [
        _sum_row_norms([norms for index, norms in rows if groups[index] == group], device)
        for group in range(num_groups)
    ]
    return torch.stack(sums)


def _compute_row_norms(gradients: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """Return the norms of rows of `ROW` elements of each gradient, then those of the shorter last
    rows, each with the number of the gradient."""
    flat = [gradient.reshape(-1) for gradient in gradients]
    rows = [
        (number, torch.linalg.vector_norm(x[: x.numel() // ROW * ROW].view(-1, ROW), dim=1))
        for number, x in enumerate(flat)
        if x.numel() >= ROW
    ]
    tails = {
        number: x[x.numel() // ROW * ROW :] for number, x in enumerate(flat) if x.numel() % ROW
    }
    if tails:
        norms = torch._foreach_norm(list(tails.values()))
        rows += [(number, norm.unsqueeze(0)) for number, norm in zip(tails, norms, strict=True)]
    return rows


def _sum_row_norms(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.cat(list(norms)).double().square_().sum()


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

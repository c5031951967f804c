"""The global gradient norm, every element counted once, and the factor that keeps it below a
bound."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.parallel.mesh import Mesh
from megalith.plan.shards import Shard, is_first_replica

ROW = 64
"""Elements whose squares are added in fp32; rows are added in float64. Rows are counted from the
start of each slice. A slice that starts at a multiple inside its parameter has the rows of the
whole; weights that one matmul writes lie without gaps, and may be cut elsewhere, and then the
sum depends on who owns what, by rounding in fp32 (measured: below 1e-8 of the sum, from 5000
normal numbers on). A whole matrix added in fp32 is off by 8e-5 (4M of them; torch 2.13)."""


def counted(gradients: Sequence[tuple[Shard, Tensor]], mesh: Mesh) -> list[Tensor]:
    """The gradients that this rank counts: those of which no rank before it holds the same
    slice."""
    here = mesh.coordinates
    return [gradient for shard, gradient in gradients if is_first_replica(shard, here)]


def sum_of_squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Of all elements together: a float64 scalar."""
    flat = [gradient.reshape(-1) for gradient in gradients]
    heads = [x[: x.numel() // ROW * ROW].view(-1, ROW) for x in flat if x.numel() >= ROW]
    tails = [x[x.numel() // ROW * ROW :] for x in flat if x.numel() % ROW]
    norms = [torch.linalg.vector_norm(rows, dim=1) for rows in heads]
    norms += [torch.stack(torch._foreach_norm(tails))] if tails else []
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.cat(norms).double().square_().sum()


def num_zeros(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Elements that are exactly zero: a float64 scalar."""
    counts = [gradient.numel() - torch.count_nonzero(gradient) for gradient in gradients]
    return (
        torch.stack(counts).sum().double()
        if counts
        else torch.zeros((), dtype=torch.float64, device=device)
    )


def clip_factor(norm: Tensor, limit: float) -> Tensor | None:
    """What to multiply gradients by so that their norm is at most `limit`; None when no clipping is
    asked for."""
    if limit == 0:
        return None
    return torch.clamp(limit / (norm + 1e-6), max=1.0)

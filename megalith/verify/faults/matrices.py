"""Planted faults in update rules per matrix and in the exchange of pieces with assigned ranks."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megalith.optim import assigned_ranks
from megalith.optim.muon import Muon
from megalith.optim.rules import UpdateScalars
from megalith.optim.slots import OptimizerSlot
from megalith.plan.assigned_ranks import AssignedRanksPlan, Piece, WaveExchange
from megalith.plan.matrices import MatrixSplit, WeightMatrix
from megalith.plan.shards import Box
from megalith.verify.faults.plant import Original, replaces


@replaces(assigned_ranks, "split_into_matrices", "dp, muon", everywhere=True)
def keys_orthogonalized_with_values(
    original: Original,
    name: str,
    shape: Sequence[int],
    inputs: int,
    *,
    split: MatrixSplit,
    nope_dim: int | None,
) -> list[WeightMatrix]:
    """Muon orthogonalizes keys and values as one matrix."""
    matrices: list[WeightMatrix] = original(
        name,
        shape,
        inputs,
        split="fused" if name.endswith(".kv") else split,
        nope_dim=nope_dim,
    )
    return matrices


@replaces(Muon, "apply", "tp, muon")
def muon_scale_of_local_shape(
    original: Original,
    self: Muon,
    master_weights: Sequence[Tensor],
    directions: Sequence[Tensor],
    shape: tuple[int, int],
    scalars: UpdateScalars,
) -> None:
    """Muon scales the update by the shape of the rank's piece instead of that of the matrix."""
    for master, direction in zip(master_weights, directions, strict=True):
        columns = min(shape[1], master.numel() // len(master))
        local_shape = (master.numel() // columns, columns)
        original(self, [master], [direction], local_shape, scalars)


@replaces(assigned_ranks, "assemble_matrix_", "tp, muon")
def pieces_stacked_in_rank_order(
    original: Original, matrix: Tensor, origin: Box, pieces: Sequence[tuple[Piece, Tensor]]
) -> None:
    """The assigned rank stacks pieces in the order of their ranks, as if each were some rows."""
    matrix.view(-1).copy_(torch.cat([values.reshape(-1) for _, values in pieces]))


@replaces(assigned_ranks, "list_wave_exchanges", "dp, muon")
def replica_without_direction(
    original: Original, plan: AssignedRanksPlan, rank: int
) -> list[WaveExchange]:
    """Only the first of the ranks with copies of the same elements gets the update direction."""
    replicas = tuple(
        tuple(one._replace(ranks=one.ranks[:1]) for one in of_matrix) for of_matrix in plan.replicas
    )
    exchanges: list[WaveExchange] = original(replace(plan, replicas=replicas), rank)
    return exchanges


@replaces(Muon, "prepare", "dp, muon", everywhere=True)
def muon_momentum_unclipped(
    original: Original,
    self: Muon,
    slots: Sequence[OptimizerSlot],
    gradients: Sequence[Tensor],
    scalars: UpdateScalars,
) -> list[Tensor]:
    """Muon updates its momentum from gradients that are not clipped."""
    prepared: list[Tensor] = original(self, slots, gradients, scalars._replace(scale=None))
    return prepared

"""Interfaces of update rules: elementwise rules work on any slice of a parameter, per-matrix rules
on whole matrices, and summed rules on pieces with sums over the ranks that hold them.

A rule is built as Rule(config) from the optimizer's settings. It has no slots and no communication:
`RuleOptimizer` (optim/optimizer.py) calls it with the slots of its parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from megalith.optim.slots import OptimizerSlot


class UpdateScalars(NamedTuple):
    """Numbers of one update, equal for all slots of a call."""

    lr: float
    """Learning rate of these slots."""

    weight_decay: float
    """Weight decay of these slots; 0 for vectors by default."""

    updates: int
    """Number of this update, from 1."""

    scale: Tensor | None = None
    """Factor by which the gradients are multiplied first: clip factor times inverse loss scale;
    None: 1."""

    eps_factor: float = 1.0
    """Factor of the rule's eps (muP)."""


@runtime_checkable
class ElementwiseRule(Protocol):
    """Update rule that works on any slice of a parameter, such as AdamW, SGD and Lion."""

    roles: tuple[str, ...]
    """Names of the states, each with the shape of the slice."""

    def update(
        self, slots: Sequence[OptimizerSlot], gradients: list[Tensor], scalars: UpdateScalars
    ) -> None:
        """Update master weights and states of slots from one gradient per slot, which may be
        overwritten."""


@runtime_checkable
class RoundingRule(ElementwiseRule, Protocol):
    """Elementwise rule whose `update` also rounds the master weights into the weights."""

    rounds_weights: bool
    """Whether it does."""


@runtime_checkable
class MatrixRule(Protocol):
    """Update rule whose direction is computed from whole matrices, such as Muon and SOAP.

    `prepare` and `apply` are elementwise; `compute_direction` runs on the assigned rank of each
    matrix and does not depend on the sharding.
    """

    roles: tuple[str, ...]
    """Names of the states with the shape of the slice, such as momentum."""

    def prepare(
        self, slots: Sequence[OptimizerSlot], gradients: list[Tensor], scalars: UpdateScalars
    ) -> list[Tensor]:
        """Update the states of the slices; return the slice of the matrix to send of each slot."""

    def message_dtype(self, params: torch.dtype) -> torch.dtype:
        """Return the dtype in which pieces are sent; `params`: dtype of the weights, not of the
        master weights."""

    def matrix_state_shapes(self, rows: int, columns: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of each state of one matrix that is stored on its assigned rank."""

    def compute_direction(
        self, matrices: Tensor, states: Mapping[str, Tensor], updates: int
    ) -> Tensor:
        """Return the directions of matrices [b, rows, columns]; updates their states [b, ...] in
        place."""

    def apply(
        self,
        master_weights: Sequence[Tensor],
        directions: Sequence[Tensor],
        shape: tuple[int, int],
        scalars: UpdateScalars,
    ) -> None:
        """Apply weight decay and step to views of slices of matrices of this (rows, columns)."""


class MatrixPiece(NamedTuple):
    """Rectangular piece of one matrix that a rank holds."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used
    """Number of the matrix among all matrices of the call, from 0; its shape is `shapes[index]`."""

    row_start: int
    """First row of the piece."""

    column_start: int
    """First column of the piece."""

    master: Tensor
    """View of the master weights [r, c]."""

    gradient: Tensor
    """View of the gradient [r, c], which may be overwritten."""

    counted: bool
    """Whether this rank has the first replica of the piece, which counts in sums."""

    states: Mapping[str, Tensor]
    """Whole states of the matrix, equal on every rank that holds a piece of it."""


@runtime_checkable
class SummedRule(Protocol):
    """Update rule of matrices that needs only sums over the pieces of a matrix, such as
    Adafactor."""

    roles: tuple[str, ...]
    """Names of the states with the shape of the slice."""

    def matrix_state_shapes(self, rows: int, columns: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of each state of one matrix, which every rank with a piece of it
        stores."""

    def update_pieces(
        self,
        pieces: Sequence[MatrixPiece],
        scalars: UpdateScalars,
        shapes: Sequence[tuple[int, int]],
        all_reduce: Callable[[Tensor], None],
        device: torch.device,
    ) -> None:
        """Update pieces of matrices of these (rows, columns), equal on every rank.

        `all_reduce` sums a tensor on `device` in place over the ranks that hold pieces; every rank
        makes the same calls, also without a piece.
        """


UpdateRule = ElementwiseRule | MatrixRule | SummedRule
"""Update rule of either kind."""


def is_per_matrix(rule: UpdateRule) -> bool:
    """Return whether a rule applies to whole matrices only."""
    return isinstance(rule, MatrixRule | SummedRule)

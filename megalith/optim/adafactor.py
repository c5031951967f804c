"""Adafactor: second moments factored into row and column means, for each matrix."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.config.optim import AdafactorConfig, OptimConfig
from megalith.optim.rules import MatrixPiece, UpdateScalars


class Adafactor:
    """Adafactor update rule, equal to torch.optim.Adafactor.

    Row means, column means, the norm of the weights and the norm of the update are sums over whole
    matrices: two all-reduces sum them over the ranks that hold pieces, in float64. Every rank with
    a piece of a matrix stores its row and column means. Source: Shazeer and Stern 2018,
    arXiv:1804.04235, algorithm 4.
    """

    roles: tuple[str, ...] = ()

    def __init__(self, config: OptimConfig) -> None:
        self.config: AdafactorConfig = config.adafactor

    def matrix_state_shapes(self, rows: int, columns: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the row and column means of squared gradients."""
        return {"row_mean": (rows,), "column_mean": (columns,)}

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
        makes the same two calls, also without a piece.
        """
        if scalars.scale is not None:
            for piece in pieces:
                piece.gradient.mul_(scalars.scale.to(piece.gradient.dtype))
        sums = SquareSums.zeros(shapes, device)
        for piece in pieces:
            if piece.counted:
                sums.add(piece)
        all_reduce(sums.buffer)

        states = {piece.index: piece.states for piece in pieces}
        weight = scalars.updates**self.config.beta2_decay
        for index, state in states.items():
            rows, columns = shapes[index]
            row_mean, column_mean = state["row_mean"], state["column_mean"]
            row_mean.lerp_((sums.rows[index] / columns).to(row_mean.dtype), weight)
            column_mean.lerp_((sums.columns[index] / rows).to(row_mean.dtype), weight)

        updates = [self._compute_update(piece) for piece in pieces]
        update_squares = torch.zeros(len(shapes), dtype=torch.float64, device=device)
        for piece, update in zip(pieces, updates, strict=True):
            if piece.counted:
                update_squares[piece.index] += _sum_of_squares(update)
        all_reduce(update_squares)

        steps = self._compute_steps(shapes, sums.weights, update_squares, scalars)
        for piece, update in zip(pieces, updates, strict=True):
            if scalars.weight_decay:
                piece.master.mul_(1 - scalars.lr * scalars.weight_decay)
            piece.master.sub_(update.mul_(steps[piece.index].to(update.dtype)))

    def _compute_update(self, piece: MatrixPiece) -> Tensor:
        """Return the gradient divided by the root of its factored second moment."""
        eps1 = self.config.eps1 or torch.finfo(piece.master.dtype).eps
        row_mean, column_mean = piece.states["row_mean"], piece.states["column_mean"]
        num_rows, num_columns = piece.gradient.shape
        rows = row_mean[piece.row_start : piece.row_start + num_rows]
        columns = column_mean[piece.column_start : piece.column_start + num_columns]
        square = torch.outer(rows, columns).div_(row_mean.mean().clamp(min=eps1))
        return square.clamp_(min=eps1 * eps1).rsqrt_().mul_(piece.gradient)

    def _compute_steps(
        self,
        shapes: Sequence[tuple[int, int]],
        weight_squares: Tensor,
        update_squares: Tensor,
        scalars: UpdateScalars,
    ) -> Tensor:
        """Return the factor of each matrix's update: the learning rate times the RMS of the
        weights, divided by the RMS of the update where that exceeds d."""
        numel = torch.tensor(
            [rows * columns for rows, columns in shapes],
            dtype=torch.float64,
            device=weight_squares.device,
        )
        lr = min(scalars.lr, 1 / math.sqrt(scalars.updates))
        weight_rms = (weight_squares / numel).sqrt_().clamp_(min=self.config.eps2)
        update_rms = (update_squares / numel).sqrt_()
        return lr * weight_rms / (update_rms / self.config.d).clamp_(min=1.0)


class SquareSums(NamedTuple):
    """Sums of squares of matrices, as views of one float64 buffer."""

    buffer: Tensor
    rows: list[Tensor]
    """Squared gradients of each row, for each matrix."""

    columns: list[Tensor]
    """Squared gradients of each column, for each matrix."""

    weights: Tensor
    """Squared master weights of each matrix."""

    @classmethod
    def zeros(cls, shapes: Sequence[tuple[int, int]], device: torch.device) -> "SquareSums":
        """Return sums of matrices of these (rows, columns), all zero."""
        sizes = [size for shape in shapes for size in shape]
        buffer = torch.zeros(sum(sizes) + len(shapes), dtype=torch.float64, device=device)
        *vectors, weights = buffer.split([*sizes, len(shapes)])
        return cls(buffer, vectors[0::2], vectors[1::2], weights)

    def add(self, piece: MatrixPiece) -> None:
        """Add the squares of a piece."""
        gradient, index = piece.gradient, piece.index
        num_rows, num_columns = gradient.shape
        row_norms = torch.linalg.vector_norm(gradient, dim=1).double()
        column_norms = torch.linalg.vector_norm(gradient, dim=0).double()
        self.rows[index].narrow(0, piece.row_start, num_rows).add_(row_norms.square_())
        self.columns[index].narrow(0, piece.column_start, num_columns).add_(column_norms.square_())
        self.weights[index] += _sum_of_squares(piece.master)


def _sum_of_squares(x: Tensor) -> Tensor:
    """Return the sum of squares of a matrix: fp32 along its rows, float64 over them."""
    row_norms: Tensor = torch.linalg.vector_norm(x, dim=1)
    return row_norms.double().square_().sum()

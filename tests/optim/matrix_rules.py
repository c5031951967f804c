"""One process that runs a per-matrix rule, for comparisons with other packages."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.observe.machine import FORMATS
from megalith.optim.rules import MatrixPiece, MatrixRule, SummedRule, UpdateScalars
from megalith.optim.slots import build_slot
from megalith.plan.shards import Shard


def draw(shapes: Sequence[tuple[int, ...]], seed: int, dtype: torch.dtype) -> list[Tensor]:
    """Return normally distributed tensors, drawn in fp32 in this order."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


class WholeMatrices:
    """Matrices of one process and their per-matrix rule."""

    def __init__(self, rule: MatrixRule, weights: Sequence[Tensor], *, batched: bool) -> None:
        """`batched`: compute the directions of matrices of one shape together."""
        self.rule, self.updates = rule, 0
        self.slots = [
            build_slot(
                Shard.full(f"w{i}", tuple(weight.shape), dtype=FORMATS[weight.dtype]),
                weight.clone(),
                rule.roles,
            )
            for i, weight in enumerate(weights)
        ]
        self.batches = [[i] for i in range(len(weights))]
        if batched:
            shapes = sorted({tuple(weight.shape) for weight in weights})
            self.batches = [
                [i for i, weight in enumerate(weights) if tuple(weight.shape) == shape]
                for shape in shapes
            ]
        self.states = [
            {
                role: torch.zeros(len(batch), *shape, dtype=weights[0].dtype)
                for role, shape in rule.matrix_state_shapes(*weights[batch[0]].shape).items()
            }
            for batch in self.batches
        ]

    @property
    def weights(self) -> list[Tensor]:
        """Current weights."""
        return [slot.weight for slot in self.slots]

    def step(
        self,
        gradients: Sequence[Tensor],
        *,
        lr: float,
        weight_decay: float = 0.0,
        scale: Tensor | None = None,
    ) -> None:
        """Update all matrices once."""
        self.updates += 1
        scalars = UpdateScalars(lr, weight_decay, self.updates, scale)
        inputs = self.rule.prepare(self.slots, [g.clone() for g in gradients], scalars)
        dtype = self.rule.message_dtype(self.slots[0].weight.dtype)
        for batch, states in zip(self.batches, self.states, strict=True):
            matrices = torch.stack([inputs[i].to(dtype) for i in batch])
            directions = self.rule.compute_direction(matrices, states, self.updates)
            rows, columns = matrices.shape[1:]
            self.rule.apply(
                [self.slots[i].master for i in batch],
                list(directions.unbind()),
                (rows, columns),
                scalars,
            )


class RectanglePieces:
    """Matrices of one process, cut into rectangles, and their summed rule."""

    def __init__(self, rule: SummedRule, weights: Sequence[Tensor], *, parts: int) -> None:
        """`parts`: number of parts of rows and of columns."""
        self.rule, self.updates, self.parts = rule, 0, parts
        self.weights = [weight.clone() for weight in weights]
        self.shapes = [(weight.shape[0], weight.shape[1]) for weight in weights]
        self.states = [
            {
                role: torch.zeros(shape, dtype=weights[0].dtype)
                for role, shape in rule.matrix_state_shapes(*shape).items()
            }
            for shape in self.shapes
        ]

    def step(
        self,
        gradients: Sequence[Tensor],
        *,
        lr: float,
        weight_decay: float = 0.0,
        scale: Tensor | None = None,
    ) -> None:
        """Update all matrices once."""
        self.updates += 1
        pieces = []
        for index, gradient in enumerate(gradients):
            weight, row = self.weights[index], 0
            rows = zip(weight.chunk(self.parts), gradient.clone().chunk(self.parts), strict=True)
            for row_weights, row_gradients in rows:
                column = 0
                blocks = zip(
                    row_weights.chunk(self.parts, 1),
                    row_gradients.chunk(self.parts, 1),
                    strict=True,
                )
                for master, block in blocks:
                    state = self.states[index]
                    pieces.append(MatrixPiece(index, row, column, master, block, True, state))
                    column += master.shape[1]
                row += row_weights.shape[0]
        scalars = UpdateScalars(lr, weight_decay, self.updates, scale)
        self.rule.update_pieces(pieces, scalars, self.shapes, leave, torch.device("cpu"))


def leave(sums: Tensor) -> None:
    """Sum over one rank."""


def step_torch(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], gradients: Sequence[Tensor]
) -> None:
    """Update parameters of another package's optimizer."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()

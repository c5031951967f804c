"""The six matmuls of a layer of experts, on rows that lie ready: what everything around them is
measured against."""

from collections.abc import Callable

import torch
from torch import Tensor

from megalith.kernels.grouped_linear import (
    GroupedMatmulOps,
    build_groups,
    select_grouped_matmul_ops,
)
from megalith.kernels.routing import gather_rows, permute_choices


class Matmuls:
    """Each of up [e o, h] and down [e h, f] forward, for the gradient of its input and for its own.

    x and dy [t, h], chosen [t, k]. `products`: one way to compute them; unset: the one that such a
    layer takes.
    """

    def __init__(
        self,
        x: Tensor,
        dy: Tensor,
        chosen: Tensor,
        up: Tensor,
        down: Tensor,
        *,
        experts: int,
        matmul_ops: GroupedMatmulOps | None = None,
    ) -> None:
        order = permute_choices(chosen, experts)
        self.groups, self.up, self.down = build_groups(order.counts), up, down
        with torch.no_grad():
            self.rows, self.dy = gather_rows(x, order), gather_rows(dy, order)
            self.matmul_ops = matmul_ops or select_grouped_matmul_ops(self.rows, up, self.groups)
            self.wide = self.matmul_ops.forward(self.rows, up, self.groups)
            self.narrow = self.matmul_ops.input_grad(self.dy, down, self.groups)

    @property
    def operations(self) -> int:
        """Of all six, a multiplication and an addition being two."""
        per_row = sum(matrix.numel() // self.groups.experts for matrix in (self.up, self.down))
        return 3 * 2 * len(self.rows) * per_row

    def step(self) -> None:
        """All of them."""
        self.forward()
        self.input_grads()
        self.weight_grads()

    def parts(self) -> dict[str, Callable[[], None]]:
        """The three thirds of them, by what a line calls them."""
        return {
            "matmuls, forward": self.forward,
            "matmuls, of inputs": self.input_grads,
            "matmuls, of weights": self.weight_grads,
        }

    @torch.no_grad()
    def forward(self) -> None:
        """Both products."""
        self.matmul_ops.forward(self.rows, self.up, self.groups)
        self.matmul_ops.forward(self.narrow, self.down, self.groups)

    @torch.no_grad()
    def input_grads(self) -> None:
        """What goes on to earlier layers."""
        self.matmul_ops.input_grad(self.dy, self.down, self.groups)
        self.matmul_ops.input_grad(self.wide, self.up, self.groups)

    @torch.no_grad()
    def weight_grads(self) -> None:
        """One of each matrix of each expert."""
        self.matmul_ops.weight_grad(self.dy, self.narrow, self.groups)
        self.matmul_ops.weight_grad(self.wide, self.rows, self.groups)

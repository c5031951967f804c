"""`embedding`: look up token embeddings in the rows of a vocabulary-parallel table that this rank
holds."""

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.kernels.linear import Context, GradAccumulator


def embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    first_row: int = 0,
    grad_accumulator: GradAccumulator | None = None,
) -> Tensor:
    """Look up the local rows; ids of other ranks' rows give zeros, so the sum over ranks is the
    full result.

    ids [t] int64, weight [rows, h] = rows first_row ... first_row + rows - 1 of the table -> [t,
    h].
    """
    y: Tensor = EmbeddingFunction.apply(ids, weight, first_row, grad_accumulator)  # type: ignore[no-untyped-call]  # torch's own
    return y


def reference_embedding(ids: Tensor, weight: Tensor, first_row: int) -> Tensor:
    """Reference implementation of `embedding` in plain PyTorch operations."""
    rows, is_local = _local_rows(ids, weight, first_row)
    return weight[rows] * is_local.unsqueeze(1)


def add_rows_(total: Tensor, rows: Tensor, dy: Tensor) -> Tensor:
    """`total[rows[i]] += dy[i]` for every i, in place and in order: total [rows, h] of any dtype,
    dy [t, h]."""
    return total.index_add_(0, rows, dy.to(total.dtype))


def _local_rows(ids: Tensor, weight: Tensor, first_row: int) -> tuple[Tensor, Tensor]:
    """Return the row of each id in `weight` (0 if it is not local), and whether it is local."""
    local = ids - first_row
    is_local = (local >= 0) & (local < weight.shape[0])
    return local * is_local, is_local


class EmbeddingFunction(Function):
    """Autograd function of `embedding`."""

    reference = staticmethod(
        lambda ids, weight, first_row, grad_accumulator: reference_embedding(ids, weight, first_row)
    )

    @staticmethod
    def forward(
        ctx: Context,
        ids: Tensor,
        weight: Tensor,
        first_row: int,
        grad_accumulator: GradAccumulator | None,
    ) -> Tensor:
        """ids [t] -> [t, h]."""
        rows, is_local = _local_rows(ids, weight, first_row)
        ctx.save_for_backward(rows, is_local)
        ctx.shape, ctx.grad_accumulator = weight.shape, grad_accumulator
        return weight.index_select(0, rows).mul_(is_local.unsqueeze(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy [t, h] -> the table's gradient, or its rows to the gradient accumulator."""
        rows, is_local = ctx.saved_tensors
        # ids of other ranks add zeros to row 0, so that shapes do not depend on the data
        dy = dy * is_local.unsqueeze(1)
        if ctx.grad_accumulator is not None:
            ctx.grad_accumulator.rows(rows, dy)
            return None, None, None, None
        # In bf16 a frequent token's sum would lose its later terms: add in fp32, round once.
        total = dy.new_zeros(ctx.shape, dtype=torch.promote_types(dy.dtype, torch.float32))
        return None, add_rows_(total, rows, dy).to(dy.dtype), None, None

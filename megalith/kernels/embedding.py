"""`embedding`: token numbers to vectors, from the rows of the table that this rank owns."""

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
    """Look up my rows; the other ranks' rows come out as zeros, so that the sum over ranks is the
    whole answer.

    ids [t] int64, weight [rows, h] = rows first_row ... first_row + rows - 1 of the table -> [t,
    h].
    """
    y: Tensor = EmbeddingFunction.apply(ids, weight, first_row, grad_accumulator)  # type: ignore[no-untyped-call]  # torch's own
    return y


def reference_embedding(ids: Tensor, weight: Tensor, first_row: int) -> Tensor:
    """What `embedding` computes, in plain operations."""
    rows, mine = _local_rows(ids, weight, first_row)
    return weight[rows] * mine.unsqueeze(1)


def add_rows_(total: Tensor, rows: Tensor, dy: Tensor) -> Tensor:
    """`total[rows[i]] += dy[i]` for every i, in place and in order: total [rows, h] of any dtype,
    dy [t, h]."""
    return total.index_add_(0, rows, dy.to(total.dtype))


def _local_rows(ids: Tensor, weight: Tensor, first_row: int) -> tuple[Tensor, Tensor]:
    """Row numbers within `weight` (0 where the id is not mine), and which ids are mine."""
    local = ids - first_row
    mine = (local >= 0) & (local < weight.shape[0])
    return local * mine, mine


class EmbeddingFunction(Function):
    """`embedding` as autograd sees it."""

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
        rows, mine = _local_rows(ids, weight, first_row)
        ctx.save_for_backward(rows, mine)
        ctx.shape, ctx.grad_accumulator = weight.shape, grad_accumulator
        return weight.index_select(0, rows).mul_(mine.unsqueeze(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy [t, h] -> the table's gradient, or its rows to the sink."""
        rows, mine = ctx.saved_tensors
        dy = dy * mine.unsqueeze(
            1
        )  # an id of another rank adds zeros to row 0, so that no shape depends on the data
        if ctx.grad_accumulator is not None:
            ctx.grad_accumulator.rows(rows, dy)
            return None, None, None, None
        # In bf16 a frequent token's later rows would be swallowed by its sum: add in fp32, round
        # once.
        total = dy.new_zeros(ctx.shape, dtype=torch.promote_types(dy.dtype, torch.float32))
        return None, add_rows_(total, rows, dy).to(dy.dtype), None, None

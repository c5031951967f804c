"""Linear layers at the border of divided work, with their communication behind their own matmuls.

What the plain composition of an entry or an exit and a `linear` computes, to the bit, except for
rings, which add up in another order.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.kernels.linear import (
    PLAIN,
    Context,
    GradAccumulator,
    MatmulOps,
    SavedInputPlan,
    plan_saved_input,
    reference_linear,
    save,
    saved_input,
    stacked,
    weight_gradients,
)
from megalith.kernels.rebuilt import LayerInput, output_tensor
from megalith.parallel.autograd import mark_partial
from megalith.parallel.group import Group
from megalith.parallel.rings import Product, Started


class OverlappedTPComm(Protocol):
    """How a region's ways in and out go on while something is multiplied."""

    @property
    def group(self) -> Group:
        """The ranks that divide the work."""

    def prepare_input(self, x: LayerInput) -> LayerInput:
        """The plain way in."""

    def reduce_output(self, x: Tensor) -> Tensor:
        """The plain way out."""

    def all_gather_matmul(self, x: Tensor, w: Tensor, product: Product) -> tuple[Tensor, Tensor]:
        """All tokens [t, i] out of mine, and their product [t, o] with `w`."""

    def matmul_reduce_scatter(self, x: Tensor, w: Tensor, product: Product) -> Started:
        """InitialValues the sum over ranks of `product(x, w)`, for my tokens; x has all tokens."""

    def start_regather(self, x: Tensor) -> Started:
        """InitialValues getting all tokens out of mine once more, in backward."""


def all_gather_linear(
    x: LayerInput,
    parameters: Sequence[Tensor],
    overlapped: OverlappedTPComm,
    *,
    grad_accumulator: GradAccumulator | None,
) -> Tensor:
    """`linear(border.enter(x), parameters)`.

    Backward gets the tokens again while it multiplies for dx, and sends dx while it multiplies for
    the weights.
    """
    kept = plan_saved_input(x, parameters)
    y: Tensor = AllGatherLinearFunction.apply(
        output_tensor(x), kept, overlapped, grad_accumulator, PLAIN, *parameters
    )  # type: ignore[no-untyped-call]  # torch's own
    return y


def linear_reduce_scatter(
    x: LayerInput,
    parameters: Sequence[Tensor],
    overlapped: OverlappedTPComm,
    *,
    grad_accumulator: GradAccumulator | None,
) -> Tensor:
    """`border.leave(partial(linear(x, parameters)))`, step by step where the border has a ring."""
    kept = plan_saved_input(x, parameters)
    y: Tensor = LinearReduceScatterFunction.apply(
        output_tensor(x), kept, overlapped, grad_accumulator, PLAIN, *parameters
    )  # type: ignore[no-untyped-call]  # torch's own
    return y


class AllGatherLinearFunction(Function):
    """`all_gather_linear` as autograd sees it."""

    reference = staticmethod(
        lambda x, kept, overlapped, grad_accumulator, matmul_ops, *parameters: reference_linear(
            output_tensor(overlapped.prepare_input(x)), parameters
        )
    )

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        kept: SavedInputPlan,
        overlapped: OverlappedTPComm,
        grad_accumulator: GradAccumulator | None,
        matmul_ops: MatmulOps,
        *parameters: Tensor,
    ) -> Tensor:
        """x [t, i], in the layout of `tp_comm` -> y [t, o]."""
        save(ctx, kept, x, parameters)
        ctx.overlapped, ctx.grad_accumulator, ctx.matmul_ops = (
            overlapped,
            grad_accumulator,
            matmul_ops,
        )
        return overlapped.all_gather_matmul(x, stacked(parameters), matmul_ops.forward)[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy [t, o] -> dx in the layout of `tp_comm`, and dw to the sink or to the parameters."""
        wanted = ctx.needs_input_grad[5:]
        saved = ctx.saved_tensors  # asked once: a recomputed region gives them out once
        parameters, inputs = saved[: len(wanted)], saved[len(wanted) :]
        mine = saved_input(ctx, wanted, inputs)
        tokens: Started | None = None if mine is None else ctx.overlapped.start_regather(mine)
        dx: Started | None = None
        if ctx.needs_input_grad[0]:
            dx = ctx.overlapped.matmul_reduce_scatter(
                dy, stacked(parameters), ctx.matmul_ops.input_grad
            )
        grads = weight_gradients(
            ctx, parameters, wanted, None if tokens is None else tokens.wait(), dy
        )
        return None if dx is None else dx.wait(), None, None, None, None, *grads


class LinearReduceScatterFunction(Function):
    """`linear_reduce_scatter` as autograd sees it."""

    reference = staticmethod(
        lambda x, kept, overlapped, grad_accumulator, matmul_ops, *parameters: (
            overlapped.reduce_output(
                mark_partial(reference_linear(x, parameters), overlapped.group)
            )
        )
    )

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        kept: SavedInputPlan,
        overlapped: OverlappedTPComm,
        grad_accumulator: GradAccumulator | None,
        matmul_ops: MatmulOps,
        *parameters: Tensor,
    ) -> Tensor:
        """x [t, i_tp] -> y [t, o], in the layout of `tp_comm`."""
        save(ctx, kept, x, parameters)
        ctx.overlapped, ctx.grad_accumulator, ctx.matmul_ops = (
            overlapped,
            grad_accumulator,
            matmul_ops,
        )
        return overlapped.matmul_reduce_scatter(x, stacked(parameters), matmul_ops.forward).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy, in the layout of `tp_comm` -> dx [t, i_tp], and dw to the sink or to the
        parameters."""
        wanted, saved = ctx.needs_input_grad[5:], ctx.saved_tensors
        parameters, inputs = saved[: len(wanted)], saved[len(wanted) :]
        whole, dx = ctx.overlapped.all_gather_matmul(
            dy, stacked(parameters), ctx.matmul_ops.input_grad
        )
        x = saved_input(ctx, wanted, inputs)
        return dx, None, None, None, None, *weight_gradients(ctx, parameters, wanted, x, whole)

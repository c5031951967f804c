"""Linear layers of tensor-parallel work whose communication is overlapped with their own matmuls.

Results are bitwise equal to `TPComm.prepare_input` or `reduce_output` composed with `linear`,
except for collective matmuls, which add in another order.
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
from megalith.kernels.recomputed import LayerInput, output_tensor
from megalith.parallel.autograd import mark_partial
from megalith.parallel.group import Group
from megalith.parallel.tensor_overlap import PendingCollective, Product


class OverlappedTPComm(Protocol):
    """Communication of tensor-parallel work that is overlapped with matmuls."""

    @property
    def group(self) -> Group:
        """The tensor-parallel ranks."""

    def prepare_input(self, x: LayerInput) -> LayerInput:
        """Input communication without overlap."""

    def reduce_output(self, x: Tensor) -> Tensor:
        """Output communication without overlap."""

    def all_gather_matmul(self, x: Tensor, w: Tensor, product: Product) -> tuple[Tensor, Tensor]:
        """Return all tokens [t, i], gathered from x, and their product [t, o] with `w`."""

    def matmul_reduce_scatter(self, x: Tensor, w: Tensor, product: Product) -> PendingCollective:
        """Start the sum over ranks of `product(x, w)`, for this rank's tokens; x has all tokens."""

    def start_regather(self, x: Tensor) -> PendingCollective:
        """Start gathering all tokens once more, in backward."""


def all_gather_linear(
    x: LayerInput,
    parameters: Sequence[Tensor],
    overlapped: OverlappedTPComm,
    *,
    grad_accumulator: GradAccumulator | None,
) -> Tensor:
    """Compute `linear(tp_comm.prepare_input(x), parameters)` with overlapped communication.

    Backward gathers the tokens again during the matmul for dx, and reduces dx during the matmul for
    the weight gradients.
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
    """Compute `tp_comm.reduce_output(mark_partial(linear(x, parameters)))`, as a collective matmul
    if enabled."""
    kept = plan_saved_input(x, parameters)
    y: Tensor = LinearReduceScatterFunction.apply(
        output_tensor(x), kept, overlapped, grad_accumulator, PLAIN, *parameters
    )  # type: ignore[no-untyped-call]  # torch's own
    return y


class AllGatherLinearFunction(Function):
    """Autograd function of `all_gather_linear`."""

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
        """dy [t, o] -> dx in the layout of `tp_comm`, and dw to the gradient accumulator or the
        parameters."""
        needs_dw = ctx.needs_input_grad[5:]
        saved = ctx.saved_tensors  # read once: a recomputed region returns them only once
        parameters, inputs = saved[: len(needs_dw)], saved[len(needs_dw) :]
        local_x = saved_input(ctx, needs_dw, inputs)
        tokens: PendingCollective | None = (
            None if local_x is None else ctx.overlapped.start_regather(local_x)
        )
        dx: PendingCollective | None = None
        if ctx.needs_input_grad[0]:
            dx = ctx.overlapped.matmul_reduce_scatter(
                dy, stacked(parameters), ctx.matmul_ops.input_grad
            )
        grads = weight_gradients(
            ctx, parameters, needs_dw, None if tokens is None else tokens.wait(), dy
        )
        return None if dx is None else dx.wait(), None, None, None, None, *grads


class LinearReduceScatterFunction(Function):
    """Autograd function of `linear_reduce_scatter`."""

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
        """dy, in the layout of `tp_comm` -> dx [t, i_tp], and dw to the gradient accumulator or the
        parameters."""
        needs_dw, saved = ctx.needs_input_grad[5:], ctx.saved_tensors
        parameters, inputs = saved[: len(needs_dw)], saved[len(needs_dw) :]
        gathered_dy, dx = ctx.overlapped.all_gather_matmul(
            dy, stacked(parameters), ctx.matmul_ops.input_grad
        )
        x = saved_input(ctx, needs_dw, inputs)
        return (
            dx,
            None,
            None,
            None,
            None,
            *weight_gradients(ctx, parameters, needs_dw, x, gathered_dy),
        )

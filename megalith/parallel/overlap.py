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
    Kept,
    Products,
    Sink,
    kept_of,
    reference_linear,
    save,
    saved_input,
    stacked,
    weight_gradients,
)
from megalith.kernels.rebuilt import Input, value_of
from megalith.parallel.autograd import partial
from megalith.parallel.group import Group
from megalith.parallel.rings import Product, Started


class Border(Protocol):
    """How a region's ways in and out go on while something is multiplied."""

    @property
    def group(self) -> Group:
        """The ranks that divide the work."""

    def enter(self, x: Input) -> Input:
        """The plain way in."""

    def leave(self, x: Tensor) -> Tensor:
        """The plain way out."""

    def entered_product(self, x: Tensor, w: Tensor, product: Product) -> tuple[Tensor, Tensor]:
        """All tokens [t, i] out of mine, and their product [t, o] with `w`."""

    def left_product(self, x: Tensor, w: Tensor, product: Product) -> Started:
        """Start the sum over ranks of `product(x, w)`, for my tokens; x has all tokens."""

    def start_again(self, x: Tensor) -> Started:
        """Start getting all tokens out of mine once more, in backward."""


def entered_linear(
    x: Input, parameters: Sequence[Tensor], border: Border, *, sink: Sink | None
) -> Tensor:
    """`linear(border.enter(x), parameters)`.

    Backward gets the tokens again while it multiplies for dx, and sends dx while it multiplies for
    the weights.
    """
    kept = kept_of(x, parameters)
    y: Tensor = EnteredLinear.apply(value_of(x), kept, border, sink, PLAIN, *parameters)  # type: ignore[no-untyped-call]  # torch's own
    return y


def left_linear(
    x: Input, parameters: Sequence[Tensor], border: Border, *, sink: Sink | None
) -> Tensor:
    """`border.leave(partial(linear(x, parameters)))`, step by step where the border has a ring."""
    kept = kept_of(x, parameters)
    y: Tensor = LeftLinear.apply(value_of(x), kept, border, sink, PLAIN, *parameters)  # type: ignore[no-untyped-call]  # torch's own
    return y


class EnteredLinear(Function):
    """`entered_linear` as autograd sees it."""

    reference = staticmethod(
        lambda x, kept, border, sink, products, *parameters: reference_linear(
            value_of(border.enter(x)), parameters
        )
    )

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        kept: Kept,
        border: Border,
        sink: Sink | None,
        products: Products,
        *parameters: Tensor,
    ) -> Tensor:
        """x [t, i], as the region has it -> y [t, o]."""
        save(ctx, kept, x, parameters)
        ctx.border, ctx.sink, ctx.products = border, sink, products
        return border.entered_product(x, stacked(parameters), products.forward)[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy [t, o] -> dx as the region has tokens, and dw to the sink or to the parameters."""
        wanted = ctx.needs_input_grad[5:]
        saved = ctx.saved_tensors  # asked once: a recomputed region gives them out once
        parameters, inputs = saved[: len(wanted)], saved[len(wanted) :]
        mine = saved_input(ctx, wanted, inputs)
        tokens: Started | None = None if mine is None else ctx.border.start_again(mine)
        dx: Started | None = None
        if ctx.needs_input_grad[0]:
            dx = ctx.border.left_product(dy, stacked(parameters), ctx.products.input_grad)
        grads = weight_gradients(
            ctx, parameters, wanted, None if tokens is None else tokens.wait(), dy
        )
        return None if dx is None else dx.wait(), None, None, None, None, *grads


class LeftLinear(Function):
    """`left_linear` as autograd sees it."""

    reference = staticmethod(
        lambda x, kept, border, sink, products, *parameters: border.leave(
            partial(reference_linear(x, parameters), border.group)
        )
    )

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        kept: Kept,
        border: Border,
        sink: Sink | None,
        products: Products,
        *parameters: Tensor,
    ) -> Tensor:
        """x [t, i_tp] -> y [t, o], as the region has tokens."""
        save(ctx, kept, x, parameters)
        ctx.border, ctx.sink, ctx.products = border, sink, products
        return border.left_product(x, stacked(parameters), products.forward).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy, as the region has tokens -> dx [t, i_tp], and dw to the sink or to the parameters."""
        wanted, saved = ctx.needs_input_grad[5:], ctx.saved_tensors
        parameters, inputs = saved[: len(wanted)], saved[len(wanted) :]
        whole, dx = ctx.border.entered_product(dy, stacked(parameters), ctx.products.input_grad)
        x = saved_input(ctx, wanted, inputs)
        return dx, None, None, None, None, *weight_gradients(ctx, parameters, wanted, x, whole)

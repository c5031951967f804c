"""Linear layers at the border of divided work, with their communication behind their own matmuls.

What the plain composition of an entry or an exit and a `linear` computes, to the bit, except for rings, which add up in
another order.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.kernels.linear import PLAIN, Context, Kept, Products, Sink, reference_linear, stacked
from megalith.kernels.rebuilt import Input, Rebuilt, rebuild, value_of
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


def entered_linear(x: Input, parameters: Sequence[Tensor], border: Border, *, sink: Sink | None) -> Tensor:
    """`linear(border.enter(x), parameters)`.

    Backward gets the tokens again while it multiplies for dx, and sends dx while it multiplies for the weights.
    """
    wanted = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters)
    kept = Kept(wanted, x.again, x.inputs) if isinstance(x, Rebuilt) else Kept(wanted)
    y: Tensor = EnteredLinear.apply(value_of(x), kept, border, sink, PLAIN, *parameters)  # type: ignore[no-untyped-call]  # torch's own
    return y


def left_linear(x: Input, parameters: Sequence[Tensor], border: Border, *, sink: Sink | None) -> Tensor:
    """`border.leave(partial(linear(x, parameters)))`, step by step where the border has a ring."""
    wanted = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters)
    kept = Kept(wanted, x.again, x.inputs) if isinstance(x, Rebuilt) else Kept(wanted)
    y: Tensor = LeftLinear.apply(value_of(x), kept, border, sink, PLAIN, *parameters)  # type: ignore[no-untyped-call]  # torch's own
    return y


class EnteredLinear(Function):
    """`entered_linear` as autograd sees it."""

    reference = staticmethod(
        lambda x, kept, border, sink, products, *parameters: reference_linear(value_of(border.enter(x)), parameters)
    )

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, kept: Kept, border: Border, sink: Sink | None, products: Products, *parameters: Tensor
    ) -> Tensor:
        """x [t, i], as the region has it -> y [t, o]."""
        inputs = kept.inputs if kept.again is not None else (x,)
        ctx.save_for_backward(*parameters, *(inputs if kept.wanted else ()))
        ctx.again, ctx.like = kept.again, (x.shape, x.dtype)
        ctx.border, ctx.sink, ctx.products = border, sink, products
        return border.entered_product(x, stacked(parameters), products.forward)[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy [t, o] -> dx as the region has tokens, and dw to the sink or to the parameters."""
        wanted = ctx.needs_input_grad[5:]
        saved = ctx.saved_tensors  # asked once: a recomputed region gives them out once
        parameters, inputs = saved[: len(wanted)], saved[len(wanted) :]
        tokens: Started | None = None
        if any(wanted):
            mine = inputs[0] if ctx.again is None else rebuild(ctx.again, inputs, like=ctx.like)
            tokens = ctx.border.start_again(mine)
        dx: Started | None = None
        if ctx.needs_input_grad[0]:
            dx = ctx.border.left_product(dy, stacked(parameters), ctx.products.input_grad)
        grads = _weight_gradients(ctx, parameters, wanted, None if tokens is None else tokens.wait(), dy)
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
        ctx: Context, x: Tensor, kept: Kept, border: Border, sink: Sink | None, products: Products, *parameters: Tensor
    ) -> Tensor:
        """x [t, i_tp] -> y [t, o], as the region has tokens."""
        inputs = kept.inputs if kept.again is not None else (x,)
        ctx.save_for_backward(*parameters, *(inputs if kept.wanted else ()))
        ctx.again, ctx.like = kept.again, (x.shape, x.dtype)
        ctx.border, ctx.sink, ctx.products = border, sink, products
        return border.left_product(x, stacked(parameters), products.forward).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy, as the region has tokens -> dx [t, i_tp], and dw to the sink or to the parameters."""
        wanted, saved = ctx.needs_input_grad[5:], ctx.saved_tensors
        parameters, inputs = saved[: len(wanted)], saved[len(wanted) :]
        whole, dx = ctx.border.entered_product(dy, stacked(parameters), ctx.products.input_grad)
        x: Tensor | None = None
        if any(wanted):
            x = inputs[0] if ctx.again is None else rebuild(ctx.again, inputs, like=ctx.like)
        return dx, None, None, None, None, *_weight_gradients(ctx, parameters, wanted, x, whole)


def _weight_gradients(
    ctx: Context, parameters: Sequence[Tensor], wanted: Sequence[bool], x: Tensor | None, dy: Tensor
) -> list[Tensor | None]:
    """Hand x [t, i] and dy [t, o] to the sink, or give each parameter its rows of their product."""
    grads: list[Tensor | None] = [None] * len(parameters)
    if x is None or not any(wanted):
        return grads
    if ctx.sink is not None:
        ctx.sink.product(x, dy)
        return grads
    parts = ctx.products.weight_grad(dy, x).split([p.shape[0] for p in parameters])
    return [part if want else None for part, want in zip(parts, wanted, strict=True)]

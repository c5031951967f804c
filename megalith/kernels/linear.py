"""`linear`: every weight matmul, as three plain functions and the one autograd function that calls
them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.kernels.matmul import is_upcast, mm
from megalith.kernels.rebuilt import LayerInput, RecomputedOutput, output_tensor, recompute_output

Context = Any  # what autograd passes as `ctx`: it takes any attribute


HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
WORTH_ONEDNN = 1 << 23
"""Multiplications of a matmul; below, what oneDNN does around it costs more than it saves."""


def forward(x: Tensor, w: Tensor) -> Tensor:
    """`y = x @ w.T`: x [t, i], w [o, i] -> y [t, o]."""
    return _product(x, w)


def input_grad(dy: Tensor, w: Tensor) -> Tensor:
    """What x gets: dy [t, o], w [o, i] -> dx [t, i]."""
    return _product(dy, w.t())


def weight_grad(dy: Tensor, x: Tensor) -> Tensor:
    """What w gets: dy [t, o], x [t, i] -> dw [o, i]."""
    return mm(dy.t(), x)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b.T`: a [t, k], b [m, k], any strides -> [t, m].

    For fp32, torch gives matmuls on x86 to MKL. oneDNN, which every such torch has too, takes 0.88
    of MKL's time (AMD Zen 4 with AVX-512, torch 2.13, 2048 tokens, weights of 256 x 512 to 3072 x
    512). For weight gradients, whose operands are both transposed, it gains nothing, so these stay
    with `torch.mm`. bf16 goes to oneDNN anyway, or is upcast where that has no kernels for it; but
    for one row, which torch multiplies as fast as it reads `b`.
    """
    if is_upcast(a) and not (a.shape[0] == 1 and b.is_contiguous()):
        return _product(a.float(), b.float()).to(a.dtype)
    worth = (
        a.dtype == torch.float32
        and a.device.type == "cpu"
        and a.shape[0] * b.numel() >= WORTH_ONEDNN
    )
    if worth and HAS_ONEDNN and not torch.compiler.is_compiling():
        product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
        return product
    return torch.mm(a, b.t())


class MatmulOps(NamedTuple):
    """The three matmuls of a linear layer; precision recipes and communication rings replace them,
    never the layer."""

    forward: Callable[[Tensor, Tensor], Tensor] = forward
    input_grad: Callable[[Tensor, Tensor], Tensor] = input_grad
    weight_grad: Callable[[Tensor, Tensor], Tensor] = weight_grad


PLAIN = MatmulOps()


class GradAccumulator(Protocol):
    """Where the gradient of one weight matrix goes instead of autograd's `.grad`, now or later.

    A sink may keep what it is given and add it up afterwards, so nobody may write to those tensors
    again.
    """

    def product(self, x: Tensor, dy: Tensor) -> None:
        """Add `dy.T @ x`: x [t, i], dy [t, o] for a weight [o, i]."""

    def gradient(self, dw: Tensor) -> None:
        """Add a gradient that is ready: dw [o, i]."""

    def rows(self, rows: Tensor, dy: Tensor) -> None:
        """Add row i of dy [t, i] to row `rows[i]` of the gradient: rows [t] int64, repeats
        allowed."""


def add_product_(total: Tensor, x: Tensor, dy: Tensor) -> Tensor:
    """`total += dy.T @ x` in place: total [o, i], of any dtype; what most sinks do with a product.

    When the dtypes agree the matmul adds into `total` itself, which saves a pass over a matrix as
    large as the weight.
    """
    if total.dtype == dy.dtype == x.dtype:
        return (
            total.add_(torch.mm(dy.float().t(), x.float()))
            if is_upcast(dy)
            else total.addmm_(dy.t(), x)
        )
    return total.add_(weight_grad(dy, x))


def stacked(parameters: Sequence[Tensor]) -> Tensor:
    """One matrix made of the rows of all `parameters`: a view where they lie one below the other,
    else a copy."""
    if len(parameters) == 1:
        return parameters[0]
    first = parameters[0]
    if not _lie_below_one_another(parameters):
        return torch.cat(list(parameters))
    rows = sum(p.shape[0] for p in parameters)
    return first.as_strided((rows, first.shape[1]), first.stride(), first.storage_offset())


def _lie_below_one_another(parameters: Sequence[Tensor]) -> bool:
    """Whether each contiguous matrix starts where the one before it ends, in one storage."""
    if torch.compiler.is_compiling():  # a graph sees tensors, not the storage behind them
        return False
    first = parameters[0]
    storage, offset = first.untyped_storage()._cdata, first.storage_offset()
    for p in parameters:
        if (
            not p.is_contiguous()
            or p.untyped_storage()._cdata != storage
            or p.storage_offset() != offset
        ):
            return False
        offset += p.numel()
    return True


def linear(
    x: LayerInput,
    parameters: Sequence[Tensor],
    *,
    grad_accumulator: GradAccumulator | None = None,
    matmul_ops: MatmulOps = PLAIN,
) -> Tensor:
    """`x @ W.T`, where W is the rows of `parameters` stacked (queries above keys and values, say).

    x [t, i], parameters [o_1, i], [o_2, i] ... -> [t, o_1 + o_2 ...]. Backward computes dx first.
    With a sink it then hands over (x, dy) once for the whole stack, if any parameter wants a
    gradient, and autograd sees none; without one, each parameter gets its rows of dw. If x is
    `RecomputedOutput`, its inputs are kept instead of it; if no parameter wants a gradient,
    neither.
    """
    kept = plan_saved_input(x, parameters)
    y: Tensor = LinearFunction.apply(
        output_tensor(x), kept, grad_accumulator, matmul_ops, *parameters
    )  # type: ignore[no-untyped-call]  # torch's own
    return y


class SavedInputPlan(NamedTuple):
    """What backward gets x from."""

    wanted: bool
    """Whether it needs x at all."""

    again: Callable[..., Tensor] | None = None
    """Gives x when called with `inputs`; None: x itself is kept."""

    inputs: tuple[Tensor, ...] = ()


def plan_saved_input(x: LayerInput, parameters: Sequence[Tensor]) -> SavedInputPlan:
    """What the backward of a linear layer gets its input from."""
    wanted = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters)
    return (
        SavedInputPlan(wanted, x.again, x.inputs)
        if isinstance(x, RecomputedOutput)
        else SavedInputPlan(wanted)
    )


def save(ctx: Context, kept: SavedInputPlan, x: Tensor, parameters: Sequence[Tensor]) -> None:
    """In a forward: keep the parameters, and x [t, i] or what it is rebuilt from, for
    `saved_input`."""
    inputs = kept.inputs if kept.again is not None else (x,)
    ctx.save_for_backward(*parameters, *(inputs if kept.wanted else ()))
    ctx.again, ctx.like = kept.again, (x.shape, x.dtype)


def saved_input(ctx: Context, wanted: Sequence[bool], inputs: tuple[Tensor, ...]) -> Tensor | None:
    """In a backward: x, out of the saved tensors behind the parameters; None: no parameter wants a
    gradient."""
    if not any(wanted):
        return None
    return inputs[0] if ctx.again is None else recompute_output(ctx.again, inputs, like=ctx.like)


def weight_gradients(
    ctx: Context, parameters: Sequence[Tensor], wanted: Sequence[bool], x: Tensor | None, dy: Tensor
) -> list[Tensor | None]:
    """Hand x [t, i] and dy [t, o] to the sink, or give each parameter its rows of their product;
    without x, nothing."""
    if x is None:
        return [None] * len(parameters)
    if ctx.grad_accumulator is not None:
        ctx.grad_accumulator.product(x, dy)
        return [None] * len(parameters)
    parts = ctx.matmul_ops.weight_grad(dy, x).split([p.shape[0] for p in parameters])
    return [part if want else None for part, want in zip(parts, wanted, strict=True)]


def reference_linear(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """What `linear` computes, in plain operations."""
    return torch.cat([x @ p.t() for p in parameters], dim=-1)


class LinearFunction(Function):
    """`linear` as autograd sees it."""

    reference = staticmethod(
        lambda x, kept, grad_accumulator, matmul_ops, *parameters: reference_linear(x, parameters)
    )

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        kept: SavedInputPlan,
        grad_accumulator: GradAccumulator | None,
        matmul_ops: MatmulOps,
        *parameters: Tensor,
    ) -> Tensor:
        """x [t, i] -> y [t, o]."""
        save(ctx, kept, x, parameters)
        ctx.grad_accumulator, ctx.matmul_ops = grad_accumulator, matmul_ops
        return matmul_ops.forward(x, stacked(parameters))

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy [t, o] -> dx [t, i], and dw to the sink or to the parameters."""
        wanted = ctx.needs_input_grad[4:]
        saved = ctx.saved_tensors
        parameters, inputs = saved[: len(wanted)], saved[len(wanted) :]
        dx = ctx.matmul_ops.input_grad(dy, stacked(parameters)) if ctx.needs_input_grad[0] else None
        x = saved_input(ctx, wanted, inputs)
        return dx, None, None, None, *weight_gradients(ctx, parameters, wanted, x, dy)

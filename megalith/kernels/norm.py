"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), alone or together with the residual addition before it."""

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.kernels import cpu
from megalith.kernels.cpu import Kernel
from megalith.kernels.linear import Context


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, kernel: Kernel = "auto") -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight`, row by row: x [t, h], weight [h] -> [t, h].

    Statistics are taken in fp32 (float64 for float64), and the normed row is rounded to x's dtype before it meets the
    weight, as the published Llama weights expect. Backward keeps x and one number per row.
    """
    if kernel == "reference" or torch.compiler.is_compiling():
        return reference_rms_norm(x, weight, eps)
    y: Tensor = RMSNormFunction.apply(x, weight, eps, kernel == "auto" and cpu.takes(x, weight))  # type: ignore[no-untyped-call]  # torch's own
    return y


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, kernel: Kernel = "auto"
) -> tuple[Tensor, Tensor]:
    """The residual stream and its norm: (residual + x, rms_norm(residual + x)), all [t, h].

    One function instead of two, because its backward adds the two gradients of the sum while it computes one of them.
    """
    if kernel == "reference" or torch.compiler.is_compiling():
        return reference_add_rms_norm(x, residual, weight, eps)
    loops = kernel == "auto" and cpu.takes(x, residual, weight)
    total, normed = AddRMSNormFunction.apply(x, residual, weight, eps, loops)  # type: ignore[no-untyped-call]  # torch's own
    return total, normed


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What `rms_norm` computes, in plain operations."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed.to(x.dtype) * weight).to(x.dtype)


def reference_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """What `add_rms_norm` computes, in plain operations."""
    total = residual + x
    return total, reference_rms_norm(total, weight, eps)


class RMSNormFunction(Function):
    """`rms_norm` as autograd sees it."""

    reference = staticmethod(lambda x, weight, eps, loops: reference_rms_norm(x, weight, eps))

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, eps: float, loops: bool) -> Tensor:
        """x [t, h] -> [t, h]."""
        y, scale = (_loop_forward if loops else _forward)(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.loops = loops
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy [t, h] -> dx, dweight."""
        x, weight, scale = ctx.saved_tensors
        return *(_loop_backward if ctx.loops else _backward)(dy, x, weight, scale, None), None, None


class AddRMSNormFunction(Function):
    """`add_rms_norm` as autograd sees it."""

    reference = staticmethod(lambda x, residual, weight, eps, loops: reference_add_rms_norm(x, residual, weight, eps))

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, residual: Tensor, weight: Tensor, eps: float, loops: bool
    ) -> tuple[Tensor, Tensor]:
        """x, residual [t, h] -> (sum, normed)."""
        total = residual + x
        y, scale = (_loop_forward if loops else _forward)(total, weight, eps)
        ctx.save_for_backward(total, weight, scale)
        ctx.loops = loops
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dtotal: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the sum and of its norm -> one gradient for x and residual, and dweight."""
        total, weight, scale = ctx.saved_tensors
        dx, dweight = (_loop_backward if ctx.loops else _backward)(dy, total, weight, scale, dtotal)
        return dx, dx, dweight, None, None


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normed rows, and 1 / root mean square of each row [t, 1], in the statistics' dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    normed = torch.mul(x, scale)  # wide, because `scale` is
    return normed.to(x.dtype).mul_(weight), scale


def _backward(dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor, dtotal: Tensor | None) -> tuple[Tensor, Tensor]:
    """dx [t, h], with dtotal added if there is one, and dweight [h].

    With p = dy * x, both reductions are matrix-vector products: dweight = scale . p and, for each row, the part of dy
    that only stretches x, p . weight. Then dx = scale * (dy * weight - x * scale^2 * (p . weight) / h).
    """
    wide = scale.dtype
    product = torch.mul(dy.to(wide), x)
    dweight = torch.mv(product.t(), scale.squeeze(-1)).to(weight.dtype)
    along = torch.mv(product, weight.to(wide)).unsqueeze(-1)
    dx = torch.mul(dy, weight, out=product).mul_(scale)
    dx.addcmul_(x.to(wide), along.mul_(scale.pow(3)).div_(-x.shape[-1]))
    return (dx if dtotal is None else dx.add_(dtotal)).to(x.dtype), dweight


def _loop_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`_forward` in one pass."""
    x = x.contiguous()
    y, scale = torch.empty_like(x), x.new_empty(x.shape[0], 1, dtype=torch.float32)
    cpu.run("rms_norm", x.dtype, *x.shape, eps, x, weight.contiguous(), y, scale, elements=x.numel())
    return y, scale


def _loop_backward(
    dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor, dtotal: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`_backward` in one pass; each thread sums its rows' part of dweight."""
    dy, x, weight, dx = dy.contiguous(), x.contiguous(), weight.contiguous(), torch.empty_like(x)
    added = 0 if dtotal is None else dtotal.contiguous()
    dweight = x.new_zeros(cpu.num_threads(x.numel()), x.shape[1], dtype=torch.float32)
    cpu.run(
        "rms_norm_backward", x.dtype, *x.shape, dtotal is not None, dy, x, weight, scale, added, dx, dweight,
        elements=x.numel(),
    )  # fmt: skip
    return dx, dweight.sum(0).to(weight.dtype)

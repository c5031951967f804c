"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), alone or together with the residual addition before it."""

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.kernels.linear import Context


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight`, row by row: x [t, h], weight [h] -> [t, h].

    Statistics are taken in fp32 (float64 for float64), and the normed row is rounded to x's dtype before it meets the
    weight, as the published Llama weights expect. Backward keeps x and one number per row.
    """
    y: Tensor = RMSNormFunction.apply(x, weight, eps)  # type: ignore[no-untyped-call]  # torch's own
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream and its norm: (residual + x, rms_norm(residual + x)), all [t, h].

    One function instead of two, because its backward adds the two gradients of the sum while it computes one of them.
    """
    total, normed = AddRMSNormFunction.apply(x, residual, weight, eps)  # type: ignore[no-untyped-call]  # torch's own
    return total, normed


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What `rms_norm` computes, in plain operations."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def reference_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """What `add_rms_norm` computes, in plain operations."""
    total = residual + x
    return total, reference_rms_norm(total, weight, eps)


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normed rows, and 1 / root mean square of each row [t, 1], in the statistics' dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    normed = torch.mul(x, scale)  # wide, because `scale` is
    return normed.to(x.dtype).mul_(weight), scale


def _backward(dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """dx [t, h] in the statistics' dtype and dweight [h].

    With p = dy * x, both reductions are matrix-vector products: dweight = scale . p and, for each row, the part of dy
    that only stretches x, p . weight. Then dx = scale * (dy * weight - x * scale^2 * (p . weight) / h).
    """
    wide = scale.dtype
    product = torch.mul(dy.to(wide), x)
    dweight = torch.mv(product.t(), scale.squeeze(-1))
    along = torch.mv(product, weight.to(wide)).unsqueeze(-1)
    dx = torch.mul(dy, weight, out=product).mul_(scale)
    return dx.addcmul_(x.to(wide), along.mul_(scale.pow(3)).div_(-x.shape[-1])), dweight


class RMSNormFunction(Function):
    """`rms_norm` as autograd sees it."""

    reference = staticmethod(reference_rms_norm)

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [t, h] -> [t, h]."""
        y, scale = _forward(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy [t, h] -> dx, dweight."""
        x, weight, scale = ctx.saved_tensors
        dx, dweight = _backward(dy, x, weight, scale)
        return dx.to(x.dtype), dweight.to(weight.dtype), None


class AddRMSNormFunction(Function):
    """`add_rms_norm` as autograd sees it."""

    reference = staticmethod(reference_add_rms_norm)

    @staticmethod
    def forward(ctx: Context, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x, residual [t, h] -> (sum, normed)."""
        total = residual + x
        y, scale = _forward(total, weight, eps)
        ctx.save_for_backward(total, weight, scale)
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dtotal: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the sum and of its norm -> one gradient for x and residual, and dweight."""
        total, weight, scale = ctx.saved_tensors
        dx, dweight = _backward(dy, total, weight, scale)
        dx = dx.add_(dtotal).to(total.dtype)
        return dx, dx, dweight.to(weight.dtype), None

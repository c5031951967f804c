"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) and LayerNorm (Ba et al. 2016,
arXiv:1607.06450).

Each is available with and without a fused residual addition. Zero-centered norms multiply by 1 +
weight.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.config.kernels import BackendName
from megalith.kernels import cpu_threads
from megalith.kernels.backend import FusedBackend, select_backend
from megalith.kernels.linear import Context, apply_function
from megalith.kernels.triton import launch


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    zero_centered: bool = False,
    kernel: BackendName = "auto",
) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight`, row by row: x [t, h], weight [h] -> [t, h].

    Statistics are computed in fp32 (float64 for float64), and the normalized row is rounded to x's
    dtype before the multiplication by the weight, as in Llama. If `zero_centered`, it is multiplied
    by 1 + weight and then rounded, as in Gemma. Backward saves x and one number per row.
    """
    if kernel == "reference" or torch.compiler.is_compiling():
        return reference_rms_norm(x, weight, eps, zero_centered=zero_centered)
    engine = _select_backend(kernel, x, weight)
    y: Tensor = apply_function(RMSNormFunction, x, weight, eps, zero_centered, engine)
    return y


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    zero_centered: bool = False,
    kernel: BackendName = "auto",
) -> tuple[Tensor, Tensor]:
    """Fused residual addition and RMSNorm: (residual + x, rms_norm(residual + x)), all [t, h].

    Fused, because its backward adds the two gradients of the sum while computing one of them.
    """
    if kernel == "reference" or torch.compiler.is_compiling():
        return reference_add_rms_norm(x, residual, weight, eps, zero_centered=zero_centered)
    engine = _select_backend(kernel, x, weight, residual=residual)
    total, normed = apply_function(
        AddRMSNormFunction, x, residual, weight, eps, zero_centered, engine
    )
    return total, normed


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    zero_centered: bool = False,
    kernel: BackendName = "auto",
) -> Tensor:
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`, row by row: x [t, h], weight and bias
    [h] -> [t, h].

    Computed in fp32 (float64 for float64) and rounded once. Backward saves x and two numbers per
    row.
    """
    if kernel == "reference" or torch.compiler.is_compiling():
        return reference_layer_norm(x, weight, bias, eps, zero_centered=zero_centered)
    engine = _select_backend(kernel, x, weight, bias, loops=False)
    y: Tensor = apply_function(LayerNormFunction, x, weight, bias, eps, zero_centered, engine)
    return y


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    zero_centered: bool = False,
    kernel: BackendName = "auto",
) -> tuple[Tensor, Tensor]:
    """Fused residual addition and LayerNorm: (residual + x, layer_norm(residual + x)), all [t,
    h]."""
    if kernel == "reference" or torch.compiler.is_compiling():
        return reference_add_layer_norm(x, residual, weight, bias, eps, zero_centered=zero_centered)
    engine = _select_backend(kernel, x, weight, bias, residual=residual, loops=False)
    total, normed = apply_function(
        AddLayerNormFunction, x, residual, weight, bias, eps, zero_centered, engine
    )
    return total, normed


def _select_backend(
    kernel: BackendName,
    x: Tensor,
    *affine: Tensor,
    residual: Tensor | None = None,
    loops: bool = True,
) -> FusedBackend:
    """Return the backend; the Triton kernels give the sum x's dtype, which equals torch's only if
    the residual has the same dtype."""
    both = (x,) if residual is None else (x, residual)
    fits = x.shape[-1] <= launch.WIDEST and both[-1].dtype == x.dtype
    return select_backend(kernel, *both, *affine, op="norm", loops=loops, triton=fits)


# --- reference implementations


def reference_rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False
) -> Tensor:
    """Reference implementation of `rms_norm` in plain PyTorch operations."""
    wide = x.to(_wide(x))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if zero_centered:
        return (normed * (1 + weight.to(wide.dtype))).to(x.dtype)
    return (normed.to(x.dtype) * weight).to(x.dtype)


def reference_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """Reference implementation of `add_rms_norm` in plain PyTorch operations."""
    total = residual + x
    return total, reference_rms_norm(total, weight, eps, zero_centered=zero_centered)


def reference_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, zero_centered: bool = False
) -> Tensor:
    """Reference implementation of `layer_norm` in plain PyTorch operations."""
    wide = x.to(_wide(x))
    centered = wide - wide.mean(-1, keepdim=True)
    normed = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    scale = weight.to(wide.dtype)
    return (normed * (1 + scale if zero_centered else scale) + bias.to(wide.dtype)).to(x.dtype)


def reference_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """Reference implementation of `add_layer_norm` in plain PyTorch operations."""
    total = residual + x
    return total, reference_layer_norm(total, weight, bias, eps, zero_centered=zero_centered)


# --- autograd functions


class RMSNormFunction(Function):
    """Autograd function of `rms_norm`."""

    reference = staticmethod(
        lambda x, weight, eps, zero, engine: reference_rms_norm(x, weight, eps, zero_centered=zero)
    )

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        eps: float,
        zero_centered: bool,
        engine: FusedBackend,
    ) -> Tensor:
        """x [t, h] -> [t, h]."""
        _, y, scale = FORWARD[engine](x, None, weight, eps, zero_centered)
        ctx.save_for_backward(x, weight, scale)
        ctx.engine, ctx.zero_centered = engine, zero_centered
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy [t, h] -> dx, dweight."""
        return *_rms_gradients(ctx, dy, None), None, None, None


class AddRMSNormFunction(Function):
    """Autograd function of `add_rms_norm`."""

    reference = staticmethod(
        lambda x, residual, weight, eps, zero, engine: reference_add_rms_norm(
            x, residual, weight, eps, zero_centered=zero
        )
    )

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        zero_centered: bool,
        engine: FusedBackend,
    ) -> tuple[Tensor, Tensor]:
        """x, residual [t, h] -> (sum, normalized)."""
        total, y, scale = FORWARD[engine](x, residual, weight, eps, zero_centered)
        ctx.save_for_backward(total, weight, scale)
        ctx.engine, ctx.zero_centered = engine, zero_centered
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dtotal: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the sum and of its norm -> one gradient for x and residual, and dweight."""
        dx, dweight = _rms_gradients(ctx, dy, dtotal)
        return dx, dx, dweight, None, None, None


class LayerNormFunction(Function):
    """Autograd function of `layer_norm`."""

    reference = staticmethod(
        lambda x, weight, bias, eps, zero, engine: reference_layer_norm(
            x, weight, bias, eps, zero_centered=zero
        )
    )

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        zero_centered: bool,
        engine: FusedBackend,
    ) -> Tensor:
        """x [t, h] -> [t, h]."""
        _, y, scale, mean = LAYER_FORWARD[engine](x, None, weight, bias, eps, zero_centered)
        ctx.save_for_backward(x, weight, scale, mean)
        ctx.engine, ctx.zero_centered = engine, zero_centered
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy [t, h] -> dx, dweight, dbias."""
        return *_layer_gradients(ctx, dy, None), None, None, None


class AddLayerNormFunction(Function):
    """Autograd function of `add_layer_norm`."""

    reference = staticmethod(
        lambda x, residual, weight, bias, eps, zero, engine: reference_add_layer_norm(
            x, residual, weight, bias, eps, zero_centered=zero
        )
    )

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        zero_centered: bool,
        engine: FusedBackend,
    ) -> tuple[Tensor, Tensor]:
        """x, residual [t, h] -> (sum, normalized)."""
        total, y, scale, mean = LAYER_FORWARD[engine](x, residual, weight, bias, eps, zero_centered)
        ctx.save_for_backward(total, weight, scale, mean)
        ctx.engine, ctx.zero_centered = engine, zero_centered
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dtotal: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the sum and of its norm -> one gradient for x and residual, dweight and
        dbias."""
        dx, dweight, dbias = _layer_gradients(ctx, dy, dtotal)
        return dx, dx, dweight, dbias, None, None, None


# --- RMSNorm


def _wide(x: Tensor) -> torch.dtype:
    """Return the dtype of the statistics."""
    return torch.promote_types(x.dtype, torch.float32)


def _factor(weight: Tensor, zero_centered: bool) -> Tensor:
    """Return the factor of normalized rows: the weight, or 1 + weight in fp32."""
    return weight.to(_wide(weight)) + 1 if zero_centered else weight


def _sum(x: Tensor, residual: Tensor | None) -> Tensor:
    return x if residual is None else residual + x


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm's input, its output, and 1 / root mean square of each row [t, 1] in the
    statistics' dtype."""
    x = _sum(x, residual)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=_wide(x))
    scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    normed = torch.mul(x, scale)  # wide, because `scale` is
    if zero_centered:
        return x, normed.mul_(_factor(weight, zero_centered)).to(x.dtype), scale
    return x, normed.to(x.dtype).mul_(weight), scale


def _rms_gradients(ctx: Context, dy: Tensor, dtotal: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return dx [t, h] and dweight [h] in the dtypes of x and weight."""
    x, weight, scale = ctx.saved_tensors
    factor = _factor(weight, ctx.zero_centered)
    dx, dweight = BACKWARD[ctx.engine](dy, x, factor, scale, dtotal)
    return dx, dweight.to(weight.dtype)


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor, dtotal: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return dx [t, h], with dtotal added if given, and dweight [h].

    With p = dy * x, both reductions are matrix-vector products: dweight = scale . p and, for each
    row, the component of dy along x, p . weight. Then dx = scale * (dy * weight - x * scale^2 * (p
    . weight) / h).
    """
    wide = scale.dtype
    product = torch.mul(dy.to(wide), x)
    dweight = torch.mv(product.t(), scale.squeeze(-1))
    along = torch.mv(product, weight.to(wide)).unsqueeze(-1)
    dx = torch.mul(dy, weight, out=product).mul_(scale)
    dx.addcmul_(x.to(wide), along.mul_(scale.pow(3)).div_(-x.shape[-1]))
    return (dx if dtotal is None else dx.add_(dtotal)).to(x.dtype), dweight


def _loop_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    x, factor = _sum(x, residual).contiguous(), _factor(weight, zero_centered).float().contiguous()
    y, scale = torch.empty_like(x), x.new_empty(x.shape[0], 1, dtype=torch.float32)
    cpu_threads.run(
        "rms_norm",
        x.dtype,
        *x.shape,
        eps,
        not zero_centered,
        x,
        factor,
        y,
        scale,
        elements=x.numel(),
    )
    return x, y, scale


def _loop_backward(
    dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor, dtotal: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`_backward` in one pass; each thread sums dweight over its rows."""
    dy, x, weight, dx = (
        dy.contiguous(),
        x.contiguous(),
        weight.float().contiguous(),
        torch.empty_like(x),
    )
    added = 0 if dtotal is None else dtotal.contiguous()
    dweight = x.new_zeros(cpu_threads.num_threads(x.numel()), x.shape[1], dtype=torch.float32)
    cpu_threads.run(
        "rms_norm_backward",
        x.dtype,
        *x.shape,
        dtotal is not None,
        dy,
        x,
        weight,
        scale,
        added,
        dx,
        dweight,
        elements=x.numel(),
    )
    return dx, dweight.sum(0)


def _triton_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from megalith.kernels.triton import layers

    factor = _factor(weight, zero_centered)
    total, y, scale, _ = layers.norm(
        x, factor, None, eps, residual=residual, twice=not zero_centered
    )
    return total, y, scale


def _triton_backward(
    dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor, dtotal: Tensor | None
) -> tuple[Tensor, Tensor]:
    from megalith.kernels.triton import layers

    dx, dweight, _ = layers.norm_backward(dy, x, weight, scale, None, dtotal)
    return dx, dweight


Three = tuple[Tensor, Tensor, Tensor]
FORWARD: Mapping[FusedBackend, Callable[[Tensor, Tensor | None, Tensor, float, bool], Three]] = {
    "torch": _forward,
    "numba": _loop_forward,
    "triton": _triton_forward,
}
BACKWARD: Mapping[
    FusedBackend, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
] = {
    "torch": _backward,
    "numba": _loop_backward,
    "triton": _triton_backward,
}


# --- LayerNorm, which torch has as fused kernels


def _layer_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the norm's input, its output, and each row's 1 / standard deviation and mean [t, 1] in
    fp32 or float64."""
    x = _sum(x, residual)
    factor = _factor(weight, zero_centered).to(_wide(x))
    y, mean, scale = torch.native_layer_norm(
        _layer_norm_input(x), [x.shape[-1]], factor, bias.to(factor.dtype), eps
    )
    return x, y.to(x.dtype), scale, mean


def _layer_gradients(
    ctx: Context, dy: Tensor, dtotal: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx [t, h], with dtotal added if given, dweight [h] and dbias [h], in the dtypes of x
    and weight."""
    x, weight, scale, mean = ctx.saved_tensors
    factor = _factor(weight, ctx.zero_centered).to(mean.dtype)
    dx, dweight, dbias = LAYER_BACKWARD[ctx.engine](dy, x, factor, scale, mean, dtotal)
    return dx, dweight.to(weight.dtype), dbias.to(weight.dtype)


def _layer_backward(
    dy: Tensor, x: Tensor, factor: Tensor, scale: Tensor, mean: Tensor, dtotal: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    # On CPUs torch sums dweight and dbias of 16-bit inputs in 16 bits: 3 % error for 384 rows.
    wide = mean.dtype
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dy.to(wide).contiguous(),
        x.to(wide).contiguous(),
        [x.shape[-1]],
        mean,
        scale,
        factor,
        torch.zeros_like(factor),
        [True, True, True],
    )
    dx = dx.to(x.dtype)
    return dx if dtotal is None else dx.add_(dtotal), dweight, dbias


def _layer_norm_input(x: Tensor) -> Tensor:
    """Return x as input of torch's fused norm with fp32 weights: unchanged on the CPU, elsewhere in
    fp32.

    With bf16 weights the CPU kernel would compute statistics in bf16, and 1 + weight would be
    rounded.
    """
    return x.contiguous() if x.device.type == "cpu" else x.to(_wide(x)).contiguous()


def _triton_layer_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`_layer_forward` in one pass, without fp32 copies."""
    from megalith.kernels.triton import layers

    total, y, scale, mean = layers.norm(
        x, _factor(weight, zero_centered), bias, eps, residual=residual
    )
    assert mean is not None
    return total, y, scale, mean


def _triton_layer_backward(
    dy: Tensor, x: Tensor, factor: Tensor, scale: Tensor, mean: Tensor, dtotal: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    from megalith.kernels.triton import layers

    dx, dweight, dbias = layers.norm_backward(dy, x, factor, scale, mean, dtotal)
    assert dbias is not None
    return dx, dweight, dbias


LAYER_FORWARD: Mapping[
    FusedBackend,
    Callable[
        [Tensor, Tensor | None, Tensor, Tensor, float, bool], tuple[Tensor, Tensor, Tensor, Tensor]
    ],
] = {"torch": _layer_forward, "triton": _triton_layer_forward}
LAYER_BACKWARD: Mapping[
    FusedBackend, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], Three]
] = {
    "torch": _layer_backward,
    "triton": _triton_layer_backward,
}

"""Activations with one weight per token, between the matmuls of experts.

An expert's output is weighted before its second matmul, since down(w * y) = w * down(y): so
backward need not save the wide outputs for the weights' gradient, only the input and the weights.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.config.kernels import BackendName
from megalith.config.model import Activation
from megalith.kernels import cpu
from megalith.kernels.activation import (
    FORMULAS,
    REFERENCES,
    SIGMOIDS,
    GatedActivation,
    clamp_and_offset,
    clamp_gate_up,
    compute_dtype,
    loop_constants,
)
from megalith.kernels.engine import FusedBackend, select_backend
from megalith.kernels.linear import Context


def weighted_gated(
    gate_up: Tensor, weights: Tensor, gate: GatedActivation, *, kernel: BackendName = "auto"
) -> Tensor:
    """`gated(gate_up) * weights`: gate_up [t, 2 f], the gate first, weights [t] -> [t, f] in
    gate_up's dtype.

    Computed in fp32 (float64 for float64) and rounded once; the weights may have a wider dtype than
    the features. Their gradient is summed in fp32 and has the weights' dtype.
    """
    if kernel == "reference" or torch.compiler.is_compiling():
        return reference_weighted_gated(gate_up, weights, gate)
    engine = select_backend(kernel, gate_up, op="activation", loops=gate.activation in SIGMOIDS)
    y: Tensor = WeightedGatedFunction.apply(gate_up, weights, gate, engine)  # type: ignore[no-untyped-call]  # torch's own
    return y


def weighted_activate(
    x: Tensor, weights: Tensor, activation: Activation, *, kernel: BackendName = "auto"
) -> Tensor:
    """`activate(x) * weights`: x [t, f], weights [t] -> [t, f] in x's dtype; precision as in
    `weighted_gated`."""
    if kernel == "reference" or torch.compiler.is_compiling():
        return reference_weighted_activate(x, weights, activation)
    engine = select_backend(kernel, x, op="activation", loops=activation == "squared_relu")
    y: Tensor = WeightedActivationFunction.apply(x, weights, activation, engine)  # type: ignore[no-untyped-call]  # torch's own
    return y


# --- reference implementations


def reference_weighted_gated(gate_up: Tensor, weights: Tensor, gate: GatedActivation) -> Tensor:
    """Reference implementation of `weighted_gated` in plain PyTorch operations."""
    wide = gate_up.to(compute_dtype(gate_up))
    g, up = clamp_gate_up(wide, gate.clamp)
    inner = REFERENCES[gate.activation](g) * (up + gate.up_offset)
    return (inner * weights.to(wide.dtype).unsqueeze(-1)).to(gate_up.dtype)


def reference_weighted_activate(x: Tensor, weights: Tensor, activation: Activation) -> Tensor:
    """Reference implementation of `weighted_activate` in plain PyTorch operations."""
    wide = x.to(compute_dtype(x))
    return (REFERENCES[activation](wide) * weights.to(wide.dtype).unsqueeze(-1)).to(x.dtype)


# --- autograd functions


class WeightedGatedFunction(Function):
    """Autograd function of `weighted_gated`."""

    reference = staticmethod(
        lambda gate_up, weights, gate, engine: reference_weighted_gated(gate_up, weights, gate)
    )

    @staticmethod
    def forward(
        ctx: Context, gate_up: Tensor, weights: Tensor, gate: GatedActivation, engine: FusedBackend
    ) -> Tensor:
        """gate_up [t, 2 f], weights [t] -> [t, f]."""
        ctx.save_for_backward(gate_up, weights)
        ctx.gate, ctx.engine = gate, engine
        return GATED[engine](gate_up, weights, gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy [t, f] -> [t, 2 f] and [t]."""
        gate_up, weights = ctx.saved_tensors
        return *GATED_BACKWARD[ctx.engine](dy, gate_up, weights, ctx.gate), None, None


class WeightedActivationFunction(Function):
    """Autograd function of `weighted_activate`."""

    reference = staticmethod(
        lambda x, weights, activation, engine: reference_weighted_activate(x, weights, activation)
    )

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weights: Tensor, activation: Activation, engine: FusedBackend
    ) -> Tensor:
        """x [t, f], weights [t] -> [t, f]."""
        ctx.save_for_backward(x, weights)
        ctx.activation, ctx.engine = activation, engine
        return ACTIVATED[engine](x, weights, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy [t, f] -> [t, f] and [t]."""
        x, weights = ctx.saved_tensors
        return *ACTIVATED_BACKWARD[ctx.engine](dy, x, weights, ctx.activation), None, None


# --- torch backend


def _gated(gate_up: Tensor, weights: Tensor, gate: GatedActivation) -> Tensor:
    wide = gate_up.to(compute_dtype(gate_up))
    g, up = clamp_gate_up(wide, gate.clamp)
    y = FORMULAS[gate.activation].value(g).mul_(up + gate.up_offset if gate.up_offset else up)
    return y.mul_(weights.unsqueeze(-1)).to(gate_up.dtype)


def _gated_backward(
    dy: Tensor, gate_up: Tensor, weights: Tensor, gate: GatedActivation
) -> tuple[Tensor, Tensor]:
    """Return the gradient of gate_up, 0 for clamped elements, and that of the weights."""
    wide = gate_up.to(compute_dtype(gate_up))
    g, up = clamp_gate_up(wide, gate.clamp)
    formula, d, factor = FORMULAS[gate.activation], dy.to(wide.dtype), up + gate.up_offset
    value = formula.value(g).mul_(d)
    dweights = torch.linalg.vecdot(value, factor)
    d = d * weights.unsqueeze(-1)
    halves = formula.backward(d.mul_(factor), g), value.mul_(weights.unsqueeze(-1))
    if gate.clamp is not None:
        whole_gate, whole_up = wide.chunk(2, dim=-1)
        halves[0].masked_fill_(whole_gate > gate.clamp, 0.0)
        halves[1].masked_fill_(whole_up.abs() > gate.clamp, 0.0)
    return torch.cat(halves, dim=-1).to(gate_up.dtype), dweights.to(weights.dtype)


def _activated(x: Tensor, weights: Tensor, activation: Activation) -> Tensor:
    y = FORMULAS[activation].value(x.to(compute_dtype(x)))
    return y.mul_(weights.unsqueeze(-1)).to(x.dtype)


def _activated_backward(
    dy: Tensor, x: Tensor, weights: Tensor, activation: Activation
) -> tuple[Tensor, Tensor]:
    wide, d = x.to(compute_dtype(x)), dy.to(compute_dtype(x))
    dweights = torch.linalg.vecdot(FORMULAS[activation].value(wide), d)
    dx = FORMULAS[activation].backward(d * weights.unsqueeze(-1), wide)
    return dx.to(x.dtype), dweights.to(weights.dtype)


# --- numba backend, in one pass


def _loop_gated(gate_up: Tensor, weights: Tensor, gate: GatedActivation) -> Tensor:
    gate_up, w = gate_up.contiguous(), weights.float().contiguous()
    y = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    cpu.run(
        "weighted_gated",
        y.dtype,
        *y.shape,
        *loop_constants(gate),
        w,
        gate_up,
        y,
        elements=y.numel(),
    )
    return y


def _loop_gated_backward(
    dy: Tensor, gate_up: Tensor, weights: Tensor, gate: GatedActivation
) -> tuple[Tensor, Tensor]:
    dy, gate_up, w = dy.contiguous(), gate_up.contiguous(), weights.float().contiguous()
    out, dw = torch.empty_like(gate_up), torch.empty_like(w)
    cpu.run(
        "weighted_gated_backward",
        dy.dtype,
        *dy.shape,
        *loop_constants(gate),
        w,
        dy,
        gate_up,
        out,
        dw,
        elements=dy.numel(),
    )
    return out, dw.to(weights.dtype)


def _loop_squares(x: Tensor, weights: Tensor, activation: Activation) -> Tensor:
    assert activation == "squared_relu"
    x, w = x.contiguous(), weights.float().contiguous()
    y = torch.empty_like(x)
    cpu.run("weighted_squared_relu", x.dtype, *x.shape, w, x, y, elements=x.numel())
    return y


def _loop_squares_backward(
    dy: Tensor, x: Tensor, weights: Tensor, activation: Activation
) -> tuple[Tensor, Tensor]:
    dy, x, w = dy.contiguous(), x.contiguous(), weights.float().contiguous()
    dx, dw = torch.empty_like(x), torch.empty_like(w)
    cpu.run(
        "weighted_squared_relu_backward", x.dtype, *x.shape, w, dy, x, dx, dw, elements=x.numel()
    )
    return dx, dw.to(weights.dtype)


# --- Triton backend, in one pass


def _triton_gated(gate_up: Tensor, weights: Tensor, gate: GatedActivation) -> Tensor:
    from megalith.kernels import triton_gated  # imports Triton

    return triton_gated.forward(gate_up, gate.activation, clamp_and_offset(gate), weights)


def _triton_gated_backward(
    dy: Tensor, gate_up: Tensor, weights: Tensor, gate: GatedActivation
) -> tuple[Tensor, Tensor]:
    from megalith.kernels import triton_gated

    dx, dweights = triton_gated.backward(
        dy, gate_up, gate.activation, clamp_and_offset(gate), weights
    )
    assert dweights is not None
    return dx, dweights.to(weights.dtype)


def _triton_activated(x: Tensor, weights: Tensor, activation: Activation) -> Tensor:
    from megalith.kernels import triton_gated

    return triton_gated.forward(x, activation, None, weights)


def _triton_activated_backward(
    dy: Tensor, x: Tensor, weights: Tensor, activation: Activation
) -> tuple[Tensor, Tensor]:
    from megalith.kernels import triton_gated

    dx, dweights = triton_gated.backward(dy, x, activation, None, weights)
    assert dweights is not None
    return dx, dweights.to(weights.dtype)


Pair = tuple[Tensor, Tensor]

GATED: Mapping[FusedBackend, Callable[[Tensor, Tensor, GatedActivation], Tensor]] = {
    "torch": _gated,
    "numba": _loop_gated,
    "triton": _triton_gated,
}
GATED_BACKWARD: Mapping[FusedBackend, Callable[[Tensor, Tensor, Tensor, GatedActivation], Pair]] = {
    "torch": _gated_backward,
    "numba": _loop_gated_backward,
    "triton": _triton_gated_backward,
}
ACTIVATED: Mapping[FusedBackend, Callable[[Tensor, Tensor, Activation], Tensor]] = {
    "torch": _activated,
    "numba": _loop_squares,
    "triton": _triton_activated,
}
ACTIVATED_BACKWARD: Mapping[FusedBackend, Callable[[Tensor, Tensor, Tensor, Activation], Pair]] = {
    "torch": _activated_backward,
    "numba": _loop_squares_backward,
    "triton": _triton_activated_backward,
}

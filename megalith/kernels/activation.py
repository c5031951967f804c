"""Activation functions of MLPs: with and without a gate, SwiGLU, and weighted activations between
the matmuls of experts.

Only the input is saved for backward; the activation is recomputed. SwiGLU is in
kernels/activation.py. Sources: gelu: Hendrycks and Gimpel 2016, arXiv:1606.08415; gated: Shazeer
2020, arXiv:2002.05202; squared ReLU: So et al. 2021, arXiv:2109.08668; a clamped gate with an
offset: gpt-oss, arXiv:2508.10925, section 2.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from megalith.config.kernels import BackendName
from megalith.config.model import Activation
from megalith.kernels import cpu_threads
from megalith.kernels.backend import FusedBackend, select_backend
from megalith.kernels.linear import Context, apply_function

QUICK_GELU_SCALE = 1.702
"""Scale of x in quick_gelu's sigmoid, which then approximates the normal distribution best
(arXiv:1606.08415, section 2)."""

SQRT_2_OVER_PI, GELU_TANH_CUBIC = 0.7978845608028654, 0.044715
"""gelu_tanh is x / 2 * (1 + tanh(SQRT_2_OVER_PI * (x + GELU_TANH_CUBIC * x^3)))."""


class GatedActivation(NamedTuple):
    """Parameters of a gated activation of gate [t, f] and up [t, f]: `activation(min(gate, clamp))
    * (clip(up, -clamp, clamp) + up_offset)`."""

    activation: Activation
    clamp: float | None = None
    """Upper limit of the gate, and limit of |up|; the gradient beyond it is 0. Unset: no limit."""

    up_offset: float = 0.0


def activate(x: Tensor, activation: Activation, *, kernel: BackendName = "auto") -> Tensor:
    """Apply an activation to every element: x [t, f] -> [t, f], computed in fp32 (float64 for
    float64) and rounded once."""
    if kernel == "reference" or torch.compiler.is_compiling():
        return reference_activate(x, activation)
    # Raises an error if `kernel` names a backend without a kernel for this activation.
    select_backend(kernel, x, op="activation", loops=False, triton=False)
    y: Tensor = apply_function(ActivationFunction, x, activation)
    return y


def gated(gate_up: Tensor, gate: GatedActivation, *, kernel: BackendName = "auto") -> Tensor:
    """Apply a gated activation: gate_up [t, 2 f], the gate first -> [t, f], computed in fp32 or
    float64 and rounded once."""
    if kernel == "reference" or torch.compiler.is_compiling():
        return reference_gated(gate_up, gate)
    engine = select_backend(kernel, gate_up, op="activation", loops=gate.activation in SIGMOIDS)
    y: Tensor = apply_function(GatedFunction, gate_up, gate, engine)
    return y


# --- reference implementations

REFERENCES: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x / 2 * (1 + torch.erf(x / 2**0.5)),
    "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh(SQRT_2_OVER_PI * (x + GELU_TANH_CUBIC * x**3))),
    "quick_gelu": lambda x: x * torch.sigmoid(QUICK_GELU_SCALE * x),
    "relu": torch.relu,
    "squared_relu": lambda x: torch.relu(x).square(),
}


def reference_activate(x: Tensor, activation: Activation) -> Tensor:
    """Reference implementation of `activate` in plain PyTorch operations."""
    return REFERENCES[activation](x.to(compute_dtype(x))).to(x.dtype)


def reference_gated(gate_up: Tensor, gate: GatedActivation) -> Tensor:
    """Reference implementation of `gated` in plain PyTorch operations."""
    g, up = gate_up.to(compute_dtype(gate_up)).chunk(2, dim=-1)
    if gate.clamp is not None:
        g, up = g.clamp(max=gate.clamp), up.clamp(-gate.clamp, gate.clamp)
    return (REFERENCES[gate.activation](g) * (up + gate.up_offset)).to(gate_up.dtype)


# --- each activation and its backward


class Formula(NamedTuple):
    """An activation and its backward for tensors of any shape and floating dtype, computed in at
    least fp32 and rounded once."""

    value: Callable[[Tensor], Tensor]
    """x -> y."""

    backward: Callable[[Tensor, Tensor], Tensor]
    """dy, x -> dx."""


def _quick_gelu(x: Tensor) -> Tensor:
    return torch.sigmoid(QUICK_GELU_SCALE * x.to(compute_dtype(x))).mul_(x).to(x.dtype)


def _quick_gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    wide = compute_dtype(x)  # quick_gelu(x) = silu(QUICK_GELU_SCALE * x) / QUICK_GELU_SCALE
    dx: Tensor = torch.ops.aten.silu_backward(dy.to(wide), QUICK_GELU_SCALE * x.to(wide))
    return dx.to(x.dtype)


def _squared_relu_backward(dy: Tensor, x: Tensor) -> Tensor:
    return torch.relu(x).mul_(2).mul_(dy)


FORMULAS: Mapping[Activation, Formula] = {
    "silu": Formula(functional.silu, torch.ops.aten.silu_backward),
    "gelu": Formula(functional.gelu, torch.ops.aten.gelu_backward),
    "gelu_tanh": Formula(
        lambda x: functional.gelu(x, approximate="tanh"),
        lambda dy, x: torch.ops.aten.gelu_backward(dy, x, approximate="tanh"),
    ),
    "quick_gelu": Formula(_quick_gelu, _quick_gelu_backward),
    "relu": Formula(torch.relu, lambda dy, x: torch.ops.aten.threshold_backward(dy, x, 0)),
    "squared_relu": Formula(lambda x: torch.relu(x).square_(), _squared_relu_backward),
}

SIGMOIDS: Mapping[Activation, tuple[float, float]] = {
    "silu": (1.0, 0.0),
    "quick_gelu": (QUICK_GELU_SCALE, 0.0),
    "gelu_tanh": (
        2 * SQRT_2_OVER_PI,
        2 * SQRT_2_OVER_PI * GELU_TANH_CUBIC,
    ),  # (1 + tanh(u)) / 2 is sigmoid(2 u)
}
"""(a, b) of the activations of the form x * sigmoid(a x + b x^3), which share one compiled loop."""


# --- autograd functions


class ActivationFunction(Function):
    """Autograd function of `activate`."""

    reference = staticmethod(reference_activate)

    @staticmethod
    def forward(ctx: Context, x: Tensor, activation: Activation) -> Tensor:
        """[t, f] -> [t, f]."""
        ctx.save_for_backward(x)
        ctx.activation = activation
        return FORMULAS[activation].value(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor, None]:
        """dy [t, f] -> dx [t, f]."""
        (x,) = ctx.saved_tensors
        return FORMULAS[ctx.activation].backward(dy, x), None


class GatedFunction(Function):
    """Autograd function of `gated`."""

    reference = staticmethod(lambda gate_up, gate, engine: reference_gated(gate_up, gate))

    @staticmethod
    def forward(
        ctx: Context, gate_up: Tensor, gate: GatedActivation, engine: FusedBackend
    ) -> Tensor:
        """[t, 2 f] -> [t, f]."""
        ctx.save_for_backward(gate_up)
        ctx.gate, ctx.engine = gate, engine
        return FORWARD[engine](gate_up, gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor, None, None]:
        """dy [t, f] -> [t, 2 f]."""
        (gate_up,) = ctx.saved_tensors
        return BACKWARD[ctx.engine](dy, gate_up, ctx.gate), None, None


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which activations are computed."""
    return torch.promote_types(x.dtype, torch.float32)


def clamp_gate_up(wide: Tensor, clamp: float | None) -> tuple[Tensor, Tensor]:
    """Return gate and up [t, f], clamped; without a clamp, views of `wide` [t, 2 f]."""
    g, up = wide.chunk(2, dim=-1)
    return (g, up) if clamp is None else (g.clamp(max=clamp), up.clamp(-clamp, clamp))


def _forward(gate_up: Tensor, gate: GatedActivation) -> Tensor:
    g, up = clamp_gate_up(gate_up.to(compute_dtype(gate_up)), gate.clamp)
    value = FORMULAS[gate.activation].value(g)
    return value.mul_(up + gate.up_offset if gate.up_offset else up).to(gate_up.dtype)


def _backward(dy: Tensor, gate_up: Tensor, gate: GatedActivation) -> Tensor:
    """Return the gradient of gate_up [t, 2 f]; clamped elements get 0."""
    wide = gate_up.to(compute_dtype(gate_up))
    g, up = clamp_gate_up(wide, gate.clamp)
    formula, d = FORMULAS[gate.activation], dy.to(wide.dtype)
    halves = formula.backward(d * (up + gate.up_offset), g), formula.value(g).mul_(d)
    if gate.clamp is not None:
        whole_gate, whole_up = wide.chunk(2, dim=-1)
        halves[0].masked_fill_(whole_gate > gate.clamp, 0.0)
        halves[1].masked_fill_(whole_up.abs() > gate.clamp, 0.0)
    return torch.cat(halves, dim=-1).to(gate_up.dtype)


def _loop_forward(gate_up: Tensor, gate: GatedActivation) -> Tensor:
    gate_up = gate_up.contiguous()
    t, f = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(t, f)
    cpu_threads.run("gated", y.dtype, t, f, *loop_constants(gate), gate_up, y, elements=y.numel())
    return y


def _loop_backward(dy: Tensor, gate_up: Tensor, gate: GatedActivation) -> Tensor:
    dy, gate_up = dy.contiguous(), gate_up.contiguous()
    out = torch.empty_like(gate_up)
    cpu_threads.run(
        "gated_backward",
        dy.dtype,
        *dy.shape,
        *loop_constants(gate),
        dy,
        gate_up,
        out,
        elements=dy.numel(),
    )
    return out


def _triton_forward(gate_up: Tensor, gate: GatedActivation) -> Tensor:
    from megalith.kernels.triton import layers

    return layers.activation_forward(gate_up, gate.activation, clamp_and_offset(gate), None)


def _triton_backward(dy: Tensor, gate_up: Tensor, gate: GatedActivation) -> Tensor:
    from megalith.kernels.triton import layers

    return layers.activation_backward(dy, gate_up, gate.activation, clamp_and_offset(gate), None)[0]


FORWARD: Mapping[FusedBackend, Callable[[Tensor, GatedActivation], Tensor]] = {
    "torch": _forward,
    "numba": _loop_forward,
    "triton": _triton_forward,
}
BACKWARD: Mapping[FusedBackend, Callable[[Tensor, Tensor, GatedActivation], Tensor]] = {
    "torch": _backward,
    "numba": _loop_backward,
    "triton": _triton_backward,
}


def clamp_and_offset(gate: GatedActivation) -> tuple[float, float]:
    """Return (clamp, offset) of a gated activation; without a clamp, infinity."""
    return float("inf") if gate.clamp is None else gate.clamp, gate.up_offset


def loop_constants(gate: GatedActivation) -> tuple[float, float, float, float]:
    """Return (a, b) of `SIGMOIDS`, the clamp and the offset of a gated activation."""
    return *SIGMOIDS[gate.activation], *clamp_and_offset(gate)


# SwiGLU (Shazeer 2020, arXiv:2002.05202): the gated activation of an MLP.


def swiglu(gate_up: Tensor, *, kernel: BackendName = "auto") -> Tensor:
    """`silu(gate) * up`: gate_up [t, 2 f], the gate first -> [t, f]. Backward saves gate_up and
    recomputes silu."""
    if kernel == "reference" or torch.compiler.is_compiling():
        return reference_swiglu(gate_up)
    y: Tensor = apply_function(
        SwigluFunction, gate_up, select_backend(kernel, gate_up, op="activation")
    )
    return y


def reference_swiglu(gate_up: Tensor) -> Tensor:
    """Reference implementation of `swiglu` in plain PyTorch operations."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


class SwigluFunction(Function):
    """Autograd function of `swiglu`."""

    reference = staticmethod(lambda gate_up, engine: reference_swiglu(gate_up))

    @staticmethod
    def forward(ctx: Context, gate_up: Tensor, engine: FusedBackend) -> Tensor:
        """[t, 2 f] -> [t, f]."""
        ctx.save_for_backward(gate_up)
        ctx.engine = engine
        return SWIGLU_FORWARD[engine](gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor, None]:
        """dy [t, f] -> [t, 2 f]."""
        (gate_up,) = ctx.saved_tensors
        return SWIGLU_BACKWARD[ctx.engine](dy, gate_up), None


def _swiglu_forward(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def _swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient of gate_up; both halves are written in place."""
    gate, up = gate_up.chunk(2, dim=-1)
    out = torch.empty_like(gate_up)
    dgate, dup = out.chunk(2, dim=-1)
    torch.ops.aten.silu.out(gate, out=dup)
    dup.mul_(dy)
    torch.mul(dy, up, out=dgate)
    torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
    return out


def _swiglu_loop_forward(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    t, f = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(t, f)
    cpu_threads.run("swiglu", y.dtype, t, f, gate_up, y, elements=y.numel())
    return y


def _swiglu_loop_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    dy, gate_up = dy.contiguous(), gate_up.contiguous()
    out = torch.empty_like(gate_up)
    cpu_threads.run("swiglu_backward", dy.dtype, *dy.shape, dy, gate_up, out, elements=dy.numel())
    return out


def _swiglu_triton_forward(gate_up: Tensor) -> Tensor:
    from megalith.kernels.triton import layers

    return layers.activation_forward(gate_up, "silu", UNLIMITED, None)


def _swiglu_triton_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    from megalith.kernels.triton import layers

    return layers.activation_backward(dy, gate_up, "silu", UNLIMITED, None)[0]


UNLIMITED = math.inf, 0.0
"""(clamp, up_offset): no clamp, no offset."""

SWIGLU_FORWARD: Mapping[FusedBackend, Callable[[Tensor], Tensor]] = {
    "torch": _swiglu_forward,
    "numba": _swiglu_loop_forward,
    "triton": _swiglu_triton_forward,
}
SWIGLU_BACKWARD: Mapping[FusedBackend, Callable[[Tensor, Tensor], Tensor]] = {
    "torch": _swiglu_backward,
    "numba": _swiglu_loop_backward,
    "triton": _swiglu_triton_backward,
}


# Activations with one weight per token, between the matmuls of experts.
#
# An expert's output is weighted before its second matmul, since down(w * y) = w * down(y): so
# backward need not save the wide outputs for the weights' gradient, only the input and the weights.


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
    y: Tensor = apply_function(WeightedGatedFunction, gate_up, weights, gate, engine)
    return y


def weighted_activate(
    x: Tensor, weights: Tensor, activation: Activation, *, kernel: BackendName = "auto"
) -> Tensor:
    """`activate(x) * weights`: x [t, f], weights [t] -> [t, f] in x's dtype; precision as in
    `weighted_gated`."""
    if kernel == "reference" or torch.compiler.is_compiling():
        return reference_weighted_activate(x, weights, activation)
    engine = select_backend(kernel, x, op="activation", loops=activation == "squared_relu")
    y: Tensor = apply_function(WeightedActivationFunction, x, weights, activation, engine)
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
    cpu_threads.run(
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
    cpu_threads.run(
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
    cpu_threads.run("weighted_squared_relu", x.dtype, *x.shape, w, x, y, elements=x.numel())
    return y


def _loop_squares_backward(
    dy: Tensor, x: Tensor, weights: Tensor, activation: Activation
) -> tuple[Tensor, Tensor]:
    dy, x, w = dy.contiguous(), x.contiguous(), weights.float().contiguous()
    dx, dw = torch.empty_like(x), torch.empty_like(w)
    cpu_threads.run(
        "weighted_squared_relu_backward", x.dtype, *x.shape, w, dy, x, dx, dw, elements=x.numel()
    )
    return dx, dw.to(weights.dtype)


# --- Triton backend, in one pass


def _triton_gated(gate_up: Tensor, weights: Tensor, gate: GatedActivation) -> Tensor:
    from megalith.kernels.triton import layers

    return layers.activation_forward(gate_up, gate.activation, clamp_and_offset(gate), weights)


def _triton_gated_backward(
    dy: Tensor, gate_up: Tensor, weights: Tensor, gate: GatedActivation
) -> tuple[Tensor, Tensor]:
    from megalith.kernels.triton import layers

    dx, dweights = layers.activation_backward(
        dy, gate_up, gate.activation, clamp_and_offset(gate), weights
    )
    assert dweights is not None
    return dx, dweights.to(weights.dtype)


def _triton_activated(x: Tensor, weights: Tensor, activation: Activation) -> Tensor:
    from megalith.kernels.triton import layers

    return layers.activation_forward(x, activation, None, weights)


def _triton_activated_backward(
    dy: Tensor, x: Tensor, weights: Tensor, activation: Activation
) -> tuple[Tensor, Tensor]:
    from megalith.kernels.triton import layers

    dx, dweights = layers.activation_backward(dy, x, activation, None, weights)
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

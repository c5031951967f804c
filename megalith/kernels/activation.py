"""Activation functions of MLPs, with and without a gate.

Only the input is saved for backward; the activation is recomputed. SwiGLU is in kernels/swiglu.py.
Sources: gelu: Hendrycks and Gimpel 2016, arXiv:1606.08415; gated: Shazeer 2020, arXiv:2002.05202;
squared ReLU: So et al. 2021, arXiv:2109.08668; a clamped gate with an offset: gpt-oss,
arXiv:2508.10925, section 2.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from megalith.config.kernels import BackendName
from megalith.config.model import Activation
from megalith.kernels import cpu
from megalith.kernels.engine import FusedBackend, select_backend
from megalith.kernels.linear import Context

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
    select_backend(
        kernel, x, op="activation", loops=False, triton=False
    )  # rejects backends that have no kernel for it
    y: Tensor = ActivationFunction.apply(x, activation)  # type: ignore[no-untyped-call]  # torch's own
    return y


def gated(gate_up: Tensor, gate: GatedActivation, *, kernel: BackendName = "auto") -> Tensor:
    """Apply a gated activation: gate_up [t, 2 f], the gate first -> [t, f], computed in fp32 or
    float64 and rounded once."""
    if kernel == "reference" or torch.compiler.is_compiling():
        return reference_gated(gate_up, gate)
    engine = select_backend(kernel, gate_up, op="activation", loops=gate.activation in SIGMOIDS)
    y: Tensor = GatedFunction.apply(gate_up, gate, engine)  # type: ignore[no-untyped-call]  # torch's own
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
    cpu.run("gated", y.dtype, t, f, *loop_constants(gate), gate_up, y, elements=y.numel())
    return y


def _loop_backward(dy: Tensor, gate_up: Tensor, gate: GatedActivation) -> Tensor:
    dy, gate_up = dy.contiguous(), gate_up.contiguous()
    out = torch.empty_like(gate_up)
    cpu.run(
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
    from megalith.kernels import triton_gated  # imports Triton

    return triton_gated.forward(gate_up, gate.activation, clamp_and_offset(gate), None)


def _triton_backward(dy: Tensor, gate_up: Tensor, gate: GatedActivation) -> Tensor:
    from megalith.kernels import triton_gated

    return triton_gated.backward(dy, gate_up, gate.activation, clamp_and_offset(gate), None)[0]


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

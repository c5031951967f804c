"""SwiGLU (Shazeer 2020, arXiv:2002.05202): the gated activation of an MLP."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.config.kernels import BackendName
from megalith.kernels import cpu
from megalith.kernels.engine import FusedBackend, select_backend
from megalith.kernels.linear import Context


def swiglu(gate_up: Tensor, *, kernel: BackendName = "auto") -> Tensor:
    """`silu(gate) * up`: gate_up [t, 2 f], the gate first -> [t, f]. Backward saves gate_up and
    recomputes silu."""
    if kernel == "reference" or torch.compiler.is_compiling():
        return reference_swiglu(gate_up)
    y: Tensor = SwigluFunction.apply(gate_up, select_backend(kernel, gate_up, op="activation"))  # type: ignore[no-untyped-call]  # torch's own
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
        return FORWARD[engine](gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor, None]:
        """dy [t, f] -> [t, 2 f]."""
        (gate_up,) = ctx.saved_tensors
        return BACKWARD[ctx.engine](dy, gate_up), None


def _forward(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def _backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient of gate_up; both halves are written in place."""
    gate, up = gate_up.chunk(2, dim=-1)
    out = torch.empty_like(gate_up)
    dgate, dup = out.chunk(2, dim=-1)
    torch.ops.aten.silu.out(gate, out=dup)
    dup.mul_(dy)
    torch.mul(dy, up, out=dgate)
    torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
    return out


def _loop_forward(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    t, f = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(t, f)
    cpu.run("swiglu", y.dtype, t, f, gate_up, y, elements=y.numel())
    return y


def _loop_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    dy, gate_up = dy.contiguous(), gate_up.contiguous()
    out = torch.empty_like(gate_up)
    cpu.run("swiglu_backward", dy.dtype, *dy.shape, dy, gate_up, out, elements=dy.numel())
    return out


def _triton_forward(gate_up: Tensor) -> Tensor:
    from megalith.kernels import triton_gated  # imports Triton

    return triton_gated.forward(gate_up, "silu", UNLIMITED, None)


def _triton_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    from megalith.kernels import triton_gated

    return triton_gated.backward(dy, gate_up, "silu", UNLIMITED, None)[0]


UNLIMITED = math.inf, 0.0
"""(clamp, up_offset): no clamp, no offset."""

FORWARD: Mapping[FusedBackend, Callable[[Tensor], Tensor]] = {
    "torch": _forward,
    "numba": _loop_forward,
    "triton": _triton_forward,
}
BACKWARD: Mapping[FusedBackend, Callable[[Tensor, Tensor], Tensor]] = {
    "torch": _backward,
    "numba": _loop_backward,
    "triton": _triton_backward,
}

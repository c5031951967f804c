"""SwiGLU (Shazeer 2020, arXiv:2002.05202): an MLP's hidden features, gated."""

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.kernels.linear import Context


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up`: gate_up [t, 2 f], the gate first -> [t, f]. Backward keeps gate_up and computes silu again."""
    y: Tensor = SwigluFunction.apply(gate_up)  # type: ignore[no-untyped-call]  # torch's own
    return y


def reference_swiglu(gate_up: Tensor) -> Tensor:
    """What `swiglu` computes, in plain operations."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


class SwigluFunction(Function):
    """`swiglu` as autograd sees it."""

    reference = staticmethod(reference_swiglu)

    @staticmethod
    def forward(ctx: Context, gate_up: Tensor) -> Tensor:
        """[t, 2 f] -> [t, f]."""
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> Tensor:
        """dy [t, f] -> [t, 2 f], written in place half by half."""
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        dgate, dup = out.chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate, out=dup)
        dup.mul_(dy)
        torch.mul(dy, up, out=dgate)
        torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
        return out

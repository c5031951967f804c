"""Rotary positions (Su et al. 2021, arXiv:2104.09864): pairs of features turned by an angle that grows with position.

Feature i of the first half of a head is paired with feature i of the second half, as in published Llama weights.
"""

import math

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.config.rope import RopeConfig
from megalith.kernels import cpu
from megalith.kernels.cpu import Kernel
from megalith.kernels.linear import Context


def rope_frequencies(config: RopeConfig, head_dim: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Radians per token of each pair: [head_dim / 2], fp32 unless asked for float64.

    `llama3` scaling divides the slow frequencies by `factor`, keeps the fast ones, and blends linearly in between, as
    the Llama 3.1 release does.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(dtype) / head_dim
    frequencies = 1.0 / config.theta**exponents
    if config.scaling == "none":
        return frequencies
    turns = config.original_max_position * frequencies / (2 * math.pi)  # over the context length of the first training
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    keep = blend.clamp(0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / config.factor


def rope_tables(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [t, d / 2] in `dtype`: positions [t], frequencies [d / 2]; angles stay in the latter's dtype."""
    angles = positions.to(frequencies.dtype).unsqueeze(-1) * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, kernel: Kernel = "auto") -> Tensor:
    """Turn every head: x [t, n, d], any strides; cos, sin [t, d / 2] -> [t, n, d]. Backward turns back, saving no x."""
    if kernel == "reference" or torch.compiler.is_compiling():
        return reference_rope(x, cos, sin)
    y: Tensor = RopeFunction.apply(x, cos, sin, kernel == "auto" and cpu.takes(x, cos, sin))  # type: ignore[no-untyped-call]  # torch's own
    return y


def reference_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What `apply_rope` computes, in plain operations."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class RopeFunction(Function):
    """`apply_rope` as autograd sees it."""

    reference = staticmethod(lambda x, cos, sin, loops: reference_rope(x, cos, sin))

    @staticmethod
    def forward(ctx: Context, x: Tensor, cos: Tensor, sin: Tensor, loops: bool) -> Tensor:
        """x [t, n, d] -> [t, n, d]."""
        ctx.save_for_backward(cos, sin)
        ctx.loops = loops
        return (_loop_turn if loops else _turn)(x, cos, sin, sign=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy [t, n, d] -> dx, turned back."""
        return (_loop_turn if ctx.loops else _turn)(dy, *ctx.saved_tensors, sign=-1), None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, *, sign: int) -> Tensor:
    """Turn by the tables' angles (sign 1) or back (sign -1)."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    out = x.new_empty(x.shape)
    first, second = x.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)
    return out


def _loop_turn(x: Tensor, cos: Tensor, sin: Tensor, *, sign: int) -> Tensor:
    """`_turn` in one pass."""
    x = x if x.stride(2) == 1 else x.contiguous()
    out = x.new_empty(x.shape)
    tables = cos.contiguous(), sin.contiguous()
    cpu.run("rope", x.dtype, *x.shape, x.stride(0), x.stride(1), sign, x, *tables, out, elements=x.numel())
    return out

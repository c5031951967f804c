"""Rotary position embedding (RoPE; Su et al. 2021, arXiv:2104.09864): pairs of features are rotated
by angles proportional to the position id."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.config.kernels import BackendName
from megalith.config.model import RopeConfig
from megalith.kernels import cpu_threads
from megalith.kernels.backend import FusedBackend, select_backend
from megalith.kernels.linear import Context, apply_function


def rope_frequencies(
    config: RopeConfig, size: int, *, length: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the rotation of each pair in radians per token: [size / 2] for `size` rotated
    features, fp32 unless `dtype` is float64.

    linear divides all frequencies by `factor`. llama3 divides the low ones, keeps the high ones,
    and interpolates linearly in between. yarn does so too, over the index of the pair. dynamic
    raises theta once sequences of `length` tokens are longer than those of the original training;
    longrope divides each pair by its own factor, and by another one then.
    """
    exponents = torch.arange(0, size, 2, dtype=torch.int64).to(dtype) / size
    wavelengths = _theta(config, size, length) ** exponents
    frequencies = 1.0 / wavelengths
    match config.scaling:
        case "longrope":
            long = rope_length(config, length) > 0
            return 1.0 / (
                torch.tensor(config.long_factors if long else config.short_factors, dtype=dtype)
                * wavelengths
            )
        case "linear":
            return frequencies / config.factor
        case "llama3":
            # Periods of each frequency within the original context length.
            num_periods = config.original_max_position * frequencies / (2 * math.pi)
            # Llama 4 has a width of 0: no interpolation
            width = max(config.high_freq_factor - config.low_freq_factor, 1e-30)
            keep = (num_periods - config.low_freq_factor) / width
        case "yarn":
            first, last = yarn_range(config, size)
            pairs = torch.arange(size // 2, dtype=dtype)
            keep = 1.0 - (pairs - first) / (last - first)
        case _:
            return frequencies
    keep = keep.clamp(0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / config.factor


def _theta(config: RopeConfig, size: int, length: int) -> float:
    """Return the base of the wavelengths for sequences of `length` tokens."""
    if config.scaling != "dynamic" or rope_length(config, length) == 0:
        return config.theta
    stretch: float = config.factor * length / config.original_max_position - (config.factor - 1)
    return config.theta * stretch ** (size / (size - 2))


def rope_length(config: RopeConfig, length: int) -> int:
    """Return the shortest document length with the same angles as `length`; 0 if the angles are
    those of the original training's length.

    >>> scalings = ("yarn", "dynamic", "longrope")
    >>> kinds = [RopeConfig(scaling=kind, original_max_position=8) for kind in scalings]
    >>> [rope_length(rope, 11) for rope in kinds]
    [0, 11, 9]
    """
    if config.scaling not in ("dynamic", "longrope") or length <= config.original_max_position:
        return 0
    return length if config.scaling == "dynamic" else config.original_max_position + 1


def yarn_range(config: RopeConfig, size: int) -> tuple[float, float]:
    """Return the range of pair indices over which yarn interpolates: the pairs that rotate
    beta_fast and beta_slow times over the original training length."""

    def pair(num_periods: float) -> float:
        return (
            size
            * math.log(config.original_max_position / (2 * math.pi * num_periods))
            / (2 * math.log(config.theta))
        )

    first, last = pair(config.beta_fast), pair(config.beta_slow)
    if config.whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    return first, last + 0.001 if first == last else last


def attention_factor(config: RopeConfig) -> float:
    """Return the factor by which rotated queries and keys are each multiplied."""
    if config.scaling not in ("yarn", "longrope"):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.factor <= 1:
        return 1.0
    if config.scaling == "yarn":
        return 0.1 * math.log(config.factor) + 1.0
    return math.sqrt(1 + math.log(config.factor) / math.log(config.original_max_position))


def rope_tables(
    positions: Tensor,
    frequencies: Tensor,
    dtype: torch.dtype,
    *,
    factor: float = 1.0,
    sections: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) * factor, each [t, pairs] in `dtype`: positions [t], frequencies [pairs] or
    [t, pairs]; angles are computed in the frequencies' dtype.

    Positions may also be [len(sections), t] (multimodal RoPE): then the pairs of each section, in
    order, are rotated by one of these positions. Positions [t] stand for equal ones.
    """
    axes = positions.to(frequencies.dtype).unsqueeze(-1)
    if positions.ndim == 1:
        angles = axes * frequencies
    else:
        parts = frequencies.split(list(sections), dim=-1)
        angles = torch.cat([axis * part for axis, part in zip(axes, parts, strict=True)], dim=-1)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def apply_rope(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, kernel: BackendName = "auto"
) -> Tensor:
    """Rotate every head: x [t, n, d], any strides; cos, sin [t, pairs] -> [t, n, d]. Backward
    rotates back and does not save x.

    The first 2 * pairs features are rotated, the rest is copied. Pairs are features i and i +
    pairs, or, interleaved, 2 i and 2 i + 1.
    """
    if kernel == "reference" or torch.compiler.is_compiling():
        return reference_rope(x, cos, sin, interleaved)
    engine = select_backend(kernel, x, cos, sin, op="rope")
    y: Tensor = apply_function(RopeFunction, x, cos, sin, interleaved, engine)
    return y


def reference_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Reference implementation of `apply_rope` in plain PyTorch operations."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second, rest = _pairs(x, cos.shape[-1], interleaved)
    rotated = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)
    return torch.cat([joined, rest], dim=-1)


def _pairs(x: Tensor, pairs: int, interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first and the second feature of every pair, and the features that are not rotated;
    views of x."""
    rotary, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if interleaved:
        return rotary[..., 0::2], rotary[..., 1::2], rest
    return rotary[..., :pairs], rotary[..., pairs:], rest


class RopeFunction(Function):
    """Autograd function of `apply_rope`."""

    reference = staticmethod(
        lambda x, cos, sin, interleaved, engine: reference_rope(x, cos, sin, interleaved)
    )

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, engine: FusedBackend
    ) -> Tensor:
        """x [t, n, d] -> [t, n, d]."""
        ctx.save_for_backward(cos, sin)
        ctx.rotate = partial(ROTATE[engine], interleaved=interleaved)
        y: Tensor = ctx.rotate(x, cos, sin, sign=1)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy [t, n, d] -> dx, rotated back."""
        return ctx.rotate(dy, *ctx.saved_tensors, sign=-1), None, None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, sign: int, interleaved: bool) -> Tensor:
    """Rotate by the tables' angles (sign 1) or back (sign -1)."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    out = x.new_empty(x.shape)
    first, second, rest = _pairs(x, cos.shape[-1], interleaved)
    out_first, out_second, out_rest = _pairs(out, cos.shape[-1], interleaved)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)
    out_rest.copy_(rest)
    return out


def _numba_rotate(x: Tensor, cos: Tensor, sin: Tensor, *, sign: int, interleaved: bool) -> Tensor:
    x = x if x.stride(2) == 1 else x.contiguous()
    out = x.new_empty(x.shape)
    tables = cos.contiguous(), sin.contiguous()
    pairs, strides = cos.shape[-1], (x.stride(0), x.stride(1))
    if 2 * pairs == x.shape[2] and not interleaved:
        cpu_threads.run(
            "rope", x.dtype, *x.shape, *strides, sign, x, *tables, out, elements=x.numel()
        )
    else:
        loop: cpu_threads.Loop = "rope_neighbors" if interleaved else "rope_part"
        cpu_threads.run(
            loop, x.dtype, *x.shape, pairs, *strides, sign, x, *tables, out, elements=x.numel()
        )
    return out


def _triton_rotate(x: Tensor, cos: Tensor, sin: Tensor, *, sign: int, interleaved: bool) -> Tensor:
    from megalith.kernels.triton import layers

    return layers.rotate(x, cos, sin, sign=sign, interleaved=interleaved)


ROTATE: Mapping[FusedBackend, Callable[..., Tensor]] = {
    "torch": _rotate,
    "numba": _numba_rotate,
    "triton": _triton_rotate,
}
"""(x, cos, sin, *, sign, interleaved) -> rotated x."""

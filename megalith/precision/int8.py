"""Weight-only int8: weights are stored as int8 with one fp32 scale per output channel, and
activations keep their dtype."""

from typing import NamedTuple

import torch
from torch import Tensor

from megalith.kernels.grouped_linear import GroupedMatmulOps, Groups, by_expert
from megalith.kernels.linear import MatmulOps, find_small_batch_kernel, torch_forward

INT8_MAX = 127
"""Largest int8 value that is used: the range is symmetric, without a zero point."""

MAX_DEQUANTIZED_ELEMENTS = 1 << 20
"""Elements of a weight that are converted at a time, which fit the cache (heuristic)."""


class Int8Weight(NamedTuple):
    """A quantized weight matrix; the weight is `values * scales[:, None]`."""

    values: Tensor
    """int8 [o, i]."""

    scales: Tensor
    """fp32 [o]."""


def quantize_int8(weight: Tensor) -> Int8Weight:
    """Quantize a weight fp32 [o, i] symmetrically per output channel: the largest absolute value of
    a row becomes 127.

    Raises:
        ValueError: a value is NaN or infinite.
    """
    largest = weight.abs().amax(1)
    if not bool(largest.isfinite().all()):
        raise ValueError("a value is NaN or infinite")
    scales = largest / INT8_MAX
    # A row of zeros has scale 0; it must not divide by it. Values of subnormal rows are clamped.
    values = (weight / scales.where(scales > 0, 1.0)[:, None]).round_().clamp_(-INT8_MAX, INT8_MAX)
    return Int8Weight(values.to(torch.int8), scales)


def dequantize_int8(weight: Int8Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weight [o, i] in a floating-point dtype."""
    return weight.values.to(dtype) * weight.scales.to(dtype)[:, None]


def multiply_dequantized(x: Tensor, weight: Int8Weight) -> Tensor:
    """Return `x @ w.T` in x's dtype with torch's matmuls, converting some rows of the weight at a
    time: x [t, i] -> [t, o]."""
    rows = max(1, MAX_DEQUANTIZED_ELEMENTS // max(1, weight.values.shape[1]))
    parts = [torch_forward(x, part.to(x.dtype)) for part in weight.values.split(rows)]
    y = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return (y.to(torch.promote_types(x.dtype, torch.float32)) * weight.scales).to(x.dtype)


class _InferenceOnly:
    """The scales of one weight, set when it is loaded; there are no gradients."""

    def __init__(self) -> None:
        self.scales = torch.empty(0)

    def input_grad(self, *operands: object) -> Tensor:
        """Not supported."""
        raise NotImplementedError("int8 weights are for inference: they have no gradients")

    def weight_grad(self, *operands: object) -> Tensor:
        """Not supported."""
        raise NotImplementedError("int8 weights are for inference: they have no gradients")


class Int8MatmulOps(_InferenceOnly, MatmulOps):
    """Forward matmuls with an int8 weight: few rows use the small-batch kernel, which reads the
    int8 values; for others they are converted."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """x [t, i], w int8 [o, i] -> y [t, o]."""
        kernel = find_small_batch_kernel(x, w, x.shape[0])
        if kernel is not None:
            return kernel.linear(x, w, self.scales)
        return multiply_dequantized(x, Int8Weight(w, self.scales))


class Int8GroupedMatmulOps(_InferenceOnly, GroupedMatmulOps):
    """Forward grouped matmuls with int8 weights of experts; like `Int8MatmulOps`."""

    def forward(self, x: Tensor, w: Tensor, groups: Groups) -> Tensor:
        """x [r, i], w int8 [e o, i] -> y [r, o]."""
        counts = groups.on_host()
        kernel = find_small_batch_kernel(x, w, max(counts, default=0))
        if kernel is not None:
            return kernel.grouped_linear(x, w, counts, self.scales)
        experts = zip(
            x.split(counts),
            by_expert(w, len(counts)),
            self.scales.view(len(counts), -1),
            strict=True,
        )
        parts = [
            multiply_dequantized(rows, Int8Weight(values, scales))
            for rows, values, scales in experts
        ]
        return torch.cat(parts)

"""Matmuls of bf16 operands on CPUs: by torch's bf16 kernels, or in fp32 on upcast operands.

oneDNN has bf16 kernels for AVX-512 and newer, and for arm with bf16. On other CPUs torch falls back
to scalar loops. There the operands are upcast to fp32 and the result is rounded to bf16 once, as
bf16 kernels do, which also accumulate in fp32.

Measured: Zen 5 restricted to AVX2, torch 2.13, one thread, 512 tokens, a weight of 1536 x 512,
GFLOP/s of bf16 kernels and upcast: forward 24 and 80, weight gradient 36 and 77, input gradient 1.7
and 66. Restricted to AVX-512 without bf16 instructions, bf16 kernels take 0.8 to 1.2 of the time of
upcast operands, and less for few tokens, so they are used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megalith.config.kernels import BackendName


def _probe_bf16_kernels() -> bool:
    probe = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return torch.backends.mkldnn.is_available() and probe is not None and bool(probe())


HAS_BF16_KERNELS = _probe_bf16_kernels()
"""Whether oneDNN has fast bf16 kernels for this CPU."""


class _Selection:
    """Whether bf16 operands are upcast: one choice per process, like
    torch.set_float32_matmul_precision."""

    upcast = not HAS_BF16_KERNELS


def select_bf16_matmul(form: BackendName) -> None:
    """Select how this process computes matmuls of bf16 operands on CPUs.

    auto: upcast where this CPU has no bf16 kernels; upcast: always; any other: torch's own kernels.
    """
    _Selection.upcast = not HAS_BF16_KERNELS if form == "auto" else form == "upcast"


@contextmanager
def bf16_matmul(form: BackendName) -> Iterator[None]:
    """`select_bf16_matmul` inside a `with` block."""
    before = _Selection.upcast
    select_bf16_matmul(form)
    try:
        yield
    finally:
        _Selection.upcast = before


def is_upcast(x: Tensor) -> bool:
    """Whether a matmul of this operand is computed in fp32 on upcast operands."""
    return _Selection.upcast and x.dtype == torch.bfloat16 and x.device.type == "cpu"


def mm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`torch.mm` with upcast if selected: a [t, k], b [k, m] -> [t, m]."""
    if not is_upcast(a):
        return torch.mm(a, b, out=out)
    return _rounded(torch.mm(a.float(), b.float()), a.dtype, out)


def bmm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`torch.bmm` with upcast if selected: a [b, t, k], b [b, k, m] -> [b, t, m]."""
    if not is_upcast(a):
        return torch.bmm(a, b, out=out)
    return _rounded(torch.bmm(a.float(), b.float()), a.dtype, out)


def grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
    """torch's `grouped_mm` with upcast if selected."""
    if not is_upcast(a):
        return torch.nn.functional.grouped_mm(a, b, offs=offs)
    return torch.nn.functional.grouped_mm(a.float(), b.float(), offs=offs).to(a.dtype)


def einsum(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """`torch.einsum` of two operands with upcast if selected."""
    if not is_upcast(a):
        return torch.einsum(equation, a, b)
    return torch.einsum(equation, a.float(), b.float()).to(a.dtype)


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, **options: Any
) -> Tensor:  # Any: torch's own options, passed on
    """torch's SDPA with upcast if selected, also in backward."""
    attend = torch.nn.functional.scaled_dot_product_attention
    if not is_upcast(q):
        return attend(q, k, v, attn_mask=attn_mask, **options)
    mask = (
        attn_mask.float() if attn_mask is not None and attn_mask.dtype != torch.bool else attn_mask
    )
    return attend(q.float(), k.float(), v.float(), attn_mask=mask, **options).to(q.dtype)


def _rounded(product: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    return product.to(dtype) if out is None else out.copy_(product)

"""Triton kernel that adds the ranks' copies of a message with loads from a multicast address.

A load instruction on a multicast address (`multimem.ld_reduce`) makes the NVSwitch read the same
offset of every GPU's buffer, and returns the sum of the values.
"""

from typing import Any

import torch
import triton  # lint: allow optional-import: callers import this module inside functions
import triton.language as tl  # lint: allow optional-import: as above
from torch import Tensor

CHUNK_BYTES = 16
"""Bytes of one load, and alignment of messages."""

CHUNKS = 512
"""Chunks per program of four warps: 4 for each thread. Heuristic, not measured."""

FORMATS = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""Formats in which values are added; bf16 in fp32, rounded once."""

Address = Any  # in a kernel: 64-bit integers
Pointer = Any  # in a kernel: address of a tensor
Count = Any  # in a kernel: an integer
Words = Any  # in a kernel: 32-bit integers


def sum_multicast(multicast_address: int, out: Tensor) -> None:
    """Write to `out` the sum over ranks of the `out.nbytes` bytes from `multicast_address` on,
    which are values of its dtype.

    `out` is contiguous and not empty; its size and both addresses are multiples of `CHUNK_BYTES`.
    """
    num_chunks = out.nbytes // CHUNK_BYTES
    _sum_multicast[(triton.cdiv(num_chunks, CHUNKS),)](
        multicast_address,
        out.view(torch.int32),
        num_chunks,
        FORMAT=FORMATS[out.dtype],
        BLOCK=CHUNKS,
        num_warps=4,
    )


@triton.jit
def _sum_multicast(
    multicast_address: "Address",
    out_at: "Pointer",
    num_chunks: "Count",
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    first = tl.program_id(0) * BLOCK
    # threads beyond the last chunk load it again, because the load has no mask
    chunks = tl.minimum(first + tl.arange(0, BLOCK), num_chunks - 1)
    a, b, c, d = _load_sum(multicast_address + chunks.to(tl.int64) * 16, FORMAT)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (4 * BLOCK,))
    places = 4 * first + tl.arange(0, 4 * BLOCK)
    tl.store(out_at + places, words, places < 4 * num_chunks)


@triton.jit
def _load_sum(addresses: "Address", FORMAT: tl.constexpr) -> "tuple[Words, Words, Words, Words]":
    """Return the four words of the sum over ranks of each chunk."""
    if FORMAT == "bf16":
        a, b, c, d = tl.inline_asm_elementwise(
            "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,l",
            [addresses],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            "multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,l",
            [addresses],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    return a, b, c, d

"""The kernel over a multicast address adds the right bytes of all ranks."""

import os

import pytest
import torch

from megalith.testing.tiny import INTERPRET

if os.environ.get(INTERPRET) != "1":
    pytest.skip(
        "needs several GPUs (tests/parallel/test_nvls.py); tests/kernels/test_gpu.py interprets it",
        allow_module_level=True,
    )

import triton
import triton.language as tl

from megalith.kernels.triton import multicast

RANKS, PART_BYTES = tl.constexpr(3), tl.constexpr(1 << 16)


@triton.jit
def sum_values(addresses, dtype: tl.constexpr):  # type: ignore[no-untyped-def]  # in a kernel
    total = tl.load(addresses.to(tl.pointer_type(dtype))).to(tl.float32)
    for rank in range(1, RANKS):
        total += tl.load((addresses + rank * PART_BYTES).to(tl.pointer_type(dtype))).to(tl.float32)
    return total


@triton.jit
def sum_word(addresses, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]  # in a kernel
    if FORMAT == "f32":
        word = sum_values(addresses, tl.float32).to(tl.int32, bitcast=True)
    else:
        low = sum_values(addresses, tl.bfloat16).to(tl.bfloat16).to(tl.int16, bitcast=True)
        high = sum_values(addresses + 2, tl.bfloat16).to(tl.bfloat16).to(tl.int16, bitcast=True)
        word = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    return word


@triton.jit
def load_sum_of_parts(addresses, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]  # in a kernel
    a = sum_word(addresses, FORMAT)
    b = sum_word(addresses + 4, FORMAT)
    c = sum_word(addresses + 8, FORMAT)
    d = sum_word(addresses + 12, FORMAT)
    return a, b, c, d


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunks", [1, 5, multicast.CHUNKS, multicast.CHUNKS + 1])
def test_bytes_of_all_ranks_are_added(
    chunks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multicast, "_load_sum", load_sum_of_parts)
    values = PART_BYTES.value // dtype.itemsize
    generator = torch.Generator().manual_seed(chunks)
    parts = torch.randint(-40, 40, (RANKS.value, values), generator=generator).to(dtype)
    count = chunks * multicast.CHUNK_BYTES // dtype.itemsize
    for rank in range(RANKS.value):  # rows of a message
        start = rank * count
        written = torch.full((count + 8,), 99.0, dtype=dtype)
        multicast.sum_multicast(
            parts.data_ptr() + start * dtype.itemsize, written[:count].view(1, count)
        )
        assert torch.equal(written[:count], parts[:, start : start + count].sum(0))
        assert (written[count:] == 99).all(), "written beyond the end"

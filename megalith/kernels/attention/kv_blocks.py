"""Blocks of a KV cache: keys or values in the dtype of the model, or in int8 or fp8 with one scale
per token and head.

A scale of its own makes the stored bits of a token independent of the other tokens of its block:
they are the same however a sequence is divided into steps, and nothing is quantized twice.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Number to which the largest absolute value of a row is scaled."""

SCALE_NBYTES = 4
"""Bytes of a scale, which is fp32."""


class KVBlocks(NamedTuple):
    """Keys or values of all blocks of a pool."""

    data: Tensor
    """[blocks, g, T, d]."""

    scales: Tensor | None = None
    """fp32 [blocks, g, T], contiguous: the row of a token and head is its data times its scale.
    None: data is not quantized."""

    def read(self, blocks: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows [*, g, d] in `dtype` of the tokens at int64 [*] blocks and offsets."""
        if self.scales is None:
            return self.data.transpose(1, 2)[blocks, offsets].to(dtype)
        # fp8 cannot be indexed on every device
        rows = self.data.view(torch.uint8).transpose(1, 2)[blocks, offsets]
        scales = self.scales.transpose(1, 2)[blocks, offsets].unsqueeze(-1)
        wide = torch.promote_types(dtype, torch.float32)
        return (rows.view(self.data.dtype).to(wide) * scales.to(wide)).to(dtype)

    def write(self, blocks: Tensor, offsets: Tensor, rows: Tensor) -> None:
        """Store rows [t, g, d] of tokens at int64 [t] blocks and offsets, all different."""
        if self.scales is None:
            self.data.transpose(1, 2).index_put_((blocks, offsets), rows)
            return
        quantized = quantize_rows(rows, self.data.dtype)
        assert quantized.scales is not None
        for stored, new in (
            (self.data.view(torch.uint8), quantized.data.view(torch.uint8)),
            (self.scales, quantized.scales),
        ):
            stored.transpose(1, 2).index_put_((blocks, offsets), new)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, destination)."""
        sources, destinations = (list(numbers) for numbers in zip(*pairs, strict=True))
        data = self.data if self.scales is None else self.data.view(torch.uint8)
        for stored in (data, self.scales):
            if stored is not None:
                stored[destinations] = stored[sources]

    @property
    def num_bytes(self) -> int:
        """Bytes of the data and the scales."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)


def quantize_rows(rows: Tensor, dtype: torch.dtype) -> KVBlocks:
    """Quantize rows [*, d] to int8 or fp8 (e4m3): data [*, d], scales [*].

    The largest absolute value of a row becomes 127 or 448. A row with a NaN or an infinity has a
    scale that is not finite, so that it cannot be mistaken for a valid one.
    """
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    scales = (wide.abs().amax(-1) / LARGEST[dtype]).float()
    scales = scales.clamp(min=torch.finfo(torch.float32).tiny)  # a row of zeros has a divisor
    data = wide / scales.to(wide.dtype).unsqueeze(-1)
    return KVBlocks((data.round_() if dtype == torch.int8 else data).to(dtype), scales)


def allocate_blocks(shape: tuple[int, int, int, int], rows: Tensor, dtype: torch.dtype) -> KVBlocks:
    """Allocate blocks of a shape [blocks, g, T, d] in `dtype` for rows like `rows`."""
    scales = rows.new_empty(shape[:3], dtype=torch.float32) if dtype in LARGEST else None
    return KVBlocks(rows.new_empty(shape, dtype=dtype), scales)


def as_blocks(cache: Tensor | KVBlocks) -> KVBlocks:
    """Return a tensor [blocks, g, T, d] as blocks that are not quantized."""
    return KVBlocks(cache) if isinstance(cache, Tensor) else cache

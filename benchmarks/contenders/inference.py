"""Kernels of the inference engine beside torch's on one device: attention to a paged KV cache, and
matmuls of few rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megalith.kernels.attention.kv_blocks import KVBlocks, as_blocks, quantize_rows
from megalith.kernels.attention.paged import (
    PagedMetadata,
    build_paged_metadata,
    paged_attention,
    paged_latent_attention,
)
from megalith.kernels.attention.scores import PLAIN, Scores
from megalith.kernels.linear import torch_forward
from megalith.kernels.linear_small_batch import small_batch_linear
from megalith.precision.int8 import Int8Weight, multiply_dequantized, quantize_int8
from megalith.testing.tolerance import relative_error

Backends = Mapping[str, Callable[[], Tensor]]
QUANTIZED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class PagedCase:
    """One step: rows of equally many queries and keys."""

    rows: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    d: int
    rope_dim: int = 0
    """Features of the rotated keys of MLA; 0: not MLA."""

    scores: Scores = PLAIN


@dataclass(frozen=True, slots=True)
class InferenceSizes:
    """Steps, and matmuls as (rows, outputs, inputs)."""

    paged: Mapping[str, PagedCase]
    matmuls: Sequence[tuple[int, int, int]]


LARGE = InferenceSizes(
    {
        "decode 64 x 2048": PagedCase(64, 1, 2048, 32, 8, 128),
        "decode 1 x 32768": PagedCase(1, 1, 32768, 32, 8, 128),
        "draft 32 x 4096": PagedCase(32, 5, 4096, 32, 8, 128),
        "window 64 x 8192": PagedCase(64, 1, 8192, 32, 8, 128, scores=Scores(window=1024)),
        "latent 32 x 4096": PagedCase(32, 1, 4096, 128, 1, 512, 64, Scores(scale=0.07)),
    },
    [(rows, *shape) for shape in ((4096, 4096), (14336, 4096)) for rows in (1, 4, 16, 32)],
)
"""Of Llama-3 8B, and of DeepSeek-V3's attention."""

SMALL = InferenceSizes(
    {
        "decode 3 x 40": PagedCase(3, 1, 40, 4, 2, 16),
        "latent 2 x 20": PagedCase(2, 2, 20, 4, 1, 32, 16, Scores(scale=0.2)),
    },
    [(1, 40, 32), (5, 40, 32)],
)
"""For a rehearsal."""

BLOCK_SIZE = 16


def list_inference_backends(
    device: torch.device, dtype: torch.dtype, sizes: InferenceSizes
) -> Iterator[tuple[str, Backends]]:
    """(operation, its backends): "auto" is what the engine uses, in inference mode."""
    for name, case in sizes.paged.items():
        yield f"paged, {name}", paged_backends(case, device, dtype)
    for rows, outputs, inputs in sizes.matmuls:
        yield (
            f"matmul, {rows} x {outputs} x {inputs}",
            matmul_backends(rows, (outputs, inputs), device, dtype),
        )


def paged_backends(case: PagedCase, device: torch.device, dtype: torch.dtype) -> Backends:
    """The kernel with a cache in the dtype of the model, int8 and fp8, and torch's operations."""
    draw = torch.Generator().manual_seed(0)
    per_row = -(-case.keys // BLOCK_SIZE)
    tables = torch.randperm(case.rows * per_row, generator=draw, dtype=torch.int32)
    lengths = [(case.queries, case.keys)] * case.rows
    metadata = build_paged_metadata(tables.view(case.rows, -1).to(device), lengths, BLOCK_SIZE)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(device, dtype)

    tokens, pool = case.rows * case.queries, (case.rows * per_row, case.kv_heads, BLOCK_SIZE)
    widths = (case.d, case.rope_dim) if case.rope_dim else (case.d,)
    queries = [random(tokens, case.heads, width) for width in widths]
    caches = [as_blocks(random(*pool, width)) for width in widths]
    if not case.rope_dim:
        caches.append(as_blocks(random(*pool, case.d)))
    backends: dict[str, Callable[[], Tensor]] = {
        "auto": partial(attend, case, queries, caches, metadata, invariant=True),
        "torch": partial(attend, case, queries, caches, metadata, torch_only=True),
    }
    for name, cache_dtype in QUANTIZED.items():
        blocks = [quantize_rows(cache.data, cache_dtype) for cache in caches]
        backends[name] = partial(attend, case, queries, blocks, metadata, invariant=True)
    return backends


def attend(
    case: PagedCase,
    queries: Sequence[Tensor],
    caches: Sequence[KVBlocks],
    metadata: PagedMetadata,
    *,
    invariant: bool = False,
    torch_only: bool = False,
) -> Tensor:
    """Attention of one step."""
    attend = paged_latent_attention if case.rope_dim else paged_attention
    return attend(
        *queries,
        *caches,
        metadata,
        case.scores,
        batch_invariant=invariant,
        kernel="torch" if torch_only else "auto",
    )


def matmul_backends(
    rows: int, shape: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> Backends:
    """The kernel, torch's matmul, and both with int8 weights."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(rows, shape[1], generator=draw).to(device, dtype)
    w = torch.randn(shape, generator=draw)
    quantized = Int8Weight(*(part.to(device) for part in quantize_int8(w)))
    w = w.to(device, dtype)
    return {
        "auto": lambda: small_batch_linear(x, w),
        "torch": lambda: torch_forward(x, w),
        "int8": lambda: small_batch_linear(x, quantized.values, quantized.scales),
        "int8 by torch": lambda: multiply_dequantized(x, quantized),
    }


def largest_error(backends: Backends) -> float:
    """The largest relative error of the kernel against torch's operations on the same inputs."""
    pairs = [("auto", "torch"), ("int8", "int8 by torch")]
    return max(
        relative_error(backends[ours]().cpu(), backends[reference]().cpu())
        for ours, reference in pairs
        if reference in backends
    )

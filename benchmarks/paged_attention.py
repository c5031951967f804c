"""Paged attention beside gathering + `attention`, and beside torch's SDPA on contiguous keys, on
this CPU.

    python benchmarks/paged_attention.py [--threads 2] [--rounds 21] [--only decode,gqa] [--cpu]

All contenders take turns in one process. A line shows the time of the paged kernel, the rate at
which it reads keys and values, and how many times as fast it is as each other contender: the median
over the rounds of the ratio of two times of the same round, and its quartiles; `--cpu`: of CPU
times. int8 and fp8: the paged kernel with a quantized cache. SDPA reads keys and
values that lie in one tensor per row, which a paged cache does not have: it is the bound that the
kernel is compared with.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from paired import take_turns, times_as_fast
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megalith.kernels.attention.dispatch import attention, visible_key_lengths
from megalith.kernels.attention.kv_blocks import quantize_rows
from megalith.kernels.attention.paged import (
    GatheredKeys,
    PagedMetadata,
    build_paged_metadata,
    paged_attention,
    paged_latent_attention,
)
from megalith.kernels.attention.scores import PLAIN, Scores
from megalith.kernels.cpu_threads import keep_freed_memory
from megalith.kernels.packed import seq_params_from_queries

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
QUANTIZED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
Contenders = dict[str, Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Case:
    """One step: rows of equally many queries and keys."""

    rows: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    d: int = 64
    rope_dim: int = 0
    """Features of the rotated keys of MLA; 0: not MLA."""

    block_size: int = 16
    scores: Scores = PLAIN


CASES = {
    "decode": Case(16, 1, 1000, 8, 8),
    "decode_long": Case(1, 1, 32000, 8, 8),
    "gqa": Case(16, 1, 1000, 32, 8, 128),
    "window": Case(16, 1, 4000, 8, 8, scores=Scores(window=512)),
    "draft": Case(16, 5, 1000, 8, 8),
    "chunk_16": Case(4, 16, 1000, 8, 8),
    "chunk_32": Case(4, 32, 1000, 8, 8),
    "chunk_64": Case(4, 64, 1000, 8, 8),
    "chunk_256": Case(1, 256, 1000, 8, 8),
    "gqa_chunk_16": Case(1, 16, 1000, 32, 8, 128),
    "gqa_chunk_64": Case(1, 64, 1000, 32, 8, 128),
    "gqa_chunk_256": Case(1, 256, 1000, 32, 8, 128),
    "mla": Case(16, 1, 1000, 16, 1, 512, 64, scores=Scores(scale=0.07)),
}


def build_contenders(case: Case, dtype: torch.dtype) -> Contenders:
    """Return the contenders of a case, on random blocks of a pool."""
    generator = torch.Generator().manual_seed(0)
    per_row = -(-case.keys // case.block_size)
    tables = torch.randperm(case.rows * per_row, generator=generator, dtype=torch.int32)
    lengths = [(case.queries, case.keys)] * case.rows
    metadata = build_paged_metadata(tables.view(case.rows, -1), lengths, case.block_size)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    pool = case.rows * per_row, case.kv_heads, case.block_size
    q, cache = random(case.rows * case.queries, case.heads, case.d), random(*pool, case.d)
    if case.rope_dim:
        q_rope, rope_cache = random(*q.shape[:2], case.rope_dim), random(*pool, case.rope_dim)
        run = partial(paged_latent_attention, q, q_rope, cache, rope_cache, metadata, case.scores)

        def quantized(dtype: torch.dtype) -> Callable[..., object]:
            latents, rotated = (quantize_rows(one, dtype) for one in (cache, rope_cache))
            return partial(
                paged_latent_attention, q, q_rope, latents, rotated, metadata, case.scores
            )

        joined = torch.cat([cache, rope_cache], dim=-1)
        queries = torch.cat([q, q_rope], dim=-1)
        others = _gathering(queries, joined, cache, metadata, case)
    else:
        values = random(*pool, case.d)
        run = partial(paged_attention, q, cache, values, metadata, case.scores)

        def quantized(dtype: torch.dtype) -> Callable[..., object]:
            blocks = quantize_rows(cache, dtype), quantize_rows(values, dtype)
            return partial(paged_attention, q, *blocks, metadata, case.scores)

        others = _gathering(q, cache, values, metadata, case)
    return {
        "paged": partial(run, batch_invariant=True),
        **{name: partial(quantized(d), batch_invariant=True) for name, d in QUANTIZED.items()},
        "torch": partial(run, kernel="torch"),
        **others,
    }


def gather_and_attend(
    q: Tensor, keys: Tensor, values: Tensor, metadata: PagedMetadata, scores: Scores
) -> Tensor:
    """Gather the visible keys and values of all rows, and attend to them."""
    lengths = visible_key_lengths(metadata.lengths, scores)
    gathered = GatheredKeys.locate(metadata, lengths)
    k, v = (gathered.read(cache, q.dtype) for cache in (keys, values))
    return attention(q, k, v, seq_params_from_queries(list(lengths)), scores)


def _gathering(
    q: Tensor, keys: Tensor, values: Tensor, metadata: PagedMetadata, case: Case
) -> Contenders:
    """Return gather + attention, and SDPA on keys and values that were gathered before."""
    contenders: Contenders = {
        "gather": partial(gather_and_attend, q, keys, values, metadata, case.scores)
    }
    if case.scores.window is None:
        k, v = (
            torch.randn(case.rows, case.kv_heads, case.keys, x.shape[3]).to(q.dtype)
            for x in (keys, values)
        )
        by_row = q.view(case.rows, case.queries, case.heads, -1).transpose(1, 2).contiguous()
        mask = None
        if case.queries > 1:
            mask = torch.ones(case.queries, case.keys, dtype=torch.bool)
            mask = mask.tril(case.keys - case.queries)
        contenders["sdpa"] = partial(
            scaled_dot_product_attention, by_row, k, v, attn_mask=mask, enable_gqa=True
        )
    return contenders


def measure(name: str, dtype_name: str, rounds: int, *, uses_cpu_time: bool) -> str:
    """Return the line of one case."""
    case, dtype = CASES[name], DTYPES[dtype_name]
    turns = take_turns(build_contenders(case, dtype), rounds=rounds, warmup=3)
    seconds = turns.cpu_seconds if uses_cpu_time else turns.seconds
    keys = case.keys if case.scores.window is None else case.scores.window
    widths = case.d + case.rope_dim if case.rope_dim else 2 * case.d
    nbytes = case.rows * keys * case.kv_heads * widths * dtype.itemsize
    typical = statistics.median(seconds["paged"])
    ratios = [
        f"{other} {times_as_fast(seconds['paged'], seconds[other])}"
        for other in seconds
        if other != "paged"
    ]
    rate = nbytes / typical / 1e9
    return f"{name:12} {dtype_name} {typical * 1e3:8.2f} ms {rate:6.1f} GB/s  {'; '.join(ratios)}"


def main() -> None:
    """Measure the cases of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--dtype", default="fp32,bf16")
    parser.add_argument("--cpu", action="store_true", help="compare CPU times")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        for name in options.only.split(","):
            for dtype_name in options.dtype.split(","):
                line = measure(name, dtype_name, options.rounds, uses_cpu_time=options.cpu)
                print(line, flush=True)


if __name__ == "__main__":
    main()

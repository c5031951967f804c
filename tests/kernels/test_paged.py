"""Paged attention matches gathered attention, and its numba backend does so bitwise for every
division of the work."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config.kernels import BackendName
from megalith.errors import ConfigError
from megalith.kernels import cpu_threads
from megalith.kernels.attention import paged
from megalith.kernels.attention.dispatch import reference_attention
from megalith.kernels.attention.kv_blocks import (
    KVBlocks,
    allocate_blocks,
    quantize_rows,
)
from megalith.kernels.attention.paged import (
    PagedMetadata,
    build_paged_metadata,
    paged_attention,
    paged_latent_attention,
    plan_tiles,
    store,
    unsupported_reason,
)
from megalith.kernels.attention.scores import PLAIN, Scores, WeightDropout
from megalith.kernels.packed import seq_params_from_queries
from tests.cases import loop_over

NEEDS_LOOPS = pytest.mark.skipif(cpu_threads.openmp() is None, reason="torch has no GOMP interface")

SCORES = {
    "full": Scores(),
    "window": Scores(window=70),
    "one_key": Scores(window=1),
    "chunked": Scores(window=150, chunked=True),
    "softcap": Scores(softcap=2.0, scale=0.3),
    "off_by_one": Scores(off_by_one=True, window=200),
}
LENGTHS = [(1, 300), (5, 131), (0, 40), (20, 20), (1, 1), (3, 258), (33, 290)]


@dataclass(frozen=True)
class Step:
    """Random queries, keys and values of some rows, contiguous and in blocks."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_cache: Any  # Tensor, or KVBlocks of int8 or fp8
    value_cache: Any
    metadata: PagedMetadata

    def reference(self, scores: Scores, sinks: Tensor | None) -> Tensor:
        """Attention to the contiguous keys, in float64."""
        lengths = [(q, k if q else 0) for q, k in self.metadata.lengths]
        counts = [k for _, k in self.metadata.lengths]
        keys, values = (
            torch.cat([part[: kept[1]] for part, kept in zip(x.split(counts), lengths)])
            for x in (self.k, self.v)
        )
        inputs = (x.double() for x in (self.q, keys, values))
        sinks = None if sinks is None else sinks.double()
        return reference_attention(*inputs, seq_params_from_queries(lengths), scores, sinks)


def build_step(
    lengths: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    d: int = 20,
    d_v: int = 36,
    block_size: int = 3,
    dtype: torch.dtype = torch.float64,
    cache_dtype: torch.dtype | None = None,
    scores: Scores = PLAIN,
    seed: int = 0,
) -> Step:
    """Return a step whose blocks that no query needs, and the rest of the last ones, hold NaN.

    With a `cache_dtype`, int8 or fp8, k and v are what the cache stores.
    """
    generator = torch.Generator().manual_seed(seed)
    num_keys = sum(keys for _, keys in lengths)
    k = torch.randn(num_keys, kv_heads, d, generator=generator, dtype=torch.float64).to(dtype)
    v = torch.randn(num_keys, kv_heads, d_v, generator=generator, dtype=torch.float64).to(dtype)
    num_queries = sum(queries for queries, _ in lengths)
    q = torch.randn(num_queries, heads, d, generator=generator, dtype=torch.float64).to(dtype)
    counts = [-(-keys // block_size) for _, keys in lengths]
    pool = torch.randperm(sum(counts) + 5, generator=generator, dtype=torch.int32)
    tables = torch.full((len(lengths), max(counts) + 1), -1, dtype=torch.int32)
    caches = [
        fill_with_nan(
            allocate_blocks((len(pool), kv_heads, block_size, width), q, cache_dtype or dtype)
        )
        for width in (d, d_v)
    ]
    starts = 0, 0
    for row, ((queries, keys), count) in enumerate(zip(lengths, counts, strict=True)):
        block, token = starts
        blocks = pool[block : block + count]
        first = first_needed(keys - queries, scores)
        positions = torch.arange(first // block_size * block_size, keys)
        slots = blocks[positions // block_size].long() * block_size + positions % block_size
        for cache, contiguous in zip(caches, (k, v), strict=True):
            store(cache, contiguous[token + positions], slots)
        tables[row, first // block_size : count] = blocks[first // block_size :]
        starts = block + count, token + keys
    if cache_dtype is not None:
        k, v = (dequantize(quantize_rows(x, cache_dtype)) for x in (k, v))
    else:
        caches = [cache.data for cache in caches]
    return Step(q, k, v, *caches, build_paged_metadata(tables, lengths, block_size))


def fill_with_nan(blocks: KVBlocks) -> KVBlocks:
    """Fill blocks with NaN; quantized ones have NaN scales."""
    for tensor in blocks:
        if tensor is not None and tensor.dtype.itemsize > 1:
            tensor.fill_(math.nan)
    return blocks


def dequantize(rows: KVBlocks) -> Tensor:
    """Return rows [t, g, d] in float64."""
    assert rows.scales is not None
    return rows.data.double() * rows.scales.double().unsqueeze(-1)


def first_needed(position: int, scores: Scores) -> int:
    """Return the first key that the query at `position` sees."""
    if scores.window is None:
        return 0
    if scores.chunked:
        return position // scores.window * scores.window
    return max(0, position - scores.window + 1)


def run(step: Step, scores: Scores, sinks: Tensor | None = None, kernel: str = "auto") -> Tensor:
    invariant = kernel == "invariant"
    return paged_attention(
        step.q,
        step.key_cache,
        step.value_cache,
        step.metadata,
        scores,
        sinks,
        batch_invariant=invariant,
        kernel="auto" if invariant else kernel,  # type: ignore[arg-type]
    )


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@loop_over("name", SCORES)
def test_float64_matches_reference_attention(name: str) -> None:
    scores = SCORES[name]
    for seed, block_size in enumerate((1, 3, 16)):
        step = build_step(LENGTHS, block_size=block_size, scores=scores, seed=seed)
        sinks = None if scores.off_by_one else torch.randn(4, dtype=torch.float64)
        for given in (None, sinks):
            expected = step.reference(scores, given)
            for kernel in ("auto", "torch", "reference", "invariant"):
                actual = run(step, scores, given, kernel)
                torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


QUANTIZED = [torch.int8, torch.float8_e4m3fn]


@loop_over("name", SCORES)
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_quantized_cache_gives_the_attention_to_dequantized_keys(
    name: str, cache_dtype: torch.dtype
) -> None:
    scores = SCORES[name]
    tolerances = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2}
    for seed, (dtype, tolerance) in enumerate(tolerances.items()):
        step = build_step(
            LENGTHS,
            block_size=(1, 3, 16)[seed],
            dtype=dtype,
            cache_dtype=cache_dtype,
            scores=scores,
        )
        sinks = None if scores.off_by_one else torch.randn(4, dtype=dtype)
        kernels = ["auto", "torch", "reference", "invariant"]
        if dtype != torch.float64 and cpu_threads.openmp() is not None:
            kernels.append("numba")
        for kernel in kernels:
            actual = run(step, scores, sinks, kernel)
            assert actual.dtype == dtype
            expected = step.reference(scores, sinks)
            torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance)


@NEEDS_LOOPS
@loop_over("name", SCORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numba_matches_reference_attention(name: str, dtype: torch.dtype) -> None:
    # bf16 keeps 8 bits of an output of about 1; the rest is computed in fp32
    scores, tolerance = SCORES[name], 3e-6 if dtype == torch.float32 else 2e-2
    shapes = [(4, 2, 20, 36), (8, 1, 64, 16), (3, 3, 48, 130), (6, 2, 7, 5)]
    for seed, (heads, kv_heads, d, d_v) in enumerate(shapes):
        step = build_step(
            LENGTHS, heads=heads, kv_heads=kv_heads, d=d, d_v=d_v, dtype=dtype, scores=scores
        )
        sinks = torch.randn(heads) if seed % 2 and not scores.off_by_one else None
        for kernel in ("auto", "numba", "invariant"):
            actual = run(step, scores, sinks, kernel)
            assert actual.dtype == dtype
            expected = step.reference(scores, sinks)
            torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance)


def select(step: Step, lengths: list[tuple[int, int]]) -> Step:
    """Return the step whose rows have the given (queries, keys), of the same sequences; its
    queries are those of the complete sequences."""
    tokens = []
    start = 0
    for (queries, keys), (_, total) in zip(lengths, step.metadata.lengths, strict=True):
        tokens.append(torch.arange(start + keys - queries, start + keys))
        start += total
    metadata = build_paged_metadata(step.metadata.block_tables, lengths, step.metadata.block_size)
    return replace(step, q=step.q[torch.cat(tokens)], metadata=metadata)


@NEEDS_LOOPS
@loop_over("name", SCORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_query_has_the_same_bits_in_every_step(name: str, dtype: torch.dtype) -> None:
    check_bits(SCORES[name], dtype, None, (2, 4, 8))


@NEEDS_LOOPS
@loop_over("name", ["full", "window"])
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_query_of_a_quantized_cache_has_the_same_bits_in_every_step(
    name: str, cache_dtype: torch.dtype
) -> None:
    check_bits(SCORES[name], torch.bfloat16, cache_dtype, (2,))


def check_bits(
    scores: Scores, dtype: torch.dtype, cache_dtype: torch.dtype | None, kv_heads: tuple[int, ...]
) -> None:
    """Check that a query has the same bits for every division of its sequence into steps, number
    of threads and block size."""
    length = 450
    for num_heads in kv_heads:
        expected = None
        for block_size in (1, 3, 16):
            # the complete sequence as one step, of which every query is compared
            step = build_step(
                [(length, length)],
                heads=8,
                kv_heads=num_heads,
                dtype=dtype,
                cache_dtype=cache_dtype,
                block_size=block_size,
                seed=1,
            )
            for threads in (1, 2):
                torch.set_num_threads(threads)
                complete = run(step, scores, None, "invariant")
                expected = complete if expected is None else expected
                assert torch.equal(complete, expected), (block_size, threads)
                steps = [(1, 450), (1, 384), (5, 386), (64, 321), (9, 129)]
                for queries, keys in steps if threads == 1 else steps[2:3]:
                    part = run(select(step, [(queries, keys)]), scores, None, "numba")
                    assert torch.equal(part, expected[keys - queries : keys]), (queries, threads)


@NEEDS_LOOPS
def test_row_has_the_same_bits_in_every_batch() -> None:
    lengths = [(1, 200 + 7 * row) for row in range(64)]
    step = build_step(lengths, heads=8, kv_heads=8, d=16, d_v=16, dtype=torch.float32)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        batch = run(step, Scores(), None, "numba")
        for row in (0, 31, 63):
            table = step.metadata.block_tables[row : row + 1]
            alone = replace(
                step,
                q=step.q[row : row + 1],
                metadata=build_paged_metadata(table, lengths[row : row + 1], 3),
            )
            assert torch.equal(run(alone, Scores(), None, "numba"), batch[row : row + 1])


@NEEDS_LOOPS
def test_threads_split_segments_of_one_sequence() -> None:
    step = build_step([(2, 2000)], heads=2, kv_heads=1, d=16, d_v=16, dtype=torch.float32)
    expected = run(step, Scores(), None, "numba")
    plan = plan_tiles(((2, 2000),), heads=1, shared=2, window=None, chunked=False, parts=7)
    assert plan.splits.tolist() == [[0, 0, 0]]
    assert plan.bounds[:, 1].tolist() == [0, 2, 4, 6, 9, 11, 13, 0]
    # as many parts as a machine of many cores has, each processed by the threads of this one
    patched = pytest.MonkeyPatch()
    with patched.context() as patch:
        for parts in (2, 3, 7, 40):
            patch.setattr(
                paged,
                "plan_tiles",
                lambda *args, parts=parts, **kwargs: plan_tiles(
                    *args, **{**kwargs, "parts": parts}
                ),
            )
            assert torch.equal(run(step, Scores(), None, "numba"), expected), parts


@loop_over("seed", range(30))
def test_parts_cover_every_unit_once(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    lengths = [(queries := draw(0, 80), queries + draw(0, 900)) for _ in range(draw(1, 9))]
    lengths.append((1, 5))
    heads, window = draw(1, 5), draw(1, 400) if draw(0, 2) else None
    plan = plan_tiles(
        tuple(lengths),
        heads=heads,
        shared=draw(1, 9),
        window=window,
        chunked=draw(0, 2) == 1,
        parts=draw(1, 12),
    )
    units = [(tile, unit) for tile, row in enumerate(plan.tiles) for unit in range(row[5] * heads)]
    bounds = [tuple(bound) for bound in plan.bounds.tolist()]
    assert bounds[0] == (0, 0) and bounds[-1] == (len(plan.tiles), 0)
    assert bounds == sorted(bounds)
    assert all(bound in units for bound in bounds[:-1])
    divided = {
        (tile, unit // plan.tiles[tile][5])
        for tile, unit in bounds[1:-1]
        if unit % plan.tiles[tile][5]
    }
    assert {(tile, head) for tile, head, _ in plan.splits.tolist()} == divided
    assert sum(row[2] for row in plan.tiles) == sum(queries for queries, _ in lengths)


@NEEDS_LOOPS
@pytest.mark.parametrize("kernel", ["numba", "torch", "reference"])
def test_nan_of_freed_block_that_a_query_needs_reaches_the_output(kernel: str) -> None:
    """Fault 11: a block of a sliding window is freed one token early."""
    scores = Scores(window=70)
    step = build_step([(1, 300)], dtype=torch.float32, block_size=1, scores=scores)
    assert run(step, scores, None, kernel).isfinite().all()
    early = step.metadata.block_tables.clone()
    early[0, 300 - 70] = step.metadata.block_tables.max() + 1  # a block with NaN
    freed = replace(step, metadata=replace(step.metadata, block_tables=early))
    free_blocks = set(range(len(step.key_cache))) - set(step.metadata.block_tables[0].tolist())
    early[0, 300 - 70] = free_blocks.pop()
    assert run(freed, scores, None, kernel).isnan().all()


@NEEDS_LOOPS
def test_wrong_segment_boundary_changes_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments that start at the first visible key instead of at fixed positions are detected."""
    scores, lengths = Scores(window=300), [(1, 1000)]
    step = build_step(lengths, heads=8, kv_heads=2, d=16, d_v=16, dtype=torch.float32, block_size=1)
    expected = run(step, scores, None, "numba")
    shifted = replace(
        step,
        metadata=build_paged_metadata(step.metadata.block_tables[:, 60:], [(1, 940)], 1),
    )
    actual = run(shifted, scores, None, "numba")
    torch.testing.assert_close(actual, expected)
    assert not torch.equal(actual, expected)


@loop_over("dtype", [torch.float32, torch.bfloat16, torch.float64])
@loop_over("kernel", ["auto", "torch"])
def test_store_writes_only_its_slots(dtype: torch.dtype, kernel: BackendName) -> None:
    cache = torch.full((6, 2, 3, 4, 5), math.nan, dtype=dtype)
    new = torch.randn(7, 4, 8).to(dtype)
    slots = torch.randperm(24)[:7]
    store(cache[:, :, 1], new[:, 1:3, 2:7], slots, kernel=kernel)
    flat = cache[:, :, 1].transpose(1, 2).flatten(0, 1)
    assert torch.equal(flat[slots], new[:, 1:3, 2:7])
    assert cache.isnan().sum() == cache.numel() - 7 * 10


def test_store_and_attention_support_a_cache_that_is_a_view_of_the_pool() -> None:
    step = build_step(LENGTHS, dtype=torch.float32)
    pool = torch.full((len(step.key_cache), 2, 2, 3, 36), math.nan)
    views = pool[:, 0, ..., :20], pool[:, 1]
    for view, cache in zip(views, (step.key_cache, step.value_cache), strict=True):
        view.copy_(cache)
    strided = replace(step, key_cache=views[0], value_cache=views[1])
    for kernel in ("auto", "torch", "invariant"):
        assert torch.equal(run(strided, Scores(), None, kernel), run(step, Scores(), None, kernel))


@loop_over("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_latent_attention_matches_attention_with_joined_keys(dtype: torch.dtype) -> None:
    tolerance = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2}[dtype]
    for scores in (Scores(scale=0.1), Scores(scale=0.2, window=90, softcap=3.0)):
        step = build_step(LENGTHS, heads=6, kv_heads=1, d=56, d_v=40, dtype=dtype, scores=scores)
        latents, rope = step.key_cache[..., :40].clone(), step.key_cache[..., 40:].clone()
        expected = replace(step, v=step.k[..., :40]).reference(scores, None)
        queries = step.q[..., :40].contiguous(), step.q[..., 40:].contiguous()
        for kernel in ("auto", "torch", "reference"):
            for invariant in (False, True):
                actual = paged_latent_attention(
                    *queries,
                    latents,
                    rope,
                    step.metadata,
                    scores,
                    batch_invariant=invariant,
                    kernel=kernel,  # type: ignore[arg-type]
                )
                torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance)


@loop_over("cache_dtype", QUANTIZED)
def test_quantized_latents_and_rotated_keys_have_scales_of_their_own(
    cache_dtype: torch.dtype,
) -> None:
    scores = Scores(scale=0.01)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 3e-6), (torch.bfloat16, 2e-2)):
        step = build_step(LENGTHS, heads=6, kv_heads=1, d=56, d_v=40, dtype=dtype)
        step.k[..., 40:] *= 30
        step.key_cache[..., 40:] *= 30
        caches = [quantize_rows(part, cache_dtype) for part in split_latent(step.key_cache)]
        latents, rotated = (
            dequantize(quantize_rows(part, cache_dtype)) for part in split_latent(step.k)
        )
        expected = replace(step, k=torch.cat([latents, rotated], dim=-1), v=latents)
        for kernel in ("auto", "torch", "reference"):
            for invariant in (False, True):
                actual = paged_latent_attention(
                    *split_latent(step.q),
                    *caches,
                    step.metadata,
                    scores,
                    batch_invariant=invariant,
                    kernel=kernel,  # type: ignore[arg-type]
                )
                torch.testing.assert_close(
                    actual.double(), expected.reference(scores, None), rtol=0, atol=tolerance
                )


def split_latent(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Split [..., 56] into latents [..., 40] and rotated keys [..., 16]."""
    return rows[..., :40].contiguous(), rows[..., 40:].contiguous()


@NEEDS_LOOPS
def test_latent_query_has_the_same_bits_in_every_step() -> None:
    scores = Scores(scale=0.1)
    expected = None
    for block_size, threads in ((1, 1), (3, 2), (16, 1), (16, 2)):
        torch.set_num_threads(threads)
        step = build_step(
            [(400, 400)],
            heads=6,
            kv_heads=1,
            d=56,
            d_v=40,
            block_size=block_size,
            dtype=torch.float32,
        )
        caches = step.key_cache[..., :40].clone(), step.key_cache[..., 40:].clone()

        def attend(part: Step, caches: tuple[Tensor, Tensor] = caches) -> Tensor:
            queries = part.q[..., :40], part.q[..., 40:]
            return paged_latent_attention(
                *queries, *caches, part.metadata, scores, batch_invariant=True
            )

        complete = attend(step)
        expected = complete if expected is None else expected
        assert torch.equal(complete, expected)
        for queries, keys in ((1, 400), (5, 260), (64, 300)):
            part = attend(select(step, [(queries, keys)]))
            assert torch.equal(part, expected[keys - queries : keys])


@loop_over("case", [(torch.int8, 0.011), (torch.float8_e4m3fn, 0.035)])
def test_attention_error_of_a_quantized_cache(case: tuple[torch.dtype, float]) -> None:
    """The root mean square of the error, relative to that of the output with an fp32 cache, for
    normally distributed queries, keys and values of 64 features."""
    cache_dtype, bound = case
    sizes: dict[str, Any] = {"d": 64, "d_v": 64, "dtype": torch.float32}
    plain = build_step(LENGTHS, **sizes)
    quantized = build_step(LENGTHS, **sizes, cache_dtype=cache_dtype)
    expected = run(plain, Scores()).double()
    for kernel in ("auto", "torch", "invariant"):
        error = run(quantized, Scores(), None, kernel).double() - expected
        relative = float(error.square().mean().sqrt() / expected.square().mean().sqrt())
        assert bound / 2 < relative < bound, relative


@loop_over("cache_dtype", QUANTIZED)
def test_rows_that_cannot_be_quantized(cache_dtype: torch.dtype) -> None:
    tiny, huge = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    rows = torch.tensor([[0.0, 0.0], [tiny, -tiny / 4], [huge, -huge], [1.0, math.nan]])
    rows = torch.cat([rows, torch.tensor([[math.inf, 1.0], [1.0, -math.inf]])])
    restored = dequantize(quantize_rows(rows, cache_dtype))
    assert torch.equal(restored[0], torch.zeros(2, dtype=torch.float64))
    assert bool((restored[1].abs() <= tiny).all())
    torch.testing.assert_close(restored[2], rows[2].double(), rtol=1e-6, atol=0)
    assert not restored[3:].isfinite().any(dim=1).any()


def test_step_without_queries_gives_no_output() -> None:
    step = build_step([(0, 10), (0, 3)])
    for kernel in ("auto", "torch", "reference"):
        assert run(step, Scores(), None, kernel).shape == (0, 4, 36)


def test_unsupported_scores_are_reported() -> None:
    assert unsupported_reason(Scores(window=3, softcap=2.0, off_by_one=True)) is None
    assert "relative position bias" in str(unsupported_reason(Scores(relative=8)))
    assert "attention mask" in str(unsupported_reason(Scores(), has_attention_mask=True))
    assert "not causal" in str(unsupported_reason(Scores(causal=False)))
    assert "dropout" in str(unsupported_reason(Scores(dropout=WeightDropout(0.1, 1, 0))))
    step = build_step([(1, 4)])
    with pytest.raises(ConfigError, match="relative position bias"):
        run(step, Scores(relative=8))
    with pytest.raises(ConfigError, match="kernel=numba does not support float64"):
        run(step, Scores(), None, "numba")
    quantized = build_step([(1, 4)], cache_dtype=torch.int8)
    message = (
        "float64 queries on cpu with caches in int8: it takes fp32 or bf16 .* Use kernel=torch"
    )
    with pytest.raises(ConfigError, match=message):
        run(quantized, Scores(), None, "numba")

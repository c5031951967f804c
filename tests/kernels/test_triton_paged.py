"""Triton kernels of the paged KV cache match attention to contiguous keys, for every kind of
scores and cache, and give the same bits for every division of the work."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.errors import ConfigError
from megalith.kernels.attention import paged
from megalith.kernels.attention.kv_blocks import KVBlocks, allocate_blocks, quantize_rows
from megalith.kernels.attention.paged import (
    PagedKeys,
    build_paged_metadata,
    merge_partial_attention,
    paged_attention,
    paged_latent_attention,
    store,
)
from megalith.kernels.attention.scores import Scores
from megalith.plan.serving.cache_layout import TokenShard
from megalith.testing.tiny import triton_device
from megalith.testing.tolerance import BF16, EXACT, FP32, Tolerance, assert_equals
from tests.kernels.test_paged import (
    QUANTIZED,
    Step,
    build_step,
    dequantize,
    fill_with_nan,
    first_needed,
    select,
    split_latent,
)
from tests.kernels.triton_interpreter import patch_language_once, use_triton

DEVICE = triton_device()
if DEVICE is None:
    pytest.skip(
        "needs an NVIDIA GPU; tests/kernels/test_gpu.py interprets these", allow_module_level=True
    )
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

SCORES = {
    "full": Scores(),
    "window": Scores(window=17),
    "one_key": Scores(window=1),
    "chunked": Scores(window=20, chunked=True),
    "softcap": Scores(softcap=2.0, scale=0.3),
    "off_by_one": Scores(off_by_one=True, window=33),
}
LENGTHS = [(1, 40), (0, 9), (3, 20), (9, 9)]
"""Decoding, a row without queries, drafts, a prefill."""

SEGMENT = 32
"""Tokens per segment in the interpreter, so that few keys have several segments."""

SPLIT, WHOLE = 1 << 20, 0
"""Programs below which segments are processed in parallel: always, never."""

F32, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def select_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from megalith.kernels.triton import paged_attention as kernels

    use_triton(monkeypatch)
    if DEVICE is not None and DEVICE.type == "cpu":
        patch_language_once(monkeypatch)
        monkeypatch.setattr(kernels, "SEGMENT", SEGMENT)


def set_programs(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr("megalith.kernels.triton.paged_attention.MIN_PROGRAMS", number)


def move(step: Step) -> Step:
    """Return the step with queries, caches and metadata on the device."""
    metadata = step.metadata
    moved = build_paged_metadata(
        metadata.block_tables.to(DEVICE), metadata.lengths, metadata.block_size
    )
    caches = [move_cache(cache) for cache in (step.key_cache, step.value_cache)]
    return replace(
        step, q=step.q.to(DEVICE), key_cache=caches[0], value_cache=caches[1], metadata=moved
    )


def move_cache(cache: Any) -> Any:
    """Return a tensor, or KVBlocks, on the device."""
    if isinstance(cache, Tensor):
        return cache.to(DEVICE)
    return KVBlocks(*(None if part is None else part.to(DEVICE) for part in cache))


def run(step: Step, scores: Scores, sinks: Tensor | None = None) -> Tensor:
    moved = move(step)
    sinks = None if sinks is None else sinks.to(DEVICE)
    caches = moved.key_cache, moved.value_cache
    return paged_attention(moved.q, *caches, moved.metadata, scores, sinks, kernel="triton").cpu()


def tolerance_of(dtype: torch.dtype) -> Tolerance:
    return FP32 if dtype == F32 else BF16


def check(step: Step, scores: Scores, sinks: Tensor | None = None) -> None:
    actual = run(step, scores, sinks)
    assert actual.dtype == step.q.dtype
    expected = step.reference(scores, sinks)
    assert_equals(str(scores), actual, expected, tolerance_of(step.q.dtype))


def build(scores: Scores = SCORES["full"], **options: Any) -> Step:
    lengths = options.pop("lengths", LENGTHS)
    sizes = {"heads": 3, "kv_heads": 1, "dtype": F32, "scores": scores, "block_size": 3}
    return build_step(lengths, **{**sizes, **options})


def slow(*values: Any) -> Any:  # a ParameterSet of pytest
    """Parameters of a test that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


QUICK = {
    *(("full", SPLIT), ("window", WHOLE), ("chunked", WHOLE), ("softcap", WHOLE)),
    ("off_by_one", SPLIT),
}
CASES = [
    (name, number) if (name, number) in QUICK else slow(name, number)
    for name in SCORES
    for number in (SPLIT, WHOLE)
]


@pytest.mark.parametrize(("name", "number"), CASES)
def test_attention_matches_the_reference(
    name: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_programs(monkeypatch, number)
    scores = SCORES[name]
    sinks = None if scores.off_by_one or number == WHOLE else torch.tensor([0.3, -2.0, 4.0])
    block_size = 16 if number == WHOLE else 3
    check(build(scores, block_size=block_size, seed=len(name)), scores, sinks)


SHAPES = [(6, 2, 7, 5), slow((2, 2, 48, 70)), slow((40, 1, 20, 8))]
"""Query heads, key/value heads, features of keys and of values; 40 heads need several tiles."""


@pytest.mark.parametrize("shape", SHAPES)
def test_odd_shapes_match_the_reference(shape: tuple[int, int, int, int]) -> None:
    heads, kv_heads, d, d_v = shape
    sizes = {"heads": heads, "kv_heads": kv_heads, "d": d, "d_v": d_v}
    check(build(**sizes, block_size=1, lengths=[(1, 20), (9, 11)]), SCORES["full"])


@pytest.mark.parametrize("dtype", [slow(BFLOAT), slow(HALF)])
def test_narrow_dtypes_match_the_reference(dtype: torch.dtype) -> None:
    check(build(dtype=dtype), SCORES["full"], torch.zeros(3, dtype=dtype))


INT8, FP8 = QUANTIZED


@pytest.mark.parametrize(
    ("cache_dtype", "dtype"), [(INT8, BFLOAT), (FP8, F32), slow(INT8, F32), slow(FP8, BFLOAT)]
)
def test_quantized_cache_gives_the_attention_to_dequantized_keys(
    cache_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    scores = SCORES["window"]
    check(build(scores, cache_dtype=cache_dtype, dtype=dtype), scores)


@pytest.mark.parametrize("cache_dtype", [slow(None), INT8, slow(FP8)])
def test_latent_attention_matches_attention_with_joined_keys(
    cache_dtype: torch.dtype | None,
) -> None:
    scores = Scores(scale=0.05, window=30, softcap=3.0)
    sizes = {"heads": 6, "d": 56, "d_v": 40, "lengths": [(1, 50), (4, 20)]}
    step = build(scores, **sizes)
    latents, rotated = split_latent(step.k)
    caches: list[Any] = list(split_latent(step.key_cache))
    if cache_dtype is not None:
        caches = [quantize_rows(part, cache_dtype) for part in caches]
        latents, rotated = (
            dequantize(quantize_rows(part, cache_dtype)) for part in (latents, rotated)
        )
    expected = replace(step, k=torch.cat([latents, rotated], dim=-1), v=latents)
    q, metadata = step.q.to(DEVICE), move(step).metadata
    actual = paged_latent_attention(
        q[..., :40],
        q[..., 40:],
        *(move_cache(cache) for cache in caches),
        metadata,
        scores,
        kernel="triton",
    )
    assert_equals("latent", actual, expected.reference(scores, None), FP32)


def test_cache_may_be_a_view_of_the_pool_and_queries_of_a_larger_tensor() -> None:
    step = build(lengths=[(1, 20), (3, 5)])
    pool = torch.full((len(step.key_cache), 2, 1, 3, 36), math.nan)
    views = pool[:, 0, ..., :20], pool[:, 1]
    for view, cache in zip(views, (step.key_cache, step.value_cache), strict=True):
        view.copy_(cache)
    wide = torch.full((4, 7, 25), math.nan)
    wide[:, 1:7:2, :20] = step.q
    strided = replace(step, q=wide[:, 1:7:2, :20], key_cache=views[0], value_cache=views[1])
    assert torch.equal(run(strided, SCORES["full"]), run(step, SCORES["full"]))


@dataclass(frozen=True)
class ShardOnly:
    """A rank of those that divide the tokens, without communication."""

    shard: TokenShard


@pytest.mark.parametrize("number", [SPLIT, slow(WHOLE)])
def test_partial_outputs_of_ranks_merge_to_the_attention_to_all_keys(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megalith.kernels.triton import paged_attention as kernels

    set_programs(monkeypatch, number)
    scores = Scores(window=33, scale=0.2)
    step = build(scores, block_size=6, lengths=[(1, 40), (3, 17), (1, 1)])
    parts = []
    for rank in range(3):
        shard = TokenShard(rank, 3)
        ranks: Any = ShardOnly(shard)
        metadata = replace(move(step).metadata, block_size=2, ranks=ranks)
        caches = [
            KVBlocks(move_cache(store_shard(step, x, shard, scores))) for x in (step.k, step.v)
        ]
        keys = PagedKeys((step.q.to(DEVICE),), (caches[0],), caches[1])
        parts.append(kernels.attend(keys, metadata, scores, None, is_partial=True))
    assert parts[1][-1, :, -1].tolist() == [-math.inf] * 3  # one key, of rank 0
    merged = merge_partial_attention(torch.stack(parts))
    assert_equals("merged", merged, step.reference(scores, None), FP32)


def store_shard(step: Step, rows: Tensor, shard: TokenShard, scores: Scores) -> Tensor:
    """Return a cache with the keys or values [t, g, d] that a rank stores; the rest holds NaN."""
    metadata, start = step.metadata, 0
    block_size = metadata.block_size // shard.num_ranks
    cache = torch.full((len(step.key_cache), 1, block_size, rows.shape[2]), math.nan)
    for row, (queries, keys) in enumerate(metadata.lengths):
        for position in range(first_needed(keys - queries, scores), keys):
            place, owner = divmod(position, shard.num_ranks)
            if owner == shard.rank:
                block = metadata.block_tables[row, place // block_size]
                cache[block, :, place % block_size] = rows[start + position]
        start += keys
    return cache


@pytest.mark.parametrize("name", [slow("full"), "window"])
def test_query_has_the_same_bits_in_every_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scores, expected = SCORES[name], None
    for block_size in (1, 16):
        # all blocks are stored: the queries of the complete sequence see them
        step = build(lengths=[(40, 40)], block_size=block_size, seed=1)
        set_programs(monkeypatch, WHOLE)
        complete = run(step, scores)
        expected = complete if expected is None else expected
        assert_equals("complete", complete, expected, EXACT)
        for queries, keys in ((1, 33), (9, 37)):
            for number in (SPLIT, WHOLE) if block_size == 1 else (SPLIT,):
                set_programs(monkeypatch, number)
                part = run(select(step, [(queries, keys)]), scores)
                assert_equals("part", part, expected[keys - queries : keys], EXACT)


def test_row_has_the_same_bits_in_every_batch() -> None:
    step = build(lengths=[(1, 10), (2, 37), (1, 5)])
    batch, tables = run(step, SCORES["full"]), step.metadata.block_tables
    for row, (first, length) in enumerate(((0, (1, 10)), (1, (2, 37)), (3, (1, 5)))):
        alone = build_paged_metadata(tables[row : row + 1], [length], 3)
        part = replace(step, q=step.q[first : first + length[0]], metadata=alone)
        assert_equals("row", run(part, SCORES["full"]), batch[first : first + length[0]], EXACT)


def test_padding_after_the_last_row_gives_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a captured graph, whose tensors have more queries and rows than a step."""
    step = move(build(lengths=[(1, 20), (2, 37)]))
    padded = replace(
        step.metadata,
        block_tables=torch.nn.functional.pad(step.metadata.block_tables, (0, 5, 0, 2), value=-1),
        cu_seqlens_q=torch.tensor([0, 1, 3, 3, 3], dtype=torch.int32, device=DEVICE),
        kv_lengths=torch.tensor([20, 37, 0, 0], dtype=torch.int32, device=DEVICE),
    )
    q = torch.nn.functional.pad(step.q, (0, 0, 0, 0, 0, 40), value=math.nan)
    caches = step.key_cache, step.value_cache
    for number in (SPLIT, WHOLE):
        set_programs(monkeypatch, number)
        out = paged_attention(q, *caches, padded, kernel="triton")
        assert_equals("rows", out[:3], run(step, SCORES["full"]).to(DEVICE), EXACT)
        assert not out[3:].any()


def test_nan_reaches_the_outputs_that_depend_on_it() -> None:
    scores = SCORES["window"]
    step = build(scores, lengths=[(1, 40)], block_size=1)
    early = step.metadata.block_tables.clone()
    # the first visible key is freed one token early: its block holds NaN
    unused = set(range(len(step.key_cache))) - set(early[0].tolist())
    early[0, 40 - 17] = unused.pop()
    freed = replace(step, metadata=replace(step.metadata, block_tables=early))
    assert run(step, scores).isfinite().all() and run(freed, scores).isnan().all()
    both = build(lengths=[(2, 20), (1, 20)])
    both.q[2, 1, 0] = math.nan
    out = run(both, SCORES["full"])
    assert out[2, 1].isnan().all() and out[2, 0].isfinite().all() and out[:2].isfinite().all()


if DEVICE.type == "cpu":  # a compiled kernel keeps the functions that it was compiled with

    def test_merge_without_weights_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
        from megalith.kernels.triton import paged_attention as kernels

        def add(*state: Any) -> Any:
            return state[0] + state[3], state[4], state[2] + state[5]

        monkeypatch.setattr(kernels, "_merge", add)
        with pytest.raises(AssertionError, match="expected at most"):
            check(build(lengths=[(1, 40)]), SCORES["full"])

    def test_window_that_is_off_by_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
        from megalith.kernels.triton import paged_attention as kernels

        first_visible = kernels._first_visible
        monkeypatch.setattr(kernels, "_first_visible", lambda *given: first_visible(*given) + 1)
        with pytest.raises(AssertionError, match="expected at most"):
            check(build(SCORES["window"], lengths=[(1, 40)]), SCORES["window"])


else:
    LONG = [(1, 3000), (5, 1000), (0, 50), (1, 16), (40, 40)]

    @pytest.mark.parametrize("cache_dtype", [None, *QUANTIZED])
    @pytest.mark.parametrize("dtype", [F32, BFLOAT, HALF])
    @pytest.mark.parametrize("name", ["full", "window", "softcap"])
    def test_sizes_of_models_match_the_reference(
        name: str, dtype: torch.dtype, cache_dtype: torch.dtype | None
    ) -> None:
        scores = replace(SCORES[name], scale=None)
        if scores.window is not None:
            scores = replace(scores, window=700)
        sizes = {"heads": 32, "kv_heads": 8, "d": 128, "d_v": 128, "block_size": 16}
        step = build(scores, **sizes, dtype=dtype, cache_dtype=cache_dtype, lengths=LONG)
        check(step, scores, torch.randn(32))

    @pytest.mark.parametrize("dtype", [F32, BFLOAT])
    def test_bits_do_not_depend_on_the_division_of_the_work(
        dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sizes = {"heads": 32, "kv_heads": 8, "d": 128, "d_v": 128, "block_size": 16}
        step = build(**sizes, dtype=dtype, lengths=[(1500, 1500)])
        set_programs(monkeypatch, WHOLE)
        complete = run(step, SCORES["full"])
        for queries, keys in ((1, 1500), (5, 1025), (1, 512)):
            for number in (SPLIT, WHOLE):
                set_programs(monkeypatch, number)
                part = run(select(step, [(queries, keys)]), SCORES["full"])
                assert_equals("part", part, complete[keys - queries : keys], EXACT)

    def test_captured_graph_is_replayed_with_other_lengths() -> None:
        steps = [
            move(build(heads=8, kv_heads=2, d=64, d_v=64, lengths=lengths, dtype=BFLOAT, seed=1))
            for lengths in ([(1, 900), (1, 900)], [(1, 700), (1, 30)])
        ]
        tables = [step.metadata.block_tables for step in steps]
        steps[0].metadata.block_tables[:, :] = -1
        fixed, caches = steps[0], [torch.cat([step.key_cache for step in steps])]
        caches.append(torch.cat([step.value_cache for step in steps]))
        fixed.metadata.block_tables.zero_()
        call = (fixed.q, *caches, fixed.metadata)
        paged_attention(*call, kernel="triton")  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = paged_attention(*call, kernel="triton")
        other, width = steps[1], tables[1].shape[1]
        fixed.q.copy_(other.q)
        fixed.metadata.block_tables[:, :width] = tables[1] + len(steps[0].key_cache)
        fixed.metadata.kv_lengths.copy_(other.metadata.kv_lengths)
        graph.replay()
        expected = other.reference(SCORES["full"], None)
        assert_equals("replayed", out, expected, BF16)


# --- storing


@pytest.mark.parametrize("dtype", [F32, BFLOAT])
@pytest.mark.parametrize("cache_dtype", [None, *QUANTIZED])
def test_store_writes_the_bits_of_the_reference_to_its_slots_only(
    cache_dtype: torch.dtype | None, dtype: torch.dtype
) -> None:
    rows = 10 ** torch.linspace(-12, 12, 9).view(9, 1, 1) * torch.randn(9, 3, 50)
    rows[1], rows[2, 0], rows[3, 1, 7] = 0, torch.finfo(F32).tiny, math.nan
    rows[4, 2, 0], rows[5] = math.inf, torch.arange(50) / 2 - 12.5  # ties
    wide = torch.full((9, 7, 50), math.nan)
    wide[:, 1::2] = rows
    wide, slots = wide.to(DEVICE, dtype), torch.randperm(24)[:9].to(DEVICE)
    caches = []
    for kernel in ("triton", "reference"):
        cache = allocate_blocks((6, 3, 4, 50), wide, cache_dtype or dtype)
        fill_with_nan(cache)
        cache.data.view(torch.uint8).fill_(1)
        store(cache, wide[:, 1::2], slots, kernel=kernel)  # type: ignore[arg-type]
        caches.append(cache)
    actual, expected = caches
    if cache_dtype is None:
        assert_equals("rows", actual.data, expected.data, EXACT)
        return
    assert actual.scales is not None and expected.scales is not None
    assert_equals("scales", actual.scales, expected.scales, EXACT)
    # int8 of rows with a NaN is not defined
    valid = expected.scales.isfinite() | expected.scales.isnan() & (cache_dtype != torch.int8)
    written = torch.zeros(24, dtype=torch.bool, device=DEVICE)
    written[slots] = True
    valid &= written.view(6, 1, 4) & expected.scales.isfinite() | ~written.view(6, 1, 4)
    bits = actual.data.view(torch.uint8), expected.data.view(torch.uint8)
    assert torch.equal(*(each[valid] for each in bits))


def test_unsupported_inputs_are_rejected_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    step = build(lengths=[(1, 4)])
    monkeypatch.setattr(paged, "MAX_TRITON_WIDTH", 16)
    message = (
        r"kernel=triton does not support float32 queries .* of at most 16 features, and .* Use"
    )
    with pytest.raises(ConfigError, match=message):
        run(step, SCORES["full"])
    with pytest.raises(ConfigError, match="kernel=triton does not support float64 queries"):
        run(build(lengths=[(1, 4)], dtype=torch.float64), SCORES["full"])

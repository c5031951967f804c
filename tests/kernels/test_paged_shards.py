"""Ranks that divide the tokens of the KV cache merge the attention to all tokens."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.kernels.attention import paged
from megalith.kernels.attention.kv_blocks import allocate_blocks, as_blocks
from megalith.kernels.attention.paged import (
    PagedMetadata,
    build_paged_metadata,
    merge_partial_attention,
    paged_latent_attention,
    store,
)
from megalith.kernels.attention.scores import Scores
from megalith.plan.serving.cache_layout import TokenShard
from megalith.plan.shards import split_evenly
from tests.cases import loop_over
from tests.kernels.test_paged import (
    LENGTHS,
    NEEDS_LOOPS,
    QUANTIZED,
    SCORES,
    Step,
    build_step,
    fill_with_nan,
    first_needed,
    run,
)

DOUBLE, FLOAT, BF16 = torch.float64, torch.float32, torch.bfloat16


@dataclass
class Exchange:
    """What the threads of a test, one per rank, exchange."""

    num_ranks: int
    heads: list[int]
    """Query heads of each rank."""

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.num_ranks, timeout=60)
        self.values: dict[int, Tensor] = {}


@dataclass
class ThreadRank:
    """`TokenRanks` of one thread."""

    rank: int
    exchange: Exchange
    num_collectives: dict[str, int] = field(default_factory=dict)

    @property
    def shard(self) -> TokenShard:
        return TokenShard(self.rank, self.exchange.num_ranks)

    def gather_heads(self, q: Tensor) -> Tensor:
        return torch.cat(self._gather("heads", q), dim=1)

    def gather_rows(self, rows: Tensor) -> Tensor:
        return torch.cat(self._gather("rows", rows))

    def exchange_heads(self, x: Tensor) -> Tensor:
        heads = self.exchange.heads
        return torch.stack([part.split(heads, 1)[self.rank] for part in self._gather("merge", x)])

    def _gather(self, kind: str, x: Tensor) -> list[Tensor]:
        self.num_collectives[kind] = self.num_collectives.get(kind, 0) + 1
        exchange = self.exchange
        exchange.values[self.rank] = x
        exchange.barrier.wait()
        values = [exchange.values[rank] for rank in range(exchange.num_ranks)]
        exchange.barrier.wait()
        assert len({(each.shape[0], *each.shape[2:]) for each in values}) == 1
        return values


def on_every_rank(num_ranks: int, heads: list[int], call: Callable[[ThreadRank], Any]) -> list[Any]:
    """Return what `call` returns on each of `num_ranks` threads."""
    exchange = Exchange(num_ranks, heads)
    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(lambda rank: call(ThreadRank(rank, exchange)), range(num_ranks)))


def store_shard(step: Step, k: Tensor, metadata: PagedMetadata, scores: Scores) -> Any:
    """A cache with the keys or values k [t, g, d] that a rank stores; the rest holds NaN."""
    dtype = step.q.dtype
    if not isinstance(step.key_cache, Tensor):
        dtype = step.key_cache.data.dtype
    num_blocks = len(as_blocks(step.key_cache).data)
    shape = num_blocks, k.shape[1], metadata.block_size, k.shape[2]
    cache = fill_with_nan(allocate_blocks(shape, step.q, dtype))
    shard, start = metadata.shard, 0
    for row, (queries, keys) in enumerate(metadata.lengths):
        first = first_needed(keys - queries, scores)
        positions = torch.arange(first, keys)
        positions = positions[positions % shard.num_ranks == shard.rank]
        places = positions // shard.num_ranks
        blocks = metadata.block_tables[row, places // metadata.block_size].long()
        slots = blocks * metadata.block_size + places % metadata.block_size
        store(cache, k[start + positions].to(step.q.dtype), slots)
        start += keys
    return cache if cache.scales is not None else cache.data


def shard_metadata(step: Step, rank: ThreadRank) -> PagedMetadata:
    metadata = step.metadata
    num_ranks = rank.exchange.num_ranks
    assert metadata.block_size % num_ranks == 0
    block_size = metadata.block_size // num_ranks
    return build_paged_metadata(metadata.block_tables, metadata.lengths, block_size, rank)


def run_shards(
    step: Step,
    num_ranks: int,
    scores: Scores,
    sinks: Tensor | None,
    kernel: str,
    counts: dict[str, int] | None = None,
) -> Tensor:
    """The output of all heads, each from the rank that has it."""
    heads = split_evenly(step.q.shape[1], num_ranks)

    def attend(rank: ThreadRank) -> Tensor:
        metadata = shard_metadata(step, rank)
        caches = [store_shard(step, x, metadata, scores) for x in (step.k, step.v)]
        own_sinks = None if sinks is None else sinks.split(heads)[rank.rank]
        q = step.q.split(heads, 1)[rank.rank]
        local = replace(step, q=q, key_cache=caches[0], value_cache=caches[1], metadata=metadata)
        out = run(local, scores, own_sinks, kernel)
        if counts is not None:
            counts.update(rank.num_collectives)
        return out

    return torch.cat(on_every_rank(num_ranks, heads, attend), dim=1)


@pytest.fixture(autouse=True)
def use_one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@loop_over("name", SCORES)
def test_ranks_that_divide_the_tokens_give_the_attention_to_all(name: str) -> None:
    scores = SCORES[name]
    for seed, (num_ranks, block_size) in enumerate(((3, 3), (4, 16))):
        step = build_step(
            LENGTHS, heads=5, kv_heads=1, block_size=block_size, scores=scores, seed=seed
        )
        sinks = None if scores.off_by_one else torch.randn(5, dtype=DOUBLE)
        for given in (None, sinks):
            expected = step.reference(scores, given)
            for kernel in ("auto", "torch", "reference"):
                actual = run_shards(step, num_ranks, scores, given, kernel)
                torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@NEEDS_LOOPS
@loop_over("name", SCORES)
@pytest.mark.parametrize("dtype", [FLOAT, BF16])
def test_compiled_kernel_of_ranks_that_divide_the_tokens(name: str, dtype: torch.dtype) -> None:
    scores, tolerance = SCORES[name], 3e-6 if dtype == FLOAT else 2e-2
    for seed, num_ranks in enumerate((2, 3)):
        step = build_step(LENGTHS, heads=6, kv_heads=1, block_size=6, dtype=dtype, scores=scores)
        sinks = torch.randn(6) if seed and not scores.off_by_one else None
        expected = step.reference(scores, sinks)
        for kernel in ("auto", "numba", "invariant"):
            actual = run_shards(step, num_ranks, scores, sinks, kernel)
            assert actual.dtype == dtype
            torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
@pytest.mark.parametrize("dtype", [DOUBLE, FLOAT])
def test_quantized_cache_of_ranks_that_divide_the_tokens(
    dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    scores, block_size = SCORES["window"], 6
    step = build_step(
        LENGTHS, heads=4, kv_heads=1, block_size=block_size, dtype=DOUBLE, scores=scores
    )
    quantized = build_step(
        LENGTHS,
        heads=4,
        kv_heads=1,
        block_size=block_size,
        cache_dtype=cache_dtype,
        scores=scores,
    )
    # the same rows, which every rank quantizes as one process does
    step = replace(step, key_cache=quantized.key_cache, q=step.q.to(dtype))
    expected = quantized.reference(scores, None)
    for kernel in ("auto", "torch", "invariant", "reference"):
        actual = run_shards(step, 3, scores, None, kernel).double()
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6 if dtype == DOUBLE else 1e-5)


@pytest.mark.parametrize("dtype", [DOUBLE, FLOAT])
def test_latents_that_ranks_divide(dtype: torch.dtype) -> None:
    latent, rope, heads = 20, 6, [2, 2, 1]
    scores = Scores(scale=0.2)
    step = build_step(
        LENGTHS, heads=5, kv_heads=1, d=latent + rope, d_v=3, block_size=6, dtype=dtype
    )
    joined = replace(step, v=step.k[..., :latent])

    def attend(rank: ThreadRank) -> Tensor:
        metadata = shard_metadata(step, rank)
        parts = step.k.split([latent, rope], dim=-1)
        caches = [store_shard(step, x, metadata, scores) for x in parts]
        q = step.q.split(heads, 1)[rank.rank].split([latent, rope], dim=-1)
        return paged_latent_attention(*q, *caches, metadata, scores)

    actual = torch.cat(on_every_rank(3, heads, attend), dim=1)
    expected = joined.reference(scores, None)
    tolerance = 1e-12 if dtype == DOUBLE else 3e-6
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance)


def test_decoding_shares_queries_and_a_prefill_shares_keys() -> None:
    for lengths, expected in (
        ([(1, 300), (1, 20)], {"heads": 1, "merge": 1}),
        ([(40, 300)], {"rows": 2}),
        ([(1, 300), (40, 300)], {"heads": 1, "merge": 1, "rows": 2}),
    ):
        counts: dict[str, int] = {}
        step = build_step(lengths, heads=4, kv_heads=1, block_size=4)
        run_shards(step, 2, Scores(), None, "auto", counts)
        assert counts == expected


@NEEDS_LOOPS
def test_query_of_divided_tokens_has_the_same_bits_in_every_step() -> None:
    """Also in blocks of another size: the tokens of a rank depend on positions only."""
    length, expected = 300, None
    for block_size in (2, 16):
        step = build_step(
            [(length, length)], heads=4, kv_heads=1, block_size=block_size, dtype=FLOAT, seed=1
        )
        complete = run_shards(step, 2, Scores(), None, "invariant")
        expected = complete if expected is None else expected
        assert torch.equal(complete, expected)
        for queries, keys in ((1, 300), (5, 259), (40, 129)):
            metadata = build_paged_metadata(
                step.metadata.block_tables, [(queries, keys)], block_size
            )
            part = replace(
                step,
                q=step.q[keys - queries : keys],
                k=step.k[:keys],
                v=step.v[:keys],
                metadata=metadata,
            )
            actual = run_shards(part, 2, Scores(), None, "invariant")
            assert torch.equal(actual, expected[keys - queries : keys]), (queries, keys)


@loop_over("seed", range(50))
def test_merged_parts_are_the_softmax_over_all_keys(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    t, n, width = 4, 3, 5
    num_parts, num_keys = 1 + seed % 5, 1 + seed % 7
    # scores that differ by hundreds between parts would overflow without the largest
    scale = 10.0 ** (seed % 4)
    scores = scale * torch.randn(num_parts, t, n, num_keys, generator=generator, dtype=DOUBLE)
    hidden = torch.rand(num_parts, t, n, 1, generator=generator) < 0.3
    hidden[seed % num_parts] = False
    scores = scores.masked_fill(hidden, float("-inf"))
    values = torch.randn(num_parts, t, n, num_keys, width, generator=generator, dtype=DOUBLE)
    sinks = scale * torch.randn(n, generator=generator, dtype=DOUBLE) if seed % 2 else None
    weights = scores.softmax(-1).nan_to_num(0.0)
    outputs = (weights.unsqueeze(-1) * values).sum(-2)
    parts = torch.cat([outputs, scores.logsumexp(-1, keepdim=True)], dim=-1)
    actual = merge_partial_attention(parts, sinks)
    flat = scores.permute(1, 2, 0, 3).flatten(2)
    if sinks is not None:
        flat = torch.cat([flat, sinks.view(1, n, 1).expand(t, n, 1)], dim=-1)
    all_weights = flat.softmax(-1)[..., : num_parts * num_keys]
    all_values = values.permute(1, 2, 0, 3, 4).flatten(2, 3)
    expected = (all_weights.unsqueeze(-2) @ all_values).squeeze(-2)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_merged_output_of_padding_is_zero() -> None:
    parts = torch.randn(3, 5, 2, 9)
    parts[:, 3:, :, :-1] = 0.0
    parts[:, 3:, :, -1] = -torch.inf  # no keys in any set
    merged = merge_partial_attention(parts)
    assert torch.equal(merged[3:], torch.zeros(2, 2, 8))
    torch.testing.assert_close(merged[:3], merge_partial_attention(parts[:, :3]), rtol=0, atol=0)
    assert torch.equal(merge_partial_attention(parts, torch.zeros(2))[3:], torch.zeros(2, 2, 8))


def test_merge_without_weights_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault 22 of the engine."""
    monkeypatch.setattr(
        paged, "merge_partial_attention", lambda parts, sinks=None: parts[..., :-1].mean(0)
    )
    step = build_step(LENGTHS, heads=4, kv_heads=1, block_size=4)
    actual = run_shards(step, 2, Scores(), None, "auto")
    assert not torch.allclose(actual, step.reference(Scores(), None), atol=1e-6)


def test_shards_of_tokens_cover_every_position_once() -> None:
    for num_ranks in (1, 2, 3, 8):
        shards = [TokenShard(rank, num_ranks) for rank in range(num_ranks)]
        for position in range(50):
            counts = [shard.count_before(position) for shard in shards]
            assert sum(counts) == position and max(counts) - min(counts) <= 1
            growth = [shard.count_before(position + 1) for shard in shards]
            assert [b - a for a, b in zip(counts, growth)].index(1) == position % num_ranks

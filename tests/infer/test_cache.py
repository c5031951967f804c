from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config.kernels import Kernel
from megalith.config.model import MLAConfig
from megalith.infer.cache import (
    INITIAL_CAPACITY,
    AttentionView,
    GrowingBuffer,
    KVCache,
    PrefixState,
)
from megalith.kernels.attention.dispatch import attention
from megalith.kernels.attention.scores import PLAIN, Scores
from megalith.kernels.layer_inputs import Attend, LayerCache, LayerInputs
from megalith.kernels.packed import PackedSeqParams, seq_params_from_queries, seq_params_from_rows


@pytest.mark.parametrize("sizes", [[1] * 70, [3, 60, 1, 1, 200], [64, 1], [65], [500, 500]])
def test_rows_come_back_in_the_order_they_were_appended(sizes: list[int]) -> None:
    rows = torch.arange(sum(sizes) * 6.0).view(-1, 2, 3)
    buffer, before = GrowingBuffer(), 0
    for part in rows.split(sizes):
        result = buffer.append(part)
        before += len(part)
        assert torch.equal(result, rows[:before])


@pytest.mark.parametrize("window", [1, 2, 70])
@pytest.mark.parametrize("sizes", [[1] * 300, [3, 60, 1, 1, 200, 1], [500, 1, 1]])
def test_buffer_with_a_window_returns_visible_keys_and_stores_few_others(
    sizes: list[int], window: int
) -> None:
    rows = torch.arange(sum(sizes) * 6.0).view(-1, 2, 3)
    buffer, before = GrowingBuffer(AttentionView(window)), 0
    for part in rows.split(sizes):
        result = buffer.append(part)
        before += len(part)
        assert torch.equal(result, rows[max(0, before - len(part) - window + 1) : before])
    for _ in range(600):
        last = buffer.append(rows[:1])
    assert last.untyped_storage().nbytes() <= 4 * 6 * 2 * max(INITIAL_CAPACITY, 2 * window)


@pytest.mark.parametrize("window", [None, 1, 3, 70])
def test_truncated_buffer_continues_as_if_it_had_never_been_longer(window: int | None) -> None:
    rows = torch.arange(300.0).view(-1, 1, 1)
    for count in (0, 1, 2, 60, 90, 99, 100):
        buffer = GrowingBuffer(AttentionView(window))
        for part in rows[:100].split([40, 1, 20, 39]):
            buffer.append(part)
        held = buffer.holds(count)
        assert held or window is not None, "nothing is lost without a window"
        assert not buffer.holds(101)
        if held:
            buffer.cut(count)
            first = 0 if window is None else max(0, count - window + 1)
            assert torch.equal(buffer.append(rows[200:203])[:-3], rows[first:count])
        assert held or count < 100, "the end is always held"
    slid = GrowingBuffer(AttentionView(3))
    for part in rows.split(1):
        slid.append(part)
    assert slid.holds(299) and not slid.holds(100)


@pytest.mark.parametrize("size", [1, 3, 70])
@pytest.mark.parametrize("sizes", [[1] * 300, [3, 60, 1, 1, 200, 1], [500, 1, 1]])
def test_buffer_of_chunks_returns_the_chunk_of_the_first_new_token(
    sizes: list[int], size: int
) -> None:
    rows = torch.arange(sum(sizes) * 1.0).view(-1, 1, 1)
    buffer, before = GrowingBuffer(AttentionView(size, chunked=True)), 0
    for part in rows.split(sizes):
        assert buffer.holds(before) and torch.equal(
            buffer.append(part), rows[before // size * size : before + len(part)]
        )
        before += len(part)
        buffer.cut(before)
    assert not buffer.holds(before + 1)
    for count in range(before):
        if buffer.holds(count):
            buffer.cut(count)
            assert torch.equal(buffer.append(rows[:1])[:-1], rows[count // size * size : count])
            break


def stored(layer: LayerCache, k: Tensor, v: Tensor, seq_params: PackedSeqParams) -> list[Tensor]:
    """Store k and v, and return the keys and values that the cache passes to attention."""
    passed: list[Tensor] = []

    def record(q: Tensor, k: Tensor, v: Tensor, *others: Any, **options: Any) -> Tensor:
        passed.extend((k, v))
        return q

    layer.attend(record, k, k, v, seq_params)
    return passed


def test_cache_is_reused_for_the_common_prefix() -> None:
    read, rows = PrefixState(1), torch.arange(9.0).view(-1, 1, 1)
    stored(read.cache.layers([0])[0], rows[:4], rows[:4], seq_params_from_queries([(4, 4)]))
    read.record_ids([5, 6, 7, 8])
    assert read.resume([5, 6, 7, 8], sequence=0) == 3, "one token is left to be read"
    read.record_ids([5, 6, 7])
    assert read.resume([5, 9, 7, 8], sequence=0) == 1
    keys, _ = stored(
        read.cache.layers([0])[0], rows[7:], rows[7:], seq_params_from_queries([(2, 3)])
    )
    assert keys.flatten().tolist() == [0, 7, 8]
    assert read.resume([5, 9, 1], sequence=0) == 0, "reading that did not end is not trusted"
    read.record_ids([5])
    read.clear(sequence=0)
    assert read.resume([5, 1], sequence=0) == 0


def test_layers_without_a_cache_do_not_prevent_reuse_of_the_prefix() -> None:
    read, rows = PrefixState(3), torch.arange(4.0).view(-1, 1, 1)
    stored(read.cache.layers([0])[1], rows, rows, seq_params_from_queries([(4, 4)]))
    read.record_ids([5, 6, 7, 8])
    assert read.resume([5, 6, 1], sequence=0) == 2


def test_buffer_capacity_doubles() -> None:
    buffer = GrowingBuffer()
    places = {buffer.append(torch.zeros(1, 1, 1)).data_ptr() for _ in range(INITIAL_CAPACITY * 8)}
    assert len(places) <= 4


def test_documents_are_cached_separately_and_returned_packed() -> None:
    cache = KVCache(num_layers=2)
    k, v = torch.arange(5.0).view(5, 1, 1), torch.arange(10.0, 15.0).view(5, 1, 1)
    for layer in cache.layers([7, 3]):
        keys, values = stored(layer, k, v, seq_params_from_queries([(2, 2), (3, 3)]))
        assert torch.equal(keys, k) and torch.equal(values, v)
    more = torch.tensor([20.0, 21.0]).view(2, 1, 1)
    for layer in cache.layers([3, 7]):  # in another order now
        keys, _ = stored(layer, more, more, seq_params_from_queries([(1, 4), (1, 3)]))
        assert keys.flatten().tolist() == [2, 3, 4, 20, 0, 1, 21]
    (first, _) = cache.layers([3])
    assert stored(first, more[:1], more[:1], seq_params_from_queries([(1, 5)]))[
        0
    ].flatten().tolist() == [
        2,
        3,
        4,
        20,
        20,
    ]


VARIANTS = {
    "plain": (PLAIN, False),
    "window": (Scores(window=5), False),
    "chunks": (Scores(window=7, chunked=True), False),
    "a window beyond the first room": (Scores(window=INITIAL_CAPACITY + 6), False),
    "chunks beyond the first room": (Scores(window=INITIAL_CAPACITY + 6, chunked=True), False),
    "sinks": (PLAIN, True),
    "everything": (Scores(scale=0.4, window=3, softcap=2.0), True),
    "distances": (Scores(relative=9), False),
    "distances, window": (Scores(relative=9, window=5), False),
}


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_token_equals_that_of_the_full_sequence(variant: str, kernel: Kernel) -> None:
    """Two sequences of other lengths at once, prompts read in one piece or two, then token by
    token."""
    scores, has_sinks = VARIANTS[variant]
    sinks = torch.linspace(-1, 2, 4, dtype=torch.float64) if has_sinks else None
    draw = torch.Generator().manual_seed(0)
    texts = [
        [
            torch.randn(length, *shape, generator=draw, dtype=torch.float64)
            for shape in ((4, 6), (2, 6), (2, 5))
        ]
        for length in (90, 81)
    ]
    table = torch.linspace(-2, 3, 8 * 4, dtype=torch.float64).view(8, 4)
    rows = [seq_params_from_rows(1, len(q)) for q, _, _ in texts]
    whole = [
        attention(q, k, v, row, scores, sinks, attention_bias=table)
        for (q, k, v), row in zip(texts, rows, strict=True)
    ]
    cache, read = KVCache(1, [AttentionView(scores.window, scores.chunked)]), [0, 0]
    for counts in [(10, 1), (2, 4), *[(1, 1)] * 76]:
        (layer,) = cache.layers([0, 1])
        new = [[x[at : at + count] for x in text] for text, at, count in zip(texts, read, counts)]
        q, k, v = (torch.cat(same) for same in zip(*new))
        read = [at + count for at, count in zip(read, counts)]
        tokens = seq_params_from_queries(list(zip(counts, read)))
        result = attention(
            q,
            *stored(layer, k, v, tokens),
            tokens,
            scores,
            sinks,
            attention_bias=table,
            kernel=kernel,
        )
        expected = torch.cat([out[at - count : at] for out, at, count in zip(whole, read, counts)])
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def test_finished_sequence_is_removed_from_the_cache() -> None:
    cache = KVCache(num_layers=1)
    row = torch.ones(1, 1, 1)
    stored(cache.layers([4])[0], row, row, seq_params_from_queries([(1, 1)]))
    cache.drop(4)
    cache.drop(4)
    assert (
        stored(cache.layers([4])[0], row, row, seq_params_from_queries([(1, 1)]))[0].shape[0] == 1
    )


@pytest.mark.parametrize("chunked", [False, True])
def test_buffer_capacity_grows_with_the_text_and_not_with_the_window(chunked: bool) -> None:
    rows = torch.zeros(1, 1, 1)

    def room(found: torch.Tensor) -> int:
        return found.untyped_storage().nbytes() // rows.element_size()

    buffer = GrowingBuffer(AttentionView(8192, chunked=chunked))
    assert room(buffer.append(rows.expand(10, 1, 1))) == INITIAL_CAPACITY
    for count in range(11, 700):
        assert room(buffer.append(rows)) < max(2 * count, INITIAL_CAPACITY + 1)
    small = GrowingBuffer(AttentionView(256, chunked=chunked))
    for _ in range(256 * 3):
        assert room(small.append(rows)) <= (1 if chunked else 2) * 256


class PagedCache:
    """A second `LayerCache`: the keys and values of all documents in pages of three tokens."""

    PAGE = 3

    def __init__(self) -> None:
        self.pages: list[Tensor] = []
        self.table: dict[int, list[int]] = {}
        self.sequences: list[int] = []

    def attend(
        self,
        core: Attend,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seq_params: PackedSeqParams,
        **options: Any,
    ) -> Tensor:
        sizes = k.shape[1:].numel(), v.shape[1:].numel()
        rows = torch.cat([k.flatten(1), v.flatten(1)], dim=1)
        counts = [queries for queries, _ in seq_params.lengths]
        read = []
        for sequence, new, (queries, keys) in zip(
            self.sequences, rows.split(counts), seq_params.lengths, strict=True
        ):
            numbers = self.table.setdefault(sequence, [])
            for place, row in enumerate(new, start=keys - queries):
                if place % self.PAGE == 0:
                    numbers.append(len(self.pages))
                    self.pages.append(new.new_full((self.PAGE, new.shape[1]), torch.nan))
                self.pages[numbers[place // self.PAGE]][place % self.PAGE] = row
            read.append(torch.cat([self.pages[number] for number in numbers])[:keys])
        all_k, all_v = torch.cat(read).split(sizes, dim=1)
        all_k, all_v = all_k.unflatten(1, k.shape[1:]), all_v.unflatten(1, v.shape[1:])
        return core(q, all_k, all_v, seq_params, **options)

    def state(self, *_: Any, **__: Any) -> Tensor:
        raise AssertionError("attention has no recurrent state")


@pytest.mark.parametrize("latent", [False, True])
@torch.no_grad()
def test_paged_cache_gives_the_logits_of_the_growing_cache(
    latent: bool, tiny: SimpleNamespace
) -> None:
    mla = MLAConfig(kv_rank=7, nope_dim=4, rope_dim=4, value_dim=3) if latent else None
    config = tiny.config(mla=mla, num_kv_heads=6 if latent else 2)
    model = tiny.model(config, dtype=torch.float64)
    growing, paged, num_cached = KVCache(2), [PagedCache(), PagedCache()], [0, 0, 0]
    for step in ([2, 4, 1], [0, 1, 1], [5, 1, 3], [1, 1, 1]):
        order = [number for number in (2, 0, 1) if step[number]]
        for number in order:
            num_cached[number] += step[number]
        lengths = [(step[number], num_cached[number]) for number in order]
        inputs = LayerInputs(seq_params_from_queries(lengths))
        ids = torch.arange(inputs.seq_params.num_tokens) * 5 % 37
        for cache in paged:
            cache.sequences = order
        expected, result = (
            model.logits(ids, inputs, caches, torch.arange(len(ids)))
            for caches in (growing.layers(order), paged)
        )
        assert torch.equal(result, expected)


def decaying_sum(cache: LayerCache, x: Tensor, seq_params: PackedSeqParams) -> Tensor:
    """A toy recurrent mixer: y_t = y_{t-1} / 2 + x_t inside each document; x [t, h]."""

    def step(x: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        rows, last = [], []
        counts = [queries for queries, _ in seq_params.lengths]
        for state, part in zip(states, x.split(counts), strict=True):
            for row in part:
                state = state / 2 + row
                rows.append(state)
            last.append(state)
        return torch.stack(rows), torch.stack(last)

    return cache.state(step, x, seq_params, shape=(x.shape[1],))


def test_recurrent_state_continues_each_document() -> None:
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    texts = x[:7], x[7:]
    whole = [
        decaying_sum(KVCache(1).layers([0])[0], text, seq_params_from_rows(1, len(text)))
        for text in texts
    ]
    cache, num_cached = KVCache(1), [0, 0]
    for step in ([3, 1], [1, 1], [3, 3]):
        starts, num_cached = num_cached, [a + b for a, b in zip(num_cached, step)]
        parts = [text[a:b] for text, a, b in zip(texts, starts, num_cached)]
        seq_params = seq_params_from_queries(list(zip(step, num_cached)))
        y = decaying_sum(cache.layers([5, 8])[0], torch.cat(parts), seq_params)
        expected = [text[a:b] for text, a, b in zip(whole, starts, num_cached)]
        assert torch.equal(y, torch.cat(expected))


def test_recurrent_state_cannot_be_truncated() -> None:
    cache, x = KVCache(1), torch.ones(4, 2)
    decaying_sum(cache.layers([0])[0], x, seq_params_from_rows(1, 4))
    assert cache.cut(0, 4), "all tokens are kept"
    assert not cache.cut(0, 3), "an earlier state is not stored, so the text is read again"
    assert torch.equal(decaying_sum(cache.layers([0])[0], x[:1], seq_params_from_rows(1, 1)), x[:1])

import pytest
import torch

from megalith.config.kernels import Kernel
from megalith.infer.cache import (
    INITIAL_CAPACITY,
    AttentionView,
    GrowingBuffer,
    KVCache,
    PrefixState,
)
from megalith.kernels.attention.dispatch import attention
from megalith.kernels.attention.scores import PLAIN, Scores
from megalith.kernels.packed import tokens_of_queries, tokens_of_rows


@pytest.mark.parametrize("sizes", [[1] * 70, [3, 60, 1, 1, 200], [64, 1], [65], [500, 500]])
def test_rows_come_back_in_the_order_they_were_appended(sizes: list[int]) -> None:
    rows = torch.arange(sum(sizes) * 6.0).view(-1, 2, 3)
    buffer, before = GrowingBuffer(), 0
    for part in rows.split(sizes):
        found = buffer.append(part)
        before += len(part)
        assert torch.equal(found, rows[:before])


@pytest.mark.parametrize("window", [1, 2, 70])
@pytest.mark.parametrize("sizes", [[1] * 300, [3, 60, 1, 1, 200, 1], [500, 1, 1]])
def test_a_buffer_with_a_window_gives_what_new_tokens_see_and_keeps_little_more(
    sizes: list[int], window: int
) -> None:
    rows = torch.arange(sum(sizes) * 6.0).view(-1, 2, 3)
    buffer, before = GrowingBuffer(AttentionView(window)), 0
    for part in rows.split(sizes):
        found = buffer.append(part)
        before += len(part)
        assert torch.equal(found, rows[max(0, before - len(part) - window + 1) : before])
    for _ in range(600):
        last = buffer.append(rows[:1])
    assert last.untyped_storage().nbytes() <= 4 * 6 * 2 * max(INITIAL_CAPACITY, 2 * window)


@pytest.mark.parametrize("window", [None, 1, 3, 70])
def test_a_buffer_that_is_cut_goes_on_as_if_it_had_never_been_longer(window: int | None) -> None:
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
def test_a_buffer_of_chunks_gives_the_chunk_that_new_tokens_begin_in(
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


def test_what_was_read_is_kept_as_far_as_a_text_begins_alike() -> None:
    read, rows = PrefixState(1), torch.arange(9.0).view(-1, 1, 1)
    read.cache.layers([0])[0].extend(rows[:4], rows[:4], tokens_of_queries([(4, 4)]))
    read.note([5, 6, 7, 8])
    assert read.resume([5, 6, 7, 8], sequence=0) == 3, "one token is left to be read"
    read.note([5, 6, 7])
    assert read.resume([5, 9, 7, 8], sequence=0) == 1
    keys, _ = read.cache.layers([0])[0].extend(rows[7:], rows[7:], tokens_of_queries([(2, 3)]))
    assert keys.flatten().tolist() == [0, 7, 8]
    assert read.resume([5, 9, 1], sequence=0) == 0, "reading that did not end is not trusted"
    read.note([5])
    read.clear(sequence=0)
    assert read.resume([5, 1], sequence=0) == 0


def test_layers_that_keep_nothing_do_not_make_a_text_be_read_again() -> None:
    read, rows = PrefixState(3), torch.arange(4.0).view(-1, 1, 1)
    read.cache.layers([0])[1].extend(rows, rows, tokens_of_queries([(4, 4)]))
    read.note([5, 6, 7, 8])
    assert read.resume([5, 6, 1], sequence=0) == 2


def test_buffer_capacity_doubles() -> None:
    buffer = GrowingBuffer()
    places = {buffer.append(torch.zeros(1, 1, 1)).data_ptr() for _ in range(INITIAL_CAPACITY * 8)}
    assert len(places) <= 4


def test_documents_keep_apart_and_come_back_packed() -> None:
    cache = KVCache(num_layers=2)
    k, v = torch.arange(5.0).view(5, 1, 1), torch.arange(10.0, 15.0).view(5, 1, 1)
    for layer in cache.layers([7, 3]):
        keys, values = layer.extend(k, v, tokens_of_queries([(2, 2), (3, 3)]))
        assert torch.equal(keys, k) and torch.equal(values, v)
    more = torch.tensor([20.0, 21.0]).view(2, 1, 1)
    for layer in cache.layers([3, 7]):  # in another order now
        keys, _ = layer.extend(more, more, tokens_of_queries([(1, 4), (1, 3)]))
        assert keys.flatten().tolist() == [2, 3, 4, 20, 0, 1, 21]
    (first, _) = cache.layers([3])
    assert first.extend(more[:1], more[:1], tokens_of_queries([(1, 5)]))[0].flatten().tolist() == [
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
def test_token_t_read_from_the_cache_is_position_t_of_the_whole(
    variant: str, kernel: Kernel
) -> None:
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
    rows = [tokens_of_rows(1, len(q)) for q, _, _ in texts]
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
        tokens = tokens_of_queries(list(zip(counts, read)))
        found = attention(
            q,
            *layer.extend(k, v, tokens),
            tokens,
            scores,
            sinks,
            attention_bias=table,
            kernel=kernel,
        )
        expected = torch.cat([out[at - count : at] for out, at, count in zip(whole, read, counts)])
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_finished_sequence_is_forgotten() -> None:
    cache = KVCache(num_layers=1)
    row = torch.ones(1, 1, 1)
    cache.layers([4])[0].extend(row, row, tokens_of_queries([(1, 1)]))
    cache.drop(4)
    cache.drop(4)
    assert cache.layers([4])[0].extend(row, row, tokens_of_queries([(1, 1)]))[0].shape[0] == 1


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

import pytest
import torch

from megalith.infer.cache import FIRST_ROOM, GrowingBuffer, KeyValueCache
from megalith.kernels.tokens import tokens_of_queries


@pytest.mark.parametrize("sizes", [[1] * 70, [3, 60, 1, 1, 200], [64, 1], [65], [500, 500]])
def test_rows_come_back_in_the_order_they_were_appended(sizes: list[int]) -> None:
    rows = torch.arange(sum(sizes) * 6.0).view(-1, 2, 3)
    buffer, before = GrowingBuffer(), 0
    for part in rows.split(sizes):
        found = buffer.append(part)
        before += len(part)
        assert torch.equal(found, rows[:before]) and buffer.num_rows == before


def test_room_doubles_so_that_few_rows_are_copied() -> None:
    buffer = GrowingBuffer()
    places = {buffer.append(torch.zeros(1, 1, 1)).data_ptr() for _ in range(FIRST_ROOM * 8)}
    assert len(places) <= 4


def test_documents_keep_apart_and_come_back_packed() -> None:
    cache = KeyValueCache(num_layers=2)
    k, v = torch.arange(5.0).view(5, 1, 1), torch.arange(10.0, 15.0).view(5, 1, 1)
    for layer in cache.layers([7, 3]):
        keys, values = layer.extend(k, v, tokens_of_queries([(2, 2), (3, 3)]))
        assert torch.equal(keys, k) and torch.equal(values, v)
    more = torch.tensor([20.0, 21.0]).view(2, 1, 1)
    for layer in cache.layers([3, 7]):  # in another order now
        keys, _ = layer.extend(more, more, tokens_of_queries([(1, 4), (1, 3)]))
        assert keys.flatten().tolist() == [2, 3, 4, 20, 0, 1, 21]
    (first, _) = cache.layers([3])
    assert first.extend(more[:1], more[:1], tokens_of_queries([(1, 5)]))[0].flatten().tolist() == [2, 3, 4, 20, 20]


def test_a_finished_sequence_is_forgotten() -> None:
    cache = KeyValueCache(num_layers=1)
    row = torch.ones(1, 1, 1)
    cache.layers([4])[0].extend(row, row, tokens_of_queries([(1, 1)]))
    cache.drop(4)
    cache.drop(4)
    assert cache.layers([4])[0].extend(row, row, tokens_of_queries([(1, 1)]))[0].shape[0] == 1

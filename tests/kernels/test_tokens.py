"""Tokens know where each document starts, how long it is, and where a token stands in it."""

import pytest
import torch

from megalith.kernels.tokens import tokens_of_lengths, tokens_of_queries, tokens_of_rows


def test_rows_are_documents_of_one_length() -> None:
    tokens = tokens_of_rows(3, 4)
    assert (tokens.uniform, tokens.max_q, tokens.max_kv, tokens.num_tokens) == (4, 4, 4, 12)
    assert tokens.cu_q.tolist() == tokens.cu_kv.tolist() == [0, 4, 8, 12]
    assert tokens.positions.tolist() == [0, 1, 2, 3] * 3
    assert tokens.document.tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_documents_of_different_lengths_count_positions_from_zero() -> None:
    tokens = tokens_of_lengths([2, 1, 3])
    assert tokens.uniform is None
    assert tokens.max_q == 3
    assert tokens.cu_q.tolist() == [0, 2, 3, 6]
    assert tokens.positions.tolist() == [0, 1, 0, 0, 1, 2]
    assert tokens.document.tolist() == [0, 0, 1, 2, 2, 2]
    assert tokens.lengths == ((2, 2), (1, 1), (3, 3))


def test_queries_behind_a_cache_keep_their_place_in_the_document() -> None:
    tokens = tokens_of_queries([(1, 5), (2, 2), (1, 3)])
    assert tokens.cu_q.tolist() == [0, 1, 3, 4]
    assert tokens.cu_kv.tolist() == [0, 5, 7, 10]
    assert tokens.positions.tolist() == [4, 0, 1, 2]
    assert (tokens.max_q, tokens.max_kv) == (2, 5)


def test_equal_queries_with_a_cache_are_not_uniform() -> None:
    assert tokens_of_queries([(1, 5), (1, 5)]).uniform is None
    assert tokens_of_queries([(5, 5), (5, 5)]).uniform == 5


def test_one_document_is_uniform() -> None:
    assert tokens_of_lengths([7]).uniform == 7


def test_integer_types_are_those_the_kernels_expect() -> None:
    tokens = tokens_of_lengths([2, 3])
    assert tokens.cu_q.dtype == tokens.cu_kv.dtype == tokens.document.dtype == torch.int32
    assert tokens.positions.dtype == torch.int64
    assert tokens.valid.dtype == torch.bool
    assert bool(tokens.valid.all())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_are_made_on_the_device_asked_for(device: str) -> None:
    tokens = tokens_of_lengths([2, 3], device=device)
    found = {x.device.type for x in (tokens.cu_q, tokens.cu_kv, tokens.positions, tokens.document, tokens.valid)}
    assert found == {device}
    assert tokens.lengths == ((2, 2), (3, 3))  # still known on the host

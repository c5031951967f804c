"""PackedSeqParams: document boundaries, lengths and position ids."""

import pytest
import torch

from megalith.kernels.packed import (
    seq_params_from_lengths,
    seq_params_from_queries,
    seq_params_from_rows,
    seq_params_from_slices,
)
from megalith.plan.context import Slicing, plan_slices


def test_rows_are_documents_of_one_length() -> None:
    tokens = seq_params_from_rows(3, 4)
    assert (tokens.uniform, tokens.max_seqlen_q, tokens.max_seqlen_kv, tokens.num_tokens) == (
        4,
        4,
        4,
        12,
    )
    assert tokens.cu_seqlens_q.tolist() == tokens.cu_seqlens_kv.tolist() == [0, 4, 8, 12]
    assert tokens.position_ids.tolist() == [0, 1, 2, 3] * 3
    assert tokens.document_ids.tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_position_ids_restart_in_each_document() -> None:
    tokens = seq_params_from_lengths([2, 1, 3])
    assert tokens.uniform is None
    assert tokens.max_seqlen_q == 3
    assert tokens.cu_seqlens_q.tolist() == [0, 2, 3, 6]
    assert tokens.position_ids.tolist() == [0, 1, 0, 0, 1, 2]
    assert tokens.document_ids.tolist() == [0, 0, 1, 2, 2, 2]
    assert tokens.lengths == ((2, 2), (1, 1), (3, 3))


def test_position_ids_of_queries_with_cached_keys() -> None:
    tokens = seq_params_from_queries([(1, 5), (2, 2), (1, 3)])
    assert tokens.cu_seqlens_q.tolist() == [0, 1, 3, 4]
    assert tokens.cu_seqlens_kv.tolist() == [0, 5, 7, 10]
    assert tokens.position_ids.tolist() == [4, 0, 1, 2]
    assert (tokens.max_seqlen_q, tokens.max_seqlen_kv) == (2, 5)


def test_equal_queries_with_a_cache_are_not_uniform() -> None:
    assert seq_params_from_queries([(1, 5), (1, 5)]).uniform is None
    assert seq_params_from_queries([(5, 5), (5, 5)]).uniform == 5


def test_one_document_is_uniform() -> None:
    assert seq_params_from_lengths([7]).uniform == 7


def test_integer_types_are_those_the_kernels_expect() -> None:
    tokens = seq_params_from_lengths([2, 3])
    assert (
        tokens.cu_seqlens_q.dtype
        == tokens.cu_seqlens_kv.dtype
        == tokens.document_ids.dtype
        == torch.int32
    )
    assert tokens.position_ids.dtype == torch.int64
    assert tokens.valid.dtype == torch.bool
    assert bool(tokens.valid.all())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_are_created_on_the_given_device(device: str) -> None:
    tokens = seq_params_from_lengths([2, 3], device=device)
    results = {
        x.device.type
        for x in (
            tokens.cu_seqlens_q,
            tokens.cu_seqlens_kv,
            tokens.position_ids,
            tokens.document_ids,
            tokens.valid,
        )
    }
    assert results == {device}
    assert tokens.lengths == ((2, 2), (3, 3))  # still known on the host


def test_context_parallel_rows_keep_position_and_document_ids() -> None:
    slicing = Slicing(ranks=2, rank=1)
    tokens = seq_params_from_slices(plan_slices([5, 3, 8], row=8, slicing=slicing), slicing)
    assert tokens.position_ids.tolist() == [2, 3, 4, 0, 2, 3, 4, 5]
    assert tokens.document_ids.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert tokens.cu_seqlens_q.tolist() == [0, 3, 4, 8] and tokens.cu_seqlens_kv.tolist() == [
        0,
        5,
        8,
        16,
    ]
    assert tokens.lengths == ((3, 5), (1, 3), (4, 8)) and (
        tokens.max_seqlen_q,
        tokens.max_seqlen_kv,
    ) == (4, 8)
    assert tokens.uniform is None and bool(tokens.valid.all()) and tokens.num_tokens == 8
    assert tokens.whole.lengths == ((5, 5), (3, 3), (8, 8)) and tokens.whole.whole is tokens.whole


def test_padding_of_shared_documents_is_not_valid() -> None:
    slicing = Slicing(ranks=2, rank=0, by="document")
    tokens = seq_params_from_slices(plan_slices([5, 3], row=8, slicing=slicing), slicing)
    assert tokens.position_ids.tolist() == [0, 1, 6, 7, 0, 3]
    assert tokens.valid.tolist() == [True, True, False, False, True, False]


def test_parts_are_joined_in_natural_order_and_back() -> None:
    slicing = Slicing(ranks=4, rank=3, near=2)
    slices = plan_slices([16], row=16, slicing=slicing)
    context = seq_params_from_slices(slices, slicing).context
    assert context is not None
    world_group = torch.from_numpy(slices.numbers).flatten()
    assert world_group[context.all_ranks.order].tolist() == list(range(16))
    assert (
        world_group[context.all_ranks.order][context.all_ranks.back].tolist()
        == world_group.tolist()
    )
    near = torch.from_numpy(slices.numbers[2:]).flatten()
    assert near[context.neighbors.order].tolist() == list(range(4, 12))


def test_spans_are_planned_once_for_all_layers() -> None:
    slicing = Slicing(ranks=2, rank=0)
    context = seq_params_from_slices(plan_slices([8], row=8, slicing=slicing), slicing).context
    assert context is not None
    assert context.key_spans_by_group(1) is context.key_spans_by_group(1)
    assert context.key_spans_by_group(1)[1].visible.tolist() == [[0, 0], [0, 0], [0, 4], [0, 4]]
    assert context.key_spans_by_group(1, window=3)[1].visible.tolist() == [
        [0, 0],
        [0, 0],
        [2, 4],
        [3, 4],
    ]
    assert context.key_spans_to_all().visible.tolist() == [[0, 1], [0, 2], [0, 7], [0, 8]]

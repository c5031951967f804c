"""What is planted differs from what is right by the one thing that it is about."""

import numpy as np
import torch

from megalith.kernels.attention.split_kv import init_attention_result
from megalith.kernels.packed import ContextShard, tokens_of_slices, with_masks
from megalith.parallel.context import seen_of_groups, select_local_heads
from megalith.parallel.group import Group
from megalith.plan.context import Slicing, plan_slices, plan_spans
from megalith.verify.faults.model import (
    chunks_of_rows,
    heads_of_the_first_rank,
    known_to_the_first,
    nothing_found_without_the_extra_score,
    one_document_across_ranks,
    rows_of_the_first_rank,
)


def test_heads_are_those_of_the_first_rank_on_every_rank() -> None:
    table = torch.arange(12.0).view(2, 6)
    first, second = (Group(("cp",), (0, 1), rank) for rank in (0, 1))
    mine = select_local_heads(table, second)
    assert mine is not None and mine.tolist() == [[3.0, 4.0, 5.0], [9.0, 10.0, 11.0]]
    for group in (first, second):
        wrong, right = heads_of_the_first_rank(table, group), select_local_heads(table, first)
        assert wrong is not None and right is not None and torch.equal(wrong, right)
    assert heads_of_the_first_rank(None, first) is None


def test_the_extra_score_is_left_out_and_sinks_are_not() -> None:
    q = torch.zeros(2, 1, 3, 4)
    assert init_attention_result(q, 4, off_by_one=True).lse.eq(0).all()
    assert nothing_found_without_the_extra_score(q, 4, off_by_one=True).lse.isneginf().all()
    sinks = torch.tensor([0.5, 1.5])
    for begin in (init_attention_result, nothing_found_without_the_extra_score):
        assert torch.equal(begin(q, 4, sinks).lse[:, 0, 0], sinks)


def test_spans_are_right_where_the_fault_is_not() -> None:
    every, starts = np.arange(8), np.repeat([0, 3], [3, 5])
    own = one_document_across_ranks(every, every, starts)
    assert own.visible.tolist() == plan_spans(every, every, starts).visible.tolist()
    across = one_document_across_ranks(every[4:], every[:4], starts)
    assert (
        across.visible.tolist() == [[0, 4]] * 4
        and plan_spans(every[4:], every[:4], starts).visible[0, 0] == 3
    )
    chunks = chunks_of_rows(every, every, starts, window=4, chunked=True)
    assert chunks.visible[:, 0].tolist() == [0, 0, 0, 3, 4, 4, 4, 4]
    plain = chunks_of_rows(every, every, starts, window=None, chunked=False)
    assert plain.visible.tolist() == plan_spans(every, every, starts).visible.tolist()


def test_the_second_rank_has_the_masks_of_the_first_or_none() -> None:
    def shared(rank: int) -> ContextShard:
        slicing = Slicing(ranks=2, rank=rank)
        tokens = with_masks(
            tokens_of_slices(plan_slices([8], row=8, slicing=slicing), slicing),
            [torch.eye(8).bool()],
        )
        assert tokens.context is not None
        return tokens.context

    first, second = shared(0), shared(1)
    wrong, right = rows_of_the_first_rank(second, 1), seen_of_groups(first, 1)
    assert wrong is not None and right is not None
    for mine, theirs in zip(wrong, right, strict=True):
        assert torch.equal(mine.of_row(0, 1), theirs.of_row(0, 1))
    assert known_to_the_first(first, 1) is not None and known_to_the_first(second, 1) is None

"""What is planted differs from what is right by the one thing that it is about."""

import torch

from megalith.kernels.span_attention import nothing_found
from megalith.parallel.context import of_my_heads
from megalith.parallel.group import Group
from megalith.verify.attention_faults import heads_of_the_first_rank, nothing_found_without_the_extra_score


def test_heads_are_those_of_the_first_rank_on_every_rank() -> None:
    table = torch.arange(12.0).view(2, 6)
    first, second = (Group(("cp",), (0, 1), rank) for rank in (0, 1))
    mine = of_my_heads(table, second)
    assert mine is not None and mine.tolist() == [[3.0, 4.0, 5.0], [9.0, 10.0, 11.0]]
    for group in (first, second):
        wrong, right = heads_of_the_first_rank(table, group), of_my_heads(table, first)
        assert wrong is not None and right is not None and torch.equal(wrong, right)
    assert heads_of_the_first_rank(None, first) is None


def test_the_extra_score_is_left_out_and_sinks_are_not() -> None:
    q = torch.zeros(2, 1, 3, 4)
    assert nothing_found(q, 4, off_by_one=True).lse.eq(0).all()
    assert nothing_found_without_the_extra_score(q, 4, off_by_one=True).lse.isneginf().all()
    sinks = torch.tensor([0.5, 1.5])
    for begin in (nothing_found, nothing_found_without_the_extra_score):
        assert torch.equal(begin(q, 4, sinks).lse[:, 0, 0], sinks)

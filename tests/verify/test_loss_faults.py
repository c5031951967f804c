"""What is planted differs from what is right by the one thing that it is about."""

import torch

from megalith.parallel.cross_entropy import HeadShard, softmax_over_ranks
from megalith.parallel.group import single_rank_group
from megalith.verify.faults.model import logsumexp_of_own_rows


def test_only_the_logsumexp_is_that_of_own_rows() -> None:
    logits, labels = torch.randn(3, 7, dtype=torch.float64), torch.tensor([0, 6, -1])
    head = HeadShard.of(torch.empty(7, 2), single_rank_group("tp"), 0, 7, None, loops=False)
    right, wrong = (
        softmax_over_ranks(logits, labels, head),
        logsumexp_of_own_rows(logits, labels, head),
    )
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(right, wrong, strict=True))
    torch.testing.assert_close(wrong.logsumexp(), right.logsumexp())  # one rank has all rows
    two = right._replace(total=2 * right.total)  # as if another rank had as much
    assert not torch.equal(two.logsumexp(), wrong.logsumexp())

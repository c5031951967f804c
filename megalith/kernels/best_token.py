"""The token that scores highest, with the vocabulary split by rows: no rank ever has whole
logits."""

import torch
from torch import Tensor

from megalith.kernels.linear import forward as linear_forward
from megalith.parallel.group import Group, all_reduce_max_
from megalith.plan.costs import loss_chunk


def best_tokens(
    x: Tensor, weight: Tensor, *, vocab: Group, first_row: int, vocab_size: int
) -> Tensor:
    """The token of the largest product with each x: int64 [t], the same on every rank of `vocab`;
    of equals the first.

    x [t, h], whole on every rank; weight [v_local, h], rows first_row ... of the padded vocabulary,
    of which those from `vocab_size` on take no part. What becomes of products before they are
    scores (a scale, a cap) changes no order.
    """
    weight = weight[: max(0, vocab_size - first_row)]
    parts = x.split(loss_chunk(vocab_size, ranks=vocab.size))
    return torch.cat([_best(part, weight, vocab, first_row, vocab_size) for part in parts])


def _best(x: Tensor, weight: Tensor, vocab: Group, first_row: int, vocab_size: int) -> Tensor:
    if len(weight):
        largest, row = linear_forward(x, weight).max(-1)
    else:  # a rank may have padding alone
        largest, row = (
            x.new_full((len(x),), float("-inf")),
            torch.zeros(len(x), dtype=torch.int64, device=x.device),
        )
    overall = all_reduce_max_(largest.clone(), vocab)
    mine = torch.where(largest == overall, row + first_row, vocab_size)
    return -all_reduce_max_(-mine, vocab)

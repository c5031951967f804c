"""Greedy decoding over a vocabulary-parallel output head: no rank materializes the logits of the
whole vocabulary."""

import torch
from torch import Tensor

from megalith.kernels.linear import forward as linear_forward
from megalith.parallel.group import Group, all_reduce_max_
from megalith.plan.costs import loss_chunk


def greedy_tokens(
    x: Tensor, weight: Tensor, *, vocab: Group, first_row: int, vocab_size: int
) -> Tensor:
    """Return the token with the largest logit for each x: int64 [t], the same on every rank of
    `vocab`; of equal logits, the lowest token.

    x [t, h], replicated; weight [v_local, h], rows first_row ... of the padded vocabulary; rows
    from `vocab_size` on are padding and are ignored. Logit scaling and soft caps are monotonic and
    need not be applied.
    """
    weight = weight[: max(0, vocab_size - first_row)]
    parts = x.split(loss_chunk(vocab_size, ranks=vocab.size))
    return torch.cat([_best(part, weight, vocab, first_row, vocab_size) for part in parts])


def _best(x: Tensor, weight: Tensor, vocab: Group, first_row: int, vocab_size: int) -> Tensor:
    if len(weight):
        largest, row = linear_forward(x, weight).max(-1)
    else:  # this rank has only padding rows
        largest, row = (
            x.new_full((len(x),), float("-inf")),
            torch.zeros(len(x), dtype=torch.int64, device=x.device),
        )
    overall = all_reduce_max_(largest.clone(), vocab)
    candidate = torch.where(largest == overall, row + first_row, vocab_size)
    return -all_reduce_max_(-candidate, vocab)

"""Greedy decoding over a vocabulary-parallel output head: no rank materializes the logits of the
whole vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalith.kernels.linear import forward as linear_forward
from megalith.parallel.cross_entropy import CrossEntropyResult
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


# --- loss over the vocabulary that also records logit statistics: the largest logit and the z-loss


@dataclass(slots=True)
class LogitStats:
    """Logit statistics of labeled tokens since the last call of `pop`, on the device of the
    head."""

    z: Tensor | None = None
    """float64: sum of z_loss * logsumexp^2; None: no microbatch yet."""

    largest: Tensor | None = None
    """float64: the largest logit, -inf without labels."""

    def record(self, measured: CrossEntropyResult, labels: Tensor, z_loss: float) -> None:
        """Add the statistics of a microbatch."""
        is_unlabeled = labels < 0
        z = (
            z_loss
            * measured.logsumexp.detach().double().square().masked_fill(is_unlabeled, 0.0).sum()
        )
        largest = measured.largest.detach().double().masked_fill(is_unlabeled, float("-inf"))
        # of no token, too
        largest = torch.cat([largest, largest.new_full((1,), float("-inf"))]).amax()
        self.z = z if self.z is None else self.z + z
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)

    def pop(self) -> tuple[Tensor | None, Tensor | None]:
        """Return z and the largest logit, and reset both."""
        stats, self.z, self.largest = (self.z, self.largest), None, None
        return stats


@dataclass(frozen=True, slots=True)
class LossWithLogitStats:
    """Summed loss that records logit statistics; calls `compute` and returns its loss only."""

    compute: Callable[..., CrossEntropyResult]
    z_loss: float = 0.0
    logit_stats: LogitStats = field(default_factory=LogitStats)

    def __call__(self, x: Tensor, weight: Tensor, labels: Tensor, **others: object) -> Tensor:
        """Sum over labeled tokens of -log p(label) + z_loss * logsumexp^2."""
        measured = self.compute(x, weight, labels, z_loss=self.z_loss, **others)
        with torch.no_grad():
            self.logit_stats.record(measured, labels, self.z_loss)
        return measured.loss

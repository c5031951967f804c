"""Faulty replacement functions for the loss; see `verify/faults.py`."""

import torch
from torch import Tensor

from megalith.kernels.cross_entropy import HeadShard, Softmax, softmax_over_ranks


class LocalLogsumexp(Softmax):
    """Softmax over the whole vocabulary with a logsumexp over the rank's shard."""

    own: Tensor

    def logsumexp(self) -> Tensor:
        """Return the local logsumexp [c]."""
        return self.own.clone()


def logsumexp_of_own_rows(logits: Tensor, labels: Tensor, head: HeadShard) -> Softmax:
    """Return correct probabilities, with the logsumexp for the z-loss of the rank's vocabulary
    shard."""
    softmax = LocalLogsumexp(*softmax_over_ranks(logits, labels, head))
    softmax.own = torch.logsumexp(logits.to(softmax.total.dtype), -1)
    return softmax

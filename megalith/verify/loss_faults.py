"""What faults in the loss put in place of the right functions; see `verify/faults.py`."""

import torch
from torch import Tensor

from megalith.kernels.cross_entropy import Head, Softmax, softmax_over_ranks


class OfOwnRows(Softmax):
    """Softmax over the whole vocabulary, whose logsumexp is of the rank's own rows."""

    own: Tensor

    def logsumexp(self) -> Tensor:
        """[c]: what the rank finds alone."""
        return self.own.clone()


def logsumexp_of_own_rows(logits: Tensor, labels: Tensor, head: Head) -> Softmax:
    """Probabilities are right, and what their scores' size costs is found by every rank for
    itself."""
    found = OfOwnRows(*softmax_over_ranks(logits, labels, head))
    found.own = torch.logsumexp(logits.to(found.total.dtype), -1)
    return found

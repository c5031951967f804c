"""Logits whose vocabulary is sharded over the tensor-parallel group, and what ranks exchange of
them."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalith.parallel.collectives import all_gather_no_grad
from megalith.parallel.group import Group
from megalith.parallel.tensor import VocabParallelHead

MASKED = float("-inf")
"""Logit of a token that is never sampled."""


@dataclass(frozen=True, slots=True)
class VocabSlice:
    """The token ids whose logits this tensor-parallel rank has."""

    group: Group
    """The ranks over which the vocabulary is sharded."""

    first_token: int
    """Token id of the first column of the logits."""

    vocab_size: int
    """Number of token ids; the columns after them, which pad the vocabulary, are never sampled."""

    max_columns: int
    """Largest number of columns of a rank."""

    @staticmethod
    def from_head(head: VocabParallelHead) -> "VocabSlice":
        """Return the slice of the logits of an output head."""
        vocab = head.vocab
        return VocabSlice(vocab.group, vocab.first_row, vocab.vocab_size, head.max_rows)

    def remove_padding(self, logits: Tensor) -> Tensor:
        """Return the columns of logits [rows, v_local] that have a token id, in fp32 or float64."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits[:, : max(0, self.vocab_size - self.first_token)]

    def select_logits(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return the logit of one token per row of logits [rows, v_local]: float64 [rows], -inf if
        it is that of another rank."""
        columns = tokens - self.first_token
        is_local = (columns >= 0) & (columns < logits.shape[1])
        selected = torch.full(columns.shape, MASKED, dtype=torch.float64, device=logits.device)
        selected[is_local] = logits[is_local.nonzero().squeeze(1), columns[is_local]].double()
        return selected

    def gather(self, x: Tensor) -> NDArray[np.float64]:
        """Return x [...] of every rank, in the order of ranks: [tp, ...]."""
        gathered: NDArray[np.float64] = (
            all_gather_no_grad(x.unsqueeze(0), self.group).cpu().double().numpy()
        )
        return gathered


def find_finite_rows(logits: Tensor) -> Tensor:
    """Return whether each row has finite logits only; `isfinite` of all would take 20 times as
    long."""
    if not logits.shape[1]:
        return torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    return logits.amax(-1).isfinite() & logits.amin(-1).isfinite()

"""Embeddings: the hidden states of a prompt, pooled over the chunks in which it is processed."""

import math

import torch
from torch import Tensor

from megalith.config.serve import Pooling
from megalith.errors import CheckpointError


class HiddenStatePooler:
    """Pools the hidden states of one prompt after the final norm, in float64.

    mean: tokens are added one after the other, so that the result does not depend on the chunks.
    """

    def __init__(self, pooling: Pooling) -> None:
        self.pooling = pooling
        self._pooled: Tensor | None = None
        """Hidden state of the last token, or sum over the tokens so far, [h]."""
        self._num_tokens = 0
        """Number of prompt tokens so far, those before the first chunk included."""

    @property
    def needs_all_tokens(self) -> bool:
        """Whether tokens that the prefix cache contains must be processed again."""
        return self.pooling == "mean"

    def add(self, start: int, hidden: Tensor) -> None:
        """Add the hidden states [count, h] of the tokens from position `start`. A preempted request
        processes its prompt again; each token is added once."""
        new = hidden[max(0, self._num_tokens - start) :].double()
        if not len(new):
            return
        self._num_tokens = start + len(hidden)
        if self.pooling == "mean" and self._pooled is not None:
            new = torch.cat([self._pooled.unsqueeze(0), new])
        self._pooled = new.cumsum(0)[-1] if self.pooling == "mean" else new[-1]

    def embedding(self) -> list[float]:
        """Return the pooled hidden state, scaled to unit length.

        Raises:
            CheckpointError: it has no direction, because it is zero, NaN or infinite.
        """
        assert self._pooled is not None, "called after the last token"
        length = float(self._pooled.norm())
        if length == 0 or not math.isfinite(length):
            raise CheckpointError(
                f"the pooled hidden state has length {length}, so it cannot be scaled to length 1: "
                "the weights, or the computation in this dtype, are broken. Check the checkpoint, "
                "or use dtype fp32."
            )
        values: list[float] = (self._pooled / length).tolist()
        return values

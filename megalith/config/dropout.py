"""Dropout: which activations are dropped while training."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutConfig:
    """Probabilities of being set to zero. What is dropped depends on seed, step, layer, token and feature, so it is
    the same under every layout, when backward computes again, and after a resume."""

    embedding: float = 0.0
    """Of the embeddings."""

    residual: float = 0.0
    """Of what attention and MLP add to the residual stream."""

    attention: float = 0.0
    """Of attention's weights."""

    def drops(self) -> bool:
        """Whether anything is dropped."""
        return max(self.embedding, self.residual, self.attention) > 0

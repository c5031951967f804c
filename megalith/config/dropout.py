"""Dropout: which activations are dropped while training."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutConfig:
    """Probabilities of being set to zero. What is dropped depends on seed, step, layer, token
    and feature, so it is the same under every layout, when backward computes again, and after a
    resume."""

    embedding: float = 0.0
    """Of the embeddings."""

    residual: float = 0.0
    """Of what attention and MLP add to the residual stream."""

    attention: float = 0.0
    """Of attention's weights."""

    def drops(self) -> bool:
        """Whether anything is dropped."""
        return max(self.embedding, self.residual, self.attention) > 0


def dropout_problems(dropout: DropoutConfig) -> list[str]:
    """What keeps a run from dropping what it is asked to, as messages for the user."""
    shares = {field.name: getattr(dropout, field.name) for field in fields(dropout)}
    return [
        f"model.dropout.{name}={p} must be a probability, at least 0 and below 1. Use 0.1."
        for name, p in shares.items()
        if not 0 <= p < 1
    ]

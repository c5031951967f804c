"""Dropout probabilities."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutConfig:
    """Dropout probabilities. The masks depend on seed, step, layer, token and feature only, so
    they are the same under every parallel layout, in recomputation and after a resume."""

    embedding: float = 0.0
    """Dropout probability of the embeddings."""

    residual: float = 0.0
    """Dropout probability of the outputs of attention and MLP."""

    attention: float = 0.0
    """Dropout probability of the attention weights."""

    def is_enabled(self) -> bool:
        """Return whether any probability is above 0."""
        return max(self.embedding, self.residual, self.attention) > 0


def dropout_problems(dropout: DropoutConfig) -> list[str]:
    """Return the violated rules as error messages."""
    shares = {field.name: getattr(dropout, field.name) for field in fields(dropout)}
    return [
        f"model.dropout.{name}={p} must be a probability, at least 0 and below 1. Use 0.1."
        for name, p in shares.items()
        if not 0 <= p < 1
    ]

"""Multi-head latent attention: the sizes of the short vectors, and of what heads make of them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention: keys and values of all heads from one short vector per token.

    Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.
    """

    kv_rank: int
    """Features of the vector that keys and values come from."""

    q_rank: int | None = None
    """The same for queries; unset: they come from the layer's input."""

    nope_dim: int = 128
    """Features per head of queries and keys that know no position."""

    rope_dim: int = 64
    """Features that turn with the position; the keys' are shared by all heads."""

    value_dim: int = 128
    """Features per head of values."""

    norms: bool = True
    """Norm the two short vectors, as published models do. Without, heads read what the projections
    down give."""

    norm_eps: float = 1e-6
    """Of the norms of the two vectors, which are of the kind of `model.norm`."""

    yarn_mscale: float | None = None
    """With yarn: scores are multiplied by (0.1 yarn_mscale ln(rope.factor) + 1) squared; unset: not
    at all."""

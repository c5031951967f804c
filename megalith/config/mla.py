"""Multi-head latent attention (MLA): sizes of the latent vectors and of the heads."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention: keys and values of all heads are projected from one latent
    vector per token.

    Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.
    """

    kv_rank: int
    """Size of the latent vector of keys and values."""

    q_rank: int | None = None
    """Size of the latent vector of queries. Unset: queries are projected from the layer's input
    directly."""

    nope_dim: int = 128
    """Size per head of the part of queries and keys without RoPE."""

    rope_dim: int = 64
    """Size per head of the part of queries and keys with RoPE; this part of the keys is shared
    by all heads."""

    value_dim: int = 128
    """Size of values per head."""

    norms: bool = True
    """Normalize the two latent vectors, as published models do."""

    norm_eps: float = 1e-6
    """Epsilon of the norms of the latent vectors, whose type is `model.norm`."""

    yarn_mscale: float | None = None
    """With yarn: attention scores are multiplied by (0.1 yarn_mscale ln(rope.factor) + 1)
    squared. Unset: not scaled."""

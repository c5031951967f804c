"""What attention does beside comparing queries with keys: norms, windows, caps, sinks, gates; latent attention."""

from dataclasses import dataclass
from typing import Literal

QKNorm = Literal["none", "head", "whole", "l2"]
"""What queries and keys are normed over before they are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """How queries and keys become weights of values."""

    qk_norm: QKNorm = "none"
    """Norm queries and keys: over each head's features, with one weight for all heads (head); over all heads'
    features together (whole); or over each head's, without a weight (l2)."""

    scale: float | None = None
    """What scores are multiplied by; unset: 1 / sqrt(head_dim)."""

    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap); unset: they stay."""

    window: int | None = None
    """Tokens that a token sees in layers with a sliding window, itself included; unset: all before it."""

    window_layers: tuple[bool, ...] = ()
    """Which layers have the window, as a pattern that repeats over the layers; unset: all."""

    sinks: bool = False
    """A learnt score per head that takes part in softmax and stands for no token. Source: arXiv:2309.17453."""

    gated: bool = False
    """Multiply each head's output by the sigmoid of a projection of the layer's input. Source: arXiv:2505.06708."""


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

    norm_eps: float = 1e-6
    """Of the norms of the two vectors."""

    yarn_mscale: float | None = None
    """With yarn: scores are multiplied by (0.1 yarn_mscale ln(rope.factor) + 1) squared; unset: not at all."""

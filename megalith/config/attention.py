"""What attention does beside comparing queries with keys: norms, windows, caps, sinks, gates."""

from dataclasses import dataclass
from typing import Literal

QKNorm = Literal["none", "head", "whole", "l2"]
"""What queries and keys are normed over before they are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """How queries and keys become weights of values."""

    qk_norm: QKNorm = "none"
    """Norm queries and keys: over each head's features, with one weight for all heads (head);
    over all heads' features together (whole); or over each head's, without a weight (l2)."""

    qk_norm_eps: float | None = None
    """Of these norms; unset: the model's norm_eps."""

    qk_norm_layers: tuple[bool, ...] = ()
    """Which layers have these norms, as a pattern that repeats over the layers; unset: all."""

    scale: float | None = None
    """What scores are multiplied by; unset: 1 / sqrt(head_dim)."""

    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap); unset: they stay."""

    causal: bool = True
    """A token sees none that comes after it; otherwise it sees its whole document."""

    window: int | None = None
    """Tokens that a token sees in layers with a sliding window, itself included; unset: all
    before it. As many after it, unless `causal`."""

    window_right: int | None = None
    """Tokens after it that a token sees there, where attention looks both ways; unset: window -
    1, as many as before it. A window as long as the longest document is none to the left."""

    window_layers: tuple[bool, ...] = ()
    """Which layers have the window, as a pattern that repeats over the layers; unset: all."""

    chunked: bool = False
    """The window does not slide: documents are cut into runs of `window` tokens, and a token
    sees those of its own run. Source: Meta 2025, the Llama 4 release."""

    sinks: bool = False
    """A learned score per head that takes part in softmax and stands for no token. Source:
    arXiv:2309.17453."""

    off_by_one: bool = False
    """A score of 0 takes part in softmax and stands for no token, so that a head may look at
    nothing: weights are exp(s) / (1 + sum of exp(s)). Source: Miller 2023, "Attention is off by
    one"."""

    gated: bool = False
    """Multiply each head's output by the sigmoid of a projection of the layer's input. Source:
    arXiv:2505.06708."""


def attention_notes(attention: AttentionConfig) -> list[str]:
    """What a run says at its start of attention that makes the next token known."""
    if attention.causal:
        return []
    return [
        "model.attention.causal=false: every token sees the one that it is to predict, so the loss "
        "tells how well a "
        "model copies; set model.attention.causal=true to learn to write"
    ]

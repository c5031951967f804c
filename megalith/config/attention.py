"""Attention settings: QK norms, softmax scale, masks, sliding windows, attention sinks and
gates."""

from dataclasses import dataclass
from typing import Literal

QKNorm = Literal["none", "head", "whole", "l2"]
"""Normalization of queries and keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Attention mechanism: scores, masks, norms and gates."""

    qk_norm: QKNorm = "none"
    """Normalization of queries and keys. head: over the features of each head, with one weight
    shared by all heads; whole: over the features of all heads; l2: over those of each head,
    without a weight."""

    qk_norm_eps: float | None = None
    """Epsilon of the QK norms. Unset: the model's norm_eps."""

    qk_norm_layers: tuple[bool, ...] = ()
    """Layers with QK norms, as a pattern that repeats over the layers. Empty: all."""

    scale: float | None = None
    """Softmax scale, by which attention scores are multiplied. Unset: 1 / sqrt(head_dim)."""

    softcap: float | None = None
    """Soft cap of attention scores s: softcap * tanh(s / softcap). Unset: no cap."""

    causal: bool = True
    """Causal attention mask. Off: each token attends to its whole document."""

    window: int | None = None
    """Sliding-window size in tokens, including the token itself. Without `causal`, the window
    also covers as many tokens after it. Unset: full attention."""

    window_right: int | None = None
    """Without `causal`: number of tokens after a token that it attends to in layers with a
    window. Unset: window - 1. To limit only this side, set `window` to the length of the
    longest document."""

    window_layers: tuple[bool, ...] = ()
    """Layers with the sliding window, as a pattern that repeats over the layers. Empty: all."""

    chunked: bool = False
    """Chunked attention: documents are split into chunks of `window` tokens, and a token attends
    only to its own chunk. Source: Meta 2025, the Llama 4 release."""

    sinks: bool = False
    """Attention sinks: a learned logit per head is included in the softmax denominator. Source:
    arXiv:2309.17453."""

    off_by_one: bool = False
    """Include a logit of 0 in the softmax denominator, exp(s) / (1 + sum of exp(s)), so that a
    head can attend to nothing. Source: Miller 2023, "Attention is off by one"."""

    gated: bool = False
    """Multiply each head's output by the sigmoid of a projection of the layer's input. Source:
    arXiv:2505.06708."""


def list_attention_warnings(attention: AttentionConfig) -> list[str]:
    """Return a warning for the start of a run if attention is not causal."""
    if attention.causal:
        return []
    return [
        "model.attention.causal=false: every token attends to its own label, so the loss measures "
        "copying; set model.attention.causal=true to train a language model"
    ]

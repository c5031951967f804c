"""Cross-layer attention: later layers attend to the hidden states of an earlier layer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossConfig:
    """Layers with a second attention, to the hidden states of an earlier layer (the cross-layer
    source).

    The attention mask is that of self-attention without a window. Each layer projects its own keys
    and values from the source, which is normalized once. Source: Sun et al. 2024, arXiv:2405.05254,
    where layers share keys and values; the layer is the decoder layer of Vaswani et al. 2017,
    arXiv:1706.03762, section 3.1.
    """

    memory: int
    """Number of layers after which the hidden states are taken as the source; 0: the input of
    the first layer."""

    layers: tuple[bool, ...] = ()
    """Layers that attend to the source, as a pattern that repeats from layer number `memory` on.
    Empty: all of them."""

"""Cross attention: later layers look at what an earlier one made of the same tokens."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossConfig:
    """Layers with a second attention, to the hidden states that the text had some layers before:
    the memory.

    A token sees the memory of the tokens that it sees in self-attention without a window. Every
    layer makes keys and values of its own from the memory, which is normed once, as what layers
    read is. Source: Sun et al. 2024, arXiv:2405.05254, where layers share keys and values; the
    layer is the decoder's of Vaswani et al. 2017, arXiv:1706.03762, section 3.1.
    """

    memory: int
    """After how many layers the memory is taken; 0: from what enters the first layer."""

    layers: tuple[bool, ...] = ()
    """Which layers look at it, as a pattern that repeats from layer number `memory` on; empty: all
    from there on."""

"""Layers that are not all alike: other sizes, and parts that are left out or replaced, as patterns
over the layers."""

from dataclasses import dataclass
from typing import Literal

Part = Literal["full", "linear", "none"]
"""What a layer has for attention, or for its MLP: all of it, one matrix [h, h] in its place, or
nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersConfig:
    """What single layers have of their own, each a pattern that repeats over the layers; unset: all
    are alike.

    Source: Bercovich et al. 2024, arXiv:2411.19146 (Puzzle), section 3.1.
    """

    attention: tuple[Part, ...] = ()
    """full: attention; linear: one matrix in its place, with the same norms; none: neither it nor
    its norms."""

    mlp: tuple[Part, ...] = ()
    """The same of the MLP."""

    num_kv_heads: tuple[int, ...] = ()
    """Key/value heads; model.num_kv_heads is the largest."""

    ffn_hidden_size: tuple[int, ...] = ()
    """Features inside the MLP; model.ffn_hidden_size is the largest."""


ALIKE = LayersConfig()
"""All layers are what the model says."""

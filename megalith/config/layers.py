"""Settings of layers that differ from each other, as patterns repeated over the layers."""

from dataclasses import dataclass
from typing import Literal

LayerPart = Literal["full", "linear", "none"]
"""Attention or MLP of a layer: full, a linear layer [h, h] in its place, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersConfig:
    """Layers of different kinds or sizes. Each field is a pattern that repeats over the layers;
    empty means that all layers are equal.

    Source: Bercovich et al. 2024, arXiv:2411.19146 (Puzzle), section 3.1.
    """

    attention: tuple[LayerPart, ...] = ()
    """Attention of each layer. full: attention; linear: a linear layer in its place, with the
    same norms; none: neither attention nor its norms."""

    mlp: tuple[LayerPart, ...] = ()
    """MLP of each layer. full: MLP; linear: a linear layer in its place, with the same norms;
    none: neither the MLP nor its norms."""

    num_kv_heads: tuple[int, ...] = ()
    """Number of KV heads of each layer; model.num_kv_heads is the largest."""

    ffn_hidden_size: tuple[int, ...] = ()
    """Intermediate size of each layer's MLP; model.ffn_hidden_size is the largest."""


EQUAL_LAYERS = LayersConfig()
"""Default: all layers are equal."""

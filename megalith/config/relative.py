"""Relative positions: a learned number for each head and each bucket of distances, added to the
scores."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeConfig:
    """Biases by distance, the same in all layers.

    Source: Raffel et al. 2020, arXiv:1910.10683, section 2.1.
    """

    buckets: int = 32
    """Of distances; near ones have a bucket each, further ones share. Where tokens look both
    ways, later keys have the second half."""

    max_distance: int = 128
    """Distances of so many tokens and more share the last bucket."""

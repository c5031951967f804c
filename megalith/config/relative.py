"""Relative position biases: a learned bias per head and distance bucket, added to attention
scores."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeConfig:
    """Relative position biases, shared by all layers.

    Source: Raffel et al. 2020, arXiv:1910.10683, section 2.1.
    """

    buckets: int = 32
    """Number of distance buckets. Small distances have one bucket each, larger ones share
    buckets. Without a causal mask, keys after the query use the second half."""

    max_distance: int = 128
    """Distance in tokens from which all distances share the last bucket."""

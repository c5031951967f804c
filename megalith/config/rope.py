"""Rotary positions: how far apart two tokens are, told to attention by turning pairs of
features."""

from dataclasses import dataclass
from typing import Literal

RopeScaling = Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"]
"""Ways to read further than a model was trained to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions.

    Source: Su et al. 2021, arXiv:2104.09864; linear: Chen et al. 2023, arXiv:2306.15595; yarn: Peng
    et al. 2023, arXiv:2309.00071; longrope: Ding et al. 2024, arXiv:2402.13753; llama3: the Llama
    3.1 release; dynamic: base changed with the length (NTK-aware).
    """

    theta: float = 10_000.0
    """Base of the wavelengths: pair i of the d features that turn does so by position * theta **
    (-2 i / d)."""

    local_theta: float | None = None
    """The same for layers with a sliding window, which are then not scaled; unset: as all
    others."""

    fraction: float = 1.0
    """Part of each head's features, from the first, that turns; the rest has no position."""

    interleaved: bool = False
    """Turn features 2 i and 2 i + 1 together, as GPT-J does; otherwise i and i + d / 2."""

    skip: tuple[bool, ...] = ()
    """Layers without positions, as a pattern that repeats over the layers: (no, no, no, yes) is
    every fourth."""

    skip_growth: float = 0.0
    """Such layers multiply queries by 1 + skip_growth * ln(1 + floor((position + 1) /
    skip_step)), so that attention stays as sharp among many tokens as among few; 0: they do not.
    Source: Nakanishi 2025, arXiv:2501.19399."""

    skip_step: int = 8192
    """After so many tokens of a document the factor is another."""

    sections: tuple[int, ...] = ()
    """Multimodal positions: how many pairs turn by time, by height and by width. Source:
    arXiv:2409.12191."""

    scaling: RopeScaling = "none"
    """linear divides positions by `factor`; dynamic raises theta with the length read; llama3
    stretches the long wavelengths, yarn those that no training row held whole; longrope every
    pair by a factor of its own; the last two also sharpen attention."""

    factor: float = 8.0
    """How many times further the model reads; of no use to `none`."""

    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_max_position / low_freq_factor are stretched in full."""

    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_max_position / high_freq_factor stay as they are."""

    original_max_position: int = 8192
    """llama3, yarn, dynamic, longrope: the context length of the first training, in tokens."""

    beta_fast: float = 32.0
    """yarn: pairs that turn more often than this over the original context stay as they are."""

    beta_slow: float = 1.0
    """yarn: pairs that turn less often than this are stretched in full."""

    whole_pairs: bool = True
    """yarn: round the pairs where stretching begins and ends to whole numbers."""

    attention_factor: float | None = None
    """yarn, longrope: what queries and keys are multiplied by; unset: 0.1 ln(factor) + 1 with yarn,
    sqrt(1 + ln(factor) / ln(original_max_position)) with longrope."""

    short_factors: tuple[float, ...] = ()
    """longrope: what each pair's angles are divided by in documents as long as
    original_max_position or shorter."""

    long_factors: tuple[float, ...] = ()
    """longrope: the same in documents that are longer."""

"""Rotary position embedding (RoPE): base frequency, layers and context extension."""

from dataclasses import dataclass
from typing import Literal

RopeScaling = Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"]
"""Methods of context extension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding and its context extension.

    Source: Su et al. 2021, arXiv:2104.09864; linear: Chen et al. 2023, arXiv:2306.15595; yarn: Peng
    et al. 2023, arXiv:2309.00071; longrope: Ding et al. 2024, arXiv:2402.13753; llama3: the Llama
    3.1 release; dynamic: base changed with the length (NTK-aware).
    """

    theta: float = 10_000.0
    """Base of the frequencies: pair i of d rotary features rotates by position * theta ** (-2 i
    / d)."""

    local_theta: float | None = None
    """Base of the frequencies in layers with a sliding window, to which `scaling` is then not
    applied. Unset: theta."""

    fraction: float = 1.0
    """Fraction of each head's features, from the first, to which RoPE is applied (partial
    rotary)."""

    interleaved: bool = False
    """Rotate features 2 i and 2 i + 1 as a pair, as GPT-J does. Off: features i and i + d / 2."""

    skip: tuple[bool, ...] = ()
    """Layers without RoPE (NoPE), as a pattern that repeats over the layers: (no, no, no, yes)
    is every fourth layer. Empty: none."""

    skip_growth: float = 0.0
    """Attention temperature of layers without RoPE: queries are multiplied by 1 + skip_growth *
    ln(1 + floor((position + 1) / skip_step)), so that attention does not flatten over long
    contexts; 0: off. Source: Nakanishi 2025, arXiv:2501.19399."""

    skip_step: int = 8192
    """Number of tokens of a document after which the attention temperature changes."""

    sections: tuple[int, ...] = ()
    """Multimodal RoPE: number of pairs that rotate by time, by height and by width. Empty: one
    position per token. Source: arXiv:2409.12191."""

    scaling: RopeScaling = "none"
    """Context extension. linear: divide positions by `factor`; dynamic: raise theta with the
    sequence length; llama3: stretch long wavelengths; yarn: stretch wavelengths longer than
    the original context; longrope: a factor per pair. yarn and longrope also scale attention."""

    factor: float = 8.0
    """Ratio of the extended to the original context length; not used with scaling none."""

    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_max_position / low_freq_factor are stretched by the
    full factor."""

    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_max_position / high_freq_factor are unchanged."""

    original_max_position: int = 8192
    """llama3, yarn, dynamic, longrope: context length of pretraining, in tokens."""

    beta_fast: float = 32.0
    """yarn: pairs with more rotations than this over the original context are unchanged."""

    beta_slow: float = 1.0
    """yarn: pairs with fewer rotations than this over the original context are stretched by the
    full factor."""

    whole_pairs: bool = True
    """yarn: round the first and last pair of the interpolation range to whole numbers."""

    attention_factor: float | None = None
    """yarn, longrope: factor applied to queries and keys. Unset: 0.1 ln(factor) + 1 with yarn,
    sqrt(1 + ln(factor) / ln(original_max_position)) with longrope."""

    short_factors: tuple[float, ...] = ()
    """longrope: divisor of each pair's angles in documents of at most original_max_position
    tokens."""

    long_factors: tuple[float, ...] = ()
    """longrope: divisor of each pair's angles in longer documents."""

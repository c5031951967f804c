"""What a decoder-only transformer is made of: the sizes and choices that decide its weights and its mathematics."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions: how far apart two tokens are, told to attention by turning pairs of features.

    Source: Su et al. 2021, arXiv:2104.09864; the `llama3` scaling is that of the Llama 3.1 release.
    """

    theta: float = 10_000.0
    """Base of the wavelengths: pair i of a head turns by position * theta ** (-2 i / head_dim)."""

    scaling: Literal["none", "llama3"] = "none"
    """`llama3` stretches the long wavelengths by `factor`, so that a model reads further than it was trained to."""

    factor: float = 8.0
    """llama3: how many times longer the longest wavelengths become."""

    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_max_position / low_freq_factor are stretched in full."""

    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_max_position / high_freq_factor stay as they are."""

    original_max_position: int = 8192
    """llama3: the context length of the first training, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Llama-class decoder: RMSNorm, rotary positions, grouped-query attention and SwiGLU.

    Source: Touvron et al. 2023, arXiv:2302.13971; Grattafiori et al. 2024, arXiv:2407.21783.
    """

    vocab_size: int
    """Tokens the model knows; logits beyond it (see `vocab_multiple`) are never chosen."""

    hidden_size: int
    """Features per token between layers (h)."""

    num_layers: int
    """Transformer layers."""

    num_heads: int
    """Query heads (n)."""

    num_kv_heads: int
    """Key/value heads (g); every n/g query heads share one."""

    ffn_hidden_size: int
    """Features inside the MLP (f)."""

    head_dim: int | None = None
    """Features per head (d); unset: hidden_size / num_heads."""

    max_seq_len: int = 8192
    """Longest context the model is meant to read, in tokens."""

    norm_eps: float = 1e-5
    """Added to the mean square before the root in RMSNorm."""

    rope: RopeConfig = field(default_factory=RopeConfig)
    """Rotary positions."""

    tied_embeddings: bool = False
    """Use the embedding table as the output head."""

    qkv_bias: bool = False
    """Add a bias to queries, keys and values."""

    output_bias: bool = False
    """Add a bias after the attention's output projection."""

    mlp_bias: bool = False
    """Add biases inside the MLP."""

    vocab_multiple: int = 64
    """The vocabulary's rows are padded to a multiple of this; padded rows stay zero and are never chosen."""

    init_std: float = 0.02
    """Standard deviation of the initial weights; the projections back into the residual stream get
    init_std / sqrt(2 * num_layers) (Radford et al. 2019, section 2.3)."""

    def head_size(self) -> int:
        """Features per head (d)."""
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_heads

    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: `vocab_size` rounded up to `vocab_multiple`."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

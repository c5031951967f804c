"""What a decoder-only transformer is made of: the sizes and choices that decide its weights and its
mathematics."""

from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from megalith.config.attention import AttentionConfig
from megalith.config.cross import CrossConfig
from megalith.config.dropout import DropoutConfig
from megalith.config.layers import ALIKE, LayersConfig, Part
from megalith.config.mla import MLAConfig
from megalith.config.moe import MoEConfig
from megalith.config.mtp import MTPConfig
from megalith.config.mup import MuPConfig
from megalith.config.relative import RelativeConfig
from megalith.config.rope import RopeConfig

T = TypeVar("T")

Norm = Literal["rms", "layer"]
"""RMSNorm (arXiv:1910.07467) or LayerNorm (arXiv:1607.06450)."""

NormPlacement = Literal["before", "around", "after"]
"""Where a layer norms: what goes into attention and MLP, what goes in and comes out, or what comes
out."""

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu"]
"""gelu is the exact one, gelu_tanh its approximation, quick_gelu x * sigmoid(1.702 x)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer. The defaults are those of Llama: RMSNorm before attention and
    MLP, rotary positions, grouped-query attention and SwiGLU.

    Source: Touvron et al. 2023, arXiv:2302.13971; Grattafiori et al. 2024, arXiv:2407.21783.
    """

    vocab_size: int
    """Tokens the model knows; logits beyond it (see `pad_vocab_to_multiple_of`) are never
    chosen."""

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

    norm: Norm = "rms"
    """How features are normed."""

    norm_eps: float = 1e-5
    """Added to the mean square, or the variance, before the root."""

    zero_centered_gamma: bool = False
    """Norms multiply by 1 + weight, which starts at 0."""

    norm_placement: NormPlacement = "before"
    """before: x + f(norm(x)), around: x + norm(f(norm(x))), after: x + norm(f(x))."""

    block: Literal["sequential", "parallel", "parallel_one_norm"] = "sequential"
    """parallel: attention and MLP read the same x and are added together, each with a norm of its
    own or with one."""

    positions: Literal["rope", "learned", "relative", "none"] = "rope"
    """How tokens know their place: turned features, a learned vector for each place, scores that
    grow or shrink by the distance, or only by what they may see."""

    rope: RopeConfig = field(default_factory=RopeConfig)
    """Rotary positions."""

    relative: RelativeConfig = field(default_factory=RelativeConfig)
    """Biases by distance."""

    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """How queries and keys become weights of values."""

    mla: MLAConfig | None = None
    """Multi-head latent attention in place of keys and values per head, with sizes of its own:
    head_dim is then unset, and num_kv_heads the number of query heads. Unset: keys and values
    per head."""

    cross: CrossConfig | None = None
    """A second attention in some layers, to hidden states of an earlier layer. Unset: none."""

    moe: MoEConfig | None = None
    """A mixture of experts in place of the MLP, in all layers or some. Unset: none."""

    activation: Activation = "silu"
    """Inside the MLP, and inside experts."""

    gated: bool = True
    """The MLP is down(activation(gate(x)) * up(x)); otherwise down(activation(up(x)))."""

    activation_clamp: float | None = None
    """With `gated`: gate is cut off above this, and up at plus and minus this; unset: neither."""

    up_offset: float = 0.0
    """With `gated`: added to up(x)."""

    embedding_scale: float = 1.0
    """What embeddings are multiplied by, with the vectors of learned positions that are added to
    them."""

    residual_scale: float = 1.0
    """What attention and MLP are multiplied by before they are added to the residual stream."""

    fp32_residual: bool = False
    """Keep the residual stream in fp32 from the embeddings to the last norm, also between
    pipeline stages, while attention and MLPs compute as precision.params says."""

    logit_scale: float = 1.0
    """What scores of the vocabulary are multiplied by."""

    logit_softcap: float | None = None
    """Scores z of the vocabulary become logit_softcap * tanh(z / logit_softcap); unset: they
    stay."""

    layers: LayersConfig = ALIKE
    """Where layers are not all alike."""

    mtp: MTPConfig = field(default_factory=MTPConfig)
    """Prediction of tokens further ahead."""

    dropout: DropoutConfig = field(default_factory=DropoutConfig)
    """Activations dropped while training."""

    tied_embeddings: bool = False
    """Use the embedding table as the output head."""

    qkv_bias: bool = False
    """Add a bias to queries, keys and values."""

    output_bias: bool = False
    """Add a bias after the attention's output projection."""

    mlp_bias: bool = False
    """Add biases inside the MLP."""

    pad_vocab_to_multiple_of: int = 64
    """The vocabulary's rows are padded to a multiple of this; padded rows stay zero and are never
    chosen."""

    init_std: float = 0.02
    """Standard deviation of the initial weights; the projections back into the residual stream get
    init_std / sqrt(2 * num_layers) (Radford et al. 2019, section 2.3)."""

    embedding_init_std: float | None = None
    """The same of the tables of tokens and of places, which then do not decay, so that they keep
    it; unset: init_std, and they decay as all matrices do."""

    init: Literal["normal", "xavier_uniform"] = "normal"
    """xavier_uniform: matrices start uniform, with variance 2 / (inputs + outputs) whatever
    init_std; tables do not."""

    init_overrides: tuple[tuple[str, float], ...] = ()
    """Patterns of parameter names, such as layers.*.mlp.down, with the standard deviation of
    their normal first values; the first that fits decides."""

    mup: MuPConfig | None = None
    """Start and learn as a narrower model does. Unset: the same rates and spreads for every
    width."""

    def at(self, layer: int) -> "ModelConfig":
        """A model whose layers are all as this one's layer of that number, over all stages."""
        own, kind = self.layers, self.attention
        if kind.qk_norm_layers:
            normed = _repeated(kind.qk_norm_layers, layer, True)
            kind = replace(kind, qk_norm=kind.qk_norm if normed else "none", qk_norm_layers=())
        if own == ALIKE:
            return self if kind is self.attention else replace(self, attention=kind)
        return replace(
            self,
            attention=kind,
            num_kv_heads=_repeated(own.num_kv_heads, layer, self.num_kv_heads),
            ffn_hidden_size=_repeated(own.ffn_hidden_size, layer, self.ffn_hidden_size),
            layers=LayersConfig(
                attention=(self.attention_part(layer),), mlp=(self.mlp_part(layer),)
            ),
        )

    def attention_part(self, layer: int) -> Part:
        """What a layer, numbered over all stages, has for attention."""
        return _repeated(self.layers.attention, layer, "full")

    def mlp_part(self, layer: int) -> Part:
        """The same for its MLP."""
        return _repeated(self.layers.mlp, layer, "full")

    def head_size(self) -> int:
        """Features per head (d)."""
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_heads

    def key_size(self) -> int:
        """Features per head of queries and keys."""
        return self.head_size() if self.mla is None else self.mla.nope_dim + self.mla.rope_dim

    def value_size(self) -> int:
        """Features per head of values."""
        return self.head_size() if self.mla is None else self.mla.value_dim

    def width_factor(self) -> float:
        """m of muP: how many times wider than its base the model is; 1 without muP."""
        return 1.0 if self.mup is None else self.hidden_size / self.mup.base_hidden_size

    def score_scale(self) -> float | None:
        """What scores of attention are multiplied by; unset: 1 / sqrt(features of a key)."""
        if self.attention.scale is not None or self.mup is None:
            return self.attention.scale
        size = self.key_size() ** self.mup.attention_scale_power
        return float((self.mup.base_head_dim or 1) ** 0.5 / size)

    def has_window(self, layer: int) -> bool:
        """Whether a layer, numbered over all stages, sees only a window of tokens."""
        attends = self.attention.window is not None and self.attention_part(layer) == "full"
        return attends and _repeated(self.attention.window_layers, layer, True)

    def qk_norm_eps(self) -> float:
        """Of the norms of queries and keys."""
        return self.norm_eps if self.attention.qk_norm_eps is None else self.attention.qk_norm_eps

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, numbered over all stages, has a mixture of experts in place of its
        MLP."""
        mixes = self.moe is not None and self.mlp_part(layer) == "full"
        return mixes and _repeated(self.moe.layers if self.moe else (), layer, True)

    def uses_cross_layer_source(self, layer: int) -> bool:
        """Whether a layer, numbered over all stages, looks at the memory."""
        own = self.cross
        return (
            own is not None
            and layer >= own.memory
            and _repeated(own.layers, layer - own.memory, True)
        )

    def has_cross_layer_source_before(self, layers: range) -> int | None:
        """Which of these layers reads the hidden states that become the memory, counted from the
        first; None: none."""
        taken = self.cross is not None and self.cross.memory in layers
        return self.cross.memory - layers.start if taken and self.cross is not None else None

    def needs_cross_layer_source(self, layer: int) -> bool:
        """Whether layers from that number on look at a memory that was taken before it."""
        taken = self.cross is not None and layer > self.cross.memory
        return taken and any(
            self.uses_cross_layer_source(later) for later in range(layer, self.num_layers)
        )

    def needs_biases(self, *, layers: int) -> bool:
        """Whether so many layers, MTP layers too, read the table of biases by
        distance."""
        return self.positions == "relative" and layers > 0

    def uses_rope(self, layer: int) -> bool:
        """Whether a layer, numbered over all stages, turns its queries and keys with their
        positions."""
        attends = self.positions == "rope" and self.attention_part(layer) == "full"
        return attends and not _repeated(self.rope.skip, layer, False)

    def has_attention_temperature(self, layer: int) -> bool:
        """Whether a layer, numbered over all stages, multiplies its queries by what grows with
        their positions."""
        attends = self.positions == "rope" and self.attention_part(layer) == "full"
        return attends and not self.uses_rope(layer) and self.rope.skip_growth > 0

    def rotary_size(self) -> int:
        """Features per head that turn with the position."""
        return (
            self.mla.rope_dim
            if self.mla is not None
            else int(self.head_size() * self.rope.fraction)
        )

    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: `vocab_size` rounded up to `pad_vocab_to_multiple_of`."""
        return -(-self.vocab_size // self.pad_vocab_to_multiple_of) * self.pad_vocab_to_multiple_of


def _repeated(pattern: tuple[T, ...], layer: int, otherwise: T) -> T:
    """What a pattern that repeats says of a layer."""
    return pattern[layer % len(pattern)] if pattern else otherwise

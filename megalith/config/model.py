"""Model configuration: the sizes and choices that define the parameters and the forward pass of
a decoder-only transformer."""

from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from megalith.config.attention import AttentionConfig
from megalith.config.cross import CrossConfig
from megalith.config.dropout import DropoutConfig
from megalith.config.layers import EQUAL_LAYERS, LayerPart, LayersConfig
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
"""Position of a layer's norms: before attention and MLP (pre-norm), before and after, or after
(post-norm)."""

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu"]
"""Activation functions: gelu is exact, gelu_tanh its tanh approximation, quick_gelu is x *
sigmoid(1.702 x)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Decoder-only transformer. The defaults are those of Llama: pre-norm RMSNorm, rotary position
    embedding, grouped-query attention and SwiGLU.

    Source: Touvron et al. 2023, arXiv:2302.13971; Grattafiori et al. 2024, arXiv:2407.21783.
    """

    vocab_size: int
    """Number of tokens in the vocabulary. Logits of padding rows (see
    `pad_vocab_to_multiple_of`) are ignored."""

    hidden_size: int
    """Size of the hidden states (h)."""

    num_layers: int
    """Number of transformer layers."""

    num_heads: int
    """Number of query heads (n)."""

    num_kv_heads: int
    """Number of KV heads (g). Each is shared by n/g query heads."""

    ffn_hidden_size: int
    """Intermediate size of the MLP (f)."""

    head_dim: int | None = None
    """Size of each attention head (d). Unset: hidden_size / num_heads."""

    max_seq_len: int = 8192
    """Maximum context length in tokens."""

    norm: Norm = "rms"
    """Type of normalization: RMSNorm or LayerNorm."""

    norm_eps: float = 1e-5
    """Epsilon added to the mean square (RMSNorm) or the variance (LayerNorm) before the square
    root."""

    zero_centered_gamma: bool = False
    """Norms multiply by 1 + weight, and the weight is initialized to 0."""

    norm_placement: NormPlacement = "before"
    """Position of the norms. before: x + f(norm(x)); around: x + norm(f(norm(x))); after: x +
    norm(f(x))."""

    block: Literal["sequential", "parallel", "parallel_one_norm"] = "sequential"
    """Layer structure. sequential: the MLP follows attention. parallel: attention and MLP both
    read x and their outputs are added, each with its own norm. parallel_one_norm: the same
    with one shared norm."""

    positions: Literal["rope", "learned", "relative", "none"] = "rope"
    """Position encoding. rope: rotary position embedding; learned: a learned embedding per
    position; relative: a learned bias per distance, added to attention scores; none: no
    position encoding, only the attention mask."""

    rope: RopeConfig = field(default_factory=RopeConfig)
    """Rotary position embedding."""

    relative: RelativeConfig = field(default_factory=RelativeConfig)
    """Relative position biases."""

    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """Attention scores, masks, norms and gates."""

    mla: MLAConfig | None = None
    """Multi-head latent attention (MLA), which replaces keys and values per head and has its own
    sizes: leave head_dim unset and set num_kv_heads to num_heads. Unset: standard attention."""

    cross: CrossConfig | None = None
    """Second attention in some layers, to the hidden states of an earlier layer. Unset: none."""

    moe: MoEConfig | None = None
    """Mixture of experts that replaces the MLP in all or some layers. Unset: none."""

    activation: Activation = "silu"
    """Activation function of the MLP and of experts."""

    gated: bool = True
    """Gated MLP: down(activation(gate(x)) * up(x)). Off: down(activation(up(x)))."""

    activation_clamp: float | None = None
    """With `gated`: clamps gate(x) from above to this value, and up(x) to plus or minus this
    value. Unset: no clamping."""

    up_offset: float = 0.0
    """With `gated`: constant added to up(x)."""

    embedding_scale: float = 1.0
    """Factor applied to token embeddings, including learned position embeddings added to them."""

    residual_scale: float = 1.0
    """Factor applied to the outputs of attention and MLP before they are added to the residual
    stream."""

    fp32_residual: bool = False
    """Keep the residual stream in fp32 from the embeddings to the final norm, also between
    pipeline stages; attention and MLPs still compute in precision.params."""

    logit_scale: float = 1.0
    """Factor applied to the logits."""

    logit_softcap: float | None = None
    """Soft cap of the logits z: logit_softcap * tanh(z / logit_softcap). Unset: no cap."""

    layers: LayersConfig = EQUAL_LAYERS
    """Attention, MLP and sizes that differ between layers."""

    mtp: MTPConfig = field(default_factory=MTPConfig)
    """Multi-token prediction (MTP)."""

    dropout: DropoutConfig = field(default_factory=DropoutConfig)
    """Dropout probabilities for training."""

    tied_embeddings: bool = False
    """Use the token embedding table as the output head."""

    qkv_bias: bool = False
    """Add a bias to the projections of queries, keys and values."""

    output_bias: bool = False
    """Add a bias to the output projection of attention."""

    mlp_bias: bool = False
    """Add biases to the linear layers of the MLP."""

    pad_vocab_to_multiple_of: int = 64
    """Pad the vocabulary to a multiple of this number of rows. Padding rows stay zero and are
    never predicted."""

    init_std: float = 0.02
    """Standard deviation of the initial weights. Output projections into the residual stream use
    init_std / sqrt(2 * num_layers) (Radford et al. 2019, section 2.3)."""

    embedding_init_std: float | None = None
    """Standard deviation of the initial token and position embeddings, which then have no weight
    decay. Unset: init_std, with weight decay as for all matrices."""

    init: Literal["normal", "xavier_uniform"] = "normal"
    """Distribution of the initial weights. xavier_uniform: matrices are uniform with variance 2
    / (fan_in + fan_out), independent of init_std; embeddings stay normal."""

    init_overrides: tuple[tuple[str, float], ...] = ()
    """List of (pattern, standard deviation): initial values of parameters whose name matches the
    pattern, such as layers.*.mlp.down, are normal with this standard deviation; the first
    match applies."""

    mup: MuPConfig | None = None
    """Maximal update parametrization (muP). Unset: standard parametrization, with the same
    learning rate and initial standard deviation for every width."""

    def at(self, layer: int) -> "ModelConfig":
        """Return a config in which all layers equal layer `layer` of this model (numbered over
        all stages)."""
        own, kind = self.layers, self.attention
        if kind.qk_norm_layers:
            normed = _repeated(kind.qk_norm_layers, layer, True)
            kind = replace(kind, qk_norm=kind.qk_norm if normed else "none", qk_norm_layers=())
        if own == EQUAL_LAYERS:
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

    def attention_part(self, layer: int) -> LayerPart:
        """Return what layer `layer`, numbered over all stages, has as attention."""
        return _repeated(self.layers.attention, layer, "full")

    def mlp_part(self, layer: int) -> LayerPart:
        """Return what layer `layer`, numbered over all stages, has as MLP."""
        return _repeated(self.layers.mlp, layer, "full")

    def head_size(self) -> int:
        """Return the size of an attention head (d)."""
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_heads

    def key_size(self) -> int:
        """Return the size of queries and keys per head."""
        return self.head_size() if self.mla is None else self.mla.nope_dim + self.mla.rope_dim

    def value_size(self) -> int:
        """Return the size of values per head."""
        return self.head_size() if self.mla is None else self.mla.value_dim

    def width_factor(self) -> float:
        """Return the width multiplier m of muP, hidden_size / base_hidden_size; 1 without muP."""
        return 1.0 if self.mup is None else self.hidden_size / self.mup.base_hidden_size

    def softmax_scale(self) -> float | None:
        """Return the softmax scale of attention scores; None means 1 / sqrt(key_size())."""
        if self.attention.scale is not None or self.mup is None:
            return self.attention.scale
        size = self.key_size() ** self.mup.attention_scale_power
        return float((self.mup.base_head_dim or 1) ** 0.5 / size)

    def has_window(self, layer: int) -> bool:
        """Return whether layer `layer`, numbered over all stages, uses sliding-window attention."""
        attends = self.attention.window is not None and self.attention_part(layer) == "full"
        return attends and _repeated(self.attention.window_layers, layer, True)

    def qk_norm_eps(self) -> float:
        """Return the epsilon of the norms of queries and keys."""
        return self.norm_eps if self.attention.qk_norm_eps is None else self.attention.qk_norm_eps

    def has_experts(self, layer: int) -> bool:
        """Return whether layer `layer`, numbered over all stages, has a mixture of experts
        instead of an MLP."""
        mixes = self.moe is not None and self.mlp_part(layer) == "full"
        return mixes and _repeated(self.moe.layers if self.moe else (), layer, True)

    def uses_cross_layer_source(self, layer: int) -> bool:
        """Return whether layer `layer`, numbered over all stages, attends to the cross-layer
        source."""
        own = self.cross
        return (
            own is not None
            and layer >= own.memory
            and _repeated(own.layers, layer - own.memory, True)
        )

    def find_cross_layer_source(self, layers: range) -> int | None:
        """Return the index in `layers` of the layer whose input is the cross-layer source; None
        if it is in none of them."""
        taken = self.cross is not None and self.cross.memory in layers
        return self.cross.memory - layers.start if taken and self.cross is not None else None

    def needs_cross_layer_source(self, layer: int) -> bool:
        """Return whether `layer` or a later layer attends to a cross-layer source computed
        before `layer`."""
        taken = self.cross is not None and layer > self.cross.memory
        return taken and any(
            self.uses_cross_layer_source(later) for later in range(layer, self.num_layers)
        )

    def needs_relative_biases(self, *, layers: int) -> bool:
        """Return whether `layers` layers, including MTP layers, read the table of relative
        position biases."""
        return self.positions == "relative" and layers > 0

    def uses_rope(self, layer: int) -> bool:
        """Return whether layer `layer`, numbered over all stages, applies RoPE to queries and
        keys."""
        attends = self.positions == "rope" and self.attention_part(layer) == "full"
        return attends and not _repeated(self.rope.skip, layer, False)

    def has_attention_temperature(self, layer: int) -> bool:
        """Return whether layer `layer`, numbered over all stages, scales queries by an attention
        temperature that grows with the position."""
        attends = self.positions == "rope" and self.attention_part(layer) == "full"
        return attends and not self.uses_rope(layer) and self.rope.skip_growth > 0

    def rotary_size(self) -> int:
        """Return the number of features per head to which RoPE is applied."""
        return (
            self.mla.rope_dim
            if self.mla is not None
            else int(self.head_size() * self.rope.fraction)
        )

    def padded_vocab_size(self) -> int:
        """Return the number of rows of the embedding table: `vocab_size` rounded up to a
        multiple of `pad_vocab_to_multiple_of`."""
        return -(-self.vocab_size // self.pad_vocab_to_multiple_of) * self.pad_vocab_to_multiple_of


def _repeated(pattern: tuple[T, ...], layer: int, otherwise: T) -> T:
    return pattern[layer % len(pattern)] if pattern else otherwise

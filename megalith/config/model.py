"""Model configuration: the sizes and choices that define the parameters and the forward pass of a
decoder-only transformer: attention, RoPE, MLA, MTP, muP, dropout."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, TypeVar

from megalith.config.fields import Example, Ge, Gt, Le, Lt
from megalith.config.moe import MoEConfig
from megalith.config.plugins import ModelPlugins

MAX_LAYERS = 1 << 14
"""Maximum layers. Heuristic: a hundred times the deepest models; plans build lists of layers."""

# Attention settings: QK norms, softmax scale, masks, sliding windows, attention sinks and
# gates.

QKNorm = Literal["none", "head", "whole", "l2"]
"""Normalization of queries and keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Attention mechanism: scores, masks, norms and gates."""

    qk_norm: QKNorm = "none"
    """Normalization of queries and keys. head: over the features of each head, with one weight
    shared by all heads; whole: over the features of all heads; l2: over those of each head,
    without a weight."""

    qk_norm_eps: Annotated[float | None, Gt(0), Le(1.0), Example(1e-6)] = None
    """Epsilon of the QK norms. Unset: the model's norm_eps."""

    qk_norm_layers: tuple[bool, ...] = ()
    """Layers with QK norms, as a pattern that repeats over the layers. Empty: all."""

    scale: Annotated[float | None, Gt(0), Example(0.125)] = None
    """Softmax scale, by which attention scores are multiplied. Unset: 1 / sqrt(head_dim)."""

    softcap: Annotated[float | None, Gt(0), Example(50.0)] = None
    """Soft cap of attention scores s: softcap * tanh(s / softcap). Unset: no cap."""

    causal: bool = True
    """Causal attention mask. Off: each token attends to its whole document."""

    window: Annotated[int | None, Ge(1)] = None
    """Sliding-window size in tokens, including the token itself. Without `causal`, the window
    also covers as many tokens after it. Unset: full attention."""

    window_right: Annotated[int | None, Ge(0)] = None
    """Without `causal`: number of tokens after a token that it attends to in layers with a
    window. Unset: window - 1. To limit only this side, set `window` to the length of the
    longest document."""

    window_layers: tuple[bool, ...] = ()
    """Layers with the sliding window, as a pattern that repeats over the layers. Empty: all."""

    chunked: bool = False
    """Chunked attention: documents are split into chunks of `window` tokens, and a token attends
    only to its own chunk. Source: Meta 2025, the Llama 4 release."""

    sinks: bool = False
    """Attention sinks: a learned logit per head is included in the softmax denominator. Source:
    arXiv:2309.17453."""

    off_by_one: bool = False
    """Include a logit of 0 in the softmax denominator, exp(s) / (1 + sum of exp(s)), so that a
    head can attend to nothing. Source: Miller 2023, "Attention is off by one"."""

    gated: bool = False
    """Multiply each head's output by the sigmoid of a projection of the layer's input. Source:
    arXiv:2505.06708."""


def list_attention_warnings(attention: AttentionConfig) -> list[str]:
    """Return a warning for the start of a run if attention is not causal."""
    if attention.causal:
        return []
    return [
        "model.attention.causal=false: every token attends to its own label, so the loss measures "
        "copying; set model.attention.causal=true to train a language model"
    ]


# --- rotary position embedding (RoPE): base frequency, layers and context extension

RopeScaling = Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"]
"""Methods of context extension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding and its context extension.

    Source: Su et al. 2021, arXiv:2104.09864; linear: Chen et al. 2023, arXiv:2306.15595; yarn: Peng
    et al. 2023, arXiv:2309.00071; longrope: Ding et al. 2024, arXiv:2402.13753; llama3: the Llama
    3.1 release; dynamic: base changed with the length (NTK-aware).
    """

    theta: Annotated[float, Gt(0), Le(1e15)] = 10_000.0
    """Base of the frequencies: pair i of d rotary features rotates by position * theta ** (-2 i
    / d)."""

    local_theta: Annotated[float | None, Gt(0), Le(1e15), Example(1e4)] = None
    """Base of the frequencies in layers with a sliding window, to which `scaling` is then not
    applied. Unset: theta."""

    fraction: Annotated[float, Gt(0), Le(1)] = 1.0
    """Fraction of each head's features, from the first, to which RoPE is applied (partial
    rotary)."""

    interleaved: bool = False
    """Rotate features 2 i and 2 i + 1 as a pair, as GPT-J does. Off: features i and i + d / 2."""

    skip: tuple[bool, ...] = ()
    """Layers without RoPE (NoPE), as a pattern that repeats over the layers: (no, no, no, yes)
    is every fourth layer. Empty: none."""

    skip_growth: Annotated[float, Ge(0)] = 0.0
    """Attention temperature of layers without RoPE: queries are multiplied by 1 + skip_growth *
    ln(1 + floor((position + 1) / skip_step)), so that attention does not flatten over long
    contexts; 0: off. Source: Nakanishi 2025, arXiv:2501.19399."""

    skip_step: Annotated[int, Ge(1)] = 8192
    """Number of tokens of a document after which the attention temperature changes."""

    sections: tuple[int, ...] = ()
    """Multimodal RoPE: number of pairs that rotate by time, by height and by width. Empty: one
    position per token. Source: arXiv:2409.12191."""

    scaling: RopeScaling = "none"
    """Context extension. linear: divide positions by `factor`; dynamic: raise theta with the
    sequence length; llama3: stretch long wavelengths; yarn: stretch wavelengths longer than
    the original context; longrope: a factor per pair. yarn and longrope also scale attention."""

    factor: Annotated[float, Gt(0)] = 8.0
    """Ratio of the extended to the original context length; not used with scaling none."""

    low_freq_factor: Annotated[float, Gt(0)] = 1.0
    """llama3: wavelengths above original_max_position / low_freq_factor are stretched by the
    full factor."""

    high_freq_factor: Annotated[float, Gt(0)] = 4.0
    """llama3: wavelengths below original_max_position / high_freq_factor are unchanged."""

    original_max_position: Annotated[int, Ge(1)] = 8192
    """llama3, yarn, dynamic, longrope: context length of pretraining, in tokens."""

    beta_fast: Annotated[float, Gt(0)] = 32.0
    """yarn: pairs with more rotations than this over the original context are unchanged."""

    beta_slow: Annotated[float, Gt(0)] = 1.0
    """yarn: pairs with fewer rotations than this over the original context are stretched by the
    full factor."""

    whole_pairs: bool = True
    """yarn: round the first and last pair of the interpolation range to whole numbers."""

    attention_factor: Annotated[float | None, Gt(0), Example(1.0)] = None
    """yarn, longrope: factor applied to queries and keys. Unset: 0.1 ln(factor) + 1 with yarn,
    sqrt(1 + ln(factor) / ln(original_max_position)) with longrope."""

    short_factors: Annotated[tuple[float, ...], Gt(0)] = ()
    """longrope: divisor of each pair's angles in documents of at most original_max_position
    tokens."""

    long_factors: Annotated[tuple[float, ...], Gt(0)] = ()
    """longrope: divisor of each pair's angles in longer documents."""


# --- multi-head latent attention (MLA): sizes of the latent vectors and of the heads


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention: keys and values of all heads are projected from one latent
    vector per token.

    Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.
    """

    kv_rank: Annotated[int, Ge(1)]
    """Size of the latent vector of keys and values."""

    q_rank: Annotated[int | None, Ge(1)] = None
    """Size of the latent vector of queries. Unset: queries are projected from the layer's input
    directly."""

    nope_dim: Annotated[int, Ge(1)] = 128
    """Size per head of the part of queries and keys without RoPE."""

    rope_dim: Annotated[int, Ge(1)] = 64
    """Size per head of the part of queries and keys with RoPE; this part of the keys is shared
    by all heads."""

    value_dim: Annotated[int, Ge(1)] = 128
    """Size of values per head."""

    norms: bool = True
    """Normalize the two latent vectors, as published models do."""

    norm_eps: Annotated[float, Gt(0), Le(1.0)] = 1e-6
    """Epsilon of the norms of the latent vectors, whose type is `model.norm`."""

    yarn_mscale: Annotated[float | None, Gt(0), Example(1.0)] = None
    """With yarn: attention scores are multiplied by (0.1 yarn_mscale ln(rope.factor) + 1)
    squared. Unset: not scaled."""


# --- cross-layer attention: later layers attend to the hidden states of an earlier layer


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossConfig:
    """Layers with a second attention, to the hidden states of an earlier layer (the cross-layer
    source).

    The attention mask is that of self-attention without a window. Each layer projects its own keys
    and values from the source, which is normalized once. Source: Sun et al. 2024, arXiv:2405.05254,
    where layers share keys and values; the layer is the decoder layer of Vaswani et al. 2017,
    arXiv:1706.03762, section 3.1.
    """

    memory: int
    """Number of layers after which the hidden states are taken as the source; 0: the input of
    the first layer."""

    layers: tuple[bool, ...] = ()
    """Layers that attend to the source, as a pattern that repeats from layer number `memory` on.
    Empty: all of them."""


# Relative position biases: a learned bias per head and distance bucket, added to attention
# scores.


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


# --- multi-token prediction (MTP) settings


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPConfig:
    """Multi-token prediction: additional layers that predict the tokens after the next one.

    Source: DeepSeek-AI 2024, arXiv:2412.19437, section 2.2.
    """

    num_layers: Annotated[int, Ge(0), Le(MAX_LAYERS)] = 0
    """Number of MTP layers, each of which predicts one more token after the next; 0: none."""

    loss_weight: Annotated[float, Ge(0), Le(1e3)] = 0.1
    """Weight of the mean MTP loss in the total loss."""


# Maximal update parametrization (muP): initialization and learning rates that transfer from a
# narrow to a wide model.


@dataclass(frozen=True, slots=True, kw_only=True)
class MuPConfig:
    """Maximal update parametrization (muP). With m = hidden_size / base_hidden_size, weight
    matrices of layers are initialized with std / sqrt(m), logits are divided by m, and so are
    Adam's learning rate and eps of these matrices; with SGD the learning rate of all other
    parameters is multiplied by m. Embeddings, vectors and the output head are initialized as in
    the base model.

    Source: Yang et al. 2022, arXiv:2203.03466, table 8; Lingle 2024, arXiv:2404.05728.
    """

    base_hidden_size: Annotated[int, Ge(1)]
    """Hidden size of the base model, on which init_std and the learning rate were tuned."""

    base_head_dim: Annotated[int | None, Ge(1)] = None
    """Head size of the base model, at which attention scores are scaled as without muP. Unset:
    scores are divided by head_dim ** attention_scale_power."""

    attention_scale_power: Annotated[float, Ge(0)] = 1.0
    """Exponent p of the attention scale sqrt(base_head_dim) / head_dim ** p."""


# --- dropout probabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutConfig:
    """Dropout probabilities. The masks depend on seed, step, layer, token and feature only, so
    they are the same under every parallel layout, in recomputation and after a resume."""

    embedding: Annotated[float, Ge(0), Lt(1), Example(0.1)] = 0.0
    """Dropout probability of the embeddings."""

    residual: Annotated[float, Ge(0), Lt(1), Example(0.1)] = 0.0
    """Dropout probability of the outputs of attention and MLP."""

    attention: Annotated[float, Ge(0), Lt(1), Example(0.1)] = 0.0
    """Dropout probability of the attention weights."""

    def is_enabled(self) -> bool:
        """Return whether any probability is above 0."""
        return max(self.embedding, self.residual, self.attention) > 0


# --- settings of layers that differ from each other, as patterns repeated over the layers

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

    num_kv_heads: Annotated[tuple[int, ...], Ge(1)] = ()
    """Number of KV heads of each layer; model.num_kv_heads is the largest."""

    ffn_hidden_size: Annotated[tuple[int, ...], Ge(1)] = ()
    """Intermediate size of each layer's MLP; model.ffn_hidden_size is the largest."""


EQUAL_LAYERS = LayersConfig()
"""Default: all layers are equal."""


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

    vocab_size: Annotated[int, Ge(1)]
    """Number of tokens in the vocabulary. Logits of padding rows (see
    `pad_vocab_to_multiple_of`) are ignored."""

    hidden_size: Annotated[int, Ge(1)]
    """Size of the hidden states (h)."""

    num_layers: Annotated[int, Ge(1), Le(MAX_LAYERS)]
    """Number of transformer layers."""

    num_heads: Annotated[int, Ge(1)]
    """Number of query heads (n)."""

    num_kv_heads: Annotated[int, Ge(1)]
    """Number of KV heads (g). Each is shared by n/g query heads."""

    ffn_hidden_size: Annotated[int, Ge(1)]
    """Intermediate size of the MLP (f)."""

    head_dim: Annotated[int | None, Ge(1)] = None
    """Size of each attention head (d). Unset: hidden_size / num_heads."""

    max_seq_len: Annotated[int, Ge(1)] = 8192
    """Maximum context length in tokens."""

    norm: Norm = "rms"
    """Type of normalization: RMSNorm or LayerNorm."""

    norm_eps: Annotated[float, Gt(0), Le(1.0)] = 1e-5
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

    activation_clamp: Annotated[float | None, Gt(0), Example(7.0)] = None
    """With `gated`: clamps gate(x) from above to this value, and up(x) to plus or minus this
    value. Unset: no clamping."""

    up_offset: float = 0.0
    """With `gated`: constant added to up(x)."""

    embedding_scale: Annotated[float, Gt(0)] = 1.0
    """Factor applied to token embeddings, including learned position embeddings added to them."""

    residual_scale: Annotated[float, Gt(0)] = 1.0
    """Factor applied to the outputs of attention and MLP before they are added to the residual
    stream."""

    fp32_residual: bool = False
    """Keep the residual stream in fp32 from the embeddings to the final norm, also between
    pipeline stages; attention and MLPs still compute in precision.params."""

    logit_scale: Annotated[float, Gt(0)] = 1.0
    """Factor applied to the logits."""

    logit_softcap: Annotated[float | None, Gt(0), Example(30.0)] = None
    """Soft cap of the logits z: logit_softcap * tanh(z / logit_softcap). Unset: no cap."""

    layers: LayersConfig = EQUAL_LAYERS
    """Attention, MLP and sizes that differ between layers."""

    plugins: ModelPlugins = field(default_factory=ModelPlugins)
    """Parts of the model from other packages."""

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

    pad_vocab_to_multiple_of: Annotated[int, Ge(1)] = 64
    """Pad the vocabulary to a multiple of this number of rows. Padding rows stay zero and are
    never predicted."""

    init_std: Annotated[float, Ge(0), Le(1e3)] = 0.02
    """Standard deviation of the initial weights. Output projections into the residual stream use
    init_std / sqrt(2 * num_layers) (Radford et al. 2019, section 2.3)."""

    embedding_init_std: Annotated[float | None, Ge(0), Le(1e3)] = None
    """Standard deviation of the initial token and position embeddings, which then have no weight
    decay. Unset: init_std, with weight decay as for all matrices."""

    init: Literal["normal", "xavier_uniform"] = "normal"
    """Distribution of the initial weights. xavier_uniform: matrices are uniform with variance 2
    / (fan_in + fan_out), independent of init_std; embeddings stay normal."""

    init_overrides: Annotated[tuple[tuple[str, float], ...], Ge(0), Le(1e3)] = ()
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

"""What most families have in common with Llama: fields of config.json, tensors, and that nothing is
left unsaid."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megalith.config.dropout import DropoutConfig
from megalith.config.model import ModelConfig
from megalith.config.mtp import MTPConfig
from megalith.config.rope import RopeConfig
from megalith.config.tree import differences
from megalith.errors import ConfigError, raise_all
from megalith.kernels.rope import attention_factor
from megalith.models.experts import (
    LayerRules,
    Words,
    canonical_experts,
    joined_rules,
    mixture_rules,
)
from megalith.models.fields import Fields, activation_word
from megalith.models.names import Family, TensorRule, rule
from megalith.models.rope import rope_values, write_rope

# --- config.json


SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
"""Theirs -> ours; a config without one of them is not complete."""


def read_common_fields(
    fields: Fields,
    *,
    max_seq_len: int = 2048,
    norm_eps: float = 1e-6,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    tied: bool = False,
    activation: str = "hidden_act",
    switch: bool = True,
) -> dict[str, Any]:
    """Arguments of ModelConfig that nearly all families spell alike; values are those of a config
    without the field.

    `kv_heads` unset: as many as heads; `head_dim` unset: hidden_size / heads; `activation`: the
    field's name; `switch`: whether attention_bias says that queries, keys, values and output have
    biases.
    """
    sizes = {ours: fields.whole(theirs) for theirs, ours in SIZES.items()}
    heads, hidden = sizes["num_heads"], sizes["hidden_size"]
    size = fields.whole_or_none("head_dim") or head_dim
    default = "silu" if activation == "hidden_act" else "gelu_pytorch_tanh"
    there = (
        "num_key_value_heads" in fields.raw
    )  # null means as many as heads, missing what the family says
    biases = {name: fields.flag("attention_bias") for name in ("qkv_bias", "output_bias") if switch}
    return {
        **sizes,
        "num_kv_heads": fields.whole("num_key_value_heads", heads if there else kv_heads or heads),
        "head_dim": None if size is None or size * heads == hidden else size,
        "max_seq_len": fields.whole("max_position_embeddings", max_seq_len),
        "norm_eps": fields.number("rms_norm_eps", norm_eps),
        "activation": fields.activation(activation, default),
        "tied_embeddings": fields.flag("tie_word_embeddings", tied),
        **biases,
        "dropout": DropoutConfig(attention=fields.number("attention_dropout", 0.0, zero=True)),
        "init_std": fields.number("initializer_range", 0.02, zero=True),
    }


def write_common_fields(
    config: ModelConfig, family: Family, *, activation: str = "hidden_act", switch: bool = True
) -> dict[str, Any]:
    """The same in the other direction, and rotary positions. With the switch, biases that ours
    lacks are zero there."""
    return {
        **({"attention_bias": config.qkv_bias or config.output_bias} if switch else {}),
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{theirs: getattr(config, ours) for theirs, ours in SIZES.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size(),
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        activation: activation_word(config.activation),
        "tie_word_embeddings": config.tied_embeddings,
        "attention_dropout": config.dropout.attention,
        **write_rope(config.rope),
        "use_cache": True,
    }


def whole_heads(config: ModelConfig) -> None:
    """Refuse a model whose heads do not share its features evenly.

    Raises:
        ConfigError: it is one, and families that ask this refuse it in transformers.
    """
    if config.hidden_size % config.num_heads:
        raise_all(
            [
                f"model.hidden_size={config.hidden_size} is not a multiple of "
                f"model.num_heads={config.num_heads}, and "
                f"transformers refuses such a model. Use a Megalith checkpoint for this model."
            ]
        )


SLIDING, FULL = "sliding_attention", "full_attention"
SWITCH_REMEDY = ", or use_sliding_window to true and sliding_window to a number of tokens"
SIZE_REMEDY = ", or sliding_window to a number of tokens"


def read_windows(
    fields: Fields, layers: int, default: Sequence[bool], *, window: int | None, remedy: str = ""
) -> tuple[bool, ...]:
    """Return which layers have a sliding window: from layer_types, or `default` where the config
    has none.

    Sliding layers without a `window` are a problem: transformers then fails, or applies the window
    in some of its attention backends and not in others. `remedy`: what else the message suggests.
    """
    layer_types = fields.flags_of_layers("layer_types", layers, {SLIDING: True, FULL: False})
    sliding_layers = tuple(default) if layer_types is None else layer_types
    if window is None and any(sliding_layers):
        names = ("use_sliding_window", "sliding_window")
        values = " and ".join(
            f"{name}={fields.raw[name]!r}" for name in names if name in fields.raw
        )
        fields.problems.append(
            f"layer_types has {SLIDING!r} for {sum(sliding_layers)} of {layers} layers"
            f"{' by default' if layer_types is None else ''}, and "
            f"{values or f'{names[0]} and {names[1]} are missing'}: these layers have no window. "
            "Set layer_types to "
            f"{FULL!r} for every layer{remedy}."
        )
    return shortest(sliding_layers)


def write_windows(config: ModelConfig) -> list[str]:
    """layer_types."""
    return [SLIDING if config.has_window(layer) else FULL for layer in range(config.num_layers)]


def read_switched_windows(fields: Fields, layers: int) -> dict[str, Any]:
    """Arguments of AttentionConfig from Qwen's four fields: a switch, the window, and which layers
    have it.

    max_window_layers counts the layers at the bottom that have none, whatever its name and older
    documentation say.
    """
    first = (
        0 if fields.value("max_window_layers") == 0 else fields.whole_or_none("max_window_layers")
    )
    first = 28 if first is None else first
    window = fields.whole_or_none("sliding_window") if "sliding_window" in fields.raw else 4096
    window = window if fields.flag("use_sliding_window") else None
    default = [window is not None and layer >= first for layer in range(layers)]
    return windowed(
        window, read_windows(fields, layers, default, window=window, remedy=SWITCH_REMEDY)
    )


def write_switched_windows(config: ModelConfig) -> dict[str, Any]:
    """The same in the other direction."""
    first = next(
        (layer for layer in range(config.num_layers) if config.has_window(layer)), config.num_layers
    )
    return {
        "use_sliding_window": first < config.num_layers,
        "sliding_window": config.attention.window if first < config.num_layers else None,
        "max_window_layers": first,  # transformers before 4.53 looks at nothing else
        "layer_types": write_windows(config),
    }


def shortest(flags: tuple[bool, ...]) -> tuple[bool, ...]:
    """A pattern over layers without its repetitions.

    >>> shortest((True, False, True, False, True))
    (True, False)
    """
    return next(
        flags[:n]
        for n in range(1, len(flags) + 1)
        if all(flag == flags[i % n] for i, flag in enumerate(flags))
    )


def windowed(window: int | None, layers: tuple[bool, ...]) -> dict[str, Any]:
    """Arguments of AttentionConfig; a window that no layer has is none."""
    if window is None or not any(layers):
        return {}
    return {"window": window, "window_layers": () if all(layers) else layers}


# --- nothing left unsaid


Read = Callable[[Mapping[str, Any]], ModelConfig]


class UnexportedFieldsError(ConfigError):
    """A family has no words for some settings of a model."""

    def __init__(self, text: str, settings: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.settings = tuple(settings)


def check_all_fields_exported(
    raw: dict[str, Any], config: ModelConfig, read_config: Read, family: Family
) -> dict[str, Any]:
    """`raw`, what a family wrote about a model, if reading it gives the same model.

    Raises:
        UnexportedFieldsError: the family has no words for something; each setting is named.
    """
    if (biases := raw.get("attention_bias")) is not None:  # one switch for all four
        config = replace(config, qkv_bias=biases, output_bias=biases)
    lost = differences(canonical(read_config(raw)), canonical(config))
    try:
        raise_all(
            [
                f"model.{field}={ours!r}: {family.architecture} has no word for it; it would be "
                f"{theirs!r} there. Use "
                f"a Megalith checkpoint for this model."
                for field, theirs, ours in lost
            ]
        )
    except ConfigError as error:
        raise UnexportedFieldsError(str(error), [field for field, _, _ in lost]) from None
    return raw


def canonical(config: ModelConfig) -> ModelConfig:
    """The same mathematics outside of training with every setting in one way: those without
    effect as they are by default, patterns without repetitions."""
    size, kind, rope = config.head_size(), config.attention, RopeConfig()
    windows = tuple(config.has_window(layer) for layer in range(config.num_layers))
    window = windowed(kind.window, shortest(windows))
    if config.positions == "rope":
        turned = shortest(tuple(not config.uses_rope(layer) for layer in range(config.num_layers)))
        rope = canonical_rope(config.rope, windows=any(windows), skip=turned if any(turned) else ())
    scale = size**-0.5 if kind.scale is None and config.mla is None else kind.scale
    normed = tuple(
        config.at(layer).attention.qk_norm != "none" for layer in range(config.num_layers)
    )
    kind = replace(
        kind,
        qk_norm=kind.qk_norm if any(normed) else "none",
        chunked=kind.chunked and any(windows),
        qk_norm_layers=shortest(normed) if any(normed) and not all(normed) else (),
    )
    own_eps = (
        kind.qk_norm_eps if kind.qk_norm != "none" and kind.qk_norm_eps != config.norm_eps else None
    )
    rounded = {
        "window": None,
        "window_layers": (),
        "scale": scale and float(f"{scale:.12g}"),
        **window,
    }
    kept = replace(
        config,
        pad_vocab_to_multiple_of=1,
        dropout=DropoutConfig(),
        rope=rope,
        attention=replace(kind, qk_norm_eps=own_eps, **rounded),
        logit_scale=float(f"{config.logit_scale:.12g}"),
        mtp=MTPConfig(num_layers=config.mtp.num_layers),
        init="normal",
        embedding_init_std=None,
        init_overrides=(),
        fp32_residual=False,
    )
    kept = canonical_experts(kept)
    if config.mla is not None:
        return replace(kept, head_dim=None, num_kv_heads=config.num_heads)
    return replace(kept, head_dim=size)


def canonical_rope(rope: RopeConfig, *, windows: bool, skip: tuple[bool, ...]) -> RopeConfig:
    """Rotary positions with nothing said that their kind of scaling, or a model without windows,
    does not look at."""
    kind, values = rope_values(rope)
    kept: dict[str, Any] = {
        "scaling": rope.scaling,
        "theta": rope.theta,
        "fraction": rope.fraction,
        "interleaved": rope.interleaved,
        "sections": rope.sections,
        "skip": skip,
    }
    if windows and (rope.local_theta != rope.theta or values):
        kept["local_theta"] = rope.local_theta
    if skip and rope.skip_growth:
        kept |= {"skip_growth": rope.skip_growth, "skip_step": rope.skip_step}
    looked_at = ["factor"] if values else []
    if kind in ("dynamic", "llama3", "yarn", "longrope"):
        looked_at.append("original_max_position")
    if kind == "llama3":
        looked_at += ["low_freq_factor", "high_freq_factor"]
    if kind == "yarn":
        looked_at += ["beta_fast", "beta_slow", "whole_pairs"]
        kept["attention_factor"] = float(f"{attention_factor(rope):.12g}")
    if kind == "longrope":
        looked_at = ["original_max_position", "short_factors", "long_factors"]
        kept["attention_factor"] = float(f"{attention_factor(rope):.12g}")
    return RopeConfig(**kept, **{name: getattr(rope, name) for name in looked_at})


# --- tensors


NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
"""Ours -> theirs, in Llama and all that norm as it does."""

HEAD = "lm_head.weight"

Rules = Callable[[ModelConfig], list[TensorRule]]
"""Every tensor of theirs, in the order of the forward pass."""


def no_experts(config: ModelConfig, theirs: str, ours: str) -> list[TensorRule]:
    """Of a family whose configs are read without experts, and that refuses to write any."""
    return []


ROTARY_BUFFERS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Tensors of old files that hold nothing to keep: conversions of 2023 stored the frequencies."""


def common_rules(
    config: ModelConfig,
    *,
    norms: Mapping[str, str] = NORMS,
    all_biases: bool = True,
    experts: LayerRules = no_experts,
    mlp: str = "mlp",
) -> list[TensorRule]:
    """Every tensor of theirs, in the order of the forward pass.

    `all_biases`: they have one switch for the biases of queries, keys, values and output, so what
    ours lacks is zero; `experts`: those of a layer with a mixture of experts; `mlp`: what an MLP is
    called.
    """
    v, h = config.vocab_size, config.hidden_size
    found = [rule("model.embed_tokens.weight", "embed.weight", (v, h), shape=(v, h))]
    for layer in range(config.num_layers):
        theirs, ours = f"model.layers.{layer}", f"layers.{layer}"
        attention = attention_rules(
            config, f"{theirs}.self_attn", f"{ours}.attention", all_biases=all_biases
        )
        inner = (
            experts(config, theirs, f"{ours}.moe")
            if config.has_experts(layer)
            else mlp_rules(config, f"{theirs}.{mlp}", f"{ours}.mlp")
        )
        for word, rules in (("attention", attention), ("mlp", inner)):
            around = {
                part: [
                    rule(
                        f"{theirs}.{norms[part]}.weight", f"{ours}.{part}.weight", (h,), shape=(h,)
                    )
                ]
                for part in (f"{word}_norm", f"{word}_post_norm")
                if part in norms
            }
            found += [*around.get(f"{word}_norm", []), *rules, *around.get(f"{word}_post_norm", [])]
    found.append(rule("model.norm.weight", "norm.weight", (h,), shape=(h,)))
    if not config.tied_embeddings:
        found.append(rule(HEAD, "head.weight", (v, h), shape=(v, h)))
    return found


def rules_with_experts(words: Words, *, all_biases: bool = True) -> tuple[Rules, Rules]:
    """`Family.rules` and `Family.joined`: every expert has tensors of its own, or those of a layer
    share two."""
    each, raise_on_all_ranks = (
        partial(common_rules, all_biases=all_biases, experts=kind(words))
        for kind in (mixture_rules, joined_rules)
    )
    return each, raise_on_all_ranks


def attention_rules(
    config: ModelConfig, theirs: str, ours: str, *, all_biases: bool
) -> list[TensorRule]:
    """Queries, keys, values, their norms, and the output."""
    h, n, g, d = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_size()
    found = [
        rule(f"{theirs}.q_proj.weight", f"{ours}.q", (n, d, h), shape=(n * d, h)),
        rule(f"{theirs}.k_proj.weight", f"{ours}.kv", (g, d, h), shape=(g * d, h), part=0),
        rule(f"{theirs}.v_proj.weight", f"{ours}.kv", (g, d, h), shape=(g * d, h), part=1),
        rule(f"{theirs}.o_proj.weight", f"{ours}.o", (h, n, d), shape=(h, n * d)),
    ]
    for word, heads in (
        (("q", n), ("k", g)) if config.attention.qk_norm in ("head", "whole") else ()
    ):
        size = (d,) if config.attention.qk_norm == "head" else (heads, d)
        shape = (math.prod(size),)
        found.append(
            rule(f"{theirs}.{word}_norm.weight", f"{ours}.{word}_norm.weight", size, shape=shape)
        )
    if config.qkv_bias:
        found += [
            rule(f"{theirs}.q_proj.bias", f"{ours}.q_bias", (n, d), shape=(n * d,)),
            rule(f"{theirs}.k_proj.bias", f"{ours}.kv_bias", (g, d), shape=(g * d,), part=0),
            rule(f"{theirs}.v_proj.bias", f"{ours}.kv_bias", (g, d), shape=(g * d,), part=1),
        ]
    elif config.output_bias and all_biases:
        zeros = {"q": n * d, "k": g * d, "v": g * d}
        found += [
            rule(f"{theirs}.{word}_proj.bias", None, (size,), shape=(size,))
            for word, size in zeros.items()
        ]
    if config.output_bias or (config.qkv_bias and all_biases):
        output = f"{ours}.o_bias" if config.output_bias else None
        found.append(rule(f"{theirs}.o_proj.bias", output, (h,), shape=(h,)))
    return found


def mlp_rules(config: ModelConfig, theirs: str, ours: str) -> list[TensorRule]:
    """A gated MLP."""
    h, f = config.hidden_size, config.ffn_hidden_size
    found = [
        rule(f"{theirs}.gate_proj.weight", f"{ours}.gate_up", (f, h), shape=(f, h), part=0),
        rule(f"{theirs}.up_proj.weight", f"{ours}.gate_up", (f, h), shape=(f, h), part=1),
        rule(f"{theirs}.down_proj.weight", f"{ours}.down", (h, f), shape=(h, f)),
    ]
    if config.mlp_bias:
        found += [
            rule(f"{theirs}.gate_proj.bias", f"{ours}.gate_up_bias", (f,), shape=(f,), part=0),
            rule(f"{theirs}.up_proj.bias", f"{ours}.gate_up_bias", (f,), shape=(f,), part=1),
            rule(f"{theirs}.down_proj.bias", f"{ours}.down_bias", (h,), shape=(h,)),
        ]
    return found

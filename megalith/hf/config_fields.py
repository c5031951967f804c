"""Config fields and tensor rules that most model families share with Llama, and the check that
every setting of a model is exported."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megalith.config.model import DropoutConfig, ModelConfig, MTPConfig, RopeConfig
from megalith.config.tree import differences
from megalith.errors import ConfigError, raise_all
from megalith.hf.fields import Fields, hf_activation_name
from megalith.hf.moe import ExpertNames, LayerRules, canonical_experts, fused_moe_rules, moe_rules
from megalith.hf.rope import rope_values, write_rope
from megalith.hf.tensor_rules import Family, TensorRule, rule
from megalith.kernels.rope import attention_factor

# --- config.json


SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
"""Hugging Face field -> ModelConfig field; all are required in a config.json."""


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
    """Return the arguments of ModelConfig whose fields most families name alike.

    `max_seq_len`, `norm_eps`, `kv_heads`, `head_dim` and `tied` are the family's defaults.
    `kv_heads` unset: the number of heads; `head_dim` unset: hidden_size / heads; `activation`: name
    of the field; `switch`: whether attention_bias sets the biases of queries, keys, values and
    output.
    """
    sizes = {name: fields.read_int(hf_name) for hf_name, name in SIZES.items()}
    heads, hidden = sizes["num_heads"], sizes["hidden_size"]
    explicit_head_dim = fields.read_optional_int("head_dim") or head_dim
    default = "silu" if activation == "hidden_act" else "gelu_pytorch_tanh"
    has_kv_heads = (
        "num_key_value_heads" in fields.raw
    )  # null means num_heads, a missing field the family default
    biases = {
        name: fields.read_flag("attention_bias") for name in ("qkv_bias", "output_bias") if switch
    }
    return {
        **sizes,
        "num_kv_heads": fields.read_int(
            "num_key_value_heads", heads if has_kv_heads else kv_heads or heads
        ),
        "head_dim": None
        if explicit_head_dim is None or explicit_head_dim * heads == hidden
        else explicit_head_dim,
        "max_seq_len": fields.read_int("max_position_embeddings", max_seq_len),
        "norm_eps": fields.read_number("rms_norm_eps", norm_eps),
        "activation": fields.read_activation(activation, default),
        "tied_embeddings": fields.read_flag("tie_word_embeddings", tied),
        **biases,
        "dropout": DropoutConfig(attention=fields.read_number("attention_dropout", 0.0, zero=True)),
        "init_std": fields.read_number("initializer_range", 0.02, zero=True),
    }


def write_common_fields(
    config: ModelConfig, family: Family, *, activation: str = "hidden_act", switch: bool = True
) -> dict[str, Any]:
    """Return the config.json fields that most families name alike, with those of rotary embeddings.

    With `switch`, attention_bias is true if the model has any of the biases; missing ones are
    exported as zeros.
    """
    return {
        **({"attention_bias": config.qkv_bias or config.output_bias} if switch else {}),
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{hf_name: getattr(config, name) for hf_name, name in SIZES.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size(),
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        activation: hf_activation_name(config.activation),
        "tie_word_embeddings": config.tied_embeddings,
        "attention_dropout": config.dropout.attention,
        **write_rope(config.rope),
        "use_cache": True,
    }


def check_head_sizes(config: ModelConfig) -> None:
    """Check that the number of heads divides hidden_size.

    Raises:
        ConfigError: it does not, which transformers does not support for this family.
    """
    if config.hidden_size % config.num_heads:
        raise_all(
            [
                f"model.hidden_size={config.hidden_size} is not a multiple of "
                f"model.num_heads={config.num_heads}, which transformers does not support for this "
                f"family. Keep the model as a Megalith checkpoint."
            ]
        )


SLIDING, FULL = "sliding_attention", "full_attention"
SWITCH_REMEDY = ", or use_sliding_window to true and sliding_window to a number of tokens"
SIZE_REMEDY = ", or sliding_window to a number of tokens"


def read_windows(
    fields: Fields, layers: int, default: Sequence[bool], *, window: int | None, remedy: str = ""
) -> tuple[bool, ...]:
    """Return which layers have a sliding window, from layer_types or, if that is missing,
    `default`.

    Sliding layers without a `window` are reported as a problem: some attention backends of
    transformers fail for them and others ignore the window. `remedy` is a further suggestion for
    the message.
    """
    layer_types = fields.read_layer_flags("layer_types", layers, {SLIDING: True, FULL: False})
    sliding_layers = tuple(default) if layer_types is None else layer_types
    if window is None and any(sliding_layers):
        names = ("use_sliding_window", "sliding_window")
        values = " and ".join(
            f"{name}={fields.raw[name]!r}" for name in names if name in fields.raw
        )
        fields.problems.append(
            f"layer_types has {SLIDING!r} for {sum(sliding_layers)} of {layers} layers"
            f"{' by default' if layer_types is None else ''}, and "
            f"{values or f'{names[0]} and {names[1]} are missing'}, so no window size is set. "
            "Set layer_types to "
            f"{FULL!r} for every layer{remedy}."
        )
    return shortest_pattern(sliding_layers)


def write_windows(config: ModelConfig) -> list[str]:
    """Return layer_types: the kind of attention of each layer."""
    return [SLIDING if config.has_window(layer) else FULL for layer in range(config.num_layers)]


def read_qwen_windows(fields: Fields, layers: int) -> dict[str, Any]:
    """Return the sliding-window arguments of AttentionConfig from use_sliding_window,
    sliding_window, max_window_layers and layer_types (Qwen).

    max_window_layers is the number of bottom layers without a window, contrary to its name and to
    older documentation.
    """
    first = (
        0
        if fields.read_value("max_window_layers") == 0
        else fields.read_optional_int("max_window_layers")
    )
    first = 28 if first is None else first
    window = fields.read_optional_int("sliding_window") if "sliding_window" in fields.raw else 4096
    window = window if fields.read_flag("use_sliding_window") else None
    default = [window is not None and layer >= first for layer in range(layers)]
    return window_arguments(
        window, read_windows(fields, layers, default, window=window, remedy=SWITCH_REMEDY)
    )


def write_qwen_windows(config: ModelConfig) -> dict[str, Any]:
    """Return the four sliding-window fields of Qwen: the inverse of `read_qwen_windows`."""
    first = next(
        (layer for layer in range(config.num_layers) if config.has_window(layer)), config.num_layers
    )
    return {
        "use_sliding_window": first < config.num_layers,
        "sliding_window": config.attention.window if first < config.num_layers else None,
        "max_window_layers": first,  # the only field that transformers before 4.53 reads
        "layer_types": write_windows(config),
    }


def shortest_pattern(flags: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return the shortest pattern whose repetition gives `flags`.

    >>> shortest_pattern((True, False, True, False, True))
    (True, False)
    """
    return next(
        flags[:n]
        for n in range(1, len(flags) + 1)
        if all(flag == flags[i % n] for i, flag in enumerate(flags))
    )


def window_arguments(window: int | None, layers: tuple[bool, ...]) -> dict[str, Any]:
    """Return the sliding-window arguments of AttentionConfig; none if no layer has a window."""
    if window is None or not any(layers):
        return {}
    return {"window": window, "window_layers": () if all(layers) else layers}


# --- check that every setting is exported


Read = Callable[[Mapping[str, Any]], ModelConfig]


class UnexportedFieldsError(ConfigError):
    """Settings of a model that cannot be expressed in the config.json of a family."""

    def __init__(self, text: str, settings: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.settings = tuple(settings)


def check_all_fields_exported(
    raw: dict[str, Any], config: ModelConfig, read_config: Read, family: Family
) -> dict[str, Any]:
    """Return `raw`, the exported config.json, if reading it back gives the same model.

    Raises:
        UnexportedFieldsError: some settings cannot be expressed; each is named.
    """
    if (biases := raw.get("attention_bias")) is not None:  # one field for all four biases
        config = replace(config, qkv_bias=biases, output_bias=biases)
    changes = differences(canonical(read_config(raw)), canonical(config))
    try:
        raise_all(
            [
                f"model.{field}={value!r}: {family.architecture} cannot express this setting; it "
                "would "
                f"be exported as {exported!r}. Keep the model as a Megalith checkpoint."
                for field, exported, value in changes
            ]
        )
    except ConfigError as error:
        raise UnexportedFieldsError(str(error), [field for field, _, _ in changes]) from None
    return raw


def canonical(config: ModelConfig) -> ModelConfig:
    """Return the canonical form of a config: equal configs compute the same outside of training.

    Settings without effect get their default values, and patterns are as short as possible.
    """
    head_dim, attention, rope = config.head_size(), config.attention, RopeConfig()
    windows = tuple(config.has_window(layer) for layer in range(config.num_layers))
    window = window_arguments(attention.window, shortest_pattern(windows))
    if config.positions == "rope":
        layers_without_rope = shortest_pattern(
            tuple(not config.uses_rope(layer) for layer in range(config.num_layers))
        )
        rope = canonical_rope(
            config.rope,
            windows=any(windows),
            skip=layers_without_rope if any(layers_without_rope) else (),
        )
    scale = head_dim**-0.5 if attention.scale is None and config.mla is None else attention.scale
    layers_with_qk_norm = tuple(
        config.at(layer).attention.qk_norm != "none" for layer in range(config.num_layers)
    )
    attention = replace(
        attention,
        qk_norm=attention.qk_norm if any(layers_with_qk_norm) else "none",
        chunked=attention.chunked and any(windows),
        qk_norm_layers=shortest_pattern(layers_with_qk_norm)
        if any(layers_with_qk_norm) and not all(layers_with_qk_norm)
        else (),
    )
    qk_norm_eps = (
        attention.qk_norm_eps
        if attention.qk_norm != "none" and attention.qk_norm_eps != config.norm_eps
        else None
    )
    window_and_scale = {
        "window": None,
        "window_layers": (),
        "scale": scale and float(f"{scale:.12g}"),
        **window,
    }
    result = replace(
        config,
        pad_vocab_to_multiple_of=1,
        dropout=DropoutConfig(),
        rope=rope,
        attention=replace(attention, qk_norm_eps=qk_norm_eps, **window_and_scale),
        logit_scale=float(f"{config.logit_scale:.12g}"),
        mtp=MTPConfig(num_layers=config.mtp.num_layers),
        init="normal",
        embedding_init_std=None,
        init_overrides=(),
        fp32_residual=False,
    )
    result = canonical_experts(result)
    if config.mla is not None:
        return replace(result, head_dim=None, num_kv_heads=config.num_heads)
    return replace(result, head_dim=head_dim)


def canonical_rope(rope: RopeConfig, *, windows: bool, skip: tuple[bool, ...]) -> RopeConfig:
    """Return `rope` with defaults for all settings that its scaling does not use."""
    kind, values = rope_values(rope)
    settings: dict[str, Any] = {
        "scaling": rope.scaling,
        "theta": rope.theta,
        "fraction": rope.fraction,
        "interleaved": rope.interleaved,
        "sections": rope.sections,
        "skip": skip,
    }
    if windows and (rope.local_theta != rope.theta or values):
        settings["local_theta"] = rope.local_theta
    if skip and rope.skip_growth:
        settings |= {"skip_growth": rope.skip_growth, "skip_step": rope.skip_step}
    used_names = ["factor"] if values else []
    if kind in ("dynamic", "llama3", "yarn", "longrope"):
        used_names.append("original_max_position")
    if kind == "llama3":
        used_names += ["low_freq_factor", "high_freq_factor"]
    if kind == "yarn":
        used_names += ["beta_fast", "beta_slow", "whole_pairs"]
        settings["attention_factor"] = float(f"{attention_factor(rope):.12g}")
    if kind == "longrope":
        used_names = ["original_max_position", "short_factors", "long_factors"]
        settings["attention_factor"] = float(f"{attention_factor(rope):.12g}")
    return RopeConfig(**settings, **{name: getattr(rope, name) for name in used_names})


# --- tensors


NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
"""Megalith norm -> Hugging Face norm, in Llama and all families with the same norm placement."""

HEAD = "lm_head.weight"

Rules = Callable[[ModelConfig], list[TensorRule]]
"""Function that returns the tensor rules of a model, in the order of the forward pass."""


def no_experts(config: ModelConfig, hf_name: str, parameter: str) -> list[TensorRule]:
    """Return no rules: for families that do not support experts."""
    return []


ROTARY_BUFFERS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Tensors without parameters: conversions of 2023 stored the rotary frequencies."""


def common_rules(
    config: ModelConfig,
    *,
    norms: Mapping[str, str] = NORMS,
    all_biases: bool = True,
    experts: LayerRules = no_experts,
    mlp: str = "mlp",
) -> list[TensorRule]:
    """Return the tensor rules of a Llama-like model, in the order of the forward pass.

    `norms`: names of the norms; `all_biases`: attention_bias sets all four biases, so missing ones
    are exported as zeros; `experts`: rules of an MoE layer; `mlp`: name of the MLP module.
    """
    v, h = config.vocab_size, config.hidden_size
    rules = [rule("model.embed_tokens.weight", "embed.weight", (v, h), shape=(v, h))]
    for layer in range(config.num_layers):
        hf_layer, layer_name = f"model.layers.{layer}", f"layers.{layer}"
        attention = attention_rules(
            config, f"{hf_layer}.self_attn", f"{layer_name}.attention", all_biases=all_biases
        )
        mlp_or_experts = (
            experts(config, hf_layer, f"{layer_name}.moe")
            if config.has_experts(layer)
            else mlp_rules(config, f"{hf_layer}.{mlp}", f"{layer_name}.mlp")
        )
        for block, inner_rules in (("attention", attention), ("mlp", mlp_or_experts)):
            norm_rules = {
                part: [
                    rule(
                        f"{hf_layer}.{norms[part]}.weight",
                        f"{layer_name}.{part}.weight",
                        (h,),
                        shape=(h,),
                    )
                ]
                for part in (f"{block}_norm", f"{block}_post_norm")
                if part in norms
            }
            rules += [
                *norm_rules.get(f"{block}_norm", []),
                *inner_rules,
                *norm_rules.get(f"{block}_post_norm", []),
            ]
    rules.append(rule("model.norm.weight", "norm.weight", (h,), shape=(h,)))
    if not config.tied_embeddings:
        rules.append(rule(HEAD, "head.weight", (v, h), shape=(v, h)))
    return rules


def build_moe_family_rules(words: ExpertNames, *, all_biases: bool = True) -> tuple[Rules, Rules]:
    """Return `Family.rules` (separate tensors per expert) and `Family.fused_rules` (fused expert
    tensors)."""
    separate, fused = (
        partial(common_rules, all_biases=all_biases, experts=kind(words))
        for kind in (moe_rules, fused_moe_rules)
    )
    return separate, fused


def attention_rules(
    config: ModelConfig, hf_name: str, parameter: str, *, all_biases: bool
) -> list[TensorRule]:
    """Return the rules of an attention layer: q, k, v, their norms, and the output projection."""
    h, n, g, d = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_size()
    rules = [
        rule(f"{hf_name}.q_proj.weight", f"{parameter}.q", (n, d, h), shape=(n * d, h)),
        rule(f"{hf_name}.k_proj.weight", f"{parameter}.kv", (g, d, h), shape=(g * d, h), part=0),
        rule(f"{hf_name}.v_proj.weight", f"{parameter}.kv", (g, d, h), shape=(g * d, h), part=1),
        rule(f"{hf_name}.o_proj.weight", f"{parameter}.o", (h, n, d), shape=(h, n * d)),
    ]
    for word, heads in (
        (("q", n), ("k", g)) if config.attention.qk_norm in ("head", "whole") else ()
    ):
        size = (d,) if config.attention.qk_norm == "head" else (heads, d)
        shape = (math.prod(size),)
        rules.append(
            rule(
                f"{hf_name}.{word}_norm.weight",
                f"{parameter}.{word}_norm.weight",
                size,
                shape=shape,
            )
        )
    if config.qkv_bias:
        rules += [
            rule(f"{hf_name}.q_proj.bias", f"{parameter}.q_bias", (n, d), shape=(n * d,)),
            rule(f"{hf_name}.k_proj.bias", f"{parameter}.kv_bias", (g, d), shape=(g * d,), part=0),
            rule(f"{hf_name}.v_proj.bias", f"{parameter}.kv_bias", (g, d), shape=(g * d,), part=1),
        ]
    elif config.output_bias and all_biases:
        zeros = {"q": n * d, "k": g * d, "v": g * d}
        rules += [
            rule(f"{hf_name}.{word}_proj.bias", None, (size,), shape=(size,))
            for word, size in zeros.items()
        ]
    if config.output_bias or (config.qkv_bias and all_biases):
        output = f"{parameter}.o_bias" if config.output_bias else None
        rules.append(rule(f"{hf_name}.o_proj.bias", output, (h,), shape=(h,)))
    return rules


def mlp_rules(config: ModelConfig, hf_name: str, parameter: str) -> list[TensorRule]:
    """Return the rules of a gated MLP."""
    h, f = config.hidden_size, config.ffn_hidden_size
    rules = [
        rule(f"{hf_name}.gate_proj.weight", f"{parameter}.gate_up", (f, h), shape=(f, h), part=0),
        rule(f"{hf_name}.up_proj.weight", f"{parameter}.gate_up", (f, h), shape=(f, h), part=1),
        rule(f"{hf_name}.down_proj.weight", f"{parameter}.down", (h, f), shape=(h, f)),
    ]
    if config.mlp_bias:
        rules += [
            rule(
                f"{hf_name}.gate_proj.bias", f"{parameter}.gate_up_bias", (f,), shape=(f,), part=0
            ),
            rule(f"{hf_name}.up_proj.bias", f"{parameter}.gate_up_bias", (f,), shape=(f,), part=1),
            rule(f"{hf_name}.down_proj.bias", f"{parameter}.down_bias", (h,), shape=(h,)),
        ]
    return rules

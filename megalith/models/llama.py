"""Llama as Hugging Face knows it: its config.json and its tensors, in both directions."""

import re
from collections.abc import Mapping
from typing import Any

from megalith.config.model import ModelConfig
from megalith.config.rope import RopeConfig
from megalith.errors import raise_all
from megalith.models.names import Family, TensorRule, rule

# --- config.json

SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
"""Theirs -> ours; a config without one of them is not complete."""

ONLY: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),  # two names of one function
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "chunk_size_feed_forward": (0, None),
    "pruned_heads": ({}, None),
}
"""Fields that change the mathematics, with the values we compute."""

MAPPED = frozenset(
    (*SIZES, "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "initializer_range"),
) | {"tie_word_embeddings", "attention_bias", "mlp_bias", "rope_theta", "rope_scaling", "rope_parameters"}

HARMLESS = frozenset((
    "architectures", "model_type", "transformers_version", "name_or_path", "torch_dtype", "dtype", "use_cache",
    "tokenizer_class", "prefix", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id",
    "cls_token_id", "decoder_start_token_id", "return_dict", "output_hidden_states", "output_attentions",
    "output_scores", "return_dict_in_generate", "torchscript", "id2label", "label2id", "num_labels", "problem_type",
    "finetuning_task", "task_specific_params", "max_length", "max_new_tokens", "min_length", "min_new_tokens",
    "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k",
    "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "remove_invalid_values",
    "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
    "exponential_decay_length_penalty", "is_llama_config", "unsloth_fixed", "unsloth_version",
    "transformers.js_config", "pretraining_tp",
))  # fmt: skip
"""Fields that change no result of a forward pass. pretraining_tp only orders the sums of a matmul."""

ROPE_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position",
}
"""llama3 scaling: theirs -> ours; all of them are needed."""

DEFAULT_THETA = 10_000.0


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Contents of a config.json -> our config.

    Raises:
        ConfigError: fields that are missing, of the wrong kind, unknown, or not supported; all of them together.
    """
    problems = [_missing(name) for name in SIZES if name not in raw]
    problems += [text for name, value in raw.items() if (text := _problem(name, value)) is not None]
    rope = _read_rope(raw, problems)
    raise_all(problems)
    heads, head_dim = raw["num_attention_heads"], raw.get("head_dim")
    return ModelConfig(
        **{ours: raw[theirs] for theirs, ours in SIZES.items()},
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=None if head_dim is None or head_dim * heads == raw["hidden_size"] else head_dim,
        max_seq_len=raw.get("max_position_embeddings") or 2048,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=rope,
        tied_embeddings=bool(raw.get("tie_word_embeddings")),
        qkv_bias=bool(raw.get("attention_bias")),
        output_bias=bool(raw.get("attention_bias")),
        mlp_bias=bool(raw.get("mlp_bias")),
        init_std=float(raw.get("initializer_range", 0.02)),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Our config -> contents of a config.json, readable by transformers 4 and 5.

    Raises:
        ConfigError: the model cannot be a Llama of theirs.
    """
    if config.hidden_size % config.num_heads:
        raise_all(
            [
                f"model.hidden_size={config.hidden_size} is not a multiple of model.num_heads={config.num_heads}, and "
                f"transformers refuses such a Llama. Use a Megalith checkpoint for this model."
            ]
        )
    return {
        "architectures": [LLAMA.architecture],
        "model_type": LLAMA.model_type,
        **{theirs: getattr(config, ours) for theirs, ours in SIZES.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size(),
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": config.qkv_bias or config.output_bias,
        "attention_dropout": 0.0,
        "mlp_bias": config.mlp_bias,
        **_write_rope(config.rope),
        "use_cache": True,
    }


def _missing(name: str) -> str:
    return f"{name} is missing, expected a whole number. Use the config.json that came with the weights."


def _problem(name: str, value: Any) -> str | None:
    """What is wrong with one field, if anything; null and false always mean that something is off."""
    if name in SIZES or name in ("num_key_value_heads", "head_dim", "max_position_embeddings"):
        fine = (type(value) is int and value > 0) or (value is None and name not in SIZES)
        return None if fine else f"{name}={value!r}: expected a whole number above 0."
    if name in ("rms_norm_eps", "initializer_range", "rope_theta"):
        allowed = value == 0 if name == "initializer_range" else value is None and name == "rope_theta"
        fine = (type(value) in (int, float) and value > 0) or allowed
        return None if fine else f"{name}={value!r}: expected a number above 0."
    if name in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
        return None if value in (True, False, None) else f"{name}={value!r}: expected true or false."
    if name in ONLY:
        return None if value in ONLY[name] else f"{name}={value!r} is not supported: it must be {ONLY[name][0]!r}."
    if name in MAPPED or name in HARMLESS or name.startswith("_") or value is None or value is False:
        return None
    return (
        f"{name}={value!r:.60} is not known, so it may change what the model computes. Remove it from config.json "
        f"if it does not."
    )


def _read_rope(raw: Mapping[str, Any], problems: list[str]) -> RopeConfig:
    """Rotary positions, from `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (5)."""
    old, new = raw.get("rope_scaling") or {}, raw.get("rope_parameters") or {}
    for name, value in (("rope_scaling", old), ("rope_parameters", new)):
        if not isinstance(value, Mapping):
            problems.append(f"{name}={value!r}: expected a mapping, or null.")
            return RopeConfig()
    thetas = {part["rope_theta"] for part in (raw, old, new) if type(part.get("rope_theta")) in (int, float)}
    kinds = {str(part.get("rope_type", part.get("type", "default"))) for part in (old, new) if part}
    values = {key: value for part in (new, old) for key, value in part.items() if key not in ("rope_type", "type")}
    clash = [key for key in old.keys() & new.keys() - {"rope_type", "type"} if old[key] != new[key]]
    if len(thetas) > 1 or len(kinds) > 1 or clash:
        problems.append(
            f"rope_theta={raw.get('rope_theta')}, rope_scaling={dict(old)} and rope_parameters={dict(new)} disagree. "
            f"Remove those that are wrong."
        )
        return RopeConfig()
    kind = kinds.pop() if kinds else "default"
    if type(values.get("rope_theta")) in (int, float, type(None)):
        values.pop("rope_theta", None)
    if values.get("partial_rotary_factor") in (1, None):
        values.pop("partial_rotary_factor", None)
    theta = float(thetas.pop()) if thetas else DEFAULT_THETA
    if kind == "default" and not values:
        return RopeConfig(theta=theta)
    if kind == "llama3" and values.keys() == ROPE_KEYS.keys() and _are_numbers(values):
        original = values.pop("original_max_position_embeddings")
        scaling: dict[str, Any] = {ROPE_KEYS[key]: float(value) for key, value in values.items()}
        return RopeConfig(theta=theta, scaling="llama3", original_max_position=original, **scaling)
    problems.append(
        f"rotary positions of rope_type={kind!r} with {values} are not supported: rope_type must be 'default' with "
        f"nothing beside rope_theta, or 'llama3' with {', '.join(ROPE_KEYS)}."
    )
    return RopeConfig()


def _are_numbers(values: Mapping[str, Any]) -> bool:
    whole = type(values["original_max_position_embeddings"]) is int
    return whole and all(type(value) in (int, float) and value > 0 for value in values.values())


def _write_rope(rope: RopeConfig) -> dict[str, Any]:
    """Both spellings: transformers 5 reads the last, everything older the first two."""
    scaling = {theirs: getattr(rope, ours) for theirs, ours in ROPE_KEYS.items()} if rope.scaling == "llama3" else {}
    kind = "llama3" if scaling else "default"
    return {
        "rope_theta": rope.theta,
        "rope_scaling": {"rope_type": kind, **scaling} if scaling else None,
        "rope_parameters": {"rope_type": kind, "rope_theta": rope.theta, **scaling},
    }


# --- tensors


def rules(config: ModelConfig) -> list[TensorRule]:
    """Every tensor of a Llama of theirs, in the order of the forward pass."""
    v, h = config.vocab_size, config.hidden_size
    found = [rule("model.embed_tokens.weight", "embed.weight", (v, h), shape=(v, h))]
    for layer in range(config.num_layers):
        found += _layer_rules(config, f"model.layers.{layer}", f"layers.{layer}")
    found.append(rule("model.norm.weight", "norm.weight", (h,), shape=(h,)))
    if not config.tied_embeddings:
        found.append(rule(LLAMA.tied, "head.weight", (v, h), shape=(v, h)))
    return found


def _layer_rules(config: ModelConfig, theirs: str, ours: str) -> list[TensorRule]:
    h = config.hidden_size
    return [
        rule(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.weight", (h,), shape=(h,)),
        *_attention_rules(config, f"{theirs}.self_attn", f"{ours}.attention"),
        rule(f"{theirs}.post_attention_layernorm.weight", f"{ours}.mlp_norm.weight", (h,), shape=(h,)),
        *_mlp_rules(config, f"{theirs}.mlp", f"{ours}.mlp"),
    ]


def _attention_rules(config: ModelConfig, theirs: str, ours: str) -> list[TensorRule]:
    h, n, g, d = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_size()
    found = [
        rule(f"{theirs}.q_proj.weight", f"{ours}.q", (n, d, h), shape=(n * d, h)),
        rule(f"{theirs}.k_proj.weight", f"{ours}.kv", (g, d, h), shape=(g * d, h), part=0),
        rule(f"{theirs}.v_proj.weight", f"{ours}.kv", (g, d, h), shape=(g * d, h), part=1),
        rule(f"{theirs}.o_proj.weight", f"{ours}.o", (h, n, d), shape=(h, n * d)),
    ]
    if config.qkv_bias:
        found += [
            rule(f"{theirs}.q_proj.bias", f"{ours}.q_bias", (n, d), shape=(n * d,)),
            rule(f"{theirs}.k_proj.bias", f"{ours}.kv_bias", (g, d), shape=(g * d,), part=0),
            rule(f"{theirs}.v_proj.bias", f"{ours}.kv_bias", (g, d), shape=(g * d,), part=1),
        ]
    elif config.output_bias:  # they have one switch for all four
        sizes = {"q": n * d, "k": g * d, "v": g * d}
        found += [rule(f"{theirs}.{name}_proj.bias", None, (size,), shape=(size,)) for name, size in sizes.items()]
    if config.qkv_bias or config.output_bias:
        output = f"{ours}.o_bias" if config.output_bias else None
        found.append(rule(f"{theirs}.o_proj.bias", output, (h,), shape=(h,)))
    return found


def _mlp_rules(config: ModelConfig, theirs: str, ours: str) -> list[TensorRule]:
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


LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    read_config=read_config,
    write_config=write_config,
    rules=rules,
    ignored=re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),  # conversions of 2023 stored it
    tied="lm_head.weight",
)

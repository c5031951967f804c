"""Hugging Face format of Gemma 3 (text): QK-norm, and sliding windows with a separate rope theta.

Source: Gemma Team 2025, arXiv:2503.19786.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalith.config.model import AttentionConfig, ModelConfig, RopeConfig
from megalith.hf.config_fields import (
    FULL,
    HEAD,
    ROTARY_BUFFERS,
    SIZE_REMEDY,
    SLIDING,
    check_all_fields_exported,
    check_head_sizes,
    common_rules,
    read_common_fields,
    read_windows,
    window_arguments,
    write_common_fields,
    write_windows,
)
from megalith.hf.fields import Fields
from megalith.hf.gemma2 import NORMS, scalar_of
from megalith.hf.rope import read_rope, rope_values
from megalith.hf.tensor_rules import Family, TensorRule


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a config.json.

    Raises:
        ConfigError: fields are missing, of the wrong type, unknown or not supported; all of them
            are reported together.
    """
    fields = Fields(raw)
    common_fields = read_common_fields(
        fields,
        max_seq_len=131_072,
        kv_heads=4,
        head_dim=256,
        tied=True,
        activation="hidden_activation",
    )
    fields.ignore("hidden_act")  # transformers reads only hidden_activation
    layers = common_fields["num_layers"]
    every = fields.read_int("sliding_window_pattern", 6)
    window = fields.read_optional_int("sliding_window") if "sliding_window" in raw else 4096
    default = [(layer + 1) % every != 0 for layer in range(layers)]
    windows = window_arguments(
        window, read_windows(fields, layers, default, window=window, remedy=SIZE_REMEDY)
    )
    rope = _read_rope(fields, common_fields["max_seq_len"], windows=bool(windows))
    scale = fields.read_number("query_pre_attn_scalar", 256.0) ** -0.5
    if fields.read_value("attn_logit_softcapping") is not None:
        fields.problems.append(
            f"attn_logit_softcapping={raw['attn_logit_softcapping']}: transformers ignores it for "
            f"Gemma 3. Set it to null."
        )
    logit_cap = fields.read_optional_number("final_logit_softcapping")
    fields.raise_problems()
    return ModelConfig(
        **common_fields,
        rope=rope,
        attention=AttentionConfig(qk_norm="head", scale=scale, **windows),
        zero_centered_gamma=True,
        norm_placement="around",
        embedding_scale=common_fields["hidden_size"] ** 0.5,
        logit_softcap=logit_cap,
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model, readable by transformers 4 and 5.

    Raises:
        ConfigError: the model cannot be expressed as Gemma 3.
    """
    check_head_sizes(config)
    raw = {
        **write_common_fields(config, GEMMA3, activation="hidden_activation"),
        **_write_rope(config.rope),
        "query_pre_attn_scalar": scalar_of(config),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": config.logit_softcap,
        "sliding_window": config.attention.window
        or 4096,  # transformers requires one even if no layer has it
        "layer_types": write_windows(config),
    }
    return check_all_fields_exported(raw, config, read_config, GEMMA3)


def _read_rope(fields: Fields, max_position: int, *, windows: bool) -> RopeConfig:
    """Return the rotary embeddings; scaling applies only to layers without a window."""
    everywhere = read_rope(fields, max_position=max_position, theta=1_000_000.0, layer=FULL)
    local = read_rope(
        fields,
        max_position=max_position,
        theta_name="rope_local_base_freq",
        layer=SLIDING,
        scaled=False,
    )
    if local.scaling != "none":
        fields.problems.append(
            f"rope_type={local.scaling!r} for {SLIDING} is not supported: layers with a window "
            "need "
            "'default'."
        )
    return replace(everywhere, local_theta=local.theta if windows else None)


def _write_rope(rope: RopeConfig) -> dict[str, Any]:
    """Return the fields of rotary embeddings for transformers 4, and for 5, with a mapping for each
    kind of layer."""
    kind, values = rope_values(rope)
    local = rope.theta if rope.local_theta is None else rope.local_theta
    return {
        "rope_theta": rope.theta,
        "rope_local_base_freq": local,
        "rope_scaling": {"rope_type": kind, **values} if values else None,
        "rope_parameters": {
            FULL: {"rope_type": kind, "rope_theta": rope.theta, **values},
            SLIDING: {"rope_type": "default", "rope_theta": local},
        },
    }


def rules(config: ModelConfig) -> list[TensorRule]:
    """Return the tensor rules, in the order of the forward pass."""
    return common_rules(config, norms=NORMS)


GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    read_config=read_config,
    write_config=write_config,
    rules=rules,
    ignored=ROTARY_BUFFERS,
    tied=HEAD,
)

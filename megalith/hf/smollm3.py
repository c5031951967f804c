"""Hugging Face format of SmolLM3: Llama with every fourth layer without rotary embeddings (NoPE).

Source: the release of SmolLM3-3B, Hugging Face, 2025; layers without positions: Yang et al. 2025,
arXiv:2501.18795.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalith.config.model import AttentionConfig, ModelConfig
from megalith.hf.config_fields import (
    HEAD,
    ROTARY_BUFFERS,
    SWITCH_REMEDY,
    check_all_fields_exported,
    common_rules,
    read_common_fields,
    read_windows,
    shortest_pattern,
    window_arguments,
    write_common_fields,
    write_windows,
)
from megalith.hf.fields import Fields
from megalith.hf.rope import read_rope
from megalith.hf.tensor_rules import Family, TensorRule


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a config.json.

    Raises:
        ConfigError: fields are missing, of the wrong type, unknown or not supported; all of them
            are reported together.
    """
    fields = Fields(raw)
    common_fields = read_common_fields(fields, max_seq_len=32_768, kv_heads=4, tied=True)
    layers = common_fields["num_layers"]
    every = fields.read_int("no_rope_layer_interval", 4)
    skip = fields.read_layer_flags("no_rope_layers", layers, {1: False, 0: True})
    skip = skip or tuple((layer + 1) % every == 0 for layer in range(layers))
    rope = read_rope(fields, max_position=common_fields["max_seq_len"], theta=2_000_000.0)
    rope = replace(rope, skip=shortest_pattern(skip) if any(skip) else ())
    window, switched = (
        fields.read_optional_int("sliding_window"),
        fields.read_flag("use_sliding_window"),
    )
    window = window if switched else None
    default = skip if window is not None else (False,)
    windows = window_arguments(
        window, read_windows(fields, layers, default, window=window, remedy=SWITCH_REMEDY)
    )
    fields.ignore("max_window_layers")
    mlp_bias = fields.read_flag("mlp_bias")
    fields.raise_problems()
    return ModelConfig(
        **common_fields, rope=rope, attention=AttentionConfig(**windows), mlp_bias=mlp_bias
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model, readable by transformers 4 and 5.

    Raises:
        ConfigError: the model cannot be expressed as SmolLM3.
    """
    raw = {
        **write_common_fields(config, SMOLLM3),
        "mlp_bias": config.mlp_bias,
        "no_rope_layers": [int(config.uses_rope(layer)) for layer in range(config.num_layers)],
        "use_sliding_window": config.attention.window is not None,
        "sliding_window": config.attention.window,
        "layer_types": write_windows(config),
    }
    return check_all_fields_exported(raw, config, read_config, SMOLLM3)


def rules(config: ModelConfig) -> list[TensorRule]:
    """Return the tensor rules, in the order of the forward pass."""
    return common_rules(config)


SMOLLM3 = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    read_config=read_config,
    write_config=write_config,
    rules=rules,
    ignored=ROTARY_BUFFERS,
    tied=HEAD,
)

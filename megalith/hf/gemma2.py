"""Hugging Face format of Gemma 2: pre- and post-norms, logit soft caps, a sliding window in every
other layer.

Source: Gemma Team 2024, arXiv:2408.00118.
"""

from collections.abc import Mapping
from typing import Any

from megalith.config.model import AttentionConfig, ModelConfig
from megalith.hf.config_fields import (
    HEAD,
    ROTARY_BUFFERS,
    SIZE_REMEDY,
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
from megalith.hf.rope import read_rope
from megalith.hf.tensor_rules import Family, TensorRule

NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
"""Megalith norm -> Hugging Face norm: the name of Llama's second norm is that of a post-norm
here."""


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a config.json.

    Raises:
        ConfigError: fields are missing, of the wrong type, unknown or not supported; all of them
            are reported together.
    """
    fields = Fields(raw)
    common_fields = read_common_fields(
        fields,
        max_seq_len=8192,
        kv_heads=4,
        head_dim=256,
        tied=True,
        activation="hidden_activation",
    )
    fields.ignore("hidden_act")  # transformers reads only hidden_activation
    layers = common_fields["num_layers"]
    rope = read_rope(fields, max_position=common_fields["max_seq_len"])
    window = fields.read_optional_int("sliding_window") if "sliding_window" in raw else 4096
    fields.require("sliding_window_size", window)  # the first releases have both fields
    default = [layer % 2 == 0 for layer in range(layers)]
    windows = window_arguments(
        window, read_windows(fields, layers, default, window=window, remedy=SIZE_REMEDY)
    )
    scale = fields.read_number("query_pre_attn_scalar", 256.0) ** -0.5
    cap = fields.read_optional_number("attn_logit_softcapping", 50.0)
    logit_cap = fields.read_optional_number("final_logit_softcapping", 30.0)
    fields.raise_problems()
    return ModelConfig(
        **common_fields,
        rope=rope,
        attention=AttentionConfig(scale=scale, softcap=cap, **windows),
        zero_centered_gamma=True,
        norm_placement="around",
        embedding_scale=common_fields["hidden_size"] ** 0.5,
        logit_softcap=logit_cap,
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model, readable by transformers 4 and 5.

    Raises:
        ConfigError: the model cannot be expressed as Gemma 2.
    """
    check_head_sizes(config)
    raw = {
        **write_common_fields(config, GEMMA2, activation="hidden_activation"),
        "query_pre_attn_scalar": scalar_of(config),
        "attn_logit_softcapping": config.attention.softcap,
        "final_logit_softcapping": config.logit_softcap,
        "sliding_window": config.attention.window,
        "layer_types": write_windows(config),
    }
    return check_all_fields_exported(raw, config, read_config, GEMMA2)


def scalar_of(config: ModelConfig) -> int:
    """Return query_pre_attn_scalar: scores are divided by its square root; transformers requires an
    integer."""
    return (
        config.head_size() if config.attention.scale is None else round(config.attention.scale**-2)
    )


def rules(config: ModelConfig) -> list[TensorRule]:
    """Return the tensor rules, in the order of the forward pass."""
    return common_rules(config, norms=NORMS)


GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    read_config=read_config,
    write_config=write_config,
    rules=rules,
    ignored=ROTARY_BUFFERS,
    tied=HEAD,
)

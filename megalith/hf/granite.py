"""Hugging Face format of Granite 3: Llama with multipliers of embeddings, attention scores,
residuals and logits.

Source: the release of Granite 3.0, IBM, 2024; the multipliers: Yang et al. 2022, arXiv:2203.03466.
"""

from collections.abc import Mapping
from typing import Any

from megalith.config.model import AttentionConfig, ModelConfig
from megalith.hf.config_fields import (
    HEAD,
    ROTARY_BUFFERS,
    check_all_fields_exported,
    common_rules,
    read_common_fields,
    write_common_fields,
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
    common_fields = read_common_fields(fields)
    rope = read_rope(fields, max_position=common_fields["max_seq_len"])
    mlp_bias = fields.read_flag("mlp_bias")
    embedding, residual = (
        fields.read_number("embedding_multiplier", 1.0),
        fields.read_number("residual_multiplier", 1.0),
    )
    scale, divisor = (
        fields.read_number("attention_multiplier", 1.0),
        fields.read_number("logits_scaling", 1.0),
    )
    fields.raise_problems()
    return ModelConfig(
        **common_fields,
        rope=rope,
        attention=AttentionConfig(scale=scale),
        mlp_bias=mlp_bias,
        embedding_scale=embedding,
        residual_scale=residual,
        logit_scale=1 / divisor,
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model, readable by transformers 4 and 5.

    Raises:
        ConfigError: the model cannot be expressed as Granite.
    """
    scale = config.attention.scale
    raw = {
        **write_common_fields(config, GRANITE),
        "mlp_bias": config.mlp_bias,
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        "attention_multiplier": config.head_size() ** -0.5 if scale is None else scale,
        "logits_scaling": 1 / config.logit_scale,
    }
    return check_all_fields_exported(raw, config, read_config, GRANITE)


def rules(config: ModelConfig) -> list[TensorRule]:
    """Return the tensor rules, in the order of the forward pass."""
    return common_rules(config)


GRANITE = Family(
    architecture="GraniteForCausalLM",
    model_type="granite",
    read_config=read_config,
    write_config=write_config,
    rules=rules,
    ignored=ROTARY_BUFFERS,
    tied=HEAD,
)

"""Hugging Face format of Mistral: Llama with a sliding window in every layer.

Source: Jiang et al. 2023, arXiv:2310.06825.
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
    window_arguments,
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
    common_fields = read_common_fields(fields, switch=False, max_seq_len=131_072, kv_heads=8)
    rope = read_rope(fields, max_position=common_fields["max_seq_len"])
    window = fields.read_optional_int("sliding_window") if "sliding_window" in raw else 4096
    fields.raise_problems()
    return ModelConfig(
        **common_fields, rope=rope, attention=AttentionConfig(**window_arguments(window, (True,)))
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model, readable by transformers 4 and 5.

    Raises:
        ConfigError: the model cannot be expressed as Mistral.
    """
    raw = {
        **write_common_fields(config, MISTRAL, switch=False),
        "sliding_window": config.attention.window,
    }
    return check_all_fields_exported(raw, config, read_config, MISTRAL)


def rules(config: ModelConfig) -> list[TensorRule]:
    """Return the tensor rules, in the order of the forward pass."""
    return common_rules(config)


MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    read_config=read_config,
    write_config=write_config,
    rules=rules,
    ignored=ROTARY_BUFFERS,
    tied=HEAD,
)

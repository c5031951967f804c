"""Hugging Face format of Qwen2 and Qwen2.5: Llama with biases of queries, keys and values.

Source: Yang et al. 2024, arXiv:2407.10671; arXiv:2412.15115.
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
    read_qwen_windows,
    write_common_fields,
    write_qwen_windows,
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
    common_fields = read_common_fields(fields, switch=False, max_seq_len=32_768, kv_heads=32)
    rope = read_rope(fields, max_position=common_fields["max_seq_len"])
    windows = read_qwen_windows(fields, common_fields["num_layers"])
    fields.raise_problems()
    return ModelConfig(
        **common_fields, rope=rope, qkv_bias=True, attention=AttentionConfig(**windows)
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model, readable by transformers 4 and 5.

    Raises:
        ConfigError: the model cannot be expressed as Qwen2.
    """
    return check_all_fields_exported(
        {**write_common_fields(config, QWEN2, switch=False), **write_qwen_windows(config)},
        config,
        read_config,
        QWEN2,
    )


def rules(config: ModelConfig) -> list[TensorRule]:
    """Return the tensor rules, in the order of the forward pass."""
    return common_rules(config, all_biases=False)


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    read_config=read_config,
    write_config=write_config,
    rules=rules,
    ignored=ROTARY_BUFFERS,
    tied=HEAD,
)

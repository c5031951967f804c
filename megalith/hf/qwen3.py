"""Hugging Face format of Qwen3: Llama with QK-norm per head.

Source: Yang et al. 2025, arXiv:2505.09388.
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
    common_fields = read_common_fields(fields, max_seq_len=32_768, kv_heads=32, head_dim=128)
    rope = read_rope(fields, max_position=common_fields["max_seq_len"])
    windows = read_qwen_windows(fields, common_fields["num_layers"])
    fields.raise_problems()
    attention = AttentionConfig(qk_norm="head", **windows)
    return ModelConfig(**common_fields, rope=rope, attention=attention)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model, readable by transformers 4 and 5.

    Raises:
        ConfigError: the model cannot be expressed as Qwen3.
    """
    raw = {**write_common_fields(config, QWEN3), **write_qwen_windows(config)}
    return check_all_fields_exported(raw, config, read_config, QWEN3)


def rules(config: ModelConfig) -> list[TensorRule]:
    """Return the tensor rules, in the order of the forward pass."""
    return common_rules(config)


QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    read_config=read_config,
    write_config=write_config,
    rules=rules,
    ignored=ROTARY_BUFFERS,
    tied=HEAD,
)

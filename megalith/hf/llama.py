"""Hugging Face format of Llama 1 to 3 and SmolLM: config.json and tensors.

Source: Touvron et al. 2023, arXiv:2302.13971; Grattafiori et al. 2024, arXiv:2407.21783.
"""

from collections.abc import Mapping
from typing import Any

from megalith.config.model import ModelConfig
from megalith.hf.config_fields import (
    HEAD,
    ROTARY_BUFFERS,
    check_all_fields_exported,
    check_head_sizes,
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
    fields.raise_problems()
    return ModelConfig(**common_fields, rope=rope, mlp_bias=mlp_bias)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model, readable by transformers 4 and 5.

    Raises:
        ConfigError: the model cannot be expressed as Llama.
    """
    check_head_sizes(config)
    raw = {**write_common_fields(config, LLAMA), "mlp_bias": config.mlp_bias}
    return check_all_fields_exported(raw, config, read_config, LLAMA)


def rules(config: ModelConfig) -> list[TensorRule]:
    """Return the tensor rules, in the order of the forward pass."""
    return common_rules(config)


LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    read_config=read_config,
    write_config=write_config,
    rules=rules,
    ignored=ROTARY_BUFFERS,
    tied=HEAD,
)

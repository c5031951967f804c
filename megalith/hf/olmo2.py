"""Hugging Face format of OLMo 2: only post-norms, and QK-norm over all heads.

Source: OLMo Team 2024, arXiv:2501.00656.
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

NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
"""Megalith norm -> Hugging Face norm."""


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a config.json.

    Raises:
        ConfigError: fields are missing, of the wrong type, unknown or not supported; all of them
            are reported together.
    """
    fields = Fields(raw)
    common_fields = read_common_fields(fields, norm_eps=1e-5)
    rope = read_rope(fields, max_position=common_fields["max_seq_len"])
    fields.raise_problems()
    return ModelConfig(
        **common_fields,
        rope=rope,
        attention=AttentionConfig(qk_norm="whole"),
        norm_placement="after",
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model, readable by transformers 4 and 5.

    Raises:
        ConfigError: the model cannot be expressed as OLMo 2.
    """
    return check_all_fields_exported(write_common_fields(config, OLMO2), config, read_config, OLMO2)


def rules(config: ModelConfig) -> list[TensorRule]:
    """Return the tensor rules, in the order of the forward pass."""
    return common_rules(config, norms=NORMS)


OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    read_config=read_config,
    write_config=write_config,
    rules=rules,
    ignored=ROTARY_BUFFERS,
    tied=HEAD,
)

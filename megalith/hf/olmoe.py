"""Hugging Face format of OLMoE: QK-norm over all heads, and a mixture of experts in every layer.

Source: Muennighoff et al. 2024, arXiv:2409.02060.
"""

from collections.abc import Mapping
from typing import Any

from megalith.config.model import AttentionConfig, ModelConfig
from megalith.hf.config_fields import (
    HEAD,
    ROTARY_BUFFERS,
    build_moe_family_rules,
    check_all_fields_exported,
    check_head_sizes,
    read_common_fields,
    write_common_fields,
)
from megalith.hf.fields import Fields
from megalith.hf.moe import ExpertNames, read_moe, require_moe, write_moe
from megalith.hf.rope import read_rope
from megalith.hf.tensor_rules import Family


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a config.json.

    Raises:
        ConfigError: fields are missing, of the wrong type, unknown or not supported; all of them
            are reported together.
    """
    fields = Fields(raw)
    common_fields = read_common_fields(fields, max_seq_len=4096, norm_eps=1e-5)
    rope = read_rope(fields, max_position=common_fields["max_seq_len"])
    fields.require("clip_qkv", None)
    width = common_fields["ffn_hidden_size"]
    moe = read_moe(
        fields,
        common_fields["num_layers"],
        experts=64,
        top_k=8,
        width=width,
        sparse=False,
        coefficient=0.01,
    )
    fields.raise_problems()
    return ModelConfig(
        **common_fields, rope=rope, attention=AttentionConfig(qk_norm="whole"), moe=moe
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model, readable by transformers 4 and 5.

    Raises:
        ConfigError: the model cannot be expressed as OLMoE.
    """
    moe = require_moe(config, OLMOE.architecture)
    check_head_sizes(config)
    raw = {
        **write_common_fields(config, OLMOE),
        "intermediate_size": moe.ffn_hidden_size,
        **write_moe(config, moe),
    }
    return check_all_fields_exported(raw, config, read_config, OLMOE)


rules, fused_rules = build_moe_family_rules(ExpertNames())

OLMOE = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    read_config=read_config,
    write_config=write_config,
    rules=rules,
    fused_rules=fused_rules,
    ignored=ROTARY_BUFFERS,
    tied=HEAD,
)

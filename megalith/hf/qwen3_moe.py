"""Hugging Face format of Qwen3-MoE: Qwen3 with a mixture of experts.

Source: Yang et al. 2025, arXiv:2505.09388.
"""

from collections.abc import Mapping
from typing import Any

from megalith.config.model import AttentionConfig, ModelConfig
from megalith.hf.config_fields import (
    HEAD,
    ROTARY_BUFFERS,
    build_moe_family_rules,
    check_all_fields_exported,
    read_common_fields,
    window_arguments,
    write_common_fields,
)
from megalith.hf.fields import Fields
from megalith.hf.moe import ExpertNames, read_moe, require_moe, write_moe, write_moe_layers
from megalith.hf.rope import read_rope
from megalith.hf.tensor_rules import Family


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a config.json.

    Raises:
        ConfigError: fields are missing, of the wrong type, unknown or not supported; all of them
            are reported together.
    """
    fields = Fields(raw)
    common_fields = read_common_fields(fields, max_seq_len=32_768, kv_heads=4)
    rope = read_rope(fields, max_position=common_fields["max_seq_len"])
    window = fields.read_optional_int("sliding_window") if "sliding_window" in raw else 4096
    window = window if fields.read_flag("use_sliding_window") else None
    width = fields.read_int("moe_intermediate_size", 768)
    moe = read_moe(fields, common_fields["num_layers"], experts=128, top_k=8, width=width)
    fields.ignore("max_window_layers")
    fields.raise_problems()
    attention = AttentionConfig(qk_norm="head", **window_arguments(window, (True,)))
    return ModelConfig(**common_fields, rope=rope, attention=attention, moe=moe)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model, readable by transformers 4 and 5.

    Raises:
        ConfigError: the model cannot be expressed as Qwen3 with experts.
    """
    moe, window = require_moe(config, QWEN3_MOE.architecture), config.attention.window
    raw = {
        **write_common_fields(config, QWEN3_MOE),
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "moe_intermediate_size": moe.ffn_hidden_size,
        **write_moe(config, moe),
        **write_moe_layers(config),
    }
    return check_all_fields_exported(raw, config, read_config, QWEN3_MOE)


rules, fused_rules = build_moe_family_rules(ExpertNames())

QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    read_config=read_config,
    write_config=write_config,
    rules=rules,
    fused_rules=fused_rules,
    ignored=ROTARY_BUFFERS,
    tied=HEAD,
)

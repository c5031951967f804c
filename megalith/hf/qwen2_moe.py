"""Hugging Face format of Qwen1.5-MoE and Qwen2-MoE: a mixture of experts with a gated shared
expert.

Source: Yang et al. 2024, arXiv:2407.10671, section 2.2.2.
"""

from collections.abc import Mapping
from typing import Any

from megalith.config.model import ModelConfig
from megalith.hf.config_fields import (
    HEAD,
    ROTARY_BUFFERS,
    build_moe_family_rules,
    check_all_fields_exported,
    read_common_fields,
    read_windows,
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
    common_fields = read_common_fields(fields, switch=False, max_seq_len=32_768)
    rope = read_rope(fields, max_position=common_fields["max_seq_len"])
    biases = fields.read_flag("qkv_bias", True)
    fields.require("use_sliding_window", False)
    moe = read_moe(
        fields,
        common_fields["num_layers"],
        experts=60,
        top_k=4,
        width=fields.read_int("moe_intermediate_size", 1408),
        shared_ffn_hidden_size=fields.read_int("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )
    read_windows(fields, common_fields["num_layers"], (False,), window=None)
    fields.ignore("max_window_layers", "sliding_window")
    fields.raise_problems()
    return ModelConfig(**common_fields, rope=rope, qkv_bias=biases, moe=moe)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model, readable by transformers 4 and 5.

    Raises:
        ConfigError: the model cannot be expressed as Qwen2 with experts.
    """
    moe = require_moe(config, QWEN2_MOE.architecture)
    raw = {
        **write_common_fields(config, QWEN2_MOE, switch=False),
        "qkv_bias": config.qkv_bias,
        "use_sliding_window": False,
        "moe_intermediate_size": moe.ffn_hidden_size,
        "shared_expert_intermediate_size": moe.shared_ffn_hidden_size,
        **write_moe(config, moe),
        **write_moe_layers(config),
    }
    return check_all_fields_exported(raw, config, read_config, QWEN2_MOE)


rules, fused_rules = build_moe_family_rules(ExpertNames(), all_biases=False)

QWEN2_MOE = Family(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    read_config=read_config,
    write_config=write_config,
    rules=rules,
    fused_rules=fused_rules,
    ignored=ROTARY_BUFFERS,
    tied=HEAD,
)

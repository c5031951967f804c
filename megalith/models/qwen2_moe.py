"""Hugging Face format of Qwen1.5-MoE and Qwen2-MoE: a mixture of experts with a gated shared
expert.

Source: Yang et al. 2024, arXiv:2407.10671, section 2.2.2.
"""

from collections.abc import Mapping
from typing import Any

from megalith.config.model import ModelConfig
from megalith.models.experts import (
    Words,
    experts_of,
    read_mixture,
    write_mixture,
    write_sparse_layers,
)
from megalith.models.fields import Fields
from megalith.models.names import Family
from megalith.models.rope import read_rope
from megalith.models.usual import (
    HEAD,
    ROTARY_BUFFERS,
    check_all_fields_exported,
    read_common_fields,
    read_windows,
    rules_with_experts,
    write_common_fields,
)


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a config.json.

    Raises:
        ConfigError: fields are missing, of the wrong type, unknown or not supported; all of them
            are reported together.
    """
    fields = Fields(raw)
    common_fields = read_common_fields(fields, switch=False, max_seq_len=32_768)
    rope = read_rope(fields, max_position=common_fields["max_seq_len"])
    biases = fields.flag("qkv_bias", True)
    fields.only("use_sliding_window", False)
    moe = read_mixture(
        fields,
        common_fields["num_layers"],
        experts=60,
        top_k=4,
        width=fields.whole("moe_intermediate_size", 1408),
        shared_ffn_hidden_size=fields.whole("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )
    read_windows(fields, common_fields["num_layers"], (False,), window=None)
    fields.ignore("max_window_layers", "sliding_window")
    fields.finish()
    return ModelConfig(**common_fields, rope=rope, qkv_bias=biases, moe=moe)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model, readable by transformers 4 and 5.

    Raises:
        ConfigError: the model cannot be expressed as Qwen2 with experts.
    """
    moe = experts_of(config, QWEN2_MOE.architecture)
    raw = {
        **write_common_fields(config, QWEN2_MOE, switch=False),
        "qkv_bias": config.qkv_bias,
        "use_sliding_window": False,
        "moe_intermediate_size": moe.ffn_hidden_size,
        "shared_expert_intermediate_size": moe.shared_ffn_hidden_size,
        **write_mixture(config, moe),
        **write_sparse_layers(config),
    }
    return check_all_fields_exported(raw, config, read_config, QWEN2_MOE)


rules, joined = rules_with_experts(Words(), all_biases=False)

QWEN2_MOE = Family(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    read_config=read_config,
    write_config=write_config,
    rules=rules,
    joined=joined,
    ignored=ROTARY_BUFFERS,
    tied=HEAD,
)

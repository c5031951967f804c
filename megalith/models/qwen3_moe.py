"""Hugging Face format of Qwen3-MoE: Qwen3 with a mixture of experts.

Source: Yang et al. 2025, arXiv:2505.09388.
"""

from collections.abc import Mapping
from typing import Any

from megalith.config.attention import AttentionConfig
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
    rules_with_experts,
    windowed,
    write_common_fields,
)


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a config.json.

    Raises:
        ConfigError: fields are missing, of the wrong type, unknown or not supported; all of them
            are reported together.
    """
    fields = Fields(raw)
    common_fields = read_common_fields(fields, max_seq_len=32_768, kv_heads=4)
    rope = read_rope(fields, max_position=common_fields["max_seq_len"])
    window = fields.whole_or_none("sliding_window") if "sliding_window" in raw else 4096
    window = window if fields.flag("use_sliding_window") else None
    width = fields.whole("moe_intermediate_size", 768)
    moe = read_mixture(fields, common_fields["num_layers"], experts=128, top_k=8, width=width)
    fields.ignore("max_window_layers")
    fields.finish()
    attention = AttentionConfig(qk_norm="head", **windowed(window, (True,)))
    return ModelConfig(**common_fields, rope=rope, attention=attention, moe=moe)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model, readable by transformers 4 and 5.

    Raises:
        ConfigError: the model cannot be expressed as Qwen3 with experts.
    """
    moe, window = experts_of(config, QWEN3_MOE.architecture), config.attention.window
    raw = {
        **write_common_fields(config, QWEN3_MOE),
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "moe_intermediate_size": moe.ffn_hidden_size,
        **write_mixture(config, moe),
        **write_sparse_layers(config),
    }
    return check_all_fields_exported(raw, config, read_config, QWEN3_MOE)


rules, joined = rules_with_experts(Words())

QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    read_config=read_config,
    write_config=write_config,
    rules=rules,
    joined=joined,
    ignored=ROTARY_BUFFERS,
    tied=HEAD,
)

"""Hugging Face format of Mixtral: Mistral with a mixture of experts in every layer.

Source: Jiang et al. 2024, arXiv:2401.04088.
"""

from collections.abc import Mapping
from typing import Any

from megalith.config.model import AttentionConfig, ModelConfig
from megalith.config.moe import MoEConfig
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
from megalith.hf.moe import ExpertNames, read_aux_loss, require_moe, write_aux_loss
from megalith.hf.rope import read_rope
from megalith.hf.tensor_rules import Family


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a config.json.

    Raises:
        ConfigError: fields are missing, of the wrong type, unknown or not supported; all of them
            are reported together.
    """
    fields = Fields(raw)
    common_fields = read_common_fields(
        fields, switch=False, max_seq_len=131_072, norm_eps=1e-5, kv_heads=8
    )
    rope = read_rope(fields, max_position=common_fields["max_seq_len"], theta=1_000_000.0)
    window = window_arguments(fields.read_optional_int("sliding_window"), (True,))
    chosen = fields.read_int("num_experts_per_tok", 2)
    moe = MoEConfig(
        num_experts=fields.read_int("num_local_experts", 8),
        top_k=chosen,
        ffn_hidden_size=common_fields["ffn_hidden_size"],
        aux_loss=read_aux_loss(fields, top_k=chosen, layers=common_fields["num_layers"]),
    )
    fields.ignore(
        "router_jitter_noise"
    )  # in transformers it also applies to the input of the experts
    fields.raise_problems()
    return ModelConfig(**common_fields, rope=rope, attention=AttentionConfig(**window), moe=moe)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model, readable by transformers 4 and 5.

    Raises:
        ConfigError: the model cannot be expressed as Mixtral.
    """
    moe = require_moe(config, MIXTRAL.architecture)
    raw = {
        **write_common_fields(config, MIXTRAL, switch=False),
        "intermediate_size": moe.ffn_hidden_size,
        "sliding_window": config.attention.window,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        **write_aux_loss(config, moe),
    }
    return check_all_fields_exported(raw, config, read_config, MIXTRAL)


rules, fused_rules = build_moe_family_rules(
    ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"), all_biases=False
)

MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    read_config=read_config,
    write_config=write_config,
    rules=rules,
    fused_rules=fused_rules,
    ignored=ROTARY_BUFFERS,
    tied=HEAD,
)

"""Mixtral's config.json and tensors."""

from dataclasses import replace
from typing import Any

import pytest

from megalith.config.moe import RouterConfig
from megalith.errors import ConfigError
from megalith.hf.mixtral import MIXTRAL, fused_rules, read_config
from megalith.hf.tensor_rules import group_by_parameter
from tests.hf.published import check_published, check_rules

RAW: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 32000,
}


def test_the_published_model_is_read_and_has_as_many_parameters_as_stated() -> None:
    check_published(MIXTRAL, RAW, 46_702_792_704)


def test_every_expert_has_three_tensors_or_all_have_two() -> None:
    config = read_config(RAW | {"num_hidden_layers": 1, "num_local_experts": 3})
    check_rules(MIXTRAL, config)
    names = [rule.name for rule in MIXTRAL.rules(config) if "experts" in rule.name]
    block = "model.layers.0.block_sparse_moe.experts"
    assert names == [f"{block}.{e}.{word}.weight" for e in range(3) for word in ("w1", "w3", "w2")]
    together = [rule.name for rule in fused_rules(config) if "experts" in rule.name]
    assert together == [
        f"model.layers.0.mlp.experts.{word}" for word in ("gate_up_proj", "down_proj")
    ]
    assert (
        group_by_parameter(fused_rules(config)).keys()
        == group_by_parameter(MIXTRAL.rules(config)).keys()
    )


def test_unsupported_settings_are_rejected() -> None:
    config = read_config(RAW)
    assert config.moe is not None
    odd = replace(config, moe=replace(config.moe, router=RouterConfig(routed_scaling_factor=2.0)))
    with pytest.raises(
        ConfigError,
        match=r"model.moe.router.routed_scaling_factor=2.0: MixtralForCausalLM cannot express",
    ):
        MIXTRAL.write_config(odd)
    with pytest.raises(
        ConfigError, match=r"model.moe=null: MixtralForCausalLM needs a mixture of experts"
    ):
        MIXTRAL.write_config(replace(config, moe=None))

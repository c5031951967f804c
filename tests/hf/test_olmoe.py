"""OLMoE's config.json and tensors."""

from typing import Any

import pytest

from megalith.errors import ConfigError
from megalith.hf.olmoe import OLMOE, read_config
from tests.hf.published import check_published, check_rules

RAW: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "clip_qkv": None,
    "eos_token_id": 50279,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 50304,
}
A_LAYER = 4 * 2048 * 2048 + 2 * 2048 + 64 * 2048 + 64 * 3 * 2048 * 1024 + 2 * 2048


def test_the_published_model_is_read_and_has_as_many_parameters_as_its_layers() -> None:
    check_published(OLMOE, RAW, 2 * 50_304 * 2048 + 16 * A_LAYER + 2048)  # 6.92e9


def test_queries_and_keys_are_normed_over_all_heads() -> None:
    config = read_config(RAW | {"num_hidden_layers": 1, "num_experts": 3, "num_experts_per_tok": 2})
    check_rules(OLMOE, config)
    assert config.attention.qk_norm == "whole"


def test_clipped_queries_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"clip_qkv=8.0 is not supported: it must be None"):
        read_config(RAW | {"clip_qkv": 8.0})

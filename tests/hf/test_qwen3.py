"""Qwen3's config.json and tensors."""

from typing import Any

import pytest

from megalith.hf.qwen3 import QWEN3, read_config
from tests.hf.published import check_published, check_rules

SMALL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LARGE = SMALL | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "tie_word_embeddings": False,
    "max_window_layers": 36,
}


@pytest.mark.parametrize(("raw", "count"), [(SMALL, 596_049_920), (LARGE, 8_190_735_360)])
def test_published_models_are_read_and_have_as_many_parameters_as_stated(
    raw: dict[str, Any], count: int
) -> None:
    check_published(QWEN3, raw, count)


def test_norms_of_queries_and_keys_are_one_weight_for_all_heads() -> None:
    config = read_config(SMALL | {"num_hidden_layers": 1})
    check_rules(QWEN3, config)
    assert {
        rule.name: rule.shape
        for rule in QWEN3.rules(config)
        if "q_norm" in rule.name or "k_norm" in rule.name
    } == {f"model.layers.0.self_attn.{word}_norm.weight": (128,) for word in "qk"}


def test_default_head_dim_is_128() -> None:
    raw = {name: value for name, value in SMALL.items() if name != "head_dim"}
    assert read_config(raw).head_size() == 128 != 1024 // 16


def test_text_longer_than_trained_on_is_read_with_yarn() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    rope = read_config(SMALL | {"rope_scaling": yarn}).rope
    assert (rope.scaling, rope.factor, rope.original_max_position, rope.theta) == (
        "yarn",
        4.0,
        32768,
        1e6,
    )

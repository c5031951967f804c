"""Granite's config.json and tensors."""

from dataclasses import replace
from typing import Any

import pytest

from megalith.config.model import AttentionConfig
from megalith.hf.granite import GRANITE, read_config, write_config
from tests.hf.published import check_published, check_rules

RAW: dict[str, Any] = {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.1,
    "attention_multiplier": 0.015625,
    "bos_token_id": 0,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "logits_scaling": 8.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "granite",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.49.0",
    "use_cache": True,
    "vocab_size": 49155,
}


def test_the_published_model_is_read_and_has_as_many_parameters_as_stated() -> None:
    check_published(GRANITE, RAW, 2_533_531_648)


def test_all_four_scales_are_kept_and_so_is_dropout() -> None:
    config = read_config(RAW)
    assert (config.embedding_scale, config.residual_scale, config.logit_scale) == (
        12.0,
        0.22,
        1 / 8,
    )
    assert (config.attention.scale, config.dropout.attention) == (1 / 64, 0.1)


def test_default_attention_multiplier_is_one() -> None:
    raw = {name: value for name, value in RAW.items() if name != "attention_multiplier"}
    assert read_config(raw).attention.scale == 1.0


@pytest.mark.parametrize("divisor", [3.0, 7.0, 49.0])
def test_divisors_without_an_exact_inverse_come_back(divisor: float) -> None:
    config = read_config(RAW | {"logits_scaling": divisor})
    assert write_config(config)["logits_scaling"] == pytest.approx(divisor, rel=1e-15)


def test_default_attention_scale_is_exported_explicitly() -> None:
    config = replace(read_config(RAW), attention=AttentionConfig())
    assert write_config(config)["attention_multiplier"] == 0.125


def test_the_rules_cover_every_parameter() -> None:
    check_rules(GRANITE, read_config(RAW | {"num_hidden_layers": 1}))

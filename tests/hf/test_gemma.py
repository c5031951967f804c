"""Gemma's config.json and tensors."""

from typing import Any

import pytest

from megalith.hf.gemma import GEMMA, read_config, write_config
from tests.hf.published import check_published, check_rules

SMALL: dict[str, Any] = {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.38.0.dev0",
    "use_cache": True,
    "vocab_size": 256000,
}
LARGE = SMALL | {
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 16,
}


@pytest.mark.parametrize(("raw", "count"), [(SMALL, 2_506_172_416), (LARGE, 8_537_680_896)])
def test_published_models_are_read_and_have_as_many_parameters_as_stated(
    raw: dict[str, Any], count: int
) -> None:
    check_published(GEMMA, raw, count, reworded=("hidden_act",))


@pytest.mark.parametrize(
    ("fields", "activation"),
    [
        ({"hidden_act": "gelu"}, "gelu_tanh"),
        ({"hidden_act": "gelu", "hidden_activation": None}, "gelu_tanh"),
        ({"hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh"}, "gelu_tanh"),
        ({"hidden_act": "relu"}, "relu"),
    ],
)
def test_gelu_means_its_approximation_as_in_training(
    fields: dict[str, Any], activation: str
) -> None:
    assert read_config(SMALL | fields).activation == activation


def test_defaults_are_tied_scaled_embeddings_and_zero_centered_norms() -> None:
    config = read_config(SMALL)
    assert (
        config.tied_embeddings
        and config.zero_centered_gamma
        and config.embedding_scale == 2048**0.5
    )
    check_rules(GEMMA, read_config(SMALL | {"num_hidden_layers": 1}))
    assert write_config(config)["hidden_activation"] == "gelu_pytorch_tanh"

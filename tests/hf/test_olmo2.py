"""The config.json of OLMo 2, and its tensors."""

from typing import Any

import pytest

from megalith.hf.olmo2 import OLMO2, read_config
from tests.hf.published import check_published, check_rules

MIDDLE: dict[str, Any] = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.47.0.dev0",
    "use_cache": False,
    "vocab_size": 100352,
}
SMALL = MIDDLE | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
}
LARGE = MIDDLE | {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 40,
}


@pytest.mark.parametrize(
    ("raw", "count"), [(SMALL, 1_484_916_736), (MIDDLE, 7_298_617_344), (LARGE, 13_716_198_400)]
)
def test_published_models_are_read_and_have_as_many_parameters_as_stated(
    raw: dict[str, Any], count: int
) -> None:
    check_published(OLMO2, raw, count)


def test_it_norms_what_comes_out_and_queries_and_keys_whole() -> None:
    config = read_config(SMALL | {"num_hidden_layers": 1, "num_key_value_heads": 4})
    check_rules(OLMO2, config)
    shapes = {rule.name.removeprefix("model.layers.0."): rule.shape for rule in OLMO2.rules(config)}
    assert shapes["self_attn.q_norm.weight"] == (2048,) and shapes["self_attn.k_norm.weight"] == (
        512,
    )
    assert "input_layernorm.weight" not in shapes and shapes[
        "post_feedforward_layernorm.weight"
    ] == (2048,)

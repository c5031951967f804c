"""Mistral's config.json and tensors."""

from typing import Any

import pytest

from megalith.errors import ConfigError
from megalith.hf.mistral import MISTRAL, read_config
from tests.hf.published import check_published, check_rules

V1: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
V3 = V1 | {"rope_theta": 1e6, "sliding_window": None, "vocab_size": 32768}


@pytest.mark.parametrize(("raw", "count"), [(V1, 7_241_732_096), (V3, 7_248_023_552)])
def test_published_models_are_read_and_have_as_many_parameters_as_stated(
    raw: dict[str, Any], count: int
) -> None:
    check_published(MISTRAL, raw, count)


def test_every_layer_has_the_window_and_null_means_none() -> None:
    assert [read_config(V1).has_window(layer) for layer in (0, 31)] == [True, True]
    assert read_config(V1).attention.window == 4096 and read_config(V3).attention.window is None
    assert read_config(
        {name: value for name, value in V3.items() if name != "sliding_window"}
    ) == read_config(V3 | {"sliding_window": 4096}), "as transformers has it"


def test_the_rules_cover_every_parameter() -> None:
    check_rules(MISTRAL, read_config(V1 | {"num_hidden_layers": 2}))


def test_unsupported_biases_are_rejected() -> None:
    with pytest.raises(
        ConfigError, match="attention_bias=True: unknown field, which may change what"
    ):
        read_config(V1 | {"attention_bias": True})

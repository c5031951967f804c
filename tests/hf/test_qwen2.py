"""The config.json of Qwen2 and Qwen2.5, and its tensors."""

from dataclasses import replace
from typing import Any

import pytest

from megalith.errors import ConfigError
from megalith.hf.qwen2 import QWEN2, read_config, write_config
from tests.hf.published import check_published, check_rules

SMALL: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LARGE = SMALL | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
    "max_window_layers": 28,
}


@pytest.mark.parametrize(("raw", "count"), [(SMALL, 494_032_768), (LARGE, 7_615_616_512)])
def test_published_models_are_read_and_have_as_many_parameters_as_stated(
    raw: dict[str, Any], count: int
) -> None:
    check_published(QWEN2, raw, count, reworded=("sliding_window",))


def test_queries_keys_and_values_have_biases_and_the_output_has_none() -> None:
    config = read_config(SMALL | {"num_hidden_layers": 1})
    check_rules(QWEN2, config)
    biases = [
        rule.name.split(".")[-2] for rule in QWEN2.rules(config) if rule.name.endswith("bias")
    ]
    assert biases == ["q_proj", "k_proj", "v_proj"]
    with pytest.raises(
        ConfigError,
        match="model.qkv_bias=False: Qwen2ForCausalLM cannot express .* exported as True",
    ):
        write_config(replace(config, qkv_bias=False))


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, ()),
        ({"use_sliding_window": True, "max_window_layers": 22}, (22, 23)),
        ({"use_sliding_window": True, "max_window_layers": 0}, tuple(range(24))),
        (
            {
                "use_sliding_window": True,
                "layer_types": ["full_attention"] * 23 + ["sliding_attention"],
            },
            (23,),
        ),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, ()),
    ],
)
def test_windows_follow_from_switch_size_and_layers(
    fields: dict[str, Any], windows: tuple[int, ...]
) -> None:
    config = read_config(SMALL | fields)
    assert tuple(layer for layer in range(24) if config.has_window(layer)) == windows
    assert read_config(write_config(config)) == config


def test_layers_of_an_unknown_kind_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"layer_types=\['chunked'\]: expected 'sliding_attention' or 'full_attention'",
    ):
        read_config(SMALL | {"layer_types": ["chunked"]})

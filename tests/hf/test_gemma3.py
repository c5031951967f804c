"""The config.json of Gemma 3, and its tensors."""

from typing import Any

import pytest

from megalith.errors import ConfigError
from megalith.hf.gemma3 import GEMMA3, read_config, write_config
from tests.hf.published import check_published, check_rules

ONE: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "use_cache": True,
    "vocab_size": 262144,
}
TINY = {name: value for name, value in ONE.items() if name != "sliding_window_pattern"} | {
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "_sliding_window_pattern": 6,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
    "use_bidirectional_attention": False,
}


@pytest.mark.parametrize(("raw", "count"), [(TINY, 268_098_176), (ONE, 999_885_952)])
def test_published_models_are_read_and_have_as_many_parameters_as_stated(
    raw: dict[str, Any], count: int
) -> None:
    check_published(GEMMA3, raw, count)


def test_five_of_six_layers_have_a_window_and_a_theta_of_their_own() -> None:
    for raw in (ONE, TINY):
        config = read_config(raw)
        assert [config.has_window(layer) for layer in range(7)] == [True] * 5 + [False, True]
        assert (config.rope.theta, config.rope.local_theta) == (1e6, 1e4)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_theta": None,
            "rope_local_base_freq": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ],
)
def test_rope_scaling_applies_only_to_full_attention(fields: dict[str, Any]) -> None:
    config = read_config(ONE | fields)
    assert (config.rope.scaling, config.rope.factor, config.rope.local_theta) == (
        "linear",
        8.0,
        1e4,
    )
    assert read_config(write_config(config)) == config


def test_a_cap_that_transformers_does_not_apply_is_refused() -> None:
    with pytest.raises(ConfigError, match="attn_logit_softcapping=50.0: transformers ignores it"):
        read_config(ONE | {"attn_logit_softcapping": 50.0})


def test_rope_scaling_of_sliding_layers_is_rejected() -> None:
    kinds = {
        "full_attention": {"rope_theta": 1e6},
        "sliding_attention": {"rope_type": "linear", "factor": 2.0},
    }
    raw = {name: value for name, value in ONE.items() if not name.startswith("rope")}
    with pytest.raises(
        ConfigError, match="rope_type='linear' for sliding_attention is not supported"
    ):
        read_config(raw | {"rope_parameters": kinds})


def test_the_rules_cover_every_parameter() -> None:
    check_rules(GEMMA3, read_config(ONE | {"num_hidden_layers": 1}))

"""The config.json of Gemma 2, and its tensors."""

from typing import Any

import pytest

from megalith.errors import ConfigError
from megalith.hf.gemma2 import GEMMA2, read_config, scalar_of
from tests.hf.published import check_published, check_rules

SMALL: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "transformers_version": "4.42.4",
    "use_cache": True,
    "vocab_size": 256000,
}
MIDDLE = SMALL | {
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "sliding_window_size": 4096,
}
LARGE = SMALL | {
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "num_attention_heads": 32,
    "num_hidden_layers": 46,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "query_pre_attn_scalar": 144,
}


@pytest.mark.parametrize(
    ("raw", "count"), [(SMALL, 2_614_341_888), (MIDDLE, 9_241_705_984), (LARGE, 27_227_128_320)]
)
def test_published_models_are_read_and_have_as_many_parameters_as_stated(
    raw: dict[str, Any], count: int
) -> None:
    check_published(GEMMA2, raw, count)


def test_every_other_layer_has_a_window_from_the_first() -> None:
    config = read_config(SMALL)
    assert [config.has_window(layer) for layer in range(4)] == [True, False, True, False]
    assert (config.attention.softcap, config.logit_softcap) == (50.0, 30.0)


def test_scores_are_divided_by_the_root_of_their_scalar_and_not_of_the_head_size() -> None:
    assert read_config(LARGE).attention.scale == 1 / 12 != 128**-0.5
    assert scalar_of(read_config(LARGE)) == 144


def test_norms_have_the_names_of_other_norms_of_llama() -> None:
    config = read_config(SMALL | {"num_hidden_layers": 1})
    check_rules(GEMMA2, config)
    theirs = {
        rule.parameter: rule.name.removeprefix("model.layers.0.") for rule in GEMMA2.rules(config)
    }
    assert theirs["layers.0.attention_post_norm.weight"] == "post_attention_layernorm.weight"
    assert theirs["layers.0.mlp_norm.weight"] == "pre_feedforward_layernorm.weight"


def test_two_windows_that_disagree_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="sliding_window_size=2048 is not supported: it must be 4096"
    ):
        read_config(SMALL | {"sliding_window_size": 2048})

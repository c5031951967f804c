from typing import Any

import pytest

from megalith.errors import ConfigError
from megalith.hf.gpt_oss import GPT_OSS
from tests.hf.published import check_published, check_rules

PUBLISHED: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "rms_norm_eps": 1e-05,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201088,
}


A_LAYER = (
    2880 * 5120
    + 5120
    + 4096 * 2880
    + 2880
    + 64  # queries, keys and values, output, sinks
    + 32 * (2881 + 2 * 2880 * 2881 + 2880 * 2881)
    + 2 * 2880
)


def test_the_published_model_is_read_and_has_as_many_parameters_as_its_layers() -> None:
    check_published(GPT_OSS, PUBLISHED, 2 * 201_088 * 2880 + 24 * A_LAYER + 2880)  # 20.9e9
    config = GPT_OSS.read_config(PUBLISHED)
    assert [config.has_window(layer) for layer in range(4)] == [True, False, True, False]
    assert (config.rope.theta, config.rope.whole_pairs, config.attention.window) == (
        150_000.0,
        False,
        128,
    )
    bare = {
        name: value
        for name, value in PUBLISHED.items()
        if not name.startswith(("rope", "layer_types"))
    }
    assert GPT_OSS.read_config(bare) == config


def test_gate_and_up_columns_alternate_and_inputs_come_first() -> None:
    config = GPT_OSS.read_config(
        PUBLISHED | {"num_hidden_layers": 2, "num_local_experts": 4, "layer_types": None}
    )
    check_rules(GPT_OSS, config)
    shapes = {
        rule.name.removeprefix("model.layers.1.mlp."): rule.shape for rule in GPT_OSS.rules(config)
    }
    assert shapes["experts.gate_up_proj"] == (4, 2880, 5760) and shapes["experts.down_proj"] == (
        4,
        2880,
        2880,
    )
    assert shapes["router.bias"] == (4,)


def test_unsupported_fields_are_rejected_by_name() -> None:
    with pytest.raises(ConfigError, match="swiglu_alpha=1.5 is not supported: it must be 1.702"):
        GPT_OSS.read_config(PUBLISHED | {"swiglu_alpha": 1.5})
    with pytest.raises(
        ConfigError, match="num_experts_per_tok=4, experts_per_token=2: they differ"
    ):
        GPT_OSS.read_config(PUBLISHED | {"experts_per_token": 2})


def test_a_dense_model_cannot_be_exported_as_gpt_oss(tiny: Any) -> None:
    with pytest.raises(
        ConfigError, match="model.moe=null: GptOssForCausalLM needs a mixture of experts"
    ):
        GPT_OSS.write_config(tiny.config())

"""The config.json and tensors of Qwen3 with experts."""

from typing import Any

import pytest

from megalith.errors import ConfigError
from megalith.hf.qwen3_moe import QWEN3_MOE, read_config
from tests.hf.published import check_published, check_rules

RAW: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_the_published_model_is_read_and_has_as_many_parameters_as_stated() -> None:
    check_published(QWEN3_MOE, RAW, 30_532_122_624)


def test_layers_may_be_dense() -> None:
    config = read_config(
        RAW | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    )
    assert [config.has_experts(layer) for layer in range(4)] == [False, True, False, False]
    check_rules(QWEN3_MOE, config)
    again = QWEN3_MOE.write_config(config)
    assert (again["decoder_sparse_step"], again["mlp_only_layers"]) == (1, [0, 2, 3])
    assert QWEN3_MOE.read_config(again) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"mlp_only_layers": [48]},
            r"mlp_only_layers=\[48\]: expected numbers of layers, from 0 to 47",
        ),
        ({"num_local_experts": 64}, "these numbers of experts differ"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(RAW | fields)

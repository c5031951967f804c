"""The config.json and tensors of Qwen1.5 and Qwen2 with experts."""

from typing import Any

from megalith.hf.qwen2_moe import QWEN2_MOE, read_config
from tests.hf.published import check_published, check_rules

RAW: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
A_LAYER = 4 * 2048 * 2048 + 3 * 2048 + 61 * 2048 + 60 * 3 * 2048 * 1408 + 3 * 2048 * 5632 + 2 * 2048


def test_the_published_model_is_read_and_has_as_many_parameters_as_its_layers() -> None:
    check_published(
        QWEN2_MOE, RAW, 2 * 151_936 * 2048 + 24 * A_LAYER + 2048, reworded=("sliding_window",)
    )


def test_shared_experts_are_one_mlp_with_a_gate() -> None:
    config = read_config(RAW | {"num_hidden_layers": 1, "num_experts": 4})
    assert (
        config.moe is not None and config.moe.shared_gate and not config.moe.router.norm_topk_prob
    )
    check_rules(QWEN2_MOE, config)
    shapes = {
        rule.name.removeprefix("model.layers.0.mlp."): rule.shape
        for rule in QWEN2_MOE.rules(config)
    }
    assert shapes["shared_expert_gate.weight"] == (1, 2048)
    assert shapes["shared_expert.down_proj.weight"] == (2048, 5632)

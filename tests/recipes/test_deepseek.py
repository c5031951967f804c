"""Published sizes of DeepSeek-V2 and V3."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megalith.config.moe import AuxLossConfig
from megalith.config.train import TrainRun
from megalith.hf.families import DEEPSEEK_V2, DEEPSEEK_V3
from megalith.plan.costs import active_parameters, num_parameters
from megalith.plan.stages import plan_stages
from megalith.recipes import build_recipe, recipes
from tests.hf.test_deepseek import RAW

SECOND: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1536,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 128,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 16.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.39.3",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 102400,
}
LITE = SECOND | {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "greedy",
}


@pytest.mark.parametrize(
    ("recipe", "raw", "numbers"),
    [
        (recipes()["deepseek_v2"], SECOND, (235_741_434_880, 21_375_800_320)),
        (recipes()["deepseek_v2_lite"], LITE, (15_706_484_224, 2_661_150_208)),
    ],
    ids=["V2", "V2-Lite"],
)
def test_v2_model_matches_the_published_config(
    recipe: Callable[[], TrainRun], raw: dict[str, Any], numbers: tuple[int, int]
) -> None:
    """But for the longer context and what the released settings leave out, as below."""
    model, published = recipe().model, DEEPSEEK_V2.read_config(raw)
    assert model.moe is not None and published.mla is not None
    mla = replace(published.mla, yarn_mscale=None)
    own = replace(published, mla=mla, max_seq_len=4096, rope=model.rope, init_std=0.006)
    assert replace(model, moe=replace(model.moe, aux_loss=AuxLossConfig())) == own
    assert (model.rope.theta, model.rope.interleaved) == (
        published.rope.theta,
        published.rope.interleaved,
    )
    assert (num_parameters(model), active_parameters(model)) == numbers


def test_sixteen_stages_of_the_second_have_all_layers() -> None:
    run = build_recipe("deepseek_v2")
    stages = plan_stages(run.parallel.pipeline, pp=16, num_layers=60)
    assert [len(stage.layers) for stage in stages] == [3, *[4] * 13, 3, 2]


def test_v3_model_matches_the_published_config() -> None:
    """But for what came after the first training, a longer context; and for what the released
    settings leave out."""
    model, published = build_recipe("deepseek_v3").model, DEEPSEEK_V3.read_config(RAW)
    assert model.moe is not None and published.moe is not None
    assert published.mla is not None
    mla = replace(published.mla, yarn_mscale=None)
    own = replace(
        published, mla=mla, max_seq_len=4096, rope=model.rope, init_std=0.006, mtp=model.mtp
    )
    assert replace(model, moe=replace(model.moe, aux_loss=AuxLossConfig())) == own
    assert (model.rope.theta, model.rope.interleaved) == (
        published.rope.theta,
        published.rope.interleaved,
    )
    alone = replace(model, mtp=replace(model.mtp, num_layers=0))
    assert (num_parameters(alone), active_parameters(alone)) == (671_026_404_352, 37_552_282_624)

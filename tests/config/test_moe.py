"""Layers with experts, and settings that need random numbers."""

from dataclasses import replace

from megalith.config.model import ModelConfig
from megalith.config.moe import MoEConfig, RouterConfig
from megalith.config.train import dropout_seed
from megalith.config.tree import from_dict, to_dict
from megalith.testing.tiny import tiny_run

MOE = MoEConfig(num_experts=4, ffn_hidden_size=6)
MODEL = ModelConfig(
    vocab_size=8, hidden_size=24, num_layers=5, num_heads=2, num_kv_heads=1, ffn_hidden_size=8
)


def test_layers_with_experts_are_a_pattern_that_repeats() -> None:
    assert not MODEL.has_experts(0)
    assert replace(MODEL, moe=MOE).has_experts(4)
    second = replace(MODEL, moe=replace(MOE, layers=(False, True)))
    assert [second.has_experts(layer) for layer in range(5)] == [False, True, False, True, False]


def test_a_model_with_experts_is_written_and_read() -> None:
    model = replace(
        MODEL, moe=replace(MOE, router=RouterConfig(score="sigmoid", num_groups=2, topk_groups=1))
    )
    assert from_dict(ModelConfig, to_dict(model)) == model


def test_router_noise_needs_the_seed() -> None:
    run = tiny_run()
    plain = replace(run, model=replace(run.model, moe=MOE))
    noisy = replace(
        plain, model=replace(plain.model, moe=replace(MOE, router=RouterConfig(jitter=0.1)))
    )
    assert dropout_seed(plain) is None
    assert dropout_seed(noisy) == run.seed

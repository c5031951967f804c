"""Settings that nothing reads are found, each once, and the names of the table are settings."""

from dataclasses import replace

from megalith.config.fields import setting_names
from megalith.config.model import AttentionConfig, LayersConfig, ModelConfig, RopeConfig
from megalith.config.moe import MoEConfig
from megalith.rules.no_effect import BELONGS, reads_mlp_bias, unread_problems

MODEL = ModelConfig(
    vocab_size=8, hidden_size=8, num_layers=7, num_heads=2, num_kv_heads=1, ffn_hidden_size=8
)


def test_every_name_of_the_table_is_a_setting_or_a_section_of_them() -> None:
    known = setting_names(ModelConfig)
    for row in BELONGS:
        for name in row.settings:
            assert name in known or any(other.startswith(f"{name}.") for other in known), name
        assert row.decider in known, row.decider


def test_setting_is_reported_once_for_all_missing_requirements() -> None:
    rope = RopeConfig(scaling="linear", beta_fast=16.0, local_theta=10.0)
    (one,) = unread_problems(replace(MODEL, positions="learned", rope=rope))
    assert (
        "model.rope.local_theta=10.0, model.rope.scaling=linear, model.rope.beta_fast=16.0 with"
        in one
    )
    yarn, window = sorted(unread_problems(replace(MODEL, rope=rope)))
    assert "model.rope.beta_fast=16.0 with model.rope.scaling=linear" in yarn
    assert "model.rope.local_theta=10.0 with model.attention.window=null" in window


def test_defaults_and_used_settings_have_no_problem() -> None:
    assert unread_problems(MODEL) == []
    assert (
        unread_problems(replace(MODEL, rope=RopeConfig(scaling="yarn", factor=2.0, beta_fast=16.0)))
        == []
    )


def test_settings_of_absent_layer_types_are_rejected() -> None:
    square = replace(
        MODEL, layers=LayersConfig(attention=("linear",)), attention=AttentionConfig(sinks=True)
    )
    (text,) = unread_problems(square)
    assert text == (
        "model.attention.sinks=true with model.layers.attention=[linear]: no effect, because "
        "the setting is for attention, and no layer has it. Set "
        "model.layers.attention to full for some layer, or "
        "remove it."
    )
    (text,) = unread_problems(
        replace(MODEL, layers=LayersConfig(mlp=("none", "linear")), gated=False)
    )
    assert "model.gated=false with model.layers.mlp=[none, linear]: no effect" in text
    assert unread_problems(replace(square, layers=LayersConfig(attention=("linear", "full")))) == []


def test_mlp_bias_requires_an_mlp_or_shared_experts() -> None:
    biased, experts = replace(MODEL, mlp_bias=True), MoEConfig(num_experts=4, ffn_hidden_size=8)
    (text,) = unread_problems(replace(biased, moe=experts))
    assert text == (
        "model.mlp_bias=true with model.moe.shared_ffn_hidden_size=null: no effect, because "
        "the setting is for MLPs and "
        "shared experts, and there are none. Set model.moe.biases=true for biases of experts, or "
        "remove it."
    )
    (text,) = unread_problems(replace(biased, layers=LayersConfig(mlp=("none",))))
    assert text.startswith("model.mlp_bias=true with model.layers.mlp=[none]: no effect")
    for moe in (replace(experts, layers=(True, False)), replace(experts, shared_ffn_hidden_size=4)):
        assert unread_problems(replace(biased, moe=moe)) == [] and reads_mlp_bias(
            replace(biased, moe=moe)
        )
    assert (
        unread_problems(replace(biased, moe=experts, layers=LayersConfig(mlp=("full", "linear"))))
        == []
    )

"""Per-layer settings."""

from dataclasses import replace

from megalith.config.model import AttentionConfig, LayersConfig, ModelConfig
from megalith.config.moe import MoEConfig
from megalith.config.tree import apply_overrides, from_dict, to_dict

MODEL = ModelConfig(
    vocab_size=8, hidden_size=8, num_layers=5, num_heads=4, num_kv_heads=4, ffn_hidden_size=9
)
OWN = LayersConfig(
    attention=("full", "none"),
    mlp=("full", "full", "linear"),
    num_kv_heads=(4, 2),
    ffn_hidden_size=(9, 7, 5),
)


def test_model_with_equal_layers_is_returned_unchanged() -> None:
    assert MODEL.at(3) is MODEL


def test_patterns_repeat_over_the_layers() -> None:
    model = replace(MODEL, layers=OWN)
    assert [model.attention_part(layer) for layer in range(5)] == [
        "full",
        "none",
        "full",
        "none",
        "full",
    ]
    assert [model.mlp_part(layer) for layer in range(5)] == [
        "full",
        "full",
        "linear",
        "full",
        "full",
    ]
    assert [model.at(layer).ffn_hidden_size for layer in range(5)] == [9, 7, 5, 9, 7]
    assert [model.at(layer).num_kv_heads for layer in range(5)] == [4, 2, 4, 2, 4]
    third = model.at(3)
    assert (
        third.layers == LayersConfig(attention=("none",), mlp=("full",))
        and third.at(0) == third.at(4) == third
    )
    assert third.num_layers == 5


def test_layers_without_attention_have_no_rope_or_window() -> None:
    model = replace(MODEL, layers=OWN, attention=AttentionConfig(window=3))
    assert [model.uses_rope(layer) for layer in range(3)] == [True, False, True]
    assert [model.has_window(layer) for layer in range(3)] == [True, False, True]


def test_layers_without_an_mlp_have_no_experts() -> None:
    own = LayersConfig(mlp=("full", "linear", "full", "none"))
    model = replace(
        MODEL,
        layers=own,
        moe=MoEConfig(num_experts=4, ffn_hidden_size=8, layers=(True, True, False)),
    )
    assert [model.has_experts(layer) for layer in range(5)] == [True, False, False, False, True]


def test_patterns_are_lists_in_files_and_on_the_command_line() -> None:
    model = replace(MODEL, layers=OWN)
    assert from_dict(ModelConfig, to_dict(model)) == model
    given = apply_overrides(
        MODEL, {"layers.attention": "[full, none]", "layers.ffn_hidden_size": ["9", "7"]}
    )
    assert given.layers == LayersConfig(attention=("full", "none"), ffn_hidden_size=(9, 7))

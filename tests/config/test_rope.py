"""Layers with RoPE and their rotary size."""

from dataclasses import replace

from megalith.config.model import MLAConfig, ModelConfig, RopeConfig

MODEL = ModelConfig(
    vocab_size=8, hidden_size=24, num_layers=5, num_heads=2, num_kv_heads=1, ffn_hidden_size=8
)


def test_layers_without_rope_are_a_repeating_pattern() -> None:
    every_fourth = replace(MODEL, rope=RopeConfig(skip=(False, False, False, True)))
    assert [every_fourth.uses_rope(layer) for layer in range(5)] == [True, True, True, False, True]
    assert [MODEL.uses_rope(layer) for layer in range(5)] == [True] * 5
    assert not replace(MODEL, positions="none").uses_rope(0)


def test_rotary_size_is_a_fraction_of_the_head_or_that_of_mla() -> None:
    assert MODEL.rotary_size() == 12
    assert replace(MODEL, rope=RopeConfig(fraction=0.34)).rotary_size() == 4
    assert replace(MODEL, mla=MLAConfig(kv_rank=4, rope_dim=6)).rotary_size() == 6

"""Attention settings and their patterns over layers."""

from dataclasses import replace

from megalith.config.model import AttentionConfig, ModelConfig, list_attention_warnings

MODEL = ModelConfig(
    vocab_size=8, hidden_size=8, num_layers=7, num_heads=2, num_kv_heads=1, ffn_hidden_size=8
)


def windows(**attention: object) -> list[bool]:
    model = replace(MODEL, attention=AttentionConfig(**attention))  # type: ignore[arg-type]  # by name
    return [model.has_window(layer) for layer in range(7)]


def test_sliding_window_applies_to_all_layers_or_the_pattern() -> None:
    assert windows() == [False] * 7
    assert windows(window=3) == [True] * 7
    assert windows(window=3, window_layers=(True, True, False)) == [
        True,
        True,
        False,
        True,
        True,
        False,
        True,
    ]
    assert windows(window_layers=(True, False)) == [False] * 7


def test_non_causal_attention_is_warned_about() -> None:
    (note,) = list_attention_warnings(AttentionConfig(causal=False))
    assert "model.attention.causal=false: every token attends to its own label" in note
    assert "set model.attention.causal=true" in note
    assert list_attention_warnings(AttentionConfig(window=4)) == []

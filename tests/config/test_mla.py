"""Head sizes of multi-head latent attention."""

from dataclasses import replace

from megalith.config.model import MLAConfig, ModelConfig

MODEL = ModelConfig(
    vocab_size=8, hidden_size=24, num_layers=5, num_heads=2, num_kv_heads=2, ffn_hidden_size=8
)


def test_keys_have_both_parts_and_values_their_own_size() -> None:
    latent = replace(MODEL, mla=MLAConfig(kv_rank=4, nope_dim=5, rope_dim=6, value_dim=3))
    assert (latent.key_size(), latent.value_size(), latent.rotary_size()) == (11, 3, 6)
    assert (MODEL.key_size(), MODEL.value_size(), MODEL.rotary_size()) == (12, 12, 12)

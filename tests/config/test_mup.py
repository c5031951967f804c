"""Width factor of muP."""

from dataclasses import replace

from megalith.config.model import ModelConfig, MuPConfig
from megalith.config.tree import apply_overrides

MODEL = ModelConfig(
    vocab_size=8, hidden_size=24, num_layers=1, num_heads=2, num_kv_heads=2, ffn_hidden_size=8
)


def test_width_factor_is_1_without_mup() -> None:
    assert MODEL.width_factor() == 1.0
    assert replace(MODEL, mup=MuPConfig(base_hidden_size=16)).width_factor() == 1.5


def test_mup_and_init_overrides_can_be_set_on_the_command_line() -> None:
    typed = {
        "mup.base_hidden_size": "12",
        "init_overrides": "[['*.down', 0.5]]",
        "embedding_init_std": "1",
    }
    model = apply_overrides(MODEL, typed)
    assert model.mup == MuPConfig(base_hidden_size=12)
    assert model.init_overrides == (("*.down", 0.5),) and model.embedding_init_std == 1.0

"""How many times wider than its base a model is."""

from dataclasses import replace

from megalith.config.model import ModelConfig
from megalith.config.mup import MuPConfig
from megalith.config.tree import apply_overrides

MODEL = ModelConfig(
    vocab_size=8, hidden_size=24, num_layers=1, num_heads=2, num_kv_heads=2, ffn_hidden_size=8
)


def test_without_a_base_a_model_is_as_wide_as_itself() -> None:
    assert MODEL.width_factor() == 1.0
    assert replace(MODEL, mup=MuPConfig(base_hidden_size=16)).width_factor() == 1.5


def test_it_and_the_patterns_of_first_values_can_be_typed() -> None:
    typed = {
        "mup.base_hidden_size": "12",
        "init_overrides": "[['*.down', 0.5]]",
        "embedding_init_std": "1",
    }
    model = apply_overrides(MODEL, typed)
    assert model.mup == MuPConfig(base_hidden_size=12)
    assert model.init_overrides == (("*.down", 0.5),) and model.embedding_init_std == 1.0

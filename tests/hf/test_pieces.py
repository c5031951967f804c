"""Tensors that several families share: their names, shapes and parameters."""

from megalith.config.model import ModelConfig
from megalith.hf.tensor_rules import layer_norm_rules, ungated_rules

MODEL = ModelConfig(
    vocab_size=8, hidden_size=6, num_layers=1, num_heads=2, num_kv_heads=2, ffn_hidden_size=10
)


def test_a_layer_norm_is_a_weight_and_a_bias() -> None:
    found = [
        (rule.name, rule.parameter, rule.shape) for rule in layer_norm_rules("ln_f", "norm", 6)
    ]
    assert found == [("ln_f.weight", "norm.weight", (6,)), ("ln_f.bias", "norm.bias", (6,))]


def test_an_mlp_without_a_gate_is_two_layers_with_biases_where_it_has_any() -> None:
    for bias, count in ((False, 2), (True, 4)):
        model = ModelConfig(
            **{field: getattr(MODEL, field) for field in MODEL.__slots__} | {"mlp_bias": bias}
        )
        rules = ungated_rules(model, "fc", "proj", "layers.0.mlp")
        shapes = {rule.name: rule.shape for rule in rules}
        assert (
            len(rules) == count
            and shapes["fc.weight"] == (10, 6)
            and shapes["proj.weight"] == (6, 10)
        )
        assert {rule.parameter for rule in rules} >= {"layers.0.mlp.up", "layers.0.mlp.down"}

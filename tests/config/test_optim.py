"""The optimizer's defaults."""

from megalith.config.fields import describe, literal_values
from megalith.config.optim import OptimConfig, PrecisionConfig


def test_the_defaults_are_those_of_large_language_models() -> None:
    optim = OptimConfig()
    assert (optim.beta1, optim.beta2, optim.eps, optim.clip_grad) == (0.9, 0.95, 1e-8, 1.0)
    assert optim.decoupled_weight_decay


def test_three_number_formats_can_be_chosen() -> None:
    (params,) = describe(PrecisionConfig)
    assert literal_values(params.hint) == ["fp32", "bf16", "fp64"]

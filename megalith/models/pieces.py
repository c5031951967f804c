"""Tensor rules that several families share and Llama does not have: LayerNorm with bias, and MLPs
without a gate."""

from megalith.config.model import ModelConfig
from megalith.models.names import TensorRule, rule


def layer_norm_rules(hf_name: str, parameter: str, size: int) -> list[TensorRule]:
    """Return the rules of a LayerNorm over `size` features."""
    return [
        rule(f"{hf_name}.{part}", f"{parameter}.{part}", (size,), shape=(size,))
        for part in ("weight", "bias")
    ]


def ungated_rules(config: ModelConfig, up: str, down: str, parameter: str) -> list[TensorRule]:
    """Return the rules of an MLP without a gate, whose linear layers are named `up` and `down`."""
    h, f = config.hidden_size, config.ffn_hidden_size
    rules = [
        rule(f"{up}.weight", f"{parameter}.up", (f, h), shape=(f, h)),
        rule(f"{down}.weight", f"{parameter}.down", (h, f), shape=(h, f)),
    ]
    if config.mlp_bias:
        rules += [
            rule(f"{up}.bias", f"{parameter}.up_bias", (f,), shape=(f,)),
            rule(f"{down}.bias", f"{parameter}.down_bias", (h,), shape=(h,)),
        ]
    return rules

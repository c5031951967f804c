"""Tensors that several families have in another form than Llama: norms with a bias, MLPs without a
gate."""

from megalith.config.model import ModelConfig
from megalith.models.names import TensorRule, rule


def layer_norm_rules(theirs: str, ours: str, size: int) -> list[TensorRule]:
    """Weight and bias of a LayerNorm over `size` features."""
    return [
        rule(f"{theirs}.{part}", f"{ours}.{part}", (size,), shape=(size,))
        for part in ("weight", "bias")
    ]


def ungated_rules(config: ModelConfig, up: str, down: str, ours: str) -> list[TensorRule]:
    """An MLP without a gate, of two linear layers that they call `up` and `down`."""
    h, f = config.hidden_size, config.ffn_hidden_size
    found = [
        rule(f"{up}.weight", f"{ours}.up", (f, h), shape=(f, h)),
        rule(f"{down}.weight", f"{ours}.down", (h, f), shape=(h, f)),
    ]
    if config.mlp_bias:
        found += [
            rule(f"{up}.bias", f"{ours}.up_bias", (f,), shape=(f,)),
            rule(f"{down}.bias", f"{ours}.down_bias", (h,), shape=(h,)),
        ]
    return found

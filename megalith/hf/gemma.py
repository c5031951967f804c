"""Hugging Face format of Gemma 1: scaled embeddings, norms with 1 + weight, a GELU gate, wide
heads.

Source: Gemma Team 2024, arXiv:2403.08295.
"""

from collections.abc import Mapping
from typing import Any

from megalith.config.model import ModelConfig
from megalith.hf.config_fields import (
    HEAD,
    ROTARY_BUFFERS,
    check_all_fields_exported,
    common_rules,
    read_common_fields,
    write_common_fields,
)
from megalith.hf.fields import Fields
from megalith.hf.rope import read_rope
from megalith.hf.tensor_rules import Family, TensorRule


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a config.json.

    Raises:
        ConfigError: fields are missing, of the wrong type, unknown or not supported; all of them
            are reported together.
    """
    fields = Fields({**raw, "hidden_act": _activation(raw)})
    fields.ignore("hidden_activation")
    common_fields = read_common_fields(
        fields, max_seq_len=8192, kv_heads=16, head_dim=256, tied=True
    )
    rope = read_rope(fields, max_position=common_fields["max_seq_len"])
    fields.raise_problems()
    return ModelConfig(
        **common_fields,
        rope=rope,
        zero_centered_gamma=True,
        embedding_scale=common_fields["hidden_size"] ** 0.5,
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model, readable by transformers 4 and 5.

    Raises:
        ConfigError: the model cannot be expressed as Gemma.
    """
    raw = write_common_fields(config, GEMMA)
    raw["hidden_activation"] = raw["hidden_act"]  # transformers 4 reads the one, 5 the other
    return check_all_fields_exported(raw, config, read_config, GEMMA)


def _activation(raw: Mapping[str, Any]) -> Any:  # JSON
    """Return the activation; "gelu" in hidden_act means the tanh approximation, with which Gemma
    was trained."""
    if raw.get("hidden_activation") is not None:
        return raw["hidden_activation"]
    return "gelu_pytorch_tanh" if raw.get("hidden_act") in ("gelu", None) else raw["hidden_act"]


def rules(config: ModelConfig) -> list[TensorRule]:
    """Return the tensor rules, in the order of the forward pass."""
    return common_rules(config)


GEMMA = Family(
    architecture="GemmaForCausalLM",
    model_type="gemma",
    read_config=read_config,
    write_config=write_config,
    rules=rules,
    ignored=ROTARY_BUFFERS,
    tied=HEAD,
)

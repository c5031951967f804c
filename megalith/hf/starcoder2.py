"""Hugging Face format of StarCoder2: LayerNorm, an MLP without a gate, biases, a sliding window in
all layers.

Source: Lozhkov et al. 2024, arXiv:2402.19173.
"""

from collections.abc import Mapping
from typing import Any

from megalith.config.model import AttentionConfig, DropoutConfig, ModelConfig
from megalith.hf.config_fields import (
    HEAD,
    NORMS,
    ROTARY_BUFFERS,
    SIZES,
    attention_rules,
    check_all_fields_exported,
    check_head_sizes,
)
from megalith.hf.fields import Fields, hf_activation_name
from megalith.hf.rope import read_rope, write_rope
from megalith.hf.tensor_rules import Family, TensorRule, layer_norm_rules, rule, ungated_rules

DROPOUTS = {
    "embedding_dropout": "embedding",
    "residual_dropout": "residual",
    "attention_dropout": "attention",
}
"""Hugging Face field -> DropoutConfig field."""

UNREAD = (
    "activation_function",
    "layer_norm_epsilon",
    "attention_softmax_in_fp32",
    "scale_attention_softmax_in_fp32",
    "scale_attn_weights",
)
"""Fields of published configs that transformers does not read."""


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a config.json.

    Raises:
        ConfigError: fields are missing, of the wrong type, unknown or not supported; all of them
            are reported together.
    """
    fields = Fields(raw)
    sizes: dict[str, Any] = {name: fields.read_int(hf_name) for hf_name, name in SIZES.items()}
    length = fields.read_int("max_position_embeddings", 4096)
    has_bias = fields.read_flag("use_bias", True)
    fields.require("mlp_type", "default")
    fields.require("norm_type", "layer_norm")
    fields.ignore(*UNREAD)
    dropout = {
        name: fields.read_number(hf_name, 0.0, zero=True) for hf_name, name in DROPOUTS.items()
    }
    config = ModelConfig(
        **sizes,
        num_kv_heads=fields.read_int("num_key_value_heads", 2),
        max_seq_len=length,
        norm="layer",
        norm_eps=fields.read_number("norm_epsilon", 1e-5),
        rope=read_rope(fields, max_position=length),
        attention=AttentionConfig(window=fields.read_optional_int("sliding_window")),
        activation=fields.read_activation("hidden_act", "gelu_pytorch_tanh"),
        gated=False,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=has_bias,
        dropout=DropoutConfig(**dropout),
        tied_embeddings=fields.read_flag("tie_word_embeddings", True),
        init_std=fields.read_number("initializer_range", 0.018042, zero=True),
    )
    fields.raise_problems()
    return config


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model, readable by transformers 4 and 5.

    Raises:
        ConfigError: the model cannot be expressed as StarCoder2.
    """
    check_head_sizes(config)
    raw = {
        "architectures": [STARCODER2.architecture],
        "model_type": STARCODER2.model_type,
        **{hf_name: getattr(config, name) for hf_name, name in SIZES.items()},
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_seq_len,
        "norm_epsilon": config.norm_eps,
        "initializer_range": config.init_std,
        "hidden_act": hf_activation_name(config.activation),
        "sliding_window": config.attention.window,
        "use_bias": config.qkv_bias,
        **{hf_name: getattr(config.dropout, name) for hf_name, name in DROPOUTS.items()},
        **write_rope(config.rope),
        "tie_word_embeddings": config.tied_embeddings,
        "use_cache": True,
    }
    return check_all_fields_exported(raw, config, read_config, STARCODER2)


def rules(config: ModelConfig) -> list[TensorRule]:
    """Return the tensor rules, in the order of the forward pass."""
    v, h = config.vocab_size, config.hidden_size
    rules = [rule("model.embed_tokens.weight", "embed.weight", (v, h), shape=(v, h))]
    for layer in range(config.num_layers):
        hf_layer, layer_name = f"model.layers.{layer}", f"layers.{layer}"
        rules += layer_norm_rules(
            f"{hf_layer}.{NORMS['attention_norm']}", f"{layer_name}.attention_norm", h
        )
        rules += attention_rules(
            config, f"{hf_layer}.self_attn", f"{layer_name}.attention", all_biases=True
        )
        rules += layer_norm_rules(f"{hf_layer}.{NORMS['mlp_norm']}", f"{layer_name}.mlp_norm", h)
        rules += ungated_rules(
            config, f"{hf_layer}.mlp.c_fc", f"{hf_layer}.mlp.c_proj", f"{layer_name}.mlp"
        )
    rules += layer_norm_rules("model.norm", "norm", h)
    if not config.tied_embeddings:
        rules.append(rule(HEAD, "head.weight", (v, h), shape=(v, h)))
    return rules


STARCODER2 = Family(
    architecture="Starcoder2ForCausalLM",
    model_type="starcoder2",
    read_config=read_config,
    write_config=write_config,
    rules=rules,
    ignored=ROTARY_BUFFERS,
    tied=HEAD,
)

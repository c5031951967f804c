"""StarCoder2 as Hugging Face knows it: LayerNorm, an MLP without a gate, biases everywhere, a
window in all layers.

Source: Lozhkov et al. 2024, arXiv:2402.19173.
"""

from collections.abc import Mapping
from typing import Any

from megalith.config.attention import AttentionConfig
from megalith.config.dropout import DropoutConfig
from megalith.config.model import ModelConfig
from megalith.models.fields import Fields, activation_word
from megalith.models.names import Family, TensorRule, rule
from megalith.models.pieces import layer_norm_rules, ungated_rules
from megalith.models.rope import read_rope, write_rope
from megalith.models.usual import (
    HEAD,
    NORMS,
    ROTARY_BUFFERS,
    SIZES,
    attention_rules,
    check_all_fields_exported,
    whole_heads,
)

DROPOUTS = {
    "embedding_dropout": "embedding",
    "residual_dropout": "residual",
    "attention_dropout": "attention",
}
"""Theirs -> ours: used in training only."""

UNREAD = (
    "activation_function",
    "layer_norm_epsilon",
    "attention_softmax_in_fp32",
    "scale_attention_softmax_in_fp32",
    "scale_attn_weights",
)
"""Fields of published configs that transformers never looks at."""


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Contents of a config.json -> our config.

    Raises:
        ConfigError: fields that are missing, of the wrong kind, unknown, or not supported; all of
        them together.
    """
    fields = Fields(raw)
    sizes: dict[str, Any] = {ours: fields.whole(theirs) for theirs, ours in SIZES.items()}
    length = fields.whole("max_position_embeddings", 4096)
    biased = fields.flag("use_bias", True)
    fields.only("mlp_type", "default")
    fields.only("norm_type", "layer_norm")
    fields.ignore(*UNREAD)
    dropout = {ours: fields.number(theirs, 0.0, zero=True) for theirs, ours in DROPOUTS.items()}
    found = ModelConfig(
        **sizes,
        num_kv_heads=fields.whole("num_key_value_heads", 2),
        max_seq_len=length,
        norm="layer",
        norm_eps=fields.number("norm_epsilon", 1e-5),
        rope=read_rope(fields, max_position=length),
        attention=AttentionConfig(window=fields.whole_or_none("sliding_window")),
        activation=fields.activation("hidden_act", "gelu_pytorch_tanh"),
        gated=False,
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=biased,
        dropout=DropoutConfig(**dropout),
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        init_std=fields.number("initializer_range", 0.018042, zero=True),
    )
    fields.finish()
    return found


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Our config -> contents of a config.json, readable by transformers 4 and 5.

    Raises:
        ConfigError: the model cannot be a StarCoder2 of theirs.
    """
    whole_heads(config)
    raw = {
        "architectures": [STARCODER2.architecture],
        "model_type": STARCODER2.model_type,
        **{theirs: getattr(config, ours) for theirs, ours in SIZES.items()},
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_seq_len,
        "norm_epsilon": config.norm_eps,
        "initializer_range": config.init_std,
        "hidden_act": activation_word(config.activation),
        "sliding_window": config.attention.window,
        "use_bias": config.qkv_bias,
        **{theirs: getattr(config.dropout, ours) for theirs, ours in DROPOUTS.items()},
        **write_rope(config.rope),
        "tie_word_embeddings": config.tied_embeddings,
        "use_cache": True,
    }
    return check_all_fields_exported(raw, config, read_config, STARCODER2)


def rules(config: ModelConfig) -> list[TensorRule]:
    """Every tensor of a StarCoder2 of theirs, in the order of the forward pass."""
    v, h = config.vocab_size, config.hidden_size
    found = [rule("model.embed_tokens.weight", "embed.weight", (v, h), shape=(v, h))]
    for layer in range(config.num_layers):
        theirs, ours = f"model.layers.{layer}", f"layers.{layer}"
        found += layer_norm_rules(
            f"{theirs}.{NORMS['attention_norm']}", f"{ours}.attention_norm", h
        )
        found += attention_rules(
            config, f"{theirs}.self_attn", f"{ours}.attention", all_biases=True
        )
        found += layer_norm_rules(f"{theirs}.{NORMS['mlp_norm']}", f"{ours}.mlp_norm", h)
        found += ungated_rules(config, f"{theirs}.mlp.c_fc", f"{theirs}.mlp.c_proj", f"{ours}.mlp")
    found += layer_norm_rules("model.norm", "norm", h)
    if not config.tied_embeddings:
        found.append(rule(HEAD, "head.weight", (v, h), shape=(v, h)))
    return found


STARCODER2 = Family(
    architecture="Starcoder2ForCausalLM",
    model_type="starcoder2",
    read_config=read_config,
    write_config=write_config,
    rules=rules,
    ignored=ROTARY_BUFFERS,
    tied=HEAD,
)

"""Hugging Face format of GPT-2, whose weight matrices have inputs as rows.

Source: Radford et al. 2019, "Language models are unsupervised multitask learners".
"""

import re
from collections.abc import Mapping
from typing import Any

from megalith.config.model import DropoutConfig, ModelConfig
from megalith.hf.config_fields import HEAD, check_all_fields_exported, check_head_sizes
from megalith.hf.fields import Fields
from megalith.hf.tensor_rules import Family, TensorRule, layer_norm_rules, piece, rule

# --- config.json

SIZES = {
    "vocab_size": "vocab_size",
    "n_embd": "hidden_size",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_positions": "max_seq_len",
}
"""Hugging Face field -> ModelConfig field."""

DROPOUTS = {"embd_pdrop": "embedding", "resid_pdrop": "residual", "attn_pdrop": "attention"}
"""Hugging Face field -> DropoutConfig field."""

ELSEWHERE = (
    "n_ctx",
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_proj_to_labels",
    "summary_first_dropout",
    "gradient_checkpointing",
)
"""Fields of other models made from the same weights, or that repeat another field."""


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a config.json.

    Raises:
        ConfigError: fields are missing, of the wrong type, unknown or not supported; all of them
            are reported together.
    """
    fields = Fields(raw)
    sizes: dict[str, Any] = {name: fields.read_int(hf_name) for hf_name, name in SIZES.items()}
    fields.require("scale_attn_weights", True)
    fields.require("scale_attn_by_inverse_layer_idx", False)
    fields.require("add_cross_attention", False)
    fields.ignore(
        "reorder_and_upcast_attn", *ELSEWHERE
    )  # reorder_and_upcast_attn: attention scores in fp32, as always here
    dropout = {
        name: fields.read_number(hf_name, 0.1, zero=True) for hf_name, name in DROPOUTS.items()
    }
    config = ModelConfig(
        **sizes,
        num_kv_heads=sizes["num_heads"],
        ffn_hidden_size=fields.read_int("n_inner", 4 * sizes["hidden_size"]),
        norm="layer",
        norm_eps=fields.read_number("layer_norm_epsilon", 1e-5),
        positions="learned",
        activation=fields.read_activation("activation_function", "gelu_new"),
        gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        dropout=DropoutConfig(**dropout),
        tied_embeddings=fields.read_flag("tie_word_embeddings", True),
        init_std=fields.read_number("initializer_range", 0.02, zero=True),
    )
    fields.raise_problems()
    return config


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model.

    Raises:
        ConfigError: the model cannot be expressed as GPT-2.
    """
    check_head_sizes(config)
    hf_activations = {"gelu_tanh": "gelu_new", "squared_relu": "relu2"}
    raw = {
        "architectures": [GPT2.architecture],
        "model_type": GPT2.model_type,
        **{hf_name: getattr(config, name) for hf_name, name in SIZES.items()},
        "n_ctx": config.max_seq_len,
        "n_inner": config.ffn_hidden_size,
        "activation_function": hf_activations.get(config.activation, config.activation),
        "layer_norm_epsilon": config.norm_eps,
        "initializer_range": config.init_std,
        **{hf_name: getattr(config.dropout, name) for hf_name, name in DROPOUTS.items()},
        "tie_word_embeddings": config.tied_embeddings,
        "use_cache": True,
    }
    return check_all_fields_exported(raw, config, read_config, GPT2)


# --- tensors


def rules(config: ModelConfig) -> list[TensorRule]:
    """Return the tensor rules, in the order of the forward pass."""
    v, h, length = config.vocab_size, config.hidden_size, config.max_seq_len
    rules = [
        rule("transformer.wte.weight", "embed.weight", (v, h), shape=(v, h)),
        rule("transformer.wpe.weight", "positions.weight", (length, h), shape=(length, h)),
    ]
    for layer in range(config.num_layers):
        hf_layer, layer_name = f"transformer.h.{layer}", f"layers.{layer}"
        rules += layer_norm_rules(f"{hf_layer}.ln_1", f"{layer_name}.attention_norm", h)
        rules += _attention_rules(config, f"{hf_layer}.attn", f"{layer_name}.attention")
        rules += layer_norm_rules(f"{hf_layer}.ln_2", f"{layer_name}.mlp_norm", h)
        rules += _mlp_rules(config, f"{hf_layer}.mlp", f"{layer_name}.mlp")
    rules += layer_norm_rules("transformer.ln_f", "norm", h)
    if not config.tied_embeddings:
        rules.append(rule(HEAD, "head.weight", (v, h), shape=(v, h)))
    return rules


def _attention_rules(config: ModelConfig, hf_name: str, parameter: str) -> list[TensorRule]:
    """c_attn [h, 3 n d]: queries, keys and values side by side; c_proj [n d, h]."""
    h, n, d = config.hidden_size, config.num_heads, config.head_size()
    heads, q, kv = ((0, n), (0, d)), (0, 1), (1, 3)
    fused, shape, bias = f"{hf_name}.c_attn.weight", (h, 3 * n * d), f"{hf_name}.c_attn.bias"
    return [
        piece(
            fused,
            f"{parameter}.q",
            (*heads, (0, h)),
            shape=shape,
            view=(h, 3, n, d),
            at=((0, h), q, *heads),
            dims=(2, 3, 0),
        ),
        piece(
            fused,
            f"{parameter}.kv",
            ((0, 2), *heads, (0, h)),
            shape=shape,
            view=(h, 3, n, d),
            at=((0, h), kv, *heads),
            dims=(1, 2, 3, 0),
        ),
        piece(
            bias,
            f"{parameter}.q_bias",
            heads,
            shape=(3 * n * d,),
            view=(3, n, d),
            at=(q, *heads),
            dims=(1, 2),
        ),
        piece(
            bias,
            f"{parameter}.kv_bias",
            ((0, 2), *heads),
            shape=(3 * n * d,),
            view=(3, n, d),
            at=(kv, *heads),
        ),
        piece(
            f"{hf_name}.c_proj.weight",
            f"{parameter}.o",
            ((0, h), *heads),
            shape=(n * d, h),
            view=(n, d, h),
            dims=(2, 0, 1),
        ),
        rule(f"{hf_name}.c_proj.bias", f"{parameter}.o_bias", (h,), shape=(h,)),
    ]


def _mlp_rules(config: ModelConfig, hf_name: str, parameter: str) -> list[TensorRule]:
    """c_fc [h, f], c_proj [f, h]."""
    h, f = config.hidden_size, config.ffn_hidden_size
    transposed = (1, 0)
    return [
        piece(
            f"{hf_name}.c_fc.weight",
            f"{parameter}.up",
            ((0, f), (0, h)),
            shape=(h, f),
            view=(h, f),
            dims=transposed,
        ),
        rule(f"{hf_name}.c_fc.bias", f"{parameter}.up_bias", (f,), shape=(f,)),
        piece(
            f"{hf_name}.c_proj.weight",
            f"{parameter}.down",
            ((0, h), (0, f)),
            shape=(f, h),
            view=(f, h),
            dims=transposed,
        ),
        rule(f"{hf_name}.c_proj.bias", f"{parameter}.down_bias", (h,), shape=(h,)),
    ]


GPT2 = Family(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    read_config=read_config,
    write_config=write_config,
    rules=rules,
    ignored=re.compile(
        r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"
    ),  # attention masks stored by old versions
    tied=HEAD,
    prefix="transformer.",  # missing in files of the first release
)

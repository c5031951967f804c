"""Hugging Face format of GPT-NeoX and Pythia: q, k and v of each head are fused in one matrix.

Source: Black et al. 2022, arXiv:2204.06745; Biderman et al. 2023, arXiv:2304.01373.
"""

import re
from collections.abc import Mapping
from typing import Any

from megalith.config.model import DropoutConfig, ModelConfig
from megalith.hf.config_fields import SIZES, check_all_fields_exported, check_head_sizes
from megalith.hf.fields import Fields, hf_activation_name
from megalith.hf.rope import read_rope, write_rope
from megalith.hf.tensor_rules import (
    Family,
    TensorRule,
    layer_norm_rules,
    piece,
    rule,
    ungated_rules,
)

HEAD = "embed_out.weight"


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a config.json.

    Raises:
        ConfigError: fields are missing, of the wrong type, unknown or not supported; all of them
            are reported together.
    """
    fields = Fields(raw)
    sizes: dict[str, Any] = {name: fields.read_int(hf_name) for hf_name, name in SIZES.items()}
    length = fields.read_int("max_position_embeddings", 2048)
    rope = read_rope(
        fields,
        max_position=length,
        theta_name="rotary_emb_base",
        fraction=0.25,
        fraction_name="rotary_pct",
    )
    hidden = fields.read_number("hidden_dropout", 0.0, zero=True)
    dropout = DropoutConfig(
        embedding=hidden,
        residual=hidden,
        attention=fields.read_number("attention_dropout", 0.0, zero=True),
    )
    fields.require("is_decoder", False, True)
    fields.ignore("classifier_dropout", "gradient_checkpointing")
    has_bias = fields.read_flag("attention_bias", True)
    config = ModelConfig(
        **sizes,
        num_kv_heads=sizes["num_heads"],
        max_seq_len=length,
        norm="layer",
        norm_eps=fields.read_number("layer_norm_eps", 1e-5),
        block="parallel" if fields.read_flag("use_parallel_residual", True) else "sequential",
        rope=rope,
        activation=fields.read_activation("hidden_act", "gelu"),
        gated=False,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=True,
        dropout=dropout,
        tied_embeddings=fields.read_flag("tie_word_embeddings"),
        init_std=fields.read_number("initializer_range", 0.02, zero=True),
    )
    fields.raise_problems()
    return config


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model, readable by transformers 4 and 5.

    Raises:
        ConfigError: the model cannot be expressed as GPT-NeoX.
    """
    check_head_sizes(config)
    rope = write_rope(config.rope, fraction=True)
    raw = {
        "architectures": [NEOX.architecture],
        "model_type": NEOX.model_type,
        **{hf_name: getattr(config, name) for hf_name, name in SIZES.items()},
        "max_position_embeddings": config.max_seq_len,
        "layer_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "hidden_act": hf_activation_name(config.activation),
        "use_parallel_residual": config.block == "parallel",
        "attention_bias": config.qkv_bias,
        "attention_dropout": config.dropout.attention,
        "hidden_dropout": config.dropout.residual,
        "rotary_emb_base": rope["rope_theta"],
        "rotary_pct": rope["partial_rotary_factor"],
        "rope_scaling": rope["rope_scaling"],
        "rope_parameters": rope["rope_parameters"],
        "tie_word_embeddings": config.tied_embeddings,
        "use_cache": True,
    }
    return check_all_fields_exported(raw, config, read_config, NEOX)


def rules(config: ModelConfig) -> list[TensorRule]:
    """Return the tensor rules, in the order of the forward pass."""
    v, h = config.vocab_size, config.hidden_size
    rules = [rule("gpt_neox.embed_in.weight", "embed.weight", (v, h), shape=(v, h))]
    for layer in range(config.num_layers):
        hf_layer, layer_name = f"gpt_neox.layers.{layer}", f"layers.{layer}"
        rules += layer_norm_rules(f"{hf_layer}.input_layernorm", f"{layer_name}.attention_norm", h)
        rules += _attention_rules(config, f"{hf_layer}.attention", f"{layer_name}.attention")
        rules += layer_norm_rules(
            f"{hf_layer}.post_attention_layernorm", f"{layer_name}.mlp_norm", h
        )
        rules += ungated_rules(
            config,
            f"{hf_layer}.mlp.dense_h_to_4h",
            f"{hf_layer}.mlp.dense_4h_to_h",
            f"{layer_name}.mlp",
        )
    rules += layer_norm_rules("gpt_neox.final_layer_norm", "norm", h)
    if not config.tied_embeddings:
        rules.append(rule(HEAD, "head.weight", (v, h), shape=(v, h)))
    return rules


def _attention_rules(config: ModelConfig, hf_name: str, parameter: str) -> list[TensorRule]:
    """query_key_value [n 3 d, h]: queries, keys and values of each head."""
    h, n, d = config.hidden_size, config.num_heads, config.head_size()
    fused, view, q, kv = f"{hf_name}.query_key_value", (n, 3, d), (0, 1), (1, 3)
    heads, width, h_all = (0, n), (0, d), (0, h)
    rules = [
        piece(
            f"{fused}.weight",
            f"{parameter}.q",
            (heads, width, h_all),
            shape=(n * 3 * d, h),
            view=(*view, h),
            at=(heads, q, width, h_all),
            dims=(0, 2, 3),
        ),
        piece(
            f"{fused}.weight",
            f"{parameter}.kv",
            ((0, 2), heads, width, h_all),
            shape=(n * 3 * d, h),
            view=(*view, h),
            at=(heads, kv, width, h_all),
            dims=(1, 0, 2, 3),
        ),
    ]
    if config.qkv_bias:
        rules += [
            piece(
                f"{fused}.bias",
                f"{parameter}.q_bias",
                (heads, width),
                shape=(n * 3 * d,),
                view=view,
                at=(heads, q, width),
                dims=(0, 2),
            ),
            piece(
                f"{fused}.bias",
                f"{parameter}.kv_bias",
                ((0, 2), heads, width),
                shape=(n * 3 * d,),
                view=view,
                at=(heads, kv, width),
                dims=(1, 0, 2),
            ),
        ]
    rules.append(rule(f"{hf_name}.dense.weight", f"{parameter}.o", (h, n, d), shape=(h, n * d)))
    if config.output_bias:
        rules.append(rule(f"{hf_name}.dense.bias", f"{parameter}.o_bias", (h,), shape=(h,)))
    return rules


NEOX = Family(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    read_config=read_config,
    write_config=write_config,
    rules=rules,
    ignored=re.compile(
        r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"
    ),
    tied=HEAD,
)

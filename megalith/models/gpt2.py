"""GPT-2 as Hugging Face knows it: its config.json and its tensors, whose matrices have inputs as
rows.

Source: Radford et al. 2019, "Language models are unsupervised multitask learners".
"""

import re
from collections.abc import Mapping
from typing import Any

from megalith.config.dropout import DropoutConfig
from megalith.config.model import ModelConfig
from megalith.models.fields import Fields
from megalith.models.names import Family, TensorRule, piece, rule
from megalith.models.pieces import layer_norm_rules
from megalith.models.usual import HEAD, check_all_fields_exported, whole_heads

# --- config.json

SIZES = {
    "vocab_size": "vocab_size",
    "n_embd": "hidden_size",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_positions": "max_seq_len",
}
"""Theirs -> ours."""

DROPOUTS = {"embd_pdrop": "embedding", "resid_pdrop": "residual", "attn_pdrop": "attention"}
"""Theirs -> ours: used in training only."""

ELSEWHERE = (
    "n_ctx",
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_proj_to_labels",
    "summary_first_dropout",
    "gradient_checkpointing",
)
"""Fields about other models made from the same weights, or that repeat another field."""


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Contents of a config.json -> our config.

    Raises:
        ConfigError: fields that are missing, of the wrong kind, unknown, or not supported; all of
        them together.
    """
    fields = Fields(raw)
    sizes: dict[str, Any] = {ours: fields.whole(theirs) for theirs, ours in SIZES.items()}
    fields.only("scale_attn_weights", True)
    fields.only("scale_attn_by_inverse_layer_idx", False)
    fields.only("add_cross_attention", False)
    fields.ignore(
        "reorder_and_upcast_attn", *ELSEWHERE
    )  # the former: scores in fp32, as ours are anyway
    dropout = {ours: fields.number(theirs, 0.1, zero=True) for theirs, ours in DROPOUTS.items()}
    found = ModelConfig(
        **sizes,
        num_kv_heads=sizes["num_heads"],
        ffn_hidden_size=fields.whole("n_inner", 4 * sizes["hidden_size"]),
        norm="layer",
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        positions="learned",
        activation=fields.activation("activation_function", "gelu_new"),
        gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        dropout=DropoutConfig(**dropout),
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        init_std=fields.number("initializer_range", 0.02, zero=True),
    )
    fields.finish()
    return found


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Our config -> contents of a config.json.

    Raises:
        ConfigError: the model cannot be a GPT-2 of theirs.
    """
    whole_heads(config)
    words = {"gelu_tanh": "gelu_new", "squared_relu": "relu2"}
    raw = {
        "architectures": [GPT2.architecture],
        "model_type": GPT2.model_type,
        **{theirs: getattr(config, ours) for theirs, ours in SIZES.items()},
        "n_ctx": config.max_seq_len,
        "n_inner": config.ffn_hidden_size,
        "activation_function": words.get(config.activation, config.activation),
        "layer_norm_epsilon": config.norm_eps,
        "initializer_range": config.init_std,
        **{theirs: getattr(config.dropout, ours) for theirs, ours in DROPOUTS.items()},
        "tie_word_embeddings": config.tied_embeddings,
        "use_cache": True,
    }
    return check_all_fields_exported(raw, config, read_config, GPT2)


# --- tensors


def rules(config: ModelConfig) -> list[TensorRule]:
    """Every tensor of a GPT-2 of theirs, in the order of the forward pass."""
    v, h, length = config.vocab_size, config.hidden_size, config.max_seq_len
    found = [
        rule("transformer.wte.weight", "embed.weight", (v, h), shape=(v, h)),
        rule("transformer.wpe.weight", "positions.weight", (length, h), shape=(length, h)),
    ]
    for layer in range(config.num_layers):
        theirs, ours = f"transformer.h.{layer}", f"layers.{layer}"
        found += layer_norm_rules(f"{theirs}.ln_1", f"{ours}.attention_norm", h)
        found += _attention_rules(config, f"{theirs}.attn", f"{ours}.attention")
        found += layer_norm_rules(f"{theirs}.ln_2", f"{ours}.mlp_norm", h)
        found += _mlp_rules(config, f"{theirs}.mlp", f"{ours}.mlp")
    found += layer_norm_rules("transformer.ln_f", "norm", h)
    if not config.tied_embeddings:
        found.append(rule(HEAD, "head.weight", (v, h), shape=(v, h)))
    return found


def _attention_rules(config: ModelConfig, theirs: str, ours: str) -> list[TensorRule]:
    """c_attn [h, 3 n d] has queries, keys and values side by side; c_proj is [n d, h]."""
    h, n, d = config.hidden_size, config.num_heads, config.head_size()
    heads, q, kv = ((0, n), (0, d)), (0, 1), (1, 3)
    fused, shape, bias = f"{theirs}.c_attn.weight", (h, 3 * n * d), f"{theirs}.c_attn.bias"
    return [
        piece(
            fused,
            f"{ours}.q",
            (*heads, (0, h)),
            shape=shape,
            view=(h, 3, n, d),
            at=((0, h), q, *heads),
            dims=(2, 3, 0),
        ),
        piece(
            fused,
            f"{ours}.kv",
            ((0, 2), *heads, (0, h)),
            shape=shape,
            view=(h, 3, n, d),
            at=((0, h), kv, *heads),
            dims=(1, 2, 3, 0),
        ),
        piece(
            bias,
            f"{ours}.q_bias",
            heads,
            shape=(3 * n * d,),
            view=(3, n, d),
            at=(q, *heads),
            dims=(1, 2),
        ),
        piece(
            bias,
            f"{ours}.kv_bias",
            ((0, 2), *heads),
            shape=(3 * n * d,),
            view=(3, n, d),
            at=(kv, *heads),
        ),
        piece(
            f"{theirs}.c_proj.weight",
            f"{ours}.o",
            ((0, h), *heads),
            shape=(n * d, h),
            view=(n, d, h),
            dims=(2, 0, 1),
        ),
        rule(f"{theirs}.c_proj.bias", f"{ours}.o_bias", (h,), shape=(h,)),
    ]


def _mlp_rules(config: ModelConfig, theirs: str, ours: str) -> list[TensorRule]:
    """c_fc [h, f] and c_proj [f, h]."""
    h, f = config.hidden_size, config.ffn_hidden_size
    turned = (1, 0)
    return [
        piece(
            f"{theirs}.c_fc.weight",
            f"{ours}.up",
            ((0, f), (0, h)),
            shape=(h, f),
            view=(h, f),
            dims=turned,
        ),
        rule(f"{theirs}.c_fc.bias", f"{ours}.up_bias", (f,), shape=(f,)),
        piece(
            f"{theirs}.c_proj.weight",
            f"{ours}.down",
            ((0, h), (0, f)),
            shape=(f, h),
            view=(f, h),
            dims=turned,
        ),
        rule(f"{theirs}.c_proj.bias", f"{ours}.down_bias", (h,), shape=(h,)),
    ]


GPT2 = Family(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    read_config=read_config,
    write_config=write_config,
    rules=rules,
    ignored=re.compile(
        r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"
    ),  # masks that old versions stored
    tied=HEAD,
    prefix="transformer.",  # files of the first release lack it
)

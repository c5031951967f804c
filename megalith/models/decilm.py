"""Nemotron-NAS (DeciLM) as Hugging Face folders have it: a Llama whose layers are not all alike.

transformers has no class for it, so nothing of theirs can be compared with; its tensors are named
as Llama's. Source: Bercovich et al. 2024, arXiv:2411.19146 (Puzzle).
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalith.config.blocks import Sizes, multiplier_of, read_blocks
from megalith.config.model import ModelConfig
from megalith.errors import raise_all
from megalith.models.fields import Fields
from megalith.models.names import Family, TensorRule, rule
from megalith.models.rope import read_rope
from megalith.models.usual import (
    HEAD,
    NORMS,
    ROTARY_BUFFERS,
    attention_rules,
    check_all_fields_exported,
    mlp_rules,
    read_common_fields,
    whole_heads,
    write_common_fields,
)

COUNTS = ("num_hidden_layers", "num_attention_heads", "hidden_size")


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Contents of a config.json -> our config.

    Raises:
        ConfigError: fields that are missing, of the wrong kind, unknown, or not supported; all of
        them together.
    """
    layers, heads, hidden = (
        raw[name] if isinstance(raw.get(name), int) and raw[name] > 0 else 1 for name in COUNTS
    )  # what is wrong with them is said below
    sizes = Sizes(
        num_layers=layers,
        num_heads=heads,
        hidden_size=hidden,
        num_kv_heads=raw.get("num_key_value_heads"),
        ffn_hidden_size=raw.get("intermediate_size"),
    )  # the last two are null in published files
    blocks = read_blocks(raw.get("block_configs"), sizes)
    own = {"num_key_value_heads": blocks.num_kv_heads, "intermediate_size": blocks.ffn_hidden_size}
    fields = Fields({**raw, **own})
    fields.problems += blocks.problems
    fields.ignore("block_configs")
    common_fields = read_common_fields(fields)
    rope = read_rope(fields, max_position=common_fields["max_seq_len"])
    mlp_bias = fields.flag("mlp_bias")
    if mlp_bias and "linear" in blocks.layers.mlp:
        fields.problems.append(
            f"mlp_bias={mlp_bias} with block_configs where ffn.replace_with_linear=True is not "
            "supported: there a "
            "matrix in place of an MLP has no bias, and here it would. Set mlp_bias to false if "
            "no MLP has biases."
        )
    fields.finish()
    return ModelConfig(**common_fields, rope=rope, mlp_bias=mlp_bias, layers=blocks.layers)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Our config -> contents of a config.json.

    Raises:
        ConfigError: the model cannot be one of theirs.
    """
    whole_heads(config)
    if config.mlp_bias and any(
        config.mlp_part(layer) == "linear" for layer in range(config.num_layers)
    ):
        raise_all(
            [
                f"model.mlp_bias=true with model.layers.mlp={list(config.layers.mlp)}: in "
                f"{DECILM.architecture} a matrix "
                f"in place of an MLP has no bias. Use a Megalith checkpoint for this model."
            ]
        )
    blocks = [_block(config, layer) for layer in range(config.num_layers)]
    raw = {
        **write_common_fields(config, DECILM),
        "mlp_bias": config.mlp_bias,
        "block_configs": blocks,
    }
    raw |= dict.fromkeys(("num_key_value_heads", "intermediate_size"))  # the blocks' to say
    return check_all_fields_exported(raw, _plainly_said(config), read_config, DECILM)


def _block(config: ModelConfig, layer: int) -> dict[str, Any]:
    """What a layer is.

    Raises:
        ConfigError: its MLP is of a width that they have no word for.
    """
    own, attention, mlp = config.at(layer), config.attention_part(layer), config.mlp_part(layer)
    width = multiplier_of(own.ffn_hidden_size, config.hidden_size)
    if mlp == "full" and width is None:
        raise_all(
            [
                f"model.layers.ffn_hidden_size={own.ffn_hidden_size} in layer {layer}: "
                f"{DECILM.architecture} has multiples "
                f"of 256 only. Use a Megalith checkpoint for this model."
            ]
        )
    group = config.num_heads // own.num_kv_heads
    return {
        "attention": {
            **_part(attention),
            "n_heads_in_group": group if attention == "full" else None,
        },
        "ffn": {**_part(mlp), "ffn_mult": width if mlp == "full" else None},
    }


def _part(part: str) -> dict[str, bool]:
    return {"no_op": part == "none", "replace_with_linear": part == "linear"}


def _plainly_said(config: ModelConfig) -> ModelConfig:
    """The same layers in the shortest patterns, and nothing said of what a layer does not have."""
    parts = [
        {
            "attention": {
                **_part(config.attention_part(n)),
                "num_query_groups": config.at(n).num_kv_heads,
            },
            "mlp": {**_part(config.mlp_part(n)), "ffn_hidden_size": config.at(n).ffn_hidden_size},
        }
        for n in range(config.num_layers)
    ]
    sizes = Sizes(
        num_layers=config.num_layers, num_heads=config.num_heads, hidden_size=config.hidden_size
    )
    found = read_blocks(parts, sizes)
    return replace(
        config,
        layers=found.layers,
        num_kv_heads=found.num_kv_heads,
        ffn_hidden_size=found.ffn_hidden_size,
    )


def rules(config: ModelConfig) -> list[TensorRule]:
    """Every tensor of theirs, in the order of the forward pass."""
    v, h = config.vocab_size, config.hidden_size
    found = [rule("model.embed_tokens.weight", "embed.weight", (v, h), shape=(v, h))]
    for layer in range(config.num_layers):
        theirs, ours, own = f"model.layers.{layer}", f"layers.{layer}", config.at(layer)
        for word, part, inner in (
            ("attention", config.attention_part(layer), "self_attn"),
            ("mlp", config.mlp_part(layer), "mlp"),
        ):
            if part != "none":
                norm = NORMS[f"{word}_norm"]
                found.append(
                    rule(f"{theirs}.{norm}.weight", f"{ours}.{word}_norm.weight", (h,), shape=(h,))
                )
            if part == "linear":
                found += _linear(own, f"{theirs}.{inner}", f"{ours}.{word}")
            elif part == "full" and word == "attention":
                found += attention_rules(
                    own, f"{theirs}.{inner}", f"{ours}.{word}", all_biases=True
                )
            elif part == "full":
                found += mlp_rules(own, f"{theirs}.{inner}", f"{ours}.{word}")
    found.append(rule("model.norm.weight", "norm.weight", (h,), shape=(h,)))
    return (
        found
        if config.tied_embeddings
        else [*found, rule(HEAD, "head.weight", (v, h), shape=(v, h))]
    )


def _linear(config: ModelConfig, theirs: str, ours: str) -> list[TensorRule]:
    """One matrix in place of a part, and its bias, which only attention's has."""
    h, attends = config.hidden_size, ours.endswith(".attention")
    name = f"{theirs}.{'linear_attn' if attends else 'linear_mlp'}"
    found = [rule(f"{name}.weight", f"{ours}.linear", (h, h), shape=(h, h))]
    if attends and (config.output_bias or config.qkv_bias):
        ours_has = f"{ours}.linear_bias" if config.output_bias else None
        found.append(rule(f"{name}.bias", ours_has, (h,), shape=(h,)))
    return found


DECILM = Family(
    architecture="DeciLMForCausalLM",
    model_type="nemotron-nas",
    read_config=read_config,
    write_config=write_config,
    rules=rules,
    ignored=re.compile(ROTARY_BUFFERS.pattern),
    tied=HEAD,
    in_transformers=False,
)

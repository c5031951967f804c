"""Hugging Face format of Nemotron-NAS (DeciLM): Llama with layers of different structure.

transformers has no class for it; its tensors are named as in Llama. Source: Bercovich et al. 2024,
arXiv:2411.19146 (Puzzle).
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalith.config.block_configs import BlockModelSizes, find_ffn_multiplier, read_blocks
from megalith.config.model import ModelConfig
from megalith.errors import raise_all
from megalith.hf.config_fields import (
    HEAD,
    NORMS,
    ROTARY_BUFFERS,
    attention_rules,
    check_all_fields_exported,
    check_head_sizes,
    mlp_rules,
    read_common_fields,
    write_common_fields,
)
from megalith.hf.fields import Fields
from megalith.hf.rope import read_rope
from megalith.hf.tensor_rules import Family, TensorRule, rule

COUNTS = ("num_hidden_layers", "num_attention_heads", "hidden_size")


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a config.json.

    Raises:
        ConfigError: fields are missing, of the wrong type, unknown or not supported; all of them
            are reported together.
    """
    layers, heads, hidden = (
        raw[name] if isinstance(raw.get(name), int) and raw[name] > 0 else 1 for name in COUNTS
    )  # Fields reports problems with them below
    sizes = BlockModelSizes(
        num_layers=layers,
        num_heads=heads,
        hidden_size=hidden,
        num_kv_heads=raw.get("num_key_value_heads"),
        ffn_hidden_size=raw.get("intermediate_size"),
    )  # null in published files
    blocks = read_blocks(raw.get("block_configs"), sizes)
    sizes_of_model = {
        "num_key_value_heads": blocks.num_kv_heads,
        "intermediate_size": blocks.ffn_hidden_size,
    }
    fields = Fields({**raw, **sizes_of_model})
    fields.problems += blocks.problems
    fields.ignore("block_configs")
    common_fields = read_common_fields(fields)
    rope = read_rope(fields, max_position=common_fields["max_seq_len"])
    mlp_bias = fields.read_flag("mlp_bias")
    if mlp_bias and "linear" in blocks.layers.mlp:
        fields.problems.append(
            f"mlp_bias={mlp_bias} with ffn.replace_with_linear=True in block_configs is not "
            "supported: a matrix in place of an MLP has no bias in DeciLM. Set mlp_bias to false "
            "if no MLP has biases."
        )
    fields.raise_problems()
    return ModelConfig(**common_fields, rope=rope, mlp_bias=mlp_bias, layers=blocks.layers)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model.

    Raises:
        ConfigError: the model cannot be expressed as DeciLM.
    """
    check_head_sizes(config)
    if config.mlp_bias and any(
        config.mlp_part(layer) == "linear" for layer in range(config.num_layers)
    ):
        raise_all(
            [
                f"model.mlp_bias=true with model.layers.mlp={list(config.layers.mlp)}: in "
                f"{DECILM.architecture} a matrix "
                f"in place of an MLP has no bias. Keep the model as a Megalith checkpoint."
            ]
        )
    blocks = [_block(config, layer) for layer in range(config.num_layers)]
    raw = {
        **write_common_fields(config, DECILM),
        "mlp_bias": config.mlp_bias,
        "block_configs": blocks,
    }
    raw |= dict.fromkeys(("num_key_value_heads", "intermediate_size"))  # set in block_configs
    return check_all_fields_exported(raw, _normalize_layers(config), read_config, DECILM)


def _block(config: ModelConfig, layer: int) -> dict[str, Any]:
    """Return the block config of a layer.

    Raises:
        ConfigError: the format cannot express the width of its MLP.
    """
    layer_config, attention, mlp = (
        config.at(layer),
        config.attention_part(layer),
        config.mlp_part(layer),
    )
    width = find_ffn_multiplier(layer_config.ffn_hidden_size, config.hidden_size)
    if mlp == "full" and width is None:
        raise_all(
            [
                f"model.layers.ffn_hidden_size={layer_config.ffn_hidden_size} in layer {layer}: "
                f"{DECILM.architecture} supports only "
                f"multiples of 256. Keep the model as a Megalith checkpoint."
            ]
        )
    group = config.num_heads // layer_config.num_kv_heads
    return {
        "attention": {
            **_part(attention),
            "n_heads_in_group": group if attention == "full" else None,
        },
        "ffn": {**_part(mlp), "ffn_mult": width if mlp == "full" else None},
    }


def _part(part: str) -> dict[str, bool]:
    return {"no_op": part == "none", "replace_with_linear": part == "linear"}


def _normalize_layers(config: ModelConfig) -> ModelConfig:
    """Return the config with the shortest patterns, and without sizes of parts that layers do not
    have."""
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
    sizes = BlockModelSizes(
        num_layers=config.num_layers, num_heads=config.num_heads, hidden_size=config.hidden_size
    )
    blocks = read_blocks(parts, sizes)
    return replace(
        config,
        layers=blocks.layers,
        num_kv_heads=blocks.num_kv_heads,
        ffn_hidden_size=blocks.ffn_hidden_size,
    )


def rules(config: ModelConfig) -> list[TensorRule]:
    """Return the tensor rules, in the order of the forward pass."""
    v, h = config.vocab_size, config.hidden_size
    rules = [rule("model.embed_tokens.weight", "embed.weight", (v, h), shape=(v, h))]
    for layer in range(config.num_layers):
        hf_layer, layer_name, layer_config = (
            f"model.layers.{layer}",
            f"layers.{layer}",
            config.at(layer),
        )
        for word, part, hf_part in (
            ("attention", config.attention_part(layer), "self_attn"),
            ("mlp", config.mlp_part(layer), "mlp"),
        ):
            if part != "none":
                norm = NORMS[f"{word}_norm"]
                rules.append(
                    rule(
                        f"{hf_layer}.{norm}.weight",
                        f"{layer_name}.{word}_norm.weight",
                        (h,),
                        shape=(h,),
                    )
                )
            if part == "linear":
                rules += _linear(layer_config, f"{hf_layer}.{hf_part}", f"{layer_name}.{word}")
            elif part == "full" and word == "attention":
                rules += attention_rules(
                    layer_config, f"{hf_layer}.{hf_part}", f"{layer_name}.{word}", all_biases=True
                )
            elif part == "full":
                rules += mlp_rules(layer_config, f"{hf_layer}.{hf_part}", f"{layer_name}.{word}")
    rules.append(rule("model.norm.weight", "norm.weight", (h,), shape=(h,)))
    return (
        rules
        if config.tied_embeddings
        else [*rules, rule(HEAD, "head.weight", (v, h), shape=(v, h))]
    )


def _linear(config: ModelConfig, hf_name: str, parameter: str) -> list[TensorRule]:
    """Return the rules of a matrix in place of attention or MLP, and its bias, which only attention
    has."""
    h, is_attention = config.hidden_size, parameter.endswith(".attention")
    name = f"{hf_name}.{'linear_attn' if is_attention else 'linear_mlp'}"
    rules = [rule(f"{name}.weight", f"{parameter}.linear", (h, h), shape=(h, h))]
    if is_attention and (config.output_bias or config.qkv_bias):
        bias = f"{parameter}.linear_bias" if config.output_bias else None
        rules.append(rule(f"{name}.bias", bias, (h,), shape=(h,)))
    return rules


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

"""Hugging Face format of Llama 4 (text): chunked attention with rotary embeddings, and full
attention without them in every fourth layer.

A token goes to one routed expert, whose input is multiplied by the router weight, and to a shared
one. Source: Meta 2025, the Llama 4 release; layers without positions: Yang et al. 2025,
arXiv:2501.18795; attention temperature: Nakanishi 2025, arXiv:2501.19399.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalith.config.model import AttentionConfig, ModelConfig, RopeConfig
from megalith.config.moe import MoEConfig, RouterConfig
from megalith.hf.config_fields import (
    FULL,
    HEAD,
    ROTARY_BUFFERS,
    check_all_fields_exported,
    common_rules,
    read_common_fields,
    shortest_pattern,
    window_arguments,
    write_common_fields,
)
from megalith.hf.fields import Fields
from megalith.hf.moe import OF_TRAINING, ExpertNames, flags_or_empty, router_rules, shared_rules
from megalith.hf.rope import read_rope
from megalith.hf.tensor_rules import Family, TensorRule, WrapperFamily, piece

CHUNKED, BLOCK = "chunked_attention", "feed_forward"

OF_EXPERTS = (
    "num_local_experts",
    "num_experts_per_tok",
    "intermediate_size",
    "router_jitter_noise",
    *OF_TRAINING,
)
"""Fields without effect in a model without experts, or that each training run sets."""


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a config.json, or of its text_config.

    Raises:
        ConfigError: fields are missing, of the wrong type, unknown or not supported; all of them
            are reported together.
    """
    fields = Fields(raw)
    size = None if "head_dim" in raw else 128
    common_fields = read_common_fields(
        fields, max_seq_len=131_072, norm_eps=1e-5, head_dim=size, kv_heads=8
    )
    layers = common_fields["num_layers"]
    moe = _read_experts(fields, common_fields)
    common_fields["ffn_hidden_size"] = fields.read_int("intermediate_size_mlp", 16_384)
    rope_layers = _read_rope_layers(fields, layers)
    rope = _read_rope(fields, common_fields["max_seq_len"], rope_layers)
    attention = AttentionConfig(
        **_read_chunks(fields, rope_layers), **_read_norms(fields, rope_layers)
    )
    fields.require("for_llm_compressor", False)
    fields.ignore(*OF_EXPERTS)
    fields.raise_problems()
    return ModelConfig(**common_fields, rope=rope, attention=attention, moe=moe)


def _read_experts(fields: Fields, common_fields: Mapping[str, Any]) -> MoEConfig | None:
    """Return the mixture of experts, in every `interleave_moe_layer_step`-th layer or in the listed
    ones."""
    layers, step = common_fields["num_layers"], fields.read_int("interleave_moe_layer_step", 1)
    listed = fields.read_value("moe_layers")
    if listed is not None and not (
        isinstance(listed, list) and all(type(layer) is int and layer >= 0 for layer in listed)
    ):
        fields.problems.append(
            f"moe_layers={listed!r:.60}: expected numbers of layers, from 0 on, or null."
        )
        listed = None
    moe_layers = [
        layer in listed if listed is not None else (layer + 1) % step == 0
        for layer in range(layers)
    ]
    if not any(moe_layers):
        return None
    fields.require("num_experts_per_tok", 1)
    width = common_fields["ffn_hidden_size"]
    return MoEConfig(
        num_experts=fields.read_int("num_local_experts", 16),
        top_k=1,
        ffn_hidden_size=width,
        shared_ffn_hidden_size=width,
        apply_router_weight_on_input=True,
        router=RouterConfig(score="sigmoid", norm_topk_prob=False),
        layers=flags_or_empty(moe_layers),
    )


def _read_rope_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return which layers have rotary embeddings: ones in no_rope_layers mean that they do,
    contrary to the name."""
    every, is_listed = (
        fields.read_int("no_rope_layer_interval", 4),
        fields.read_value("no_rope_layers") != [],
    )
    flags = (
        fields.read_layer_flags("no_rope_layers", layers, {1: True, 0: False})
        if is_listed
        else None
    )
    return flags or tuple((layer + 1) % every != 0 for layer in range(layers))


def _read_rope(fields: Fields, length: int, rope_layers: tuple[bool, ...]) -> RopeConfig:
    """Return the rotary embeddings, and the attention temperature of layers without them."""
    temperature_scale, step = (
        fields.read_number("attn_scale", 0.1, zero=True),
        fields.read_int("floor_scale", 8192),
    )
    temperature_tuning = fields.read_value("attn_temperature_tuning")
    if temperature_tuning is not None and type(temperature_tuning) not in (
        bool,
        int,
    ):  # the release has 4 for true
        fields.problems.append(
            f"attn_temperature_tuning={temperature_tuning!r:.60}: expected true or false."
        )
    has_temperature = (
        bool(temperature_tuning) if "attn_temperature_tuning" in fields.raw else True
    )  # null means false
    rope = replace(read_rope(fields, max_position=length, theta=500_000.0), interleaved=True)
    if all(rope_layers):
        return rope
    rope = replace(rope, skip=shortest_pattern(tuple(not flag for flag in rope_layers)))
    return (
        replace(rope, skip_growth=temperature_scale, skip_step=step)
        if has_temperature and temperature_scale
        else rope
    )


def _read_chunks(fields: Fields, rope_layers: tuple[bool, ...]) -> dict[str, Any]:
    """Return the arguments of AttentionConfig about chunked attention: in layers with rotary
    embeddings, or as in layer_types."""
    size = (
        fields.read_optional_int("attention_chunk_size")
        if "attention_chunk_size" in fields.raw
        else 8192
    )
    listed = fields.read_layer_flags("layer_types", len(rope_layers), {CHUNKED: True, FULL: False})
    flags = rope_layers if listed is None else listed
    if size is None and any(flags):
        fields.problems.append(
            f"attention_chunk_size={size}, but some layers have chunked attention. Set it "
            f"to 8192, or layer_types to {FULL!r} for every layer."
        )
    chunks = window_arguments(size, shortest_pattern(flags))
    return {**chunks, "chunked": True} if chunks else {}


def _read_norms(fields: Fields, rope_layers: tuple[bool, ...]) -> dict[str, Any]:
    """Return the arguments of AttentionConfig about QK-norm, in layers with rotary embeddings;
    transformers applies it after them, which is equivalent."""
    if not fields.read_flag("use_qk_norm", True) or not any(rope_layers):
        return {}
    return {
        "qk_norm": "l2",
        "qk_norm_layers": () if all(rope_layers) else shortest_pattern(rope_layers),
    }


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model.

    Raises:
        ConfigError: the model cannot be expressed as Llama 4.
    """
    layers, moe, kind = range(config.num_layers), config.moe, config.attention
    width, moe_layers = (
        config.ffn_hidden_size,
        [layer for layer in layers if config.has_experts(layer)],
    )
    rope_layers = [config.uses_rope(layer) for layer in layers]
    raw = {
        **write_common_fields(config, LLAMA4),
        "intermediate_size": width if moe is None else moe.ffn_hidden_size,
        "intermediate_size_mlp": width,
        "moe_layers": moe_layers,
        "interleave_moe_layer_step": moe_layers[0] + 1 if moe_layers else 1,
        "num_local_experts": 1 if moe is None else moe.num_experts,
        "num_experts_per_tok": 1 if moe is None else moe.top_k,
        "no_rope_layers": [int(flag) for flag in rope_layers],
        "use_qk_norm": kind.qk_norm == "l2" and any(rope_layers),
        "attention_chunk_size": kind.window or 8192,
        "layer_types": [CHUNKED if config.has_window(layer) else FULL for layer in layers],
        "attn_temperature_tuning": config.rope.skip_growth > 0,
        "attn_scale": config.rope.skip_growth or 0.1,
        "floor_scale": config.rope.skip_step,
    }
    return check_all_fields_exported(raw, config, read_config, LLAMA4)


def rules(config: ModelConfig) -> list[TensorRule]:
    """Return the tensor rules, in the order of the forward pass."""
    return common_rules(config, experts=_mixture_rules, mlp=BLOCK)


def _mixture_rules(config: ModelConfig, hf_name: str, parameter: str) -> list[TensorRule]:
    """Return the rules of the router, of all experts in two tensors with inputs before outputs, and
    of the shared expert."""
    moe, h, block = config.moe, config.hidden_size, f"{hf_name}.{BLOCK}"
    assert moe is not None, "called for a layer without experts"
    e, f = moe.num_experts, moe.ffn_hidden_size
    wide, back = ((0, e), (0, 2), (0, f), (0, h)), ((0, e), (0, h), (0, f))
    up, down = f"{block}.experts.gate_up_proj", f"{block}.experts.down_proj"
    return [
        *router_rules(config, f"{block}.router", parameter),
        piece(
            up,
            f"{parameter}.experts.gate_up",
            wide,
            shape=(e, h, 2 * f),
            view=(e, h, 2, f),
            dims=(0, 2, 3, 1),
        ),
        piece(
            down, f"{parameter}.experts.down", back, shape=(e, f, h), view=(e, f, h), dims=(0, 2, 1)
        ),
        *shared_rules(config, block, parameter, ExpertNames()),
    ]


LLAMA4 = Family(
    architecture="Llama4ForCausalLM",
    model_type="llama4_text",
    read_config=read_config,
    write_config=write_config,
    rules=rules,
    ignored=ROTARY_BUFFERS,
    tied=HEAD,
    wrapper=WrapperFamily(
        architecture="Llama4ForConditionalGeneration",
        model_type="llama4",
        section="text_config",
        prefix="language_model.",
        others=re.compile(r"(vision_model|multi_modal_projector)\..*"),
    ),
)

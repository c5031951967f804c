"""Rows of the table of Hugging Face architectures (`hf/families.py`) with a mixture of experts, and
their fields and tensors of experts."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megalith.config.model import ModelConfig, MTPConfig, RopeConfig
from megalith.config.moe import MoEConfig, RouterConfig
from megalith.hf.config_fields import (
    ACTIVATION,
    ARCHITECTURE,
    FULL,
    INIT_STD,
    MAX_POSITION,
    NORM_EPS,
    SIZES,
    SLIDING_WINDOW,
    SWITCHED_WINDOW,
    TIED,
    USE_CACHE,
    ConfigField,
    FieldGroup,
    Fields,
    FieldSpec,
    Settings,
    constant,
    every_other_layer,
    layer_types,
    llama_fields,
    read_rope,
    read_setting,
    read_windows,
    shortest_pattern,
    window_arguments,
    write_rope,
)
from megalith.hf.family import Family, WrapperFamily, check_head_sizes
from megalith.hf.tensor_rules import (
    ATTENTION,
    ATTENTION_WITH_QKV_BIAS,
    EXPERT,
    GATED_MLP,
    INPUT_NORM,
    MLP_NORM,
    TensorGroup,
    TensorRow,
    TensorTable,
    has_experts,
    llama_tensors,
)

# --- config fields of experts

MOE_FFN = ConfigField(
    "intermediate_size",
    ("ffn_hidden_size", "moe.ffn_hidden_size"),
    Fields.read_int,
    encode=lambda config: read_setting(config, "moe.ffn_hidden_size"),
)
"""Size of the experts of models in which all layers have experts."""


def experts_per_token(default: int) -> ConfigField:
    """Return the entry of the number of experts per token."""
    return ConfigField("num_experts_per_tok", "moe.top_k", Fields.read_int, default)


def expert_size(default: int) -> ConfigField:
    """Return the entry of the size of experts of models with dense layers."""
    return ConfigField("moe_intermediate_size", "moe.ffn_hidden_size", Fields.read_int, default)


def read_num_experts(
    fields: Fields, default: int, *, names: Sequence[str] = ("num_experts", "num_local_experts")
) -> int:
    """Return the number of experts of a layer, under any of the names that transformers accepts."""
    counts = {name: fields.read_int(name, default) for name in names if name in fields.raw}
    if len(set(counts.values())) > 1:
        fields.problems.append(
            f"{counts}: these numbers of experts differ. Remove one of the fields, or set both "
            "to the same."
        )
    return next(iter(counts.values()), default)


def num_experts(default: int) -> FieldGroup:
    """Return the entry of the number of experts of a layer."""
    return FieldGroup(
        "num_experts",
        lambda fields, settings: {"moe.num_experts": read_num_experts(fields, default)},
        lambda config: {"num_experts": read_setting(config, "moe.num_experts")},
    )


def _read_aux_loss(fields: Fields, settings: Settings) -> Settings:
    """Return the aux loss that transformers adds if output_router_logits is true, divided among the
    layers with experts.

    With balanced experts the loss of transformers is top_k and pools all layers; ours is 1 in each
    layer, and summed.
    """
    name = "router_aux_loss_coef"
    is_null = name in fields.raw and fields.read_value(name) is None
    default = fields.defaults.get(name, 0.001)
    weight = 0.0 if is_null else fields.read_number_from_zero(name, default)
    layers = sum(settings.get("moe.layers") or (True,) * settings["num_layers"])
    if not fields.read_flag("output_router_logits") or not layers:
        return {}
    return {"moe.aux_loss.batch_coeff": float(f"{weight * settings['moe.top_k'] / layers:.12g}")}


def _write_aux_loss(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of the aux loss; without one output_router_logits is false."""
    assert config.moe is not None, "export_checks requires experts"
    layers = sum(config.has_experts(layer) for layer in range(config.num_layers))
    weight = config.moe.aux_loss.batch_coeff
    fields: dict[str, Any] = {"output_router_logits": weight > 0}
    if weight:
        fields["router_aux_loss_coef"] = float(f"{weight * layers / config.moe.top_k:.10g}")
    return fields


def _read_moe_layers(fields: Fields, settings: Settings) -> Settings:
    """Return which layers have experts, every decoder_sparse_step-th layer that is not in
    mlp_only_layers, and the aux loss."""
    layers, step = settings["num_layers"], fields.read_int("decoder_sparse_step", 1)
    dense = fields.read_value("mlp_only_layers") or []
    if not isinstance(dense, list) or any(
        type(layer) is not int or not 0 <= layer < layers for layer in dense
    ):
        fields.problems.append(
            f"mlp_only_layers={dense!r}: expected numbers of layers, from 0 to {layers - 1}, or an "
            "empty list."
        )
        dense = []
    flags = [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]
    aux_loss = _read_aux_loss(fields, settings | {"moe.layers": flags})
    return {"moe.layers": flags_or_empty(flags), **aux_loss}


def _write_moe_layers(config: ModelConfig) -> dict[str, Any]:
    dense = [layer for layer in range(config.num_layers) if not config.has_experts(layer)]
    return {**_write_aux_loss(config), "decoder_sparse_step": 1, "mlp_only_layers": dense}


def flags_or_empty(flags: Sequence[bool]) -> tuple[bool, ...]:
    """Return `MoEConfig.layers` for one flag per layer: empty for all."""
    return () if all(flags) else tuple(flags)


NORM_TOPK_PROB = ConfigField("norm_topk_prob", "moe.router.norm_topk_prob", Fields.read_flag, False)
AUX_LOSS = FieldGroup("router_aux_loss_coef", _read_aux_loss, _write_aux_loss)
MOE_LAYERS = FieldGroup("mlp_only_layers", _read_moe_layers, _write_moe_layers)
"""Layers with experts in Qwen, and the aux loss."""


def check_has_experts(config: ModelConfig, architecture: str) -> str | None:
    """Return a problem if the model has no mixture of experts."""
    if config.moe is not None:
        return None
    return (
        f"model.moe=null: {architecture} needs a mixture of experts. Use another "
        f"family, such as LlamaForCausalLM, for this model."
    )


# --- tensors of experts


def router_rows(router: str) -> tuple[TensorRow, ...]:
    """Return the rows of the router weight, its bias, and the expert bias."""
    return (
        TensorRow(f"{router}.weight", "router", "e h"),
        TensorRow(f"{router}.bias", "router_bias", "e", when="moe.router.bias"),
        TensorRow(
            f"{router}.e_score_correction_bias",
            "balancing_bias",
            "e",
            when="moe.router.expert_bias",
        ),
    )


def shared_expert_rows(name: str) -> tuple[TensorRow, ...]:
    """Return the rows of the shared expert and its gate."""
    is_shared = "moe.shared_ffn_hidden_size"
    return (
        TensorRow(
            f"{name}.gate_proj.weight", "shared.gate_up", "shared_f h", "[0] shared_f h", is_shared
        ),
        TensorRow(
            f"{name}.up_proj.weight", "shared.gate_up", "shared_f h", "[1] shared_f h", is_shared
        ),
        TensorRow(f"{name}.down_proj.weight", "shared.down", "h shared_f", when=is_shared),
        TensorRow(f"{name}_gate.weight", "shared_gate", "1 h", when="moe.shared_gate"),
    )


def separate_experts(
    *,
    block: str = "mlp",
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    shared: str = "shared_expert",
) -> TensorGroup:
    """Return the tensors of a mixture of experts with tensors of their own for each expert."""
    name, parameter = f"experts.{EXPERT}", "experts.gate_up"
    experts = (
        TensorRow(f"{name}.{gate}.weight", parameter, "moe_f h", f"{EXPERT} [0] moe_f h"),
        TensorRow(f"{name}.{up}.weight", parameter, "moe_f h", f"{EXPERT} [1] moe_f h"),
        TensorRow(f"{name}.{down}.weight", "experts.down", "h moe_f", f"{EXPERT} h moe_f"),
    )
    rows = (*router_rows("gate"), *experts, *shared_expert_rows(shared))
    return TensorGroup(block, "moe", rows, has_experts)


def fused_experts(*, shared: str = "shared_expert") -> TensorGroup:
    """Return the tensors of a mixture of experts whose experts are fused into two tensors, as in
    transformers 5."""
    experts = (
        TensorRow("experts.gate_up_proj", "experts.gate_up", "e (2 moe_f) h"),
        TensorRow("experts.down_proj", "experts.down", "e h moe_f"),
    )
    rows = (*router_rows("gate"), *experts, *shared_expert_rows(shared))
    return TensorGroup("mlp", "moe", rows, has_experts)


def moe_tensors(experts: TensorGroup, *, attention: TensorGroup = ATTENTION) -> TensorTable:
    """Return the table of a family with these experts, and the MLP of Llama in its dense layers."""
    return llama_tensors(INPUT_NORM, attention, MLP_NORM, experts, GATED_MLP)


# --- Mixtral: Jiang et al. 2024, arXiv:2401.04088.

MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    fields=llama_fields(
        MOE_FFN,
        SLIDING_WINDOW,
        ConfigField("num_local_experts", "moe.num_experts", Fields.read_int, 8),
        experts_per_token(2),
        AUX_LOSS,
        without=("attention_bias",),
    ),
    defaults={
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "rope_theta": 1_000_000.0,
    },
    ignored=("router_jitter_noise",),  # in transformers it also applies to the input of the experts
    export_checks=(check_has_experts,),
    tensors=moe_tensors(
        separate_experts(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
        attention=ATTENTION_WITH_QKV_BIAS,
    ),
    fused_tensors=moe_tensors(fused_experts(), attention=ATTENTION_WITH_QKV_BIAS),
)

# --- OLMoE: Muennighoff et al. 2024, arXiv:2409.02060.

OLMOE = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    fields=llama_fields(MOE_FFN, num_experts(64), experts_per_token(8), NORM_TOPK_PROB, AUX_LOSS),
    defaults={
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "router_aux_loss_coef": 0.01,
    },
    settings={"attention.qk_norm": "whole"},
    required={"clip_qkv": (None,)},
    export_checks=(check_has_experts, check_head_sizes),
    tensors=moe_tensors(separate_experts()),
    fused_tensors=moe_tensors(fused_experts()),
)

# --- Qwen1.5-MoE and Qwen2-MoE: Yang et al. 2024, arXiv:2407.10671, section 2.2.2.


def _reject_windows(fields: Fields, settings: Settings) -> Settings:
    fields.require("use_sliding_window", False)
    windows = settings | {"attention.window": None}
    return read_windows(fields, windows, [False] * settings["num_layers"])


QWEN2_MOE = Family(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    fields=llama_fields(
        ConfigField("qkv_bias", "qkv_bias", Fields.read_flag, True),
        FieldGroup(
            "use_sliding_window", _reject_windows, lambda config: {"use_sliding_window": False}
        ),
        expert_size(1408),
        ConfigField(
            "shared_expert_intermediate_size",
            "moe.shared_ffn_hidden_size",
            Fields.read_int,
            5632,
        ),
        num_experts(60),
        experts_per_token(4),
        NORM_TOPK_PROB,
        MOE_LAYERS,
        without=("attention_bias",),
    ),
    defaults={"max_position_embeddings": 32_768},
    settings={"moe.shared_gate": True},
    ignored=("max_window_layers", "sliding_window"),
    export_checks=(check_has_experts,),
    tensors=moe_tensors(separate_experts(), attention=ATTENTION_WITH_QKV_BIAS),
    fused_tensors=moe_tensors(fused_experts(), attention=ATTENTION_WITH_QKV_BIAS),
)

# --- Qwen3-MoE: Yang et al. 2025, arXiv:2505.09388.

QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    fields=llama_fields(
        SWITCHED_WINDOW,
        expert_size(768),
        num_experts(128),
        experts_per_token(8),
        NORM_TOPK_PROB,
        MOE_LAYERS,
    ),
    defaults={
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
    },
    settings={"attention.qk_norm": "head"},
    ignored=("max_window_layers",),
    export_checks=(check_has_experts,),
    tensors=moe_tensors(separate_experts()),
    fused_tensors=moe_tensors(fused_experts()),
)

# --- gpt-oss: OpenAI 2025, arXiv:2508.10925. Experts are fused, with inputs before outputs and
# alternating columns of gate and up.


def _read_gpt_oss_rope(fields: Fields, settings: Settings) -> Settings:
    """Return the rotary embeddings; without any fields those of the release."""
    if fields.raw.get("rope_parameters") is None and fields.raw.get("rope_scaling") is None:
        theta = fields.read_number("rope_theta", 150_000.0)
        rope = RopeConfig(
            theta=theta, scaling="yarn", factor=32.0, original_max_position=4096, whole_pairs=False
        )
    else:
        rope = read_rope(fields, max_position=settings["max_seq_len"], theta=150_000.0)
    return {"rope": rope}


def _read_top_k(fields: Fields, settings: Settings) -> Settings:
    """The number of experts per token has two names."""
    names = ("num_experts_per_tok", "experts_per_token")
    values = [fields.read_int(name, 4) for name in names if name in fields.raw]
    if len(set(values)) > 1:
        fields.problems.append(
            f"num_experts_per_tok={values[0]}, experts_per_token={values[1]}: they "
            f"differ. Set both to the same number of experts per token."
        )
    return {"moe.top_k": next(iter(values), 4)}


def _write_top_k(config: ModelConfig) -> dict[str, Any]:
    assert config.moe is not None, "export_checks requires experts"
    return dict.fromkeys(("num_experts_per_tok", "experts_per_token"), config.moe.top_k)


GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    fields=llama_fields(
        ConfigField("attention_bias", ("qkv_bias", "output_bias"), Fields.read_flag, True),
        MOE_FFN,
        constant("hidden_act", "silu"),
        FieldGroup("rope", _read_gpt_oss_rope, lambda config: write_rope(config.rope)),
        SLIDING_WINDOW,
        layer_types(every_other_layer),
        ConfigField("num_local_experts", "moe.num_experts", Fields.read_int, 128),
        FieldGroup("num_experts_per_tok", _read_top_k, _write_top_k),
        ConfigField("swiglu_limit", "activation_clamp", Fields.read_number, 7.0),
        AUX_LOSS,
    ),
    defaults={
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
    },
    settings={
        "activation": "quick_gelu",
        "attention.sinks": True,
        "up_offset": 1.0,
        "moe.biases": True,
        "moe.router.bias": True,
    },
    required={"hidden_act": ("silu",), "swiglu_alpha": (1.702,)},  # the experts do not use the one
    ignored=("initial_context_length", "num_experts"),
    export_checks=(check_has_experts,),
    tensors=llama_tensors(
        INPUT_NORM,
        replace(ATTENTION, rows=(*ATTENTION.rows, TensorRow("sinks", "sinks", "n"))),
        MLP_NORM,
        TensorGroup(
            "mlp",
            "moe",
            (
                *router_rows("router"),
                TensorRow(
                    "experts.gate_up_proj", "experts.gate_up", "e h (moe_f 2)", "e 2 moe_f h"
                ),
                TensorRow(
                    "experts.gate_up_proj_bias", "experts.gate_up_bias", "e (moe_f 2)", "e 2 moe_f"
                ),
                TensorRow("experts.down_proj", "experts.down", "e moe_f h", "e h moe_f"),
                TensorRow("experts.down_proj_bias", "experts.down_bias", "e h"),
            ),
        ),
    ),
)

# --- Llama 4 (text): Meta 2025, the Llama 4 release. Layers with RoPE have chunked attention, the
# others full attention with a temperature (arXiv:2501.18795, arXiv:2501.19399). A token goes to one
# routed expert, whose input is multiplied by the router weight, and to a shared one.

CHUNKED = "chunked_attention"


def _read_llama4_head_dim(fields: Fields, settings: Settings) -> Settings:
    """A missing field means 128, a null one hidden_size / num_attention_heads."""
    head_dim = fields.read_int_or_null("head_dim", 128)
    is_standard = head_dim is None or head_dim * settings["num_heads"] == settings["hidden_size"]
    return {"head_dim": None if is_standard else head_dim}


def _read_llama4_experts(fields: Fields, settings: Settings) -> Settings:
    """Return the mixture of experts, in every `interleave_moe_layer_step`-th layer or in the listed
    ones."""
    layers, step = settings["num_layers"], fields.read_int("interleave_moe_layer_step", 1)
    listed = fields.read_value("moe_layers")
    if listed is not None and not (
        isinstance(listed, list) and all(type(layer) is int and layer >= 0 for layer in listed)
    ):
        fields.problems.append(
            f"moe_layers={listed!r:.60}: expected numbers of layers, from 0 on, or null."
        )
        listed = None
    if listed is None:
        listed = [layer for layer in range(layers) if (layer + 1) % step == 0]
    moe_layers = [layer in listed for layer in range(layers)]
    if not any(moe_layers):
        return {}
    fields.require("num_experts_per_tok", 1)
    width = fields.read_int("intermediate_size")
    return {
        "moe.num_experts": fields.read_int("num_local_experts", 16),
        "moe.top_k": 1,
        "moe.ffn_hidden_size": width,
        "moe.shared_ffn_hidden_size": width,
        "moe.apply_router_weight_on_input": True,
        "moe.router": RouterConfig(score="sigmoid", norm_topk_prob=False),
        "moe.layers": flags_or_empty(moe_layers),
    }


def _write_llama4_experts(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    moe_layers = [layer for layer in range(config.num_layers) if config.has_experts(layer)]
    return {
        "moe_layers": moe_layers,
        "interleave_moe_layer_step": moe_layers[0] + 1 if moe_layers else 1,
        "num_local_experts": 1 if moe is None else moe.num_experts,
        "num_experts_per_tok": 1 if moe is None else moe.top_k,
    }


def _read_rope_layers(fields: Fields, settings: Settings) -> Settings:
    """Return which layers have rotary embeddings: ones in no_rope_layers mean that they do,
    contrary to the name."""
    layers, every = settings["num_layers"], fields.read_int("no_rope_layer_interval", 4)
    flags = None
    if fields.read_value("no_rope_layers") != []:
        flags = fields.read_layer_flags("no_rope_layers", layers, {1: True, 0: False})
    flags = flags or tuple((layer + 1) % every != 0 for layer in range(layers))
    skip = () if all(flags) else shortest_pattern(tuple(not flag for flag in flags))
    return {"rope.skip": skip, "rope.interleaved": True}


def _uses_rope(settings: Settings) -> tuple[bool, ...]:
    skip = settings["rope.skip"] or (False,)
    return tuple(not skip[layer % len(skip)] for layer in range(settings["num_layers"]))


def _read_temperature(fields: Fields, settings: Settings) -> Settings:
    """Return the attention temperature of layers without rotary embeddings."""
    scale = fields.read_number_from_zero("attn_scale", 0.1)
    step = fields.read_int("floor_scale", 8192)
    name = "attn_temperature_tuning"
    tuning = fields.read_value(name)
    if tuning is not None and type(tuning) not in (bool, int):  # the release has 4 for true
        fields.problems.append(f"{name}={tuning!r:.60}: expected true or false.")
    is_tuned = bool(tuning) if name in fields.raw else True  # null means false
    if not (settings["rope.skip"] and is_tuned and scale):
        return {}
    return {"rope.skip_growth": scale, "rope.skip_step": step}


def _write_temperature(config: ModelConfig) -> dict[str, Any]:
    return {
        "attn_temperature_tuning": config.rope.skip_growth > 0,
        "attn_scale": config.rope.skip_growth or 0.1,
        "floor_scale": config.rope.skip_step,
    }


def _read_chunks(fields: Fields, settings: Settings) -> Settings:
    """Return chunked attention: in layers with rotary embeddings, or as in layer_types."""
    name = "attention_chunk_size"
    size = fields.read_int_or_null(name, 8192)
    flags = fields.read_layer_flags(
        "layer_types", settings["num_layers"], {CHUNKED: True, FULL: False}
    )
    flags = _uses_rope(settings) if flags is None else flags
    if size is None and any(flags):
        fields.problems.append(
            f"attention_chunk_size={size}, but some layers have chunked attention. Set it "
            f"to 8192, or layer_types to {FULL!r} for every layer."
        )
    arguments = window_arguments(size, shortest_pattern(flags))
    arguments["chunked"] = arguments["window"] is not None
    return {f"attention.{argument}": value for argument, value in arguments.items()}


def _write_chunks(config: ModelConfig) -> dict[str, Any]:
    layers = range(config.num_layers)
    return {
        "attention_chunk_size": config.attention.window or 8192,
        "layer_types": [CHUNKED if config.has_window(layer) else FULL for layer in layers],
    }


def _read_qk_norm(fields: Fields, settings: Settings) -> Settings:
    """Return QK-norm in layers with rotary embeddings; transformers applies it after them, which is
    equivalent."""
    flags = _uses_rope(settings)
    if not fields.read_flag("use_qk_norm", True) or not any(flags):
        return {}
    return {
        "attention.qk_norm": "l2",
        "attention.qk_norm_layers": () if all(flags) else shortest_pattern(flags),
    }


def _write_qk_norm(config: ModelConfig) -> dict[str, Any]:
    uses_rope = any(config.uses_rope(layer) for layer in range(config.num_layers))
    return {"use_qk_norm": config.attention.qk_norm == "l2" and uses_rope}


LLAMA4 = Family(
    architecture="Llama4ForCausalLM",
    model_type="llama4_text",
    fields=llama_fields(
        ConfigField(
            "intermediate_size",
            "ffn_hidden_size",
            Fields.read_int,
            encode=lambda config: (config.moe or config).ffn_hidden_size,
        ),
        FieldGroup(
            "head_dim", _read_llama4_head_dim, lambda config: {"head_dim": config.head_size()}
        ),
        ConfigField("intermediate_size_mlp", "ffn_hidden_size", Fields.read_int, 16_384),
        FieldGroup("moe_layers", _read_llama4_experts, _write_llama4_experts),
        FieldGroup(
            "no_rope_layers",
            _read_rope_layers,
            lambda config: {
                "no_rope_layers": [
                    int(config.uses_rope(layer)) for layer in range(config.num_layers)
                ]
            },
        ),
        FieldGroup("use_qk_norm", _read_qk_norm, _write_qk_norm),
        FieldGroup("attention_chunk_size", _read_chunks, _write_chunks),
        FieldGroup("attn_temperature_tuning", _read_temperature, _write_temperature),
    ),
    defaults={
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "rope_theta": 500_000.0,
    },
    required={"for_llm_compressor": (False,)},
    ignored=(  # without effect in a model without experts, or set by each training run
        "num_local_experts",
        "num_experts_per_tok",
        "router_jitter_noise",
        "router_aux_loss_coef",
        "output_router_logits",
    ),
    tensors=llama_tensors(
        INPUT_NORM,
        ATTENTION,
        MLP_NORM,
        TensorGroup(
            "feed_forward",
            "moe",
            (
                *router_rows("router"),
                TensorRow(
                    "experts.gate_up_proj", "experts.gate_up", "e h (2 moe_f)", "e 2 moe_f h"
                ),
                TensorRow("experts.down_proj", "experts.down", "e moe_f h", "e h moe_f"),
                *shared_expert_rows("shared_expert"),
            ),
            has_experts,
        ),
        replace(GATED_MLP, name="feed_forward"),
    ),
    wrapper=WrapperFamily(
        architecture="Llama4ForConditionalGeneration",
        model_type="llama4",
        section="text_config",
        prefix="language_model.",
        others=re.compile(r"(vision_model|multi_modal_projector)\..*"),
    ),
)

# --- DeepSeek-V2 and V3: DeepSeek-AI 2024, arXiv:2405.04434 and arXiv:2412.19437. Rotary embeddings
# rotate neighboring features. All layers but the first few have routed and shared experts.

OF_EXPERTS = (
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "moe_layer_freq",
    "n_group",
    "topk_group",
    "topk_method",
    "scoring_func",
    "norm_topk_prob",
    "routed_scaling_factor",
    "num_local_experts",
    "num_experts",
)
"""Fields without effect in a model without experts."""


def _read_attention_heads(fields: Fields, settings: Settings) -> Settings:
    """Latent attention has as many KV heads as heads."""
    fields.require("num_key_value_heads", settings["num_heads"])
    return {"num_kv_heads": settings["num_heads"]}


def _read_deepseek_rope(fields: Fields, settings: Settings) -> Settings:
    """Return the rotary embeddings, and the attention temperature mscale_all_dim of YaRN."""
    rope = read_rope(fields, max_position=settings["max_seq_len"])
    # transformers scales attention under all of them, the release under these two
    if rope.scaling not in ("none", "yarn"):
        fields.problems.append(
            f"rotary positions with rope_type={rope.scaling!r} are not supported in DeepSeek: "
            f"rope_type must be 'default' or 'yarn'."
        )
    mscale = _read_mscale(fields.raw) if rope.scaling == "yarn" else None
    return {"rope": rope, "mla.yarn_mscale": mscale}


def _read_mscale(raw: Mapping[str, Any]) -> float | None:
    """Return mscale_all_dim, or None if it is missing or 0."""
    sections = [raw.get(name) for name in ("rope_parameters", "rope_scaling")]
    values = [section.get("mscale_all_dim") for section in sections if isinstance(section, Mapping)]
    # read_rope reports other types
    numbers = [float(value) for value in values if value and type(value) in (int, float)]
    return next(iter(numbers), None)


def _write_deepseek_rope(config: ModelConfig) -> dict[str, Any]:
    """Return the rotary fields with mscale; a ratio of 1 as in the release, which all programs
    read."""
    written = write_rope(config.rope)
    mscale = None if config.mla is None else config.mla.yarn_mscale
    if config.rope.scaling != "yarn" or mscale is None:
        return written
    for name in ("rope_scaling", "rope_parameters"):
        if config.rope.attention_factor == 1.0:
            del written[name]["attention_factor"]
            written[name]["mscale"] = mscale
        written[name]["mscale_all_dim"] = mscale
    return written


def _read_deepseek_experts(fields: Fields, settings: Settings, *, v3: bool) -> Settings:
    """Return the mixture of experts of the layers after the dense ones; none if all layers are
    dense."""
    layers, num_dense = settings["num_layers"], fields.read_value("first_k_dense_replace")
    if num_dense is None:
        num_dense = fields.defaults["first_k_dense_replace"]
    if type(num_dense) is not int or num_dense < 0:
        fields.problems.append(
            f"first_k_dense_replace={num_dense!r}: expected a whole number of at least 0."
        )
        num_dense = layers
    if num_dense >= layers:
        fields.ignore(*OF_EXPERTS)
        return {}
    fields.require("moe_layer_freq", 1)
    fields.require("scoring_func", "sigmoid" if v3 else "softmax")
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    width = fields.read_int("moe_intermediate_size", fields.defaults["moe_intermediate_size"])
    top_k = fields.read_int("num_experts_per_tok", 8)
    router = RouterConfig(
        score="sigmoid" if v3 else "softmax",
        expert_bias=v3,
        norm_topk_prob=fields.read_flag("norm_topk_prob", v3),
        routed_scaling_factor=fields.read_number("routed_scaling_factor", 2.5 if v3 else 1.0),
        **_read_groups(fields, top_k, v3=v3),
    )
    if not v3 and router.norm_topk_prob:
        fields.problems.append(
            "norm_topk_prob=True is not supported: transformers ignores it for DeepSeek-V2. Use "
            "False."
        )
    return {
        "moe": MoEConfig(
            num_experts=read_num_experts(fields, fields.defaults["n_routed_experts"], names=names),
            top_k=top_k,
            ffn_hidden_size=width,
            shared_ffn_hidden_size=_read_num_shared(fields) * width,
            router=router,
            layers=flags_or_empty([layer >= num_dense for layer in range(layers)]),
        )
    }


def _read_num_shared(fields: Fields) -> int:
    name = "n_shared_experts"
    num_shared = fields.read_value(name) if name in fields.raw else fields.defaults[name]
    if type(num_shared) is int and num_shared >= 1:
        return num_shared
    fields.problems.append(
        f"n_shared_experts={num_shared!r}: transformers needs at least one. Use 1 or more."
    )
    return 1


def _read_groups(fields: Fields, top_k: int, *, v3: bool) -> dict[str, Any]:
    """Return the arguments of RouterConfig about expert groups; none if all groups are selected."""
    method = fields.read_value("topk_method")
    groups, topk_groups = fields.read_value("n_group"), fields.read_value("topk_group")
    methods = ("noaux_tc", None) if v3 else ("greedy", "group_limited_greedy", None)
    if v3:
        groups = 8 if groups is None else groups
        topk_groups = 4 if topk_groups is None else topk_groups
    elif method != "group_limited_greedy":
        groups = topk_groups = 1
    if method not in methods:
        fields.problems.append(
            f"topk_method={method!r} is not supported: it must be {methods[-2]!r}."
        )
    if any(type(value) is not int or value < 1 for value in (groups, topk_groups)):
        fields.problems.append(
            f"n_group={groups!r}, topk_group={topk_groups!r}: expected whole numbers of at least 1."
        )
        return {}
    if topk_groups >= groups:
        return {}
    if v3 and top_k != 2 * topk_groups:
        fields.problems.append(
            f"num_experts_per_tok={top_k}, topk_group={topk_groups}: transformers scores a group "
            "by its best two experts, which must equal num_experts_per_tok / topk_group. "
            f"Use topk_group={max(1, top_k // 2)}."
        )
    group_score = "top" if v3 else "max"
    return {"num_groups": groups, "topk_groups": topk_groups, "group_score": group_score}


def _write_deepseek_experts(config: ModelConfig, *, v3: bool) -> dict[str, Any]:
    moe, layers = config.moe, range(config.num_layers)
    if moe is None:
        return {"first_k_dense_replace": config.num_layers}
    router = moe.router
    v2_method = "greedy" if router.num_groups is None else "group_limited_greedy"
    num_dense = next((layer for layer in layers if config.has_experts(layer)), config.num_layers)
    return {
        "first_k_dense_replace": num_dense,
        "moe_layer_freq": 1,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn_hidden_size,
        "n_shared_experts": (moe.shared_ffn_hidden_size or 0) // moe.ffn_hidden_size or 1,
        "scoring_func": router.score,
        "topk_method": "noaux_tc" if v3 else v2_method,
        "n_group": router.num_groups or 1,
        "topk_group": router.topk_groups or 1,
        "norm_topk_prob": router.norm_topk_prob,
        "routed_scaling_factor": router.routed_scaling_factor,
    }


def _read_num_mtp_layers(fields: Fields, settings: Settings) -> Settings:
    """Return the number of MTP layers, under the name of the release or of transformers 5."""
    names = ("num_nextn_predict_layers", "num_mtp_layers")
    values = [fields.read_value(name) for name in names]
    depths = next((value for value in values if value is not None), 0)
    if (
        any(value is not None and (type(value) is not int or value != depths) for value in values)
        or depths < 0
    ):
        fields.problems.append(
            f"{names[0]}={values[0]!r}, {names[1]}={values[1]!r}: expected one whole number, or 0."
        )
        depths = 0
    return {"mtp.num_layers": depths}


def _remove_missing_mtp_layers(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """Remove the MTP layers from the config if their tensors are missing: transformers saves models
    without them."""
    has_mtp = any(name.startswith(f"model.layers.{config.num_layers}.") for name in names)
    return config if has_mtp else replace(config, mtp=MTPConfig())


def _check_mla(config: ModelConfig, architecture: str) -> str | None:
    if config.mla is None:
        return (
            f"model.mla=None: {architecture} needs latent attention. Use another family for this "
            "model."
        )
    if not config.mla.norms:
        return (
            f"model.mla.norms=false: {architecture} always normalizes the latent vectors of "
            "queries, keys and values. Use a model with model.mla.norms=true, or keep this one as "
            "a Megalith checkpoint."
        )
    return None


def _normalize_deepseek(config: ModelConfig) -> ModelConfig:
    """Return the model without sizes that latent attention does not use, and with the default
    weight of the MTP losses, which is a setting of each run."""
    mtp = MTPConfig(num_layers=config.mtp.num_layers)
    return replace(config, num_kv_heads=config.num_heads, head_dim=None, mtp=mtp)


def deepseek_fields(*, v3: bool) -> tuple[FieldSpec, ...]:
    """Return the fields of DeepSeek-V2 or V3."""
    interleaved = ConfigField("rope_interleave", "rope.interleaved", Fields.read_flag, True)
    mtp_layers = FieldGroup(
        "num_nextn_predict_layers",
        _read_num_mtp_layers,
        lambda config: {"num_nextn_predict_layers": config.mtp.num_layers},
    )
    return (
        ARCHITECTURE,
        *SIZES,
        FieldGroup(
            "num_key_value_heads",
            _read_attention_heads,
            lambda config: {"num_key_value_heads": config.num_heads},
        ),
        ConfigField("kv_lora_rank", "mla.kv_rank", Fields.read_int, 512),
        ConfigField("qk_nope_head_dim", "mla.nope_dim", Fields.read_int, 128),
        ConfigField("qk_rope_head_dim", "mla.rope_dim", Fields.read_int, 64),
        ConfigField("v_head_dim", "mla.value_dim", Fields.read_int, 128),
        ConfigField("q_lora_rank", "mla.q_rank", Fields.read_int_or_null, 1536),
        FieldGroup(
            "n_routed_experts",
            partial(_read_deepseek_experts, v3=v3),
            partial(_write_deepseek_experts, v3=v3),
        ),
        MAX_POSITION,
        NORM_EPS,
        INIT_STD,
        ACTIVATION,
        FieldGroup("rope", _read_deepseek_rope, _write_deepseek_rope),
        *((interleaved, mtp_layers) if v3 else ()),
        constant("attention_bias", False),
        constant("attention_dropout", 0.0),
        TIED,
        USE_CACHE,
    )


_LATENT_ATTENTION = TensorGroup(
    "self_attn",
    "attention",
    (
        TensorRow("q_proj.weight", "q", "(n nope_d+rope_d) h", when="!mla.q_rank"),
        TensorRow("q_a_proj.weight", "q_down", "q_rank h", when="mla.q_rank"),
        TensorRow("q_a_layernorm.weight", "q_down_norm.weight", "q_rank", when="mla.q_rank"),
        TensorRow("q_b_proj.weight", "q_up", "(n nope_d+rope_d) q_rank", when="mla.q_rank"),
        TensorRow("kv_a_proj_with_mqa.weight", "kv_down", "kv_rank+rope_d h"),
        TensorRow("kv_a_layernorm.weight", "kv_down_norm.weight", "kv_rank"),
        TensorRow("kv_b_proj.weight", "kv_up", "(n nope_d+value_d) kv_rank"),
        TensorRow("o_proj.weight", "o", "h (n value_d)"),
    ),
)


def deepseek_tensors(experts: TensorGroup) -> TensorTable:
    """Return the tensors of DeepSeek; published files repeat embedding and head in every MTP
    layer."""
    return replace(
        moe_tensors(experts, attention=_LATENT_ATTENTION),
        mtp_input=(
            TensorRow("enorm.weight", "embed_norm.weight", "h"),
            TensorRow("hnorm.weight", "hidden_norm.weight", "h"),
            TensorRow("eh_proj.weight", "project", "h h+h"),
        ),
        mtp_output=(TensorRow("shared_head.norm.weight", "norm.weight", "h"),),
        mtp_copies=(
            TensorRow("embed_tokens.weight", "embed.weight", "v h"),
            TensorRow("shared_head.head.weight", "head.weight", "v h", when="!tied_embeddings"),
            TensorRow("shared_head.head.weight", "embed.weight", "v h", when="tied_embeddings"),
        ),
    )


DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    fields=deepseek_fields(v3=True),
    defaults={
        "max_position_embeddings": 4096,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
    },
    required={
        # biases of the down-projections are not supported
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "attention_dropout": (0,),
    },
    ignored=(
        "head_dim",  # derived from the other sizes
        "qk_head_dim",
        "aux_loss_alpha",  # set by each training run
        "seq_aux",
        "router_aux_loss_coef",
        "output_router_logits",
        "ep_size",
    ),
    export_checks=(_check_mla,),
    normalize_model=_normalize_deepseek,
    tensors=deepseek_tensors(separate_experts(shared="shared_experts")),
    fused_tensors=deepseek_tensors(fused_experts(shared="shared_experts")),
    adjust_config=_remove_missing_mtp_layers,
)
DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    fields=deepseek_fields(v3=False),
    defaults={
        "max_position_embeddings": 2048,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
    },
    settings={"rope.interleaved": True},
    required={**DEEPSEEK_V3.required, "rope_interleave": (True,)},  # transformers reads it in V3
)

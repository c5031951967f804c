"""Table of all supported Hugging Face architectures; rows of dense models are in this module.

A row lists fields of config.json and tensor names, which are used for reading and for writing. Most
rows extend those of Llama. Code stands beside a row only where the table cannot express the family.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megalith.config.block_configs import (
    BlockModelSizes,
    LayerBlocks,
    find_ffn_multiplier,
    read_blocks,
)
from megalith.config.model import ModelConfig
from megalith.hf.config_fields import (
    ARCHITECTURE,
    ATTENTION_DROPOUT,
    FULL,
    INIT_STD,
    KIND,
    MAX_POSITION,
    MLP_BIAS,
    PER_PAIR,
    QWEN_WINDOWS,
    ROPE,
    SIZES,
    SLIDING,
    SLIDING_WINDOW,
    SWITCH_REMEDY,
    SWITCHED_WINDOW,
    TIED,
    USE_CACHE,
    ConfigField,
    FieldGroup,
    Fields,
    Settings,
    activation_field,
    constant,
    every_other_layer,
    hf_activation_name,
    layer_types,
    llama_fields,
    read_nothing,
    read_rope,
    rope_values,
    shortest_pattern,
    write_rope,
)
from megalith.hf.families_moe import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GPT_OSS,
    LLAMA4,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
)
from megalith.hf.family import Family, check_head_sizes
from megalith.hf.tensor_rules import (
    ATTENTION,
    ATTENTION_WITH_QKV_BIAS,
    GATED_MLP,
    HEAD,
    INPUT_NORM,
    MLP_NORM,
    TensorGroup,
    TensorRow,
    TensorTable,
    layer_norm,
    llama_tensors,
    rms_norm,
    ungated_mlp,
)

# --- Llama: Touvron et al. 2023, arXiv:2302.13971; Grattafiori et al. 2024, arXiv:2407.21783.

LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    fields=llama_fields(MLP_BIAS),
    tensors=llama_tensors(),
    export_checks=(check_head_sizes,),
)

# --- Mistral: Jiang et al. 2023, arXiv:2310.06825.

MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    fields=llama_fields(SLIDING_WINDOW, without=("attention_bias",)),
    defaults={
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    tensors=llama_tensors(),
)

# --- Qwen2 and Qwen2.5: Yang et al. 2024, arXiv:2407.10671; arXiv:2412.15115.

QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    fields=llama_fields(QWEN_WINDOWS, without=("attention_bias",)),
    defaults={
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
    },
    settings={"qkv_bias": True},
    tensors=llama_tensors(INPUT_NORM, ATTENTION_WITH_QKV_BIAS, MLP_NORM, GATED_MLP),
)

# --- Qwen3: Yang et al. 2025, arXiv:2505.09388.

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    fields=llama_fields(QWEN_WINDOWS),
    defaults={
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
    },
    settings={"attention.qk_norm": "head"},
    tensors=llama_tensors(),
)

# --- Granite 3: the release of Granite 3.0, IBM, 2024; multipliers: arXiv:2203.03466.


def _write_attention_multiplier(config: ModelConfig) -> float:
    scale = config.attention.scale
    return config.head_size() ** -0.5 if scale is None else scale


GRANITE = Family(
    architecture="GraniteForCausalLM",
    model_type="granite",
    fields=llama_fields(
        MLP_BIAS,
        ConfigField("embedding_multiplier", "embedding_scale", Fields.read_number, 1.0),
        ConfigField("residual_multiplier", "residual_scale", Fields.read_number, 1.0),
        ConfigField(
            "attention_multiplier",
            "attention.scale",
            Fields.read_number,
            1.0,
            encode=_write_attention_multiplier,
        ),
        ConfigField(
            "logits_scaling",
            "logit_scale",
            Fields.read_number,
            1.0,
            decode=lambda divisor: 1 / divisor,
            encode=lambda config: 1 / config.logit_scale,
        ),
    ),
    tensors=llama_tensors(),
)

# --- SmolLM3: the release of SmolLM3-3B, Hugging Face, 2025; NoPE: arXiv:2501.18795.


def _read_nope_layers(fields: Fields, settings: Settings) -> Settings:
    layers, every = settings["num_layers"], fields.read_int("no_rope_layer_interval", 4)
    skip = fields.read_layer_flags("no_rope_layers", layers, {1: False, 0: True})
    skip = skip or tuple((layer + 1) % every == 0 for layer in range(layers))
    return {"rope.skip": shortest_pattern(skip) if any(skip) else ()}


def _nope_layers(fields: Fields, settings: Settings) -> list[bool]:
    """By default layers without RoPE have a window, if there is one."""
    skip = settings["rope.skip"] if settings["attention.window"] is not None else ()
    return [bool(skip) and skip[layer % len(skip)] for layer in range(settings["num_layers"])]


SMOLLM3 = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    fields=llama_fields(
        MLP_BIAS,
        FieldGroup(
            "no_rope_layers",
            _read_nope_layers,
            lambda config: {
                "no_rope_layers": [
                    int(config.uses_rope(layer)) for layer in range(config.num_layers)
                ]
            },
        ),
        SWITCHED_WINDOW,
        layer_types(_nope_layers, SWITCH_REMEDY),
    ),
    defaults={
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_theta": 2_000_000.0,
    },
    ignored=("max_window_layers",),
    tensors=llama_tensors(),
)

# --- OLMo 2: OLMo Team 2024, arXiv:2501.00656. It has only post-norms.

OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    fields=llama_fields(),
    defaults={"rms_norm_eps": 1e-5},
    settings={"attention.qk_norm": "whole", "norm_placement": "after"},
    tensors=llama_tensors(
        ATTENTION,
        rms_norm("post_attention_layernorm", "attention_post_norm"),
        GATED_MLP,
        rms_norm("post_feedforward_layernorm", "mlp_post_norm"),
    ),
)

# --- Gemma 1: Gemma Team 2024, arXiv:2403.08295.


def _normalize_gemma_activation(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields with the activation in hidden_act, where "gelu" means the tanh
    approximation, with which Gemma was trained."""
    name = raw.get("hidden_activation")
    if name is None:
        is_gelu = raw.get("hidden_act") in ("gelu", None)
        name = "gelu_pytorch_tanh" if is_gelu else raw["hidden_act"]
    return {**raw, "hidden_act": name}


def _embedding_scale(settings: Settings) -> float:
    return float(settings["hidden_size"] ** 0.5)


GEMMA = Family(
    architecture="GemmaForCausalLM",
    model_type="gemma",
    fields=llama_fields(
        FieldGroup(  # transformers 4 reads this field, 5 reads hidden_act
            "hidden_activation",
            read_nothing,
            lambda config: {"hidden_activation": hf_activation_name(config.activation)},
        )
    ),
    defaults={
        "max_position_embeddings": 8192,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "tie_word_embeddings": True,
    },
    settings={"zero_centered_gamma": True, "embedding_scale": _embedding_scale},
    ignored=("hidden_activation",),
    normalize_fields=_normalize_gemma_activation,
    tensors=llama_tensors(),
)

# --- Gemma 2: Gemma Team 2024, arXiv:2408.00118.


def _write_query_scalar(config: ModelConfig) -> int:
    """Return query_pre_attn_scalar, by whose square root scores are divided; transformers requires
    an integer."""
    scale = config.attention.scale
    return config.head_size() if scale is None else round(scale**-2)


QUERY_SCALAR = ConfigField(
    "query_pre_attn_scalar",
    "attention.scale",
    Fields.read_number,
    256.0,
    decode=lambda scalar: scalar**-0.5,
    encode=_write_query_scalar,
)
FINAL_SOFTCAP = ConfigField("final_logit_softcapping", "logit_softcap", Fields.read_optional_number)
NORMS_AROUND = llama_tensors(
    INPUT_NORM,
    ATTENTION,
    rms_norm("post_attention_layernorm", "attention_post_norm"),
    rms_norm("pre_feedforward_layernorm", "mlp_norm"),
    GATED_MLP,
    rms_norm("post_feedforward_layernorm", "mlp_post_norm"),
)
"""Pre- and post-norms; Llama's name of the second pre-norm is that of a post-norm here."""


def _check_window_size(fields: Fields, settings: Settings) -> None:
    """The first releases have the window in two fields."""
    window = fields.read_int_or_null("sliding_window", fields.defaults["sliding_window"])
    fields.require("sliding_window_size", window)


GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    fields=llama_fields(
        QUERY_SCALAR,
        ConfigField(
            "attn_logit_softcapping", "attention.softcap", Fields.read_optional_number, 50.0
        ),
        FINAL_SOFTCAP,
        SLIDING_WINDOW,
        layer_types(every_other_layer),
        activation="hidden_activation",
    ),
    defaults={
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
    },
    settings={
        "zero_centered_gamma": True,
        "norm_placement": "around",
        "embedding_scale": _embedding_scale,
    },
    ignored=("hidden_act",),  # transformers reads only hidden_activation
    check_fields=_check_window_size,
    export_checks=(check_head_sizes,),
    tensors=NORMS_AROUND,
)

# --- Gemma 3 (text): Gemma Team 2025, arXiv:2503.19786.


def _read_gemma3_rope(fields: Fields, settings: Settings) -> Settings:
    """Context extension applies only to layers without a window, which have a theta of their
    own."""
    length = settings["max_seq_len"]
    rope = read_rope(fields, max_position=length, theta=1_000_000.0, layer=FULL)
    local = read_rope(
        fields,
        max_position=length,
        theta_name="rope_local_base_freq",
        layer=SLIDING,
        scaled=False,
    )
    if local.scaling != "none":
        fields.problems.append(
            f"rope_type={local.scaling!r} for {SLIDING} is not supported: layers with a window "
            "need 'default'."
        )
    return {"rope": replace(rope, local_theta=local.theta)}


def _write_gemma3_rope(config: ModelConfig) -> dict[str, Any]:
    """Return the fields for transformers 4, and for 5, with a mapping for each kind of layer."""
    (kind, values), theta = rope_values(config.rope), config.rope.theta
    local = {"rope_type": "default", "rope_theta": _local_theta(config)}
    return write_rope(config.rope) | {
        "rope_parameters": {
            FULL: {"rope_type": kind, "rope_theta": theta, **values},
            SLIDING: local,
        }
    }


def _local_theta(config: ModelConfig) -> float:
    rope = config.rope
    return rope.theta if rope.local_theta is None else rope.local_theta


def _has_window_layer(fields: Fields, settings: Settings) -> list[bool]:
    every = fields.read_int("sliding_window_pattern", 6)
    return [(layer + 1) % every != 0 for layer in range(settings["num_layers"])]


def _reject_attention_softcap(fields: Fields, settings: Settings) -> None:
    value = fields.read_value("attn_logit_softcapping")
    if value is not None:
        fields.problems.append(
            f"attn_logit_softcapping={value}: transformers ignores it for Gemma 3. Set it to null."
        )


GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    fields=llama_fields(
        FieldGroup("rope", _read_gemma3_rope, _write_gemma3_rope),
        FieldGroup(
            "rope_local_base_freq",
            read_nothing,
            lambda config: {"rope_local_base_freq": _local_theta(config)},
        ),
        QUERY_SCALAR,
        constant("attn_logit_softcapping", None),
        FINAL_SOFTCAP,
        ConfigField(
            "sliding_window",
            "attention.window",
            Fields.read_int_or_null,
            4096,
            # transformers requires a window even if no layer has it
            encode=lambda config: config.attention.window or 4096,
        ),
        layer_types(_has_window_layer),
        activation="hidden_activation",
    ),
    defaults={
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
    },
    settings={
        "attention.qk_norm": "head",
        "zero_centered_gamma": True,
        "norm_placement": "around",
        "embedding_scale": _embedding_scale,
        "rope.local_theta": lambda settings: (
            None if settings["attention.window"] is None else settings["rope"].local_theta
        ),
    },
    ignored=("hidden_act",),  # transformers reads only hidden_activation
    check_fields=_reject_attention_softcap,
    export_checks=(check_head_sizes,),
    tensors=NORMS_AROUND,
)

# --- Phi-3 and Phi-4: Abdin et al. 2024, arXiv:2404.14219. Projections are fused.

ORIGINAL_LENGTH = "original_max_position_embeddings"


def _normalize_longrope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with current names of longrope, and the original context length beside its
    factors."""
    fields = dict(raw)
    original_length = {ORIGINAL_LENGTH: raw[ORIGINAL_LENGTH]} if ORIGINAL_LENGTH in raw else {}
    for section in ("rope_scaling", "rope_parameters"):
        mapping = fields.get(section)
        if isinstance(mapping, Mapping) and "short_factor" in mapping:
            names = {name: "longrope" for name in KIND if mapping.get(name) in ("su", "yarn")}
            fields[section] = original_length | dict(mapping) | names
    return fields


def _read_phi3_rope(fields: Fields, settings: Settings) -> Settings:
    rope = read_rope(fields, max_position=settings["max_seq_len"], fraction=1.0)
    if rope.scaling not in ("none", "longrope"):  # transformers rejects all others
        fields.problems.append(
            f"rotary positions with rope_type={rope.scaling!r} are not supported in Phi-3: "
            f"rope_type must be 'default' or 'longrope'."
        )
    return {"rope": rope}


def _write_phi3_rope(config: ModelConfig) -> dict[str, Any]:
    """Return the rotary fields; for longrope rope_scaling has only the factors, as transformers 4
    requires."""
    written = write_rope(config.rope, fraction=True)
    del written["partial_rotary_factor"]  # an entry of its own
    if config.rope.scaling == "longrope":
        factors = {name: written["rope_scaling"][name] for name in PER_PAIR}
        written["rope_scaling"] = {"type": "longrope", **factors}
        for name in ("factor", "attention_factor"):  # derived from the context lengths
            written["rope_parameters"].pop(name, None)
    return written


def _write_original_length(config: ModelConfig) -> dict[str, Any]:
    is_extended = config.rope.scaling == "longrope"
    length = config.rope.original_max_position if is_extended else config.max_seq_len
    return {ORIGINAL_LENGTH: length}


PHI3 = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    fields=llama_fields(
        FieldGroup("rope", _read_phi3_rope, _write_phi3_rope),
        FieldGroup(
            "partial_rotary_factor",
            read_nothing,
            lambda config: {"partial_rotary_factor": config.rope.fraction},
        ),
        SLIDING_WINDOW,
        FieldGroup(ORIGINAL_LENGTH, read_nothing, _write_original_length),
        ConfigField("embd_pdrop", "dropout.embedding", Fields.read_number_from_zero, 0.0),
        ConfigField("resid_pdrop", "dropout.residual", Fields.read_number_from_zero, 0.0),
        without=("attention_bias",),
    ),
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    required={
        "attention_bias": (False,),
        "full_attn_mod": (1,),
        "lm_head_bias": (False,),
        "interpolate_factor": (1,),
    },
    ignored=(ORIGINAL_LENGTH,),
    normalize_fields=_normalize_longrope,
    export_checks=(check_head_sizes,),
    tensors=llama_tensors(
        INPUT_NORM,
        TensorGroup(
            "self_attn",
            "attention",
            (
                TensorRow("qkv_proj.weight", "q", "(n+g+g[0:n] d) h", "n+g+g d h"),
                TensorRow("qkv_proj.weight", "kv", "(n+g+g[n:n+g] d) h", "[0] n+g+g d h"),
                TensorRow("qkv_proj.weight", "kv", "(n+g+g[n+g:n+g+g] d) h", "[1] n+g+g d h"),
                TensorRow("o_proj.weight", "o", "h (n d)"),
            ),
        ),
        MLP_NORM,
        TensorGroup(
            "mlp",
            "mlp",
            (
                TensorRow("gate_up_proj.weight", "gate_up", "(2 f) h"),
                TensorRow("down_proj.weight", "down", "h f"),
            ),
        ),
    ),
)

# --- StarCoder2: Lozhkov et al. 2024, arXiv:2402.19173.

STARCODER2 = Family(
    architecture="Starcoder2ForCausalLM",
    model_type="starcoder2",
    fields=(
        ARCHITECTURE,
        *SIZES,
        ConfigField("num_key_value_heads", "num_kv_heads", Fields.read_int, 2),
        MAX_POSITION,
        ConfigField("norm_epsilon", "norm_eps", Fields.read_number, 1e-5),
        INIT_STD,
        activation_field("hidden_act", "gelu_pytorch_tanh"),
        SLIDING_WINDOW,
        ConfigField("use_bias", ("qkv_bias", "output_bias", "mlp_bias"), Fields.read_flag, True),
        ConfigField("embedding_dropout", "dropout.embedding", Fields.read_number_from_zero, 0.0),
        ConfigField("residual_dropout", "dropout.residual", Fields.read_number_from_zero, 0.0),
        ATTENTION_DROPOUT,
        ROPE,
        TIED,
        USE_CACHE,
    ),
    defaults={
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "initializer_range": 0.018042,
    },
    settings={"norm": "layer", "gated": False},
    required={"mlp_type": ("default",), "norm_type": ("layer_norm",)},
    ignored=(  # fields of published configs that transformers does not read
        "activation_function",
        "layer_norm_epsilon",
        "attention_softmax_in_fp32",
        "scale_attention_softmax_in_fp32",
        "scale_attn_weights",
    ),
    export_checks=(check_head_sizes,),
    tensors=replace(
        llama_tensors(
            layer_norm("input_layernorm", "attention_norm"),
            ATTENTION,
            layer_norm("post_attention_layernorm", "mlp_norm"),
            ungated_mlp("c_fc", "c_proj"),
        ),
        head=(
            TensorRow("model.norm.weight", "norm.weight", "h"),
            TensorRow("model.norm.bias", "norm.bias", "h"),
            TensorRow(HEAD, "head.weight", "v h", when="!tied_embeddings"),
        ),
    ),
)

# --- GPT-2: Radford et al. 2019. Weight matrices have inputs as rows.


def _write_gpt2_activation(config: ModelConfig) -> str:
    names = {"gelu_tanh": "gelu_new", "squared_relu": "relu2"}
    return names.get(config.activation, config.activation)


GPT2 = Family(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    fields=(
        ARCHITECTURE,
        ConfigField("vocab_size", "vocab_size", Fields.read_int),
        ConfigField("n_embd", "hidden_size", Fields.read_int),
        ConfigField("n_layer", "num_layers", Fields.read_int),
        ConfigField("n_head", ("num_heads", "num_kv_heads"), Fields.read_int),
        ConfigField("n_positions", "max_seq_len", Fields.read_int),
        FieldGroup("n_ctx", read_nothing, lambda config: {"n_ctx": config.max_seq_len}),
        FieldGroup(
            "n_inner",
            lambda fields, settings: {
                "ffn_hidden_size": fields.read_int("n_inner", 4 * settings["hidden_size"])
            },
            lambda config: {"n_inner": config.ffn_hidden_size},
        ),
        ConfigField(
            "activation_function",
            "activation",
            Fields.read_activation,
            "gelu_new",
            encode=_write_gpt2_activation,
        ),
        ConfigField("layer_norm_epsilon", "norm_eps", Fields.read_number, 1e-5),
        INIT_STD,
        ConfigField("embd_pdrop", "dropout.embedding", Fields.read_number_from_zero, 0.1),
        ConfigField("resid_pdrop", "dropout.residual", Fields.read_number_from_zero, 0.1),
        ConfigField("attn_pdrop", "dropout.attention", Fields.read_number_from_zero, 0.1),
        TIED,
        USE_CACHE,
    ),
    defaults={"tie_word_embeddings": True},
    settings={
        "norm": "layer",
        "positions": "learned",
        "gated": False,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
    },
    required={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    ignored=(
        "reorder_and_upcast_attn",  # attention scores in fp32, as always here
        "n_ctx",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
    ),
    export_checks=(check_head_sizes,),
    tensors=TensorTable(
        layers="transformer.h",
        embedding=(
            TensorRow("transformer.wte.weight", "embed.weight", "v h"),
            TensorRow("transformer.wpe.weight", "positions.weight", "positions h"),
        ),
        layer=(
            layer_norm("ln_1", "attention_norm"),
            TensorGroup(
                "attn",
                "attention",
                (
                    TensorRow("c_attn.weight", "q", "h (3[0] n d)", "n d h"),
                    TensorRow("c_attn.weight", "kv", "h (3[1:3] n d)", "3 n d h"),
                    TensorRow("c_attn.bias", "q_bias", "(3[0] n d)", "n d"),
                    TensorRow("c_attn.bias", "kv_bias", "(3[1:3] n d)"),
                    TensorRow("c_proj.weight", "o", "(n d) h", "h n d"),
                    TensorRow("c_proj.bias", "o_bias", "h"),
                ),
            ),
            layer_norm("ln_2", "mlp_norm"),
            TensorGroup(
                "mlp",
                "mlp",
                (
                    TensorRow("c_fc.weight", "up", "h f", "f h"),
                    TensorRow("c_fc.bias", "up_bias", "f"),
                    TensorRow("c_proj.weight", "down", "f h", "h f"),
                    TensorRow("c_proj.bias", "down_bias", "h"),
                ),
            ),
        ),
        head=(
            TensorRow("transformer.ln_f.weight", "norm.weight", "h"),
            TensorRow("transformer.ln_f.bias", "norm.bias", "h"),
            TensorRow(HEAD, "head.weight", "v h", when="!tied_embeddings"),
        ),
    ),
    ignored_tensors=re.compile(  # attention masks stored by old versions
        r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"
    ),
    prefix="transformer.",  # missing in files of the first release
)

# --- GPT-NeoX and Pythia: Black et al. 2022, arXiv:2204.06745; Biderman et al. 2023,
# arXiv:2304.01373. q, k and v of each head are fused in one matrix.


def _read_neox_rope(fields: Fields, settings: Settings) -> Settings:
    rope = read_rope(
        fields,
        max_position=settings["max_seq_len"],
        theta_name="rotary_emb_base",
        fraction=0.25,
        fraction_name="rotary_pct",
    )
    return {"rope": rope}


def _write_neox_rope(config: ModelConfig) -> dict[str, Any]:
    written = write_rope(config.rope, fraction=True)
    names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    return {names.get(name, name): value for name, value in written.items()}


NEOX_HEAD = "embed_out.weight"

NEOX = Family(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    fields=(
        ARCHITECTURE,
        *SIZES,
        MAX_POSITION,
        ConfigField("layer_norm_eps", "norm_eps", Fields.read_number, 1e-5),
        INIT_STD,
        activation_field("hidden_act", "gelu"),
        ConfigField(
            "use_parallel_residual",
            "block",
            Fields.read_flag,
            True,
            decode=lambda flag: "parallel" if flag else "sequential",
            encode=lambda config: config.block == "parallel",
        ),
        ConfigField("attention_bias", ("qkv_bias", "output_bias"), Fields.read_flag, True),
        ATTENTION_DROPOUT,
        ConfigField(
            "hidden_dropout",
            ("dropout.residual", "dropout.embedding"),
            Fields.read_number_from_zero,
            0.0,
        ),
        FieldGroup("rope", _read_neox_rope, _write_neox_rope),
        TIED,
        USE_CACHE,
    ),
    settings={
        "num_kv_heads": lambda settings: settings["num_heads"],
        "norm": "layer",
        "gated": False,
        "mlp_bias": True,
    },
    required={"is_decoder": (False, True)},
    ignored=("classifier_dropout",),
    export_checks=(check_head_sizes,),
    tensors=TensorTable(
        layers="gpt_neox.layers",
        embedding=(TensorRow("gpt_neox.embed_in.weight", "embed.weight", "v h"),),
        layer=(
            layer_norm("input_layernorm", "attention_norm"),
            TensorGroup(
                "attention",
                "attention",
                (
                    TensorRow("query_key_value.weight", "q", "(n 3[0] d) h", "n d h"),
                    TensorRow("query_key_value.weight", "kv", "(n 3[1:3] d) h", "3 n d h"),
                    TensorRow("query_key_value.bias", "q_bias", "(n 3[0] d)", "n d", "qkv_bias"),
                    TensorRow(
                        "query_key_value.bias", "kv_bias", "(n 3[1:3] d)", "3 n d", "qkv_bias"
                    ),
                    TensorRow("dense.weight", "o", "h (n d)"),
                    TensorRow("dense.bias", "o_bias", "h", when="output_bias"),
                ),
            ),
            layer_norm("post_attention_layernorm", "mlp_norm"),
            ungated_mlp("dense_h_to_4h", "dense_4h_to_h"),
        ),
        head=(
            TensorRow("gpt_neox.final_layer_norm.weight", "norm.weight", "h"),
            TensorRow("gpt_neox.final_layer_norm.bias", "norm.bias", "h"),
            TensorRow(NEOX_HEAD, "head.weight", "v h", when="!tied_embeddings"),
        ),
    ),
    ignored_tensors=re.compile(
        r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"
    ),
    head=NEOX_HEAD,
)

# --- Nemotron-NAS (DeciLM): Bercovich et al. 2024, arXiv:2411.19146 (Puzzle). Layers have different
# structure; transformers has no class for it.


def _read_block_configs(raw: Mapping[str, Any]) -> LayerBlocks:
    """Return the structure of the layers; sizes of the model are null in published files."""
    names = "num_hidden_layers", "num_attention_heads", "hidden_size"
    # the reader reports problems with them
    layers, heads, hidden = (
        raw[name] if isinstance(raw.get(name), int) and raw[name] > 0 else 1 for name in names
    )
    sizes = BlockModelSizes(
        num_layers=layers,
        num_heads=heads,
        hidden_size=hidden,
        num_kv_heads=raw.get("num_key_value_heads"),
        ffn_hidden_size=raw.get("intermediate_size"),
    )
    return read_blocks(raw.get("block_configs"), sizes)


def _set_block_sizes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with the largest sizes of any block in place of null."""
    blocks = _read_block_configs(raw)
    sizes = {
        "num_key_value_heads": blocks.num_kv_heads,
        "intermediate_size": blocks.ffn_hidden_size,
    }
    return {**raw, **sizes, "block_configs": blocks}


def _read_blocks(fields: Fields, settings: Settings) -> Settings:
    blocks: LayerBlocks = fields.read_value("block_configs")
    fields.problems += blocks.problems
    if settings["mlp_bias"] and "linear" in blocks.layers.mlp:
        fields.problems.append(
            "mlp_bias=True with ffn.replace_with_linear=True in block_configs is not "
            "supported: a matrix in place of an MLP has no bias in DeciLM. Set mlp_bias to false "
            "if no MLP has biases."
        )
    return {"layers": blocks.layers}


def _write_blocks(config: ModelConfig) -> dict[str, Any]:
    """Return block_configs, and null for the sizes that it contains."""
    blocks = [_write_block(config, layer) for layer in range(config.num_layers)]
    return {"block_configs": blocks, "num_key_value_heads": None, "intermediate_size": None}


def _write_block(config: ModelConfig, layer: int) -> dict[str, Any]:
    sizes, attention, mlp = config.at(layer), config.attention_part(layer), config.mlp_part(layer)
    width = find_ffn_multiplier(sizes.ffn_hidden_size, config.hidden_size)
    group = config.num_heads // sizes.num_kv_heads
    return {
        "attention": {
            **_write_part(attention),
            "n_heads_in_group": group if attention == "full" else None,
        },
        "ffn": {**_write_part(mlp), "ffn_mult": width if mlp == "full" else None},
    }


def _write_part(part: str) -> dict[str, bool]:
    return {"no_op": part == "none", "replace_with_linear": part == "linear"}


def _check_linear_mlp_bias(config: ModelConfig, architecture: str) -> str | None:
    parts = [config.mlp_part(layer) for layer in range(config.num_layers)]
    if not config.mlp_bias or "linear" not in parts:
        return None
    return (
        f"model.mlp_bias=true with model.layers.mlp={list(config.layers.mlp)}: in {architecture} "
        f"a matrix in place of an MLP has no bias. Keep the model as a Megalith checkpoint."
    )


def _check_ffn_sizes(config: ModelConfig, architecture: str) -> str | None:
    for layer in range(config.num_layers):
        width = config.at(layer).ffn_hidden_size
        is_expressible = find_ffn_multiplier(width, config.hidden_size) is not None
        if config.mlp_part(layer) == "full" and not is_expressible:
            return (
                f"model.layers.ffn_hidden_size={width} in layer {layer}: {architecture} supports "
                f"only multiples of 256. Keep the model as a Megalith checkpoint."
            )
    return None


def _normalize_layers(config: ModelConfig) -> ModelConfig:
    """Return the model with the shortest patterns, and without sizes of parts that layers do not
    have."""
    parts = [
        {
            "attention": {
                **_write_part(config.attention_part(layer)),
                "num_query_groups": config.at(layer).num_kv_heads,
            },
            "mlp": {
                **_write_part(config.mlp_part(layer)),
                "ffn_hidden_size": config.at(layer).ffn_hidden_size,
            },
        }
        for layer in range(config.num_layers)
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


def _attention_is(part: str, config: ModelConfig, layer: int) -> bool:
    return config.attention_part(layer) == part


def _mlp_is(part: str, config: ModelConfig, layer: int) -> bool:
    return config.mlp_part(layer) == part


def _has_attention_part(config: ModelConfig, layer: int) -> bool:
    return config.attention_part(layer) != "none"


def _has_mlp_part(config: ModelConfig, layer: int) -> bool:
    return config.mlp_part(layer) != "none"


DECILM = Family(
    architecture="DeciLMForCausalLM",
    model_type="nemotron-nas",
    fields=llama_fields(MLP_BIAS, FieldGroup("block_configs", _read_blocks, _write_blocks)),
    normalize_fields=_set_block_sizes,
    export_checks=(check_head_sizes, _check_linear_mlp_bias, _check_ffn_sizes),
    normalize_model=_normalize_layers,
    tensors=llama_tensors(
        replace(INPUT_NORM, when=_has_attention_part),
        TensorGroup(
            "self_attn",
            "attention",
            (
                TensorRow("linear_attn.weight", "linear", "h h"),
                TensorRow(
                    "linear_attn.bias", "linear_bias", "h", when="output_bias", zeros="qkv_bias"
                ),
            ),
            partial(_attention_is, "linear"),
        ),
        ATTENTION,
        replace(MLP_NORM, when=_has_mlp_part),
        TensorGroup(
            "mlp",
            "mlp",
            (TensorRow("linear_mlp.weight", "linear", "h h"),),
            partial(_mlp_is, "linear"),
        ),
        GATED_MLP,
    ),
    in_transformers=False,
)

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    GEMMA,
    GEMMA2,
    GEMMA3,
    OLMO2,
    SMOLLM3,
    GRANITE,
    PHI3,
    STARCODER2,
    GPT2,
    NEOX,
    DEEPSEEK_V3,
    DEEPSEEK_V2,
    MIXTRAL,
    QWEN3_MOE,
    QWEN2_MOE,
    OLMOE,
    GPT_OSS,
    LLAMA4,
    DECILM,
)
"""All supported architectures; a model that several can express is written as the first of them."""

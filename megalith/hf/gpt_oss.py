"""Hugging Face format of gpt-oss: attention sinks, alternating sliding windows, biases, YaRN, and
experts with clamped gates.

Source: OpenAI 2025, arXiv:2508.10925.
"""

from collections.abc import Mapping
from typing import Any

from megalith.config.model import AttentionConfig, ModelConfig, RopeConfig
from megalith.config.moe import MoEConfig, RouterConfig
from megalith.hf.config_fields import (
    HEAD,
    NORMS,
    ROTARY_BUFFERS,
    SIZE_REMEDY,
    attention_rules,
    check_all_fields_exported,
    read_common_fields,
    read_windows,
    window_arguments,
    write_common_fields,
    write_windows,
)
from megalith.hf.fields import Fields
from megalith.hf.moe import read_aux_loss, require_moe, router_rules, write_aux_loss
from megalith.hf.rope import read_rope
from megalith.hf.tensor_rules import Family, TensorRule, piece, rule


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a config.json.

    Raises:
        ConfigError: fields are missing, of the wrong type, unknown or not supported; all of them
            are reported together.
    """
    fields = Fields(raw)
    common_fields = read_common_fields(
        fields, max_seq_len=131_072, norm_eps=1e-5, head_dim=64, kv_heads=8, switch=False
    )
    layers = common_fields["num_layers"]
    fields.require("hidden_act", "silu")  # the experts do not use it
    fields.require("swiglu_alpha", 1.702)
    window = fields.read_optional_int("sliding_window") if "sliding_window" in raw else 128
    default = [layer % 2 == 0 for layer in range(layers)]
    windows = window_arguments(
        window, read_windows(fields, layers, default, window=window, remedy=SIZE_REMEDY)
    )
    biases = fields.read_flag("attention_bias", True)
    top_k_values = [
        fields.read_int(name, 4)
        for name in ("num_experts_per_tok", "experts_per_token")
        if name in raw
    ]
    if len(set(top_k_values)) > 1:
        fields.problems.append(
            f"num_experts_per_tok={top_k_values[0]}, experts_per_token={top_k_values[1]}: they "
            f"differ. Set both to the same number of experts per token."
        )
    moe = MoEConfig(
        num_experts=fields.read_int("num_local_experts", 128),
        top_k=next(iter(top_k_values), 4),
        biases=True,
        ffn_hidden_size=common_fields["ffn_hidden_size"],
        router=RouterConfig(bias=True),
        aux_loss=read_aux_loss(fields, top_k=next(iter(top_k_values), 4), layers=layers),
    )
    fields.ignore("initial_context_length", "num_experts")
    config = ModelConfig(
        **common_fields | {"activation": "quick_gelu"},
        rope=_read_rope(fields, common_fields["max_seq_len"]),
        attention=AttentionConfig(sinks=True, **windows),
        activation_clamp=fields.read_number("swiglu_limit", 7.0),
        up_offset=1.0,
        qkv_bias=biases,
        output_bias=biases,
        moe=moe,
    )
    fields.raise_problems()
    return config


def _read_rope(fields: Fields, length: int) -> RopeConfig:
    """Return the rotary embeddings; without any fields those of the release."""
    if fields.raw.get("rope_parameters") is None and fields.raw.get("rope_scaling") is None:
        theta = fields.read_number("rope_theta", 150_000.0)
        return RopeConfig(
            theta=theta, scaling="yarn", factor=32.0, original_max_position=4096, whole_pairs=False
        )
    return read_rope(fields, max_position=length, theta=150_000.0)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model, readable by transformers 4 and 5.

    Raises:
        ConfigError: the model cannot be expressed as gpt-oss.
    """
    moe = require_moe(config, GPT_OSS.architecture)
    raw = {
        **write_common_fields(config, GPT_OSS),
        "hidden_act": "silu",
        "intermediate_size": moe.ffn_hidden_size,
        "sliding_window": config.attention.window,
        "layer_types": write_windows(config),
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "experts_per_token": moe.top_k,
        "swiglu_limit": config.activation_clamp,
        "attention_bias": config.qkv_bias,
        **write_aux_loss(config, moe),
    }
    return check_all_fields_exported(raw, config, read_config, GPT_OSS)


def rules(config: ModelConfig) -> list[TensorRule]:
    """Return the tensor rules, in the order of the forward pass."""
    v, h, n = config.vocab_size, config.hidden_size, config.num_heads
    rules = [rule("model.embed_tokens.weight", "embed.weight", (v, h), shape=(v, h))]
    for layer in range(config.num_layers):
        hf_layer, layer_name = f"model.layers.{layer}", f"layers.{layer}"
        rules += [
            rule(
                f"{hf_layer}.{NORMS['attention_norm']}.weight",
                f"{layer_name}.attention_norm.weight",
                (h,),
                shape=(h,),
            ),
            *attention_rules(
                config, f"{hf_layer}.self_attn", f"{layer_name}.attention", all_biases=True
            ),
            rule(f"{hf_layer}.self_attn.sinks", f"{layer_name}.attention.sinks", (n,), shape=(n,)),
            rule(
                f"{hf_layer}.{NORMS['mlp_norm']}.weight",
                f"{layer_name}.mlp_norm.weight",
                (h,),
                shape=(h,),
            ),
            *router_rules(config, f"{hf_layer}.mlp.router", f"{layer_name}.moe"),
            *_expert_rules(config, f"{hf_layer}.mlp.experts", f"{layer_name}.moe.experts"),
        ]
    rules.append(rule("model.norm.weight", "norm.weight", (h,), shape=(h,)))
    if not config.tied_embeddings:
        rules.append(rule(HEAD, "head.weight", (v, h), shape=(v, h)))
    return rules


def _expert_rules(config: ModelConfig, hf_name: str, parameter: str) -> list[TensorRule]:
    """Return the rules of fused experts: inputs come before outputs, and columns of gate and up
    alternate."""
    moe, h = config.moe, config.hidden_size
    if moe is None:
        return []
    e, f = moe.num_experts, moe.ffn_hidden_size
    wide, both, back, vector = (
        tuple((0, n) for n in shape) for shape in ((e, 2, f, h), (e, 2, f), (e, h, f), (e, h))
    )
    name = f"{hf_name}.gate_up_proj"
    return [
        piece(
            name,
            f"{parameter}.gate_up",
            wide,
            shape=(e, h, 2 * f),
            view=(e, h, f, 2),
            dims=(0, 3, 2, 1),
        ),
        piece(
            f"{name}_bias",
            f"{parameter}.gate_up_bias",
            both,
            shape=(e, 2 * f),
            view=(e, f, 2),
            dims=(0, 2, 1),
        ),
        piece(
            f"{hf_name}.down_proj",
            f"{parameter}.down",
            back,
            shape=(e, f, h),
            view=(e, f, h),
            dims=(0, 2, 1),
        ),
        piece(
            f"{hf_name}.down_proj_bias", f"{parameter}.down_bias", vector, shape=(e, h), view=(e, h)
        ),
    ]


GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    read_config=read_config,
    write_config=write_config,
    rules=rules,
    ignored=ROTARY_BUFFERS,
    tied=HEAD,
)

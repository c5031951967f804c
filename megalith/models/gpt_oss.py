"""gpt-oss as Hugging Face knows it: attention with sinks, windows in every other layer, biases,
yarn, and a mixture of experts with clamped gates in every layer.

Source: OpenAI 2025, arXiv:2508.10925.
"""

from collections.abc import Mapping
from typing import Any

from megalith.config.attention import AttentionConfig
from megalith.config.model import ModelConfig
from megalith.config.moe import MoEConfig, RouterConfig
from megalith.config.rope import RopeConfig
from megalith.models.experts import experts_of, read_balance, router_rules, write_balance
from megalith.models.fields import Fields
from megalith.models.names import Family, TensorRule, piece, rule
from megalith.models.rope import read_rope
from megalith.models.usual import (
    HEAD,
    NORMS,
    ROTARY_BUFFERS,
    SIZE_REMEDY,
    attention_rules,
    check_all_fields_exported,
    read_common_fields,
    read_windows,
    windowed,
    write_common_fields,
    write_windows,
)


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Contents of a config.json -> our config.

    Raises:
        ConfigError: fields that are missing, of the wrong kind, unknown, or not supported; all of
        them together.
    """
    fields = Fields(raw)
    common_fields = read_common_fields(
        fields, max_seq_len=131_072, norm_eps=1e-5, head_dim=64, kv_heads=8, switch=False
    )
    layers = common_fields["num_layers"]
    fields.only(
        "hidden_act", "silu"
    )  # which is not what the experts compute, whatever the config says
    fields.only("swiglu_alpha", 1.702)
    window = fields.whole_or_none("sliding_window") if "sliding_window" in raw else 128
    default = [layer % 2 == 0 for layer in range(layers)]
    windows = windowed(
        window, read_windows(fields, layers, default, window=window, remedy=SIZE_REMEDY)
    )
    biases = fields.flag("attention_bias", True)
    several = [
        fields.whole(name, 4)
        for name in ("num_experts_per_tok", "experts_per_token")
        if name in raw
    ]
    if len(set(several)) > 1:
        fields.problems.append(
            f"num_experts_per_tok={several[0]}, experts_per_token={several[1]}: two numbers of "
            f"chosen experts. Set both to the same."
        )
    moe = MoEConfig(
        num_experts=fields.whole("num_local_experts", 128),
        top_k=next(iter(several), 4),
        biases=True,
        ffn_hidden_size=common_fields["ffn_hidden_size"],
        router=RouterConfig(bias=True),
        aux_loss=read_balance(fields, top_k=next(iter(several), 4), layers=layers),
    )
    fields.ignore("initial_context_length", "num_experts")
    found = ModelConfig(
        **common_fields | {"activation": "quick_gelu"},
        rope=_read_rope(fields, common_fields["max_seq_len"]),
        attention=AttentionConfig(sinks=True, **windows),
        activation_clamp=fields.number("swiglu_limit", 7.0),
        up_offset=1.0,
        qkv_bias=biases,
        output_bias=biases,
        moe=moe,
    )
    fields.finish()
    return found


def _read_rope(fields: Fields, length: int) -> RopeConfig:
    """Rotary positions; a config that says nothing means those of the release."""
    if fields.raw.get("rope_parameters") is None and fields.raw.get("rope_scaling") is None:
        theta = fields.number("rope_theta", 150_000.0)
        return RopeConfig(
            theta=theta, scaling="yarn", factor=32.0, original_max_position=4096, whole_pairs=False
        )
    return read_rope(fields, max_position=length, theta=150_000.0)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Our config -> contents of a config.json, readable by transformers 4 and 5.

    Raises:
        ConfigError: the model cannot be a gpt-oss of theirs.
    """
    moe = experts_of(config, GPT_OSS.architecture)
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
        **write_balance(config, moe),
    }
    return check_all_fields_exported(raw, config, read_config, GPT_OSS)


def rules(config: ModelConfig) -> list[TensorRule]:
    """Every tensor of theirs, in the order of the forward pass."""
    v, h, n = config.vocab_size, config.hidden_size, config.num_heads
    found = [rule("model.embed_tokens.weight", "embed.weight", (v, h), shape=(v, h))]
    for layer in range(config.num_layers):
        theirs, ours = f"model.layers.{layer}", f"layers.{layer}"
        found += [
            rule(
                f"{theirs}.{NORMS['attention_norm']}.weight",
                f"{ours}.attention_norm.weight",
                (h,),
                shape=(h,),
            ),
            *attention_rules(config, f"{theirs}.self_attn", f"{ours}.attention", all_biases=True),
            rule(f"{theirs}.self_attn.sinks", f"{ours}.attention.sinks", (n,), shape=(n,)),
            rule(
                f"{theirs}.{NORMS['mlp_norm']}.weight", f"{ours}.mlp_norm.weight", (h,), shape=(h,)
            ),
            *router_rules(config, f"{theirs}.mlp.router", f"{ours}.moe"),
            *_expert_rules(config, f"{theirs}.mlp.experts", f"{ours}.moe.experts"),
        ]
    found.append(rule("model.norm.weight", "norm.weight", (h,), shape=(h,)))
    if not config.tied_embeddings:
        found.append(rule(HEAD, "head.weight", (v, h), shape=(v, h)))
    return found


def _expert_rules(config: ModelConfig, theirs: str, ours: str) -> list[TensorRule]:
    """Inputs come before outputs, and columns of gate and up take turns."""
    moe, h = config.moe, config.hidden_size
    if moe is None:
        return []
    e, f = moe.num_experts, moe.ffn_hidden_size
    wide, both, back, vector = (
        tuple((0, n) for n in shape) for shape in ((e, 2, f, h), (e, 2, f), (e, h, f), (e, h))
    )
    name = f"{theirs}.gate_up_proj"
    return [
        piece(
            name, f"{ours}.gate_up", wide, shape=(e, h, 2 * f), view=(e, h, f, 2), dims=(0, 3, 2, 1)
        ),
        piece(
            f"{name}_bias",
            f"{ours}.gate_up_bias",
            both,
            shape=(e, 2 * f),
            view=(e, f, 2),
            dims=(0, 2, 1),
        ),
        piece(
            f"{theirs}.down_proj",
            f"{ours}.down",
            back,
            shape=(e, f, h),
            view=(e, f, h),
            dims=(0, 2, 1),
        ),
        piece(f"{theirs}.down_proj_bias", f"{ours}.down_bias", vector, shape=(e, h), view=(e, h)),
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

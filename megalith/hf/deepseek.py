"""Hugging Face format of DeepSeek-V2 and V3: multi-head latent attention, a mixture of experts, and
MTP layers.

Rotary embeddings rotate neighboring features. All layers but the first few have routed and shared
experts; the MTP layers of V3 are numbered after the last layer. Source: DeepSeek-AI 2024,
arXiv:2405.04434 (V2) and arXiv:2412.19437 (V3).
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megalith.config.model import MLAConfig, ModelConfig, MTPConfig, RopeConfig
from megalith.config.moe import MoEConfig, RouterConfig
from megalith.errors import raise_all
from megalith.hf.config_fields import (
    HEAD,
    NORMS,
    ROTARY_BUFFERS,
    SIZES,
    check_all_fields_exported,
    mlp_rules,
)
from megalith.hf.fields import Fields, hf_activation_name
from megalith.hf.moe import (
    ExpertNames,
    LayerRules,
    flags_or_empty,
    fused_moe_rules,
    moe_rules,
    read_num_experts,
)
from megalith.hf.rope import read_rope, write_rope
from megalith.hf.tensor_rules import Family, TensorRule, rule

# --- config.json

LATENT = {
    "kv_lora_rank": "kv_rank",
    "qk_nope_head_dim": "nope_dim",
    "qk_rope_head_dim": "rope_dim",
    "v_head_dim": "value_dim",
}
"""Hugging Face field -> MLAConfig field; missing fields get the defaults of LATENT_DEFAULTS."""

LATENT_DEFAULTS = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

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

OF_TRAINING = (
    "aux_loss_alpha",
    "seq_aux",
    "router_aux_loss_coef",
    "output_router_logits",
    "ep_size",
)
"""Fields that each training run sets."""

FIRST_DENSE = {"deepseek_v2": 0, "deepseek_v3": 3}
"""Default of first_k_dense_replace."""


def read_config(raw: Mapping[str, Any], *, kind: str) -> ModelConfig:
    """Return the ModelConfig of a config.json; `kind` is its model_type.

    Raises:
        ConfigError: fields are missing, of the wrong type, unknown or not supported; all of them
            are reported together.
    """
    fields = Fields(raw)
    sizes: dict[str, Any] = {name: fields.read_int(hf_name) for hf_name, name in SIZES.items()}
    length = fields.read_int("max_position_embeddings", 2048 if kind == "deepseek_v2" else 4096)
    moe = _read_experts(fields, sizes["num_layers"], kind)
    fields.require("num_key_value_heads", sizes["num_heads"])
    fields.require("attention_bias", False)  # biases of the down-projections are not supported
    fields.require("mlp_bias", False)
    fields.require("attention_dropout", 0)
    fields.ignore("head_dim", "qk_head_dim")  # derived from the other sizes
    if kind == "deepseek_v2":  # transformers reads it only in V3
        fields.require("rope_interleave", True)
    rope = replace(
        _read_rope(fields, length), interleaved=fields.read_flag("rope_interleave", True)
    )
    latent: dict[str, Any] = {
        name: fields.read_int(hf_name, LATENT_DEFAULTS[hf_name]) for hf_name, name in LATENT.items()
    }
    q_rank = fields.read_optional_int("q_lora_rank") if "q_lora_rank" in raw else 1536
    depths = _read_num_mtp_layers(fields) if kind == "deepseek_v3" else 0
    config = ModelConfig(
        **sizes,
        num_kv_heads=sizes["num_heads"],
        max_seq_len=length,
        norm_eps=fields.read_number("rms_norm_eps", 1e-6),
        rope=rope,
        mla=MLAConfig(
            **latent, q_rank=q_rank, yarn_mscale=_mscale(raw) if rope.scaling == "yarn" else None
        ),
        activation=fields.read_activation(),
        mtp=MTPConfig(num_layers=depths),
        moe=moe,
        tied_embeddings=fields.read_flag("tie_word_embeddings"),
        init_std=fields.read_number("initializer_range", 0.02, zero=True),
    )
    fields.raise_problems()
    return config


def _read_experts(fields: Fields, layers: int, kind: str) -> MoEConfig | None:
    """Return the mixture of experts of the layers after the dense ones; None if all layers are
    dense."""
    num_dense = fields.read_value("first_k_dense_replace")
    num_dense = FIRST_DENSE[kind] if num_dense is None else num_dense
    if type(num_dense) is not int or num_dense < 0:
        fields.problems.append(
            f"first_k_dense_replace={num_dense!r}: expected a whole number of at least 0."
        )
        return None
    fields.ignore(*OF_TRAINING)
    if num_dense >= layers:
        fields.ignore(*OF_EXPERTS)
        return None
    is_v3 = kind == "deepseek_v3"
    fields.require("moe_layer_freq", 1)
    fields.require("scoring_func", "sigmoid" if is_v3 else "softmax")
    count = read_num_experts(
        fields, 256 if is_v3 else 64, names=("n_routed_experts", "num_local_experts", "num_experts")
    )
    width = fields.read_int("moe_intermediate_size", 2048 if is_v3 else 1407)
    top_k = fields.read_int("num_experts_per_tok", 8)
    shared = (
        fields.read_value("n_shared_experts")
        if "n_shared_experts" in fields.raw
        else (1 if is_v3 else 2)
    )
    if type(shared) is not int or shared < 1:
        fields.problems.append(
            f"n_shared_experts={shared!r}: transformers needs at least one. Use 1 or more."
        )
        shared = 1
    router = RouterConfig(
        score="sigmoid" if is_v3 else "softmax",
        expert_bias=is_v3,
        norm_topk_prob=fields.read_flag("norm_topk_prob", is_v3),
        routed_scaling_factor=fields.read_number("routed_scaling_factor", 2.5 if is_v3 else 1.0),
        **_read_groups(fields, top_k, kind),
    )
    if not is_v3 and router.norm_topk_prob:
        fields.problems.append(
            "norm_topk_prob=True is not supported: transformers ignores it for DeepSeek-V2. Use "
            "False."
        )
    return MoEConfig(
        num_experts=count,
        top_k=top_k,
        ffn_hidden_size=width,
        shared_ffn_hidden_size=shared * width,
        router=router,
        layers=flags_or_empty([layer >= num_dense for layer in range(layers)]),
    )


def _read_groups(fields: Fields, top_k: int, kind: str) -> dict[str, Any]:
    """Return the arguments of RouterConfig about expert groups; none if all groups are selected."""
    method = fields.read_value("topk_method")
    groups, topk_groups = fields.read_value("n_group"), fields.read_value("topk_group")
    if kind == "deepseek_v3":
        groups, topk_groups = (
            8 if groups is None else groups,
            4 if topk_groups is None else topk_groups,
        )
        methods: tuple[Any, ...] = ("noaux_tc", None)
    else:
        methods = ("greedy", "group_limited_greedy", None)
        groups, topk_groups = (groups, topk_groups) if method == "group_limited_greedy" else (1, 1)
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
    if kind == "deepseek_v3" and top_k != 2 * topk_groups:
        fields.problems.append(
            f"num_experts_per_tok={top_k}, topk_group={topk_groups}: transformers scores a group "
            "by its "
            "best two experts, which must equal num_experts_per_tok / topk_group. "
            f"Use topk_group={max(1, top_k // 2)}."
        )
    return {
        "num_groups": groups,
        "topk_groups": topk_groups,
        "group_score": "top" if kind == "deepseek_v3" else "max",
    }


def _write_experts(config: ModelConfig, kind: str) -> dict[str, Any]:
    """Return the config fields of the mixture of experts: the inverse of `_read_experts`."""
    moe = config.moe
    if moe is None:
        return {"first_k_dense_replace": config.num_layers}
    dense = next(
        (layer for layer in range(config.num_layers) if config.has_experts(layer)),
        config.num_layers,
    )
    router = moe.router
    method = (
        "noaux_tc"
        if kind == "deepseek_v3"
        else "greedy"
        if router.num_groups is None
        else "group_limited_greedy"
    )
    return {
        "first_k_dense_replace": dense,
        "moe_layer_freq": 1,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn_hidden_size,
        "n_shared_experts": (moe.shared_ffn_hidden_size or 0) // moe.ffn_hidden_size or 1,
        "scoring_func": router.score,
        "topk_method": method,
        "n_group": router.num_groups or 1,
        "topk_group": router.topk_groups or 1,
        "norm_topk_prob": router.norm_topk_prob,
        "routed_scaling_factor": router.routed_scaling_factor,
    }


def _read_rope(fields: Fields, length: int) -> RopeConfig:
    """Return the rotary embeddings; `_mscale` reads the attention temperature from the same
    fields."""
    rope = read_rope(fields, max_position=length)
    if rope.scaling not in (
        "none",
        "yarn",
    ):  # transformers scales attention under all of them, the release under these two
        fields.problems.append(
            f"rotary positions with rope_type={rope.scaling!r} are not supported in DeepSeek: "
            f"rope_type must be 'default' or 'yarn'."
        )
    return rope


def _mscale(raw: Mapping[str, Any]) -> float | None:
    """Return mscale_all_dim, the attention temperature of YaRN, or None if it is missing or 0."""
    parts = [
        part
        for name in ("rope_parameters", "rope_scaling")
        if isinstance(part := raw.get(name), Mapping)
    ]
    values = [part["mscale_all_dim"] for part in parts if part.get("mscale_all_dim")]
    return next(
        (float(value) for value in values if type(value) in (int, float)), None
    )  # read_rope reports other types


def _read_num_mtp_layers(fields: Fields) -> int:
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
        return 0
    return int(depths)


def adjust_config(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """Remove the MTP layers from the config if their tensors are missing: transformers saves models
    without them."""
    has_mtp = any(name.startswith(f"model.layers.{config.num_layers}.") for name in names)
    return config if has_mtp else replace(config, mtp=MTPConfig())


def write_config(config: ModelConfig, *, family: str) -> dict[str, Any]:
    """Return the config.json of a model, readable by transformers 4 and 5; `family` is its
    model_type.

    Raises:
        ConfigError: the model cannot be expressed as DeepSeek.
    """
    kind, mla = FAMILIES[family], config.mla
    if mla is None:
        raise_all(
            [
                f"model.mla={mla}: {kind.architecture} needs latent attention. Use another family "
                "for this model."
            ]
        )
    assert mla is not None
    if not mla.norms:
        raise_all(
            [
                f"model.mla.norms=false: {kind.architecture} always normalizes the latent "
                "vectors of "
                "queries, keys and values. Use a model with model.mla.norms=true, or keep "
                "this one as a Megalith checkpoint."
            ]
        )
    depths = {"num_nextn_predict_layers": config.mtp.num_layers} if family == "deepseek_v3" else {}
    raw = {
        "architectures": [kind.architecture],
        "model_type": kind.model_type,
        **{hf_name: getattr(config, name) for hf_name, name in SIZES.items()},
        "num_key_value_heads": config.num_heads,
        **{hf_name: getattr(mla, name) for hf_name, name in LATENT.items()},
        "q_lora_rank": mla.q_rank,
        **_write_experts(config, family),
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "hidden_act": hf_activation_name(config.activation),
        **_write_rope(config.rope, mla),
        **({"rope_interleave": config.rope.interleaved} if family == "deepseek_v3" else {}),
        **depths,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tied_embeddings,
        "use_cache": True,
    }
    mtp = MTPConfig(
        num_layers=config.mtp.num_layers
    )  # the weight of the MTP losses is a setting of each run
    exported = replace(config, num_kv_heads=config.num_heads, head_dim=None, mtp=mtp)
    return check_all_fields_exported(raw, exported, partial(read_config, kind=family), kind)


def _write_rope(rope: RopeConfig, mla: MLAConfig) -> dict[str, Any]:
    """Return the fields of rotary embeddings with mscale; a ratio of 1 as in the release, which all
    programs read."""
    written = write_rope(rope)
    if rope.scaling != "yarn" or mla.yarn_mscale is None:
        return written
    is_default = rope.attention_factor == 1.0
    for name in ("rope_scaling", "rope_parameters"):
        if is_default:
            del written[name]["attention_factor"]
            written[name]["mscale"] = mla.yarn_mscale
        written[name]["mscale_all_dim"] = mla.yarn_mscale
    return written


# --- tensors


EXPERT_NAMES = ExpertNames(shared="shared_experts")


def rules(config: ModelConfig) -> list[TensorRule]:
    """Return the tensor rules, in the order of the forward pass."""
    return _rules(config, moe_rules(EXPERT_NAMES))


def fused_rules(config: ModelConfig) -> list[TensorRule]:
    """Return the tensor rules with the experts of a layer fused into two tensors."""
    return _rules(config, fused_moe_rules(EXPERT_NAMES))


def _rules(config: ModelConfig, experts: LayerRules) -> list[TensorRule]:
    v, h = config.vocab_size, config.hidden_size
    rules = [rule("model.embed_tokens.weight", "embed.weight", (v, h), shape=(v, h))]
    for layer in range(config.num_layers):
        rules += _layer_rules(config, layer, f"model.layers.{layer}", f"layers.{layer}", experts)
    rules.append(_vector("model.norm.weight", "norm.weight", h))
    if not config.tied_embeddings:
        rules.append(rule(HEAD, "head.weight", (v, h), shape=(v, h)))
    for depth in range(config.mtp.num_layers):
        hf_layer, layer_name = f"model.layers.{config.num_layers + depth}", f"mtp.{depth}"
        rules += [
            _vector(f"{hf_layer}.enorm.weight", f"{layer_name}.embed_norm.weight", h),
            _vector(f"{hf_layer}.hnorm.weight", f"{layer_name}.hidden_norm.weight", h),
            rule(
                f"{hf_layer}.eh_proj.weight", f"{layer_name}.project", (h, 2 * h), shape=(h, 2 * h)
            ),
            *_layer_rules(config, config.num_layers - 1, hf_layer, f"{layer_name}.layer", experts),
            _vector(f"{hf_layer}.shared_head.norm.weight", f"{layer_name}.norm.weight", h),
        ]
    return rules


def copies(config: ModelConfig) -> list[TensorRule]:
    """Return the rules of embedding and head of every MTP layer, which published files repeat."""
    size, head = (
        (config.vocab_size, config.hidden_size),
        "embed.weight" if config.tied_embeddings else "head.weight",
    )
    names = [f"model.layers.{config.num_layers + depth}" for depth in range(config.mtp.num_layers)]
    tables = {"embed_tokens": "embed.weight", "shared_head.head": head}
    return [
        rule(f"{name}.{suffix}.weight", parameter, size, shape=size)
        for name in names
        for suffix, parameter in tables.items()
    ]


def _layer_rules(
    config: ModelConfig, layer: int, hf_layer: str, layer_name: str, experts: LayerRules
) -> list[TensorRule]:
    h = config.hidden_size
    has_experts = config.has_experts(layer)
    return [
        _vector(
            f"{hf_layer}.{NORMS['attention_norm']}.weight", f"{layer_name}.attention_norm.weight", h
        ),
        *_attention_rules(config, f"{hf_layer}.self_attn", f"{layer_name}.attention"),
        _vector(f"{hf_layer}.{NORMS['mlp_norm']}.weight", f"{layer_name}.mlp_norm.weight", h),
        *(
            experts(config, hf_layer, f"{layer_name}.moe")
            if has_experts
            else mlp_rules(config, f"{hf_layer}.mlp", f"{layer_name}.mlp")
        ),
    ]


def _attention_rules(config: ModelConfig, hf_name: str, parameter: str) -> list[TensorRule]:
    """Return the rules of latent attention: down-projections, norms, up-projections and the
    output."""
    h, n, mla = config.hidden_size, config.num_heads, config.mla
    assert mla is not None
    q, kv = mla.nope_dim + mla.rope_dim, mla.nope_dim + mla.value_dim
    if mla.q_rank is None:
        queries = [rule(f"{hf_name}.q_proj.weight", f"{parameter}.q", (n, q, h), shape=(n * q, h))]
    else:
        queries = [
            rule(
                f"{hf_name}.q_a_proj.weight",
                f"{parameter}.q_down",
                (mla.q_rank, h),
                shape=(mla.q_rank, h),
            ),
            _vector(
                f"{hf_name}.q_a_layernorm.weight", f"{parameter}.q_down_norm.weight", mla.q_rank
            ),
            rule(
                f"{hf_name}.q_b_proj.weight",
                f"{parameter}.q_up",
                (n, q, mla.q_rank),
                shape=(n * q, mla.q_rank),
            ),
        ]
    kv_down_size, r = mla.kv_rank + mla.rope_dim, mla.kv_rank
    return [
        *queries,
        rule(
            f"{hf_name}.kv_a_proj_with_mqa.weight",
            f"{parameter}.kv_down",
            (kv_down_size, h),
            shape=(kv_down_size, h),
        ),
        _vector(f"{hf_name}.kv_a_layernorm.weight", f"{parameter}.kv_down_norm.weight", r),
        rule(f"{hf_name}.kv_b_proj.weight", f"{parameter}.kv_up", (n, kv, r), shape=(n * kv, r)),
        rule(
            f"{hf_name}.o_proj.weight",
            f"{parameter}.o",
            (h, n, mla.value_dim),
            shape=(h, n * mla.value_dim),
        ),
    ]


def _vector(hf_name: str, parameter: str, size: int) -> TensorRule:
    return rule(hf_name, parameter, (size,), shape=(size,))


DEEPSEEK_V2, DEEPSEEK_V3 = (
    Family(
        architecture=architecture,
        model_type=kind,
        read_config=partial(read_config, kind=kind),
        write_config=partial(write_config, family=kind),
        rules=rules,
        fused_rules=fused_rules,
        ignored=ROTARY_BUFFERS,
        copies=copies,
        tied=HEAD,
        adjust_config=adjust_config,
    )
    for kind, architecture in {
        "deepseek_v2": "DeepseekV2ForCausalLM",
        "deepseek_v3": "DeepseekV3ForCausalLM",
    }.items()
)
FAMILIES: Mapping[str, Family] = {
    family.model_type: family for family in (DEEPSEEK_V2, DEEPSEEK_V3)
}

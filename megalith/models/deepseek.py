"""DeepSeek-V2 and V3 as Hugging Face knows them: config.json and tensors.

Latent attention, pairs of neighboring features that turn, a mixture of experts beside shared ones
in all layers but the first few, and in V3 MTP layers, numbered after the
last. Source: DeepSeek-AI 2024, arXiv:2405.04434 (V2) and arXiv:2412.19437 (V3).
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megalith.config.mla import MLAConfig
from megalith.config.model import ModelConfig
from megalith.config.moe import MoEConfig, RouterConfig
from megalith.config.mtp import MTPConfig
from megalith.config.rope import RopeConfig
from megalith.errors import raise_all
from megalith.models.experts import (
    LayerRules,
    Words,
    joined_rules,
    mixture_rules,
    pattern,
    read_count,
)
from megalith.models.fields import Fields, activation_word
from megalith.models.names import Family, TensorRule, rule
from megalith.models.rope import read_rope, write_rope
from megalith.models.usual import (
    HEAD,
    NORMS,
    ROTARY_BUFFERS,
    SIZES,
    check_all_fields_exported,
    mlp_rules,
)

# --- config.json

LATENT = {
    "kv_lora_rank": "kv_rank",
    "qk_nope_head_dim": "nope_dim",
    "qk_rope_head_dim": "rope_dim",
    "v_head_dim": "value_dim",
}
"""Theirs -> ours; a config without one of them has the default that is given here."""

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
"""Fields that a model without experts has no use for."""

OF_TRAINING = (
    "aux_loss_alpha",
    "seq_aux",
    "router_aux_loss_coef",
    "output_router_logits",
    "ep_size",
)
"""Fields that each run decides for itself."""

FIRST_DENSE = {"deepseek_v2": 0, "deepseek_v3": 3}
"""first_k_dense_replace of a config without it."""


def read_config(raw: Mapping[str, Any], *, kind: str) -> ModelConfig:
    """Contents of a config.json -> our config; `kind` is its model_type.

    Raises:
        ConfigError: fields that are missing, of the wrong kind, unknown, or not supported; all of
        them together.
    """
    fields = Fields(raw)
    sizes: dict[str, Any] = {ours: fields.whole(theirs) for theirs, ours in SIZES.items()}
    length = fields.whole("max_position_embeddings", 2048 if kind == "deepseek_v2" else 4096)
    moe = _read_experts(fields, sizes["num_layers"], kind)
    fields.only("num_key_value_heads", sizes["num_heads"])
    fields.only("attention_bias", False)  # theirs is of the projections down, which have none here
    fields.only("mlp_bias", False)
    fields.only("attention_dropout", 0)
    fields.ignore("head_dim", "qk_head_dim")  # they follow from the parts' sizes
    if kind == "deepseek_v2":  # transformers looks at it in V3 only
        fields.only("rope_interleave", True)
    rope = replace(_read_rope(fields, length), interleaved=fields.flag("rope_interleave", True))
    latent: dict[str, Any] = {
        ours: fields.whole(theirs, LATENT_DEFAULTS[theirs]) for theirs, ours in LATENT.items()
    }
    q_rank = fields.whole_or_none("q_lora_rank") if "q_lora_rank" in raw else 1536
    depths = _depths(fields) if kind == "deepseek_v3" else 0
    found = ModelConfig(
        **sizes,
        num_kv_heads=sizes["num_heads"],
        max_seq_len=length,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        mla=MLAConfig(
            **latent, q_rank=q_rank, yarn_mscale=_mscale(raw) if rope.scaling == "yarn" else None
        ),
        activation=fields.activation(),
        mtp=MTPConfig(num_layers=depths),
        moe=moe,
        tied_embeddings=fields.flag("tie_word_embeddings"),
        init_std=fields.number("initializer_range", 0.02, zero=True),
    )
    fields.finish()
    return found


def _read_experts(fields: Fields, layers: int, kind: str) -> MoEConfig | None:
    """The mixture of the layers after the dense ones; None where there are no others."""
    dense = fields.value("first_k_dense_replace")
    dense = FIRST_DENSE[kind] if dense is None else dense
    if type(dense) is not int or dense < 0:
        fields.problems.append(
            f"first_k_dense_replace={dense!r}: expected a whole number of at least 0."
        )
        return None
    fields.ignore(*OF_TRAINING)
    if dense >= layers:
        fields.ignore(*OF_EXPERTS)
        return None
    third = kind == "deepseek_v3"
    fields.only("moe_layer_freq", 1)
    fields.only("scoring_func", "sigmoid" if third else "softmax")
    count = read_count(
        fields, 256 if third else 64, names=("n_routed_experts", "num_local_experts", "num_experts")
    )
    width = fields.whole("moe_intermediate_size", 2048 if third else 1407)
    chosen = fields.whole("num_experts_per_tok", 8)
    shared = (
        fields.value("n_shared_experts")
        if "n_shared_experts" in fields.raw
        else (1 if third else 2)
    )
    if type(shared) is not int or shared < 1:
        fields.problems.append(
            f"n_shared_experts={shared!r}: transformers builds one at least. Use 1 or more."
        )
        shared = 1
    router = RouterConfig(
        score="sigmoid" if third else "softmax",
        expert_bias=third,
        norm_topk_prob=fields.flag("norm_topk_prob", third),
        routed_scaling_factor=fields.number("routed_scaling_factor", 2.5 if third else 1.0),
        **_read_groups(fields, chosen, kind),
    )
    if not third and router.norm_topk_prob:
        fields.problems.append(
            "norm_topk_prob=True is not supported: transformers does not look at it here. Use "
            "False."
        )
    return MoEConfig(
        num_experts=count,
        top_k=chosen,
        ffn_hidden_size=width,
        shared_ffn_hidden_size=shared * width,
        router=router,
        layers=pattern([layer >= dense for layer in range(layers)]),
    )


def _read_groups(fields: Fields, chosen: int, kind: str) -> dict[str, Any]:
    """Arguments of RouterConfig about groups; choosing from all groups is choosing from all
    experts."""
    method = fields.value("topk_method")
    groups, best = fields.value("n_group"), fields.value("topk_group")
    if kind == "deepseek_v3":
        groups, best = 8 if groups is None else groups, 4 if best is None else best
        known: tuple[Any, ...] = ("noaux_tc", None)
    else:
        known = ("greedy", "group_limited_greedy", None)
        groups, best = (groups, best) if method == "group_limited_greedy" else (1, 1)
    if method not in known:
        fields.problems.append(
            f"topk_method={method!r} is not supported: it must be {known[-2]!r}."
        )
    if any(type(value) is not int or value < 1 for value in (groups, best)):
        fields.problems.append(
            f"n_group={groups!r}, topk_group={best!r}: expected whole numbers of at least 1."
        )
        return {}
    if best >= groups:
        return {}
    if kind == "deepseek_v3" and chosen != 2 * best:
        fields.problems.append(
            f"num_experts_per_tok={chosen}, topk_group={best}: transformers judges a group by its "
            "best two experts, "
            f"which must be num_experts_per_tok / topk_group. Use topk_group={max(1, chosen // 2)}."
        )
    return {
        "num_groups": groups,
        "topk_groups": best,
        "group_score": "top" if kind == "deepseek_v3" else "max",
    }


def _write_experts(config: ModelConfig, kind: str) -> dict[str, Any]:
    """The fields of `_read_experts`."""
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
    """Rotary positions; `mscale` of latent attention is read apart, from the same place."""
    rope = read_rope(fields, max_position=length)
    if rope.scaling not in (
        "none",
        "yarn",
    ):  # transformers has_attention_temperature under all of them, the authors know these two
        fields.problems.append(
            f"rotary positions with rope_type={rope.scaling!r} are not supported in a DeepSeek: "
            "rope_type must be "
            f"'default' or 'yarn'."
        )
    return rope


def _mscale(raw: Mapping[str, Any]) -> float | None:
    """mscale_all_dim, which has_attention_temperature the scores where it is given and not 0."""
    parts = [
        part
        for name in ("rope_parameters", "rope_scaling")
        if isinstance(part := raw.get(name), Mapping)
    ]
    values = [part["mscale_all_dim"] for part in parts if part.get("mscale_all_dim")]
    return next(
        (float(value) for value in values if type(value) in (int, float)), None
    )  # others are refused elsewhere


def _depths(fields: Fields) -> int:
    """MTP layers: by the release's name of the field, or that of
    transformers 5."""
    names = ("num_nextn_predict_layers", "num_mtp_layers")
    values = [fields.value(name) for name in names]
    found = next((value for value in values if value is not None), 0)
    if (
        any(value is not None and (type(value) is not int or value != found) for value in values)
        or found < 0
    ):
        fields.problems.append(
            f"{names[0]}={values[0]!r}, {names[1]}={values[1]!r}: expected one whole number, or 0."
        )
        return 0
    return int(found)


def settle(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """The MTP layers, only if their tensors are there: transformers saves a
    model without."""
    there = any(name.startswith(f"model.layers.{config.num_layers}.") for name in names)
    return config if there else replace(config, mtp=MTPConfig())


def write_config(config: ModelConfig, *, family: str) -> dict[str, Any]:
    """Our config -> contents of a config.json, readable by transformers 4 and 5; `family` is its
    model_type.

    Raises:
        ConfigError: the model cannot be a DeepSeek of theirs.
    """
    kind, mla = FAMILIES[family], config.mla
    if mla is None:
        raise_all(
            [
                f"model.mla={mla}: {kind.architecture} has latent attention. Use another family "
                "for this model."
            ]
        )
    assert mla is not None
    if not mla.norms:
        raise_all(
            [
                f"model.mla.norms=false: {kind.architecture} norms the short vectors of queries, "
                "keys and values, and has "
                "no field that says otherwise. Use a model with model.mla.norms=true, or keep "
                "this one as it is."
            ]
        )
    depths = {"num_nextn_predict_layers": config.mtp.num_layers} if family == "deepseek_v3" else {}
    raw = {
        "architectures": [kind.architecture],
        "model_type": kind.model_type,
        **{theirs: getattr(config, ours) for theirs, ours in SIZES.items()},
        "num_key_value_heads": config.num_heads,
        **{theirs: getattr(mla, ours) for theirs, ours in LATENT.items()},
        "q_lora_rank": mla.q_rank,
        **_write_experts(config, family),
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "hidden_act": activation_word(config.activation),
        **_write_rope(config.rope, mla),
        **({"rope_interleave": config.rope.interleaved} if family == "deepseek_v3" else {}),
        **depths,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tied_embeddings,
        "use_cache": True,
    }
    weighed = MTPConfig(
        num_layers=config.mtp.num_layers
    )  # how much the further losses count is a choice of each run
    used = replace(config, num_kv_heads=config.num_heads, head_dim=None, mtp=weighed)
    return check_all_fields_exported(raw, used, partial(read_config, kind=family), kind)


def _write_rope(rope: RopeConfig, mla: MLAConfig) -> dict[str, Any]:
    """As usual, with mscale; a ratio of 1 in the words of the release, which all that read these
    models know."""
    written = write_rope(rope)
    if rope.scaling != "yarn" or mla.yarn_mscale is None:
        return written
    plain = rope.attention_factor == 1.0
    for name in ("rope_scaling", "rope_parameters"):
        if plain:
            del written[name]["attention_factor"]
            written[name]["mscale"] = mla.yarn_mscale
        written[name]["mscale_all_dim"] = mla.yarn_mscale
    return written


# --- tensors


WORDS = Words(shared="shared_experts")


def rules(config: ModelConfig) -> list[TensorRule]:
    """Every tensor of a DeepSeek of theirs, in the order of the forward pass."""
    return _rules(config, mixture_rules(WORDS))


def joined(config: ModelConfig) -> list[TensorRule]:
    """The same with all experts of a layer in two tensors."""
    return _rules(config, joined_rules(WORDS))


def _rules(config: ModelConfig, experts: LayerRules) -> list[TensorRule]:
    v, h = config.vocab_size, config.hidden_size
    found = [rule("model.embed_tokens.weight", "embed.weight", (v, h), shape=(v, h))]
    for layer in range(config.num_layers):
        found += _layer_rules(config, layer, f"model.layers.{layer}", f"layers.{layer}", experts)
    found.append(_vector("model.norm.weight", "norm.weight", h))
    if not config.tied_embeddings:
        found.append(rule(HEAD, "head.weight", (v, h), shape=(v, h)))
    for depth in range(config.mtp.num_layers):
        theirs, ours = f"model.layers.{config.num_layers + depth}", f"mtp.{depth}"
        found += [
            _vector(f"{theirs}.enorm.weight", f"{ours}.embed_norm.weight", h),
            _vector(f"{theirs}.hnorm.weight", f"{ours}.hidden_norm.weight", h),
            rule(f"{theirs}.eh_proj.weight", f"{ours}.project", (h, 2 * h), shape=(h, 2 * h)),
            *_layer_rules(config, config.num_layers - 1, theirs, f"{ours}.layer", experts),
            _vector(f"{theirs}.shared_head.norm.weight", f"{ours}.norm.weight", h),
        ]
    return found


def copies(config: ModelConfig) -> list[TensorRule]:
    """The embedding and the head, once more with every MTP layer, as in
    published files."""
    size, head = (
        (config.vocab_size, config.hidden_size),
        "embed.weight" if config.tied_embeddings else "head.weight",
    )
    names = [f"model.layers.{config.num_layers + depth}" for depth in range(config.mtp.num_layers)]
    both = {"embed_tokens": "embed.weight", "shared_head.head": head}
    return [
        rule(f"{name}.{theirs}.weight", ours, size, shape=size)
        for name in names
        for theirs, ours in both.items()
    ]


def _layer_rules(
    config: ModelConfig, layer: int, theirs: str, ours: str, experts: LayerRules
) -> list[TensorRule]:
    h = config.hidden_size
    mixed = config.has_experts(layer)
    return [
        _vector(f"{theirs}.{NORMS['attention_norm']}.weight", f"{ours}.attention_norm.weight", h),
        *_attention_rules(config, f"{theirs}.self_attn", f"{ours}.attention"),
        _vector(f"{theirs}.{NORMS['mlp_norm']}.weight", f"{ours}.mlp_norm.weight", h),
        *(
            experts(config, theirs, f"{ours}.moe")
            if mixed
            else mlp_rules(config, f"{theirs}.mlp", f"{ours}.mlp")
        ),
    ]


def _attention_rules(config: ModelConfig, theirs: str, ours: str) -> list[TensorRule]:
    """The projections down to short vectors, their norms, the projections up to heads, and the
    output."""
    h, n, mla = config.hidden_size, config.num_heads, config.mla
    assert mla is not None
    q, kv = mla.nope_dim + mla.rope_dim, mla.nope_dim + mla.value_dim
    if mla.q_rank is None:
        queries = [rule(f"{theirs}.q_proj.weight", f"{ours}.q", (n, q, h), shape=(n * q, h))]
    else:
        queries = [
            rule(
                f"{theirs}.q_a_proj.weight",
                f"{ours}.q_down",
                (mla.q_rank, h),
                shape=(mla.q_rank, h),
            ),
            _vector(f"{theirs}.q_a_layernorm.weight", f"{ours}.q_down_norm.weight", mla.q_rank),
            rule(
                f"{theirs}.q_b_proj.weight",
                f"{ours}.q_up",
                (n, q, mla.q_rank),
                shape=(n * q, mla.q_rank),
            ),
        ]
    short, r = mla.kv_rank + mla.rope_dim, mla.kv_rank
    return [
        *queries,
        rule(
            f"{theirs}.kv_a_proj_with_mqa.weight", f"{ours}.kv_down", (short, h), shape=(short, h)
        ),
        _vector(f"{theirs}.kv_a_layernorm.weight", f"{ours}.kv_down_norm.weight", r),
        rule(f"{theirs}.kv_b_proj.weight", f"{ours}.kv_up", (n, kv, r), shape=(n * kv, r)),
        rule(
            f"{theirs}.o_proj.weight",
            f"{ours}.o",
            (h, n, mla.value_dim),
            shape=(h, n * mla.value_dim),
        ),
    ]


def _vector(theirs: str, ours: str, size: int) -> TensorRule:
    return rule(theirs, ours, (size,), shape=(size,))


DEEPSEEK_V2, DEEPSEEK_V3 = (
    Family(
        architecture=architecture,
        model_type=kind,
        read_config=partial(read_config, kind=kind),
        write_config=partial(write_config, family=kind),
        rules=rules,
        joined=joined,
        ignored=ROTARY_BUFFERS,
        copies=copies,
        tied=HEAD,
        settle=settle,
    )
    for kind, architecture in {
        "deepseek_v2": "DeepseekV2ForCausalLM",
        "deepseek_v3": "DeepseekV3ForCausalLM",
    }.items()
)
FAMILIES: Mapping[str, Family] = {
    family.model_type: family for family in (DEEPSEEK_V2, DEEPSEEK_V3)
}

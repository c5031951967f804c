"""Names of Megatron-LM's tensors: the canonical name of every spelling, and the rules between
canonical tensors and parameters.

A checkpoint stacks layers in one tensor or has a tensor for each layer, has experts on an axis or
in tensors of their own, and gate and up of an MLP in one tensor or in two. `normalize_tensors`
returns one tensor for each layer, in one spelling.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megalith.checkpoint.chunks import ChunkedTensor, MegatronFolder, TensorChunk
from megalith.checkpoint.format import lengths
from megalith.config.model import ModelConfig
from megalith.errors import MAX_PROBLEMS, CheckpointError
from megalith.hf.tensor_rules import (
    LayerCondition,
    TensorGroup,
    TensorRow,
    TensorRule,
    TensorTable,
    build_rules,
    group_by_tensor,
    has_attention,
    has_experts,
    has_mlp,
)
from megalith.plan.shards import Box, intersect

# --- table of canonical tensors: those that Megatron-core 0.16 stores, in the layer form


def _all_of(*conditions: LayerCondition) -> LayerCondition:
    return lambda config, layer: all(condition(config, layer) for condition in conditions)


def _has_mla(config: ModelConfig, layer: int) -> bool:
    return has_attention(config, layer) and config.mla is not None


def _has_qkv(config: ModelConfig, layer: int) -> bool:
    return has_attention(config, layer) and config.mla is None


def _has_gate(config: ModelConfig, layer: int) -> bool:
    return _has_qkv(config, layer) and config.attention.gated


def _has_no_gate(config: ModelConfig, layer: int) -> bool:
    return _has_qkv(config, layer) and not config.attention.gated


def _has_qk_norm(config: ModelConfig, layer: int) -> bool:
    return _has_qkv(config, layer) and config.at(layer).attention.qk_norm == "head"


def _has_latent_norms(config: ModelConfig, layer: int) -> bool:
    return _has_mla(config, layer) and config.mla is not None and config.mla.norms


def _has_q_latent_norm(config: ModelConfig, layer: int) -> bool:
    return _has_latent_norms(config, layer) and bool(config.mla and config.mla.q_rank)


def _has_linear_attention(config: ModelConfig, layer: int) -> bool:
    return config.attention_part(layer) == "linear"


def _has_linear_mlp(config: ModelConfig, layer: int) -> bool:
    return config.mlp_part(layer) == "linear"


def _is_gated(config: ModelConfig, layer: int) -> bool:
    return config.gated


def _is_not_gated(config: ModelConfig, layer: int) -> bool:
    return not config.gated


def _build_norm_rows(name: str, parameter: str, dims: str = "h") -> tuple[TensorRow, ...]:
    """Return the rows of a norm; `name` precedes `weight` and `bias`, and only a LayerNorm has a
    bias."""
    return (
        TensorRow(f"{name}weight", f"{parameter}weight", dims),
        TensorRow(f"{name}bias", f"{parameter}bias", dims, when="norm=layer"),
    )


def _build_norm_group(
    name: str, parameter: str, when: LayerCondition, *, dims: str = "h", fused: bool = True
) -> TensorGroup:
    """Return the tensors of a norm in a layer; `fused`: as tensors of the linear layer after it."""
    return TensorGroup(
        name, parameter, _build_norm_rows("layer_norm_" if fused else "", "", dims), when
    )


def _build_qkv_group(when: LayerCondition, *, gated: bool) -> TensorGroup:
    """Return the tensor of queries, keys and values: for each KV group its r query heads, their
    gates (`gated`), the key head and the value head."""
    heads = "r+r" if gated else "r"
    size = f"{heads}+2"
    rows = [("0", "r", "q"), *([("r", heads, "gate")] if gated else [])]
    result: list[TensorRow] = []
    for kind, dims, suffix in (("weight", " h", ""), ("bias", "", "_bias")):
        setting = "qkv_bias" if kind == "bias" else ""
        result += [
            TensorRow(
                f"linear_qkv.{kind}",
                f"{parameter}{suffix}",
                f"(g {size}[{start}:{stop}] d){dims}",
                when=setting,
                per_group=True,
            )
            for start, stop, parameter in rows
        ]
        result += [
            TensorRow(
                f"linear_qkv.{kind}",
                f"kv{suffix}",
                f"(g {size}[{heads}+{index}] d){dims}",
                f"[{index}] g d{dims}",
                when=setting,
            )
            for index in (0, 1)
        ]
    return TensorGroup("self_attention", "attention", tuple(result), when)


_OUTPUT_BIAS = TensorRow("linear_proj.bias", "o_bias", "h", when="output_bias")

_ATTENTION = (
    _build_norm_group("self_attention.linear_qkv", "attention_norm", _has_qkv),
    _build_norm_group("input_layernorm", "attention_norm", _has_mla, fused=False),
    _build_norm_group("self_attention", "attention_norm", _has_linear_attention),
    _build_qkv_group(_has_no_gate, gated=False),
    _build_qkv_group(_has_gate, gated=True),
    _build_norm_group(
        "self_attention.q_layernorm", "attention.q_norm", _has_qk_norm, dims="d", fused=False
    ),
    _build_norm_group(
        "self_attention.k_layernorm", "attention.k_norm", _has_qk_norm, dims="d", fused=False
    ),
    TensorGroup(
        "self_attention",
        "attention",
        (
            TensorRow("core_attention.softmax_offset", "sinks", "n", when="attention.sinks"),
            TensorRow("linear_proj.weight", "o", "h (n d)"),
            _OUTPUT_BIAS,
        ),
        _has_qkv,
    ),
    _build_norm_group(
        "self_attention.linear_q_up_proj",
        "attention.q_down_norm",
        _has_q_latent_norm,
        dims="q_rank",
    ),
    _build_norm_group(
        "self_attention.linear_kv_up_proj",
        "attention.kv_down_norm",
        _has_latent_norms,
        dims="kv_rank",
    ),
    TensorGroup(
        "self_attention",
        "attention",
        (
            TensorRow("linear_q_proj.weight", "q", "(n nope_d+rope_d) h", when="!mla.q_rank"),
            TensorRow("linear_q_down_proj.weight", "q_down", "q_rank h", when="mla.q_rank"),
            TensorRow(
                "linear_q_up_proj.weight", "q_up", "(n nope_d+rope_d) q_rank", when="mla.q_rank"
            ),
            TensorRow("linear_kv_down_proj.weight", "kv_down", "kv_rank+rope_d h"),
            TensorRow("linear_kv_up_proj.weight", "kv_up", "(n nope_d+value_d) kv_rank"),
            TensorRow("linear_proj.weight", "o", "h (n value_d)"),
            _OUTPUT_BIAS,
        ),
        _has_mla,
    ),
    TensorGroup(
        "self_attention",
        "attention",
        (
            TensorRow("weight", "linear", "h h"),
            TensorRow("bias", "linear_bias", "h", when="output_bias"),
        ),
        _has_linear_attention,
    ),
)


def _build_mlp_groups(
    name: str, parameter: str, when: LayerCondition, *, size: str = "f"
) -> tuple[TensorGroup, TensorGroup]:
    """Return the tensors of an MLP with a gate, whose first layer is [gate; up], and of one
    without."""
    gated = (
        TensorRow("linear_fc1.weight", "gate_up", f"(2 {size}) h"),
        TensorRow("linear_fc1.bias", "gate_up_bias", f"(2 {size})", when="mlp_bias"),
    )
    ungated = (
        TensorRow("linear_fc1.weight", "up", f"{size} h"),
        TensorRow("linear_fc1.bias", "up_bias", size, when="mlp_bias"),
    )
    down = (
        TensorRow("linear_fc2.weight", "down", f"h {size}"),
        TensorRow("linear_fc2.bias", "down_bias", "h", when="mlp_bias"),
    )
    return (
        TensorGroup(name, parameter, (*gated, *down), _all_of(when, _is_gated)),
        TensorGroup(name, parameter, (*ungated, *down), _all_of(when, _is_not_gated)),
    )


def _has_shared_experts(config: ModelConfig, layer: int) -> bool:
    moe = config.moe
    return has_experts(config, layer) and moe is not None and bool(moe.shared_ffn_hidden_size)


_GATED_EXPERTS = (
    TensorRow("linear_fc1.weight", "experts.gate_up", "e (2 moe_f) expert_h"),
    TensorRow("linear_fc1.bias", "experts.gate_up_bias", "e (2 moe_f)", when="moe.biases"),
)
_UNGATED_EXPERTS = (
    TensorRow("linear_fc1.weight", "experts.up", "e moe_f expert_h"),
    TensorRow("linear_fc1.bias", "experts.up_bias", "e moe_f", when="moe.biases"),
)
_EXPERTS_DOWN = (
    TensorRow("linear_fc2.weight", "experts.down", "e expert_h moe_f"),
    TensorRow("linear_fc2.bias", "experts.down_bias", "e expert_h", when="moe.biases"),
)
_EXPERTS = "mlp.experts.experts"

_MLP = (
    _build_norm_group("mlp.linear_fc1", "mlp_norm", has_mlp),
    _build_norm_group("pre_mlp_layernorm", "mlp_norm", has_experts, fused=False),
    _build_norm_group("mlp", "mlp_norm", _has_linear_mlp),
    *_build_mlp_groups("mlp", "mlp", has_mlp),
    TensorGroup(
        "mlp",
        "mlp",
        (
            TensorRow("weight", "linear", "h h"),
            TensorRow("bias", "linear_bias", "h", when="mlp_bias"),
        ),
        _has_linear_mlp,
    ),
    TensorGroup(
        "mlp",
        "moe",
        (
            TensorRow("router.weight", "router", "e h"),
            TensorRow("router.bias", "router_bias", "e", when="moe.router.bias"),
            TensorRow("router.expert_bias", "balancing_bias", "e", when="moe.router.expert_bias"),
            TensorRow("router.qb_beta", "balancing_offset", "e", when="moe.aux_loss.quantile"),
            TensorRow("fc1_latent_proj.weight", "latent_in", "expert_h h", when="moe.latent_size"),
            TensorRow("fc2_latent_proj.weight", "latent_out", "h expert_h", when="moe.latent_size"),
        ),
        has_experts,
    ),
    TensorGroup(_EXPERTS, "moe", _GATED_EXPERTS + _EXPERTS_DOWN, _all_of(has_experts, _is_gated)),
    TensorGroup(
        _EXPERTS,
        "moe",
        _UNGATED_EXPERTS + _EXPERTS_DOWN,
        _all_of(has_experts, _is_not_gated),
    ),
    *_build_mlp_groups("mlp.shared_experts", "moe.shared", _has_shared_experts, size="shared_f"),
    TensorGroup(
        "mlp.shared_experts",
        "moe",
        (TensorRow("gate_weight", "shared_gate", "1 h", when="moe.shared_gate"),),
        _has_shared_experts,
    ),
)

EMBEDDING = "embedding.word_embeddings.weight"
"""Tensor of the token embeddings, whose rows above the vocabulary are padding."""

OUTPUT_LAYER = "output_layer.weight"
"""Tensor of the output head, whose rows above the vocabulary are padding."""

MEGATRON = TensorTable(
    layer=(*_ATTENTION, *_MLP),
    embedding=(
        TensorRow(EMBEDDING, "embed.weight", "v h"),
        TensorRow(
            "embedding.position_embeddings.weight",
            "positions.weight",
            "positions h",
            when="positions=learned",
        ),
    ),
    head=(
        *_build_norm_rows("decoder.final_layernorm.", "norm."),
        TensorRow(OUTPUT_LAYER, "head.weight", "v h", when="!tied_embeddings"),
    ),
    layers="decoder.layers",
    mtp_layers="mtp.layers",
    mtp_transformer_layer=".transformer_layer",
    mtp_input=(
        *_build_norm_rows("enorm.", "embed_norm."),
        *_build_norm_rows("hnorm.", "hidden_norm."),
        TensorRow("eh_proj.weight", "project", "h h+h"),
    ),
    mtp_output=_build_norm_rows("final_layernorm.", "norm."),
)
"""Tensors of Megatron-core 0.16, with one tensor for each layer and experts on the first dim. Only
settings that its arguments can express have tensors."""


class MegatronTensor(NamedTuple):
    """A canonical tensor of a model."""

    shape: tuple[int, ...]
    """Shape without padding rows of the vocabulary."""

    rules: list[TensorRule]
    """Rules that cover the tensor."""


def list_megatron_tensors(model: ModelConfig) -> dict[str, MegatronTensor]:
    """Return the canonical tensors of a model by name, in the order of the forward pass."""
    by_name = group_by_tensor(build_rules(MEGATRON, model))
    return {name: MegatronTensor(rules[0].shape, rules) for name, rules in by_name.items()}


# --- names

Role = Literal["", "master", "exp_avg", "exp_avg_sq", "momentum_buffer"]
"""What a tensor contains: weights (empty), or an optimizer state of them."""

ROLES: Mapping[str, Role] = {
    "param": "master",
    "fp32_param": "master",
    "fp32_from_fp16": "master",
    "fp32_from_fp16_params": "master",
    "master_param": "master",
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "momentum_buffer": "momentum_buffer",
}
"""Megatron's names of optimizer states -> Megalith's names."""

_WORDS = "|".join(ROLES)
_ROLE_FIRST = re.compile(rf"(?:chained_\d+\.)?optimizer\.state\.({_WORDS})\.(.+)")
_ROLE_LAST = re.compile(rf"(?:chained_\d+\.)?optimizer\.state\.(.+)\.({_WORDS})")
_OTHER_STATE = re.compile(
    r"(?:chained_\d+\.)?optimizer\.|opt_param_scheduler|rng_state|rerun_state"
)
_WRAPPERS = re.compile(r"(?:(?:model\d*|module)\.)+")
_IGNORED = re.compile(
    r".*(_extra_state(/.*)?|\.inv_freq|\.local_tokens_per_expert|\.global_tokens_per_expert"
    r"|\.ga_steps)|word_embeddings_for_head\..*|word_embeddings\.weight"
)
"""Tensors that no parameter needs: quantization states, rotary frequencies, token counts, and the
copies of a tied embedding on the last pipeline stage of the legacy format."""

_TOP_LEVEL = (
    (re.compile(r"^language_model\."), ""),
    (re.compile(r"^(encoder|transformer)\."), "decoder."),
    (re.compile(r"^decoder\.final_norm\."), "decoder.final_layernorm."),
)
"""(pattern, replacement) for old names outside of layers."""

_IN_LAYER = (
    (re.compile(r"^attention\."), "self_attention."),
    (re.compile(r"^self_attention\.query_key_value\."), "self_attention.linear_qkv."),
    (re.compile(r"^self_attention\.dense\."), "self_attention.linear_proj."),
    (re.compile(r"^input_norm\."), "input_layernorm."),
    (re.compile(r"^(post_attention_norm|post_attention_layernorm)\."), "pre_mlp_layernorm."),
    (re.compile(r"^mlp\.local_experts\."), "mlp.experts.local_experts."),
    (re.compile(r"\bdense_h_to_4h\."), "linear_fc1."),
    (re.compile(r"\bdense_4h_to_h\."), "linear_fc2."),
)
"""(pattern, replacement) for old names in a layer."""

_ATTENTION_NORM = re.compile(
    r"(?:input_layernorm\.|self_attention\.linear_qkv\.layer_norm_|self_attention\.layer_norm_)"
    r"(weight|bias)"
)
_MLP_NORM = re.compile(
    r"(?:pre_mlp_layernorm\.|mlp\.linear_fc1\.layer_norm_|mlp\.layer_norm_)(weight|bias)"
)
_LATENT_NORM = re.compile(r"self_attention\.(q|kv)_layernorm\.(weight|bias)")
_EXPERT = re.compile(
    r"mlp\.experts\.(?:experts\.)?(?:local_experts\.)?(?:(\d+)\.)?(linear_fc[12])\."
    r"(weight|bias)(\d+)?(?:_([wv]))?"
)
_GROUPED_EXPERTS = re.compile(r"mlp\.experts\.weight([12])")
_HALF = re.compile(r"(.*linear_fc1\.(?:weight|bias))_([wv])")
_LAYER = re.compile(
    r"(decoder|mtp)\.layers\.(?:(\d+)\.)?(?:(transformer_layer|mtp_model_layer)\.)?(.+)"
)


class TensorKey(NamedTuple):
    """Parsed key of a checkpoint: a tensor, one layer of stacked layers, or a part of it."""

    role: Role
    name: str
    """Canonical name."""

    layer: int | None = None
    """Index in a tensor of stacked layers; None: the tensor itself."""

    expert: int | None = None
    """Expert whose tensor it is; None: all experts, or none."""

    half: str | None = None
    """w: the gate, v: up, of an MLP whose halves are separate; None: both."""

    is_transposed: bool = False
    """Whether it is a tensor of the removed grouped GEMM: [h, (e f)] or [(e f), h]."""


def parse_key(key: str, model: ModelConfig) -> list[TensorKey] | None:
    """Parse a key: one entry, or one for each layer if layers are stacked; empty if no
    parameter needs the tensor, None if it is not one of `MEGATRON` in any spelling.

    Names of layers, experts and sizes are not checked against the model.
    """
    role: Role = ""
    if first := _ROLE_FIRST.fullmatch(key):
        role, key = ROLES[first[1]], first[2]
    elif last := _ROLE_LAST.fullmatch(key):
        role, key = ROLES[last[2]], last[1]
    elif _OTHER_STATE.match(key):
        return []
    wrappers = _WRAPPERS.match(key)
    key = key[wrappers.end() :] if wrappers else key
    for pattern, replacement in _TOP_LEVEL:
        key = pattern.sub(replacement, key)
    if _IGNORED.fullmatch(key) or (key == OUTPUT_LAYER and model.tied_embeddings):
        return []
    parts = _LAYER.fullmatch(key)
    if parts is None:
        return [TensorKey(role, key)]
    stack, number, inner, rest = parts.groups()
    is_mtp = stack == "mtp"
    if is_mtp and number is None:
        return None
    layers = range(model.num_layers) if number is None else [int(number)]
    result = []
    for layer in layers:
        prefix = f"{stack}.layers.{layer}." + ("transformer_layer." if inner else "")
        index = None if number is not None else layer
        if is_mtp and not inner:
            result.append(TensorKey(role, prefix + rest))
        else:
            own = model.num_layers - 1 if is_mtp else layer
            inside = _parse_layer_key(rest, model, min(own, model.num_layers - 1))
            result.append(inside._replace(role=role, name=prefix + inside.name, layer=index))
    return result


def _parse_layer_key(name: str, model: ModelConfig, layer: int) -> TensorKey:
    """Parse a name inside a layer, without role and prefix."""
    for pattern, replacement in _IN_LAYER:
        name = pattern.sub(replacement, name)
    if norm := _ATTENTION_NORM.fullmatch(name):
        return TensorKey("", _attention_norm(model, layer) + norm[1])
    if norm := _MLP_NORM.fullmatch(name):
        return TensorKey("", _mlp_norm(model, layer) + norm[1])
    if model.mla is not None and (norm := _LATENT_NORM.fullmatch(name)):
        return TensorKey("", f"self_attention.linear_{norm[1]}_up_proj.layer_norm_{norm[2]}")
    if experts := _EXPERT.fullmatch(name):
        number = experts[1] or experts[4]
        return TensorKey(
            "",
            f"{_EXPERTS}.{experts[2]}.{experts[3]}",
            expert=None if number is None else int(number),
            half=experts[5],
        )
    if grouped := _GROUPED_EXPERTS.fullmatch(name):
        return TensorKey("", f"{_EXPERTS}.linear_fc{grouped[1]}.weight", is_transposed=True)
    if half := _HALF.fullmatch(name):
        return TensorKey("", half[1], half=half[2])
    return TensorKey("", name)


def _attention_norm(model: ModelConfig, layer: int) -> str:
    """Return the canonical name of the norm before attention, up to `weight` or `bias`."""
    if _has_linear_attention(model, layer):
        return "self_attention.layer_norm_"
    return "input_layernorm." if model.mla is not None else "self_attention.linear_qkv.layer_norm_"


def _mlp_norm(model: ModelConfig, layer: int) -> str:
    """Return the canonical name of the norm before the MLP, up to `weight` or `bias`."""
    if _has_linear_mlp(model, layer):
        return "mlp.layer_norm_"
    return "pre_mlp_layernorm." if has_experts(model, layer) else "mlp.linear_fc1.layer_norm_"


# --- tensors

QKV_VERSION = 2
"""Checkpoint version from which query, key and value of each KV group are consecutive."""


class _StoredPart(NamedTuple):
    """A tensor of the files, and the part of a canonical tensor that it is."""

    location: TensorKey
    tensor: ChunkedTensor


def normalize_tensors(folder: MegatronFolder, model: ModelConfig) -> dict[str, ChunkedTensor]:
    """Return the tensors of a checkpoint by canonical name: weights, and optimizer states of whole
    parameters as `optimizer.{master,exp_avg,exp_avg_sq}.NAME`.

    Each has the shape that `list_megatron_tensors` gives: without padding rows of the vocabulary.
    Nothing is read before it is requested.

    Raises:
        CheckpointError: tensors are unknown, missing, given twice or of another shape than those of
            the model; all of them are named.
    """
    expected = list_megatron_tensors(model)
    parts: dict[tuple[Role, str], list[_StoredPart]] = {}
    unknown_keys: list[str] = []
    problems: list[str] = []
    for key, tensor in folder.tensors.items():
        locations = parse_key(key, model)
        if locations is None or any(one.name not in expected for one in locations):
            unknown_keys.append(key)
            continue
        if any(one.layer is not None for one in locations) and (
            not tensor.shape or tensor.shape[0] != model.num_layers
        ):
            problems.append(
                f"{key}: shape {list(tensor.shape)} has no dim of {model.num_layers} layers"
            )
            continue
        for one in locations:
            part = tensor if one.layer is None else tensor.select(one.layer)
            parts.setdefault((one.role, one.name), []).append(_StoredPart(one, part))
    if unknown_keys:
        problems.append(
            f"tensors that a model with these arguments does not have: {_list_names(unknown_keys)}"
        )
    missing = [name for name in expected if ("", name) not in parts]
    if missing:
        problems.append(f"missing tensors: {_list_names(missing)}")
    result: dict[str, ChunkedTensor] = {}
    for (role, name), members in parts.items():
        try:
            tensor = _merge(name, expected[name].shape, members, model)
            tensor = _reorder_qkv(name, tensor, folder, model)
            tensor = _crop_vocabulary(name, tensor, expected[name].shape)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        result[f"optimizer.{role}.{name}" if role else name] = tensor
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems[:MAX_PROBLEMS])
        raise CheckpointError(
            f"{folder.path}: the tensors do not fit the arguments stored with them. Copy all files "
            f"of the checkpoint again, or check its args:\n{lines}"
        )
    return result


def _list_names(names: Sequence[str]) -> str:
    """Return the names, of which the first are written out."""
    shown = ", ".join(names[:20])
    return shown if len(names) <= 20 else f"{shown} and {len(names) - 20} more"


def _merge(
    name: str, shape: tuple[int, ...], parts: Sequence[_StoredPart], model: ModelConfig
) -> ChunkedTensor:
    """Return one tensor of parts: experts, and gate and up."""
    (location, tensor), *others = parts
    if not others and location.expert is None and location.half is None:
        return _ungroup_experts(tensor, shape) if location.is_transposed else tensor
    has_experts_dim = _EXPERTS in name
    num_experts = shape[0] if has_experts_dim else 1
    remaining = {
        (expert, half): parts[0].tensor.name
        for expert in (range(num_experts) if location.expert is not None else [None])
        for half in (("w", "v") if location.half is not None else (None,))
    }
    if location.half is not None and not model.gated:
        raise CheckpointError(f"{tensor.name}: a model without a gated MLP has no such half")
    chunks: list[TensorChunk] = []
    for own, part in parts:
        if remaining.pop((own.expert, own.half), None) is None:
            raise CheckpointError(
                f"{name}: {_list_names([one.tensor.name for one in parts])} are the same tensor"
            )
        box = tuple((0, size) for size in shape)
        half_dim = 1 if has_experts_dim else 0
        if own.half is not None:
            middle = shape[half_dim] // 2
            start = 0 if own.half == "w" else middle
            box = (*box[:half_dim], (start, start + middle), *box[half_dim + 1 :])
        if own.expert is not None:
            box = ((own.expert, own.expert + 1), *box[1:])
        chunks += _move_chunks(part, box, has_new_dim=own.expert is not None)
    if remaining:
        described = [
            " ".join(
                str(word)
                for word in ("expert" if e is not None else None, e, half and f"half _{half}")
                if word is not None
            )
            for e, half in remaining
        ]
        raise CheckpointError(f"{name}: missing {_list_names(described)}")
    dtypes = {part.tensor.dtype for part in parts}
    dtype = next(iter(dtypes)) if len(dtypes) == 1 else torch.float32
    return ChunkedTensor(name, shape, dtype, chunks)


def _move_chunks(tensor: ChunkedTensor, box: Box, *, has_new_dim: bool) -> list[TensorChunk]:
    """Return the chunks of a tensor that is `box` of another one; `has_new_dim`: without the first
    dim of the box."""
    own_shape = lengths(box)[1:] if has_new_dim else lengths(box)
    if tensor.shape != own_shape:
        raise CheckpointError(
            f"{tensor.name}: shape {list(tensor.shape)}, but the arguments give {list(own_shape)}"
        )
    inner = box[1:] if has_new_dim else box
    chunks = []
    for chunk in tensor.chunks:
        moved = tuple((a + o, b + o) for (a, b), (o, _) in zip(chunk.box, inner, strict=True))
        read = _with_first_dim(chunk.read) if has_new_dim else chunk.read
        chunks.append(TensorChunk((box[0], *moved) if has_new_dim else moved, read))
    return chunks


def _with_first_dim(read: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: read().unsqueeze(0)


def _ungroup_experts(tensor: ChunkedTensor, shape: tuple[int, ...]) -> ChunkedTensor:
    """Return experts of the removed grouped GEMM, whose matrices are transposed, as [e, out, in].

    Both matrices are stored as [e, in, out] in memory, with two of the dims merged.
    """
    num_experts, outputs, inputs = shape
    if tensor.shape not in ((inputs, num_experts * outputs), (num_experts * inputs, outputs)):
        raise CheckpointError(
            f"{tensor.name}: shape {list(tensor.shape)} is not that of {num_experts} experts with "
            f"matrices of {inputs} by {outputs}"
        )

    def read() -> Tensor:
        return tensor.read().reshape(num_experts, inputs, outputs).transpose(1, 2)

    chunk = TensorChunk(tuple((0, size) for size in shape), read)
    return ChunkedTensor(tensor.name, shape, tensor.dtype, [chunk])


def _reorder_qkv(
    name: str, tensor: ChunkedTensor, folder: MegatronFolder, model: ModelConfig
) -> ChunkedTensor:
    """Return the tensor with the row order of checkpoint version 2 and later."""
    version = folder.common.get("checkpoint_version", QKV_VERSION)
    is_old = isinstance(version, int | float) and version < QKV_VERSION
    if not is_old or not name.endswith(("linear_qkv.weight", "linear_qkv.bias")):
        return tensor
    if model.num_kv_heads != model.num_heads or model.attention.gated:
        raise CheckpointError(
            f"{tensor.name}: checkpoint_version {version} has another order of queries, keys and "
            f"values, which exists only without KV groups, but the model has {model.num_heads} "
            f"heads and {model.num_kv_heads} KV heads"
        )
    row_unit = 3 * model.head_size()
    for chunk in tensor.chunks:
        if any(stop % row_unit for stop in chunk.box[0]) or (
            chunk.box[1:] != tuple((0, size) for size in tensor.shape[1:])
        ):
            raise CheckpointError(
                f"{tensor.name}: the stored parts of checkpoint_version {version} split heads. "
                "Load and save it with the Megatron-LM release that wrote it"
            )
    chunks = [
        TensorChunk(chunk.box, _reorder_on_read(chunk.read, version, model.head_size()))
        for chunk in tensor.chunks
    ]
    return replace(tensor, chunks=chunks)


def _reorder_on_read(
    read: Callable[[], Tensor], version: float, head_size: int
) -> Callable[[], Tensor]:
    return lambda: reorder_qkv_rows(read(), version=version, head_size=head_size)


def reorder_qkv_rows(values: Tensor, *, version: float, head_size: int) -> Tensor:
    """Return the rows of queries, keys and values of one tensor-parallel rank, [3 n d, ...], in the
    order [n, 3, d] of checkpoint version 2; version 0 stores [3, n, d], version 1 [n, d, 3]."""
    rows = values.shape[1:]
    if version >= QKV_VERSION:
        return values
    if version < 1:
        reordered = values.reshape(3, -1, head_size, *rows).transpose(0, 1)
    else:
        reordered = values.reshape(-1, head_size, 3, *rows).transpose(1, 2)
    return reordered.reshape(values.shape)


def _crop_vocabulary(name: str, tensor: ChunkedTensor, shape: tuple[int, ...]) -> ChunkedTensor:
    """Return the tensor with the expected shape: without padding rows, if it is a vocabulary."""
    is_vocabulary = name in (EMBEDDING, OUTPUT_LAYER)
    if is_vocabulary and tensor.shape[1:] == shape[1:] and tensor.shape[0] >= shape[0]:
        return crop_rows(tensor, shape[0])
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.name}: shape {list(tensor.shape)}, but the arguments give {list(shape)}"
        )
    return tensor


def crop_rows(tensor: ChunkedTensor, num_rows: int) -> ChunkedTensor:
    """Return the first rows of a tensor."""
    shape = (num_rows, *tensor.shape[1:])
    target = tuple((0, size) for size in shape)
    chunks = [
        TensorChunk(part, _first_rows(chunk.read, part[0][1] - part[0][0]))
        for chunk in tensor.chunks
        if (part := intersect(chunk.box, target)) is not None
    ]
    return replace(tensor, shape=shape, chunks=chunks)


def _first_rows(read: Callable[[], Tensor], num_rows: int) -> Callable[[], Tensor]:
    return lambda: read()[:num_rows]

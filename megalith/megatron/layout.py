"""Translate parallelism and activation memory to our `parallel`, `recompute` and `offload`
settings."""

import re
from collections.abc import Mapping, Sequence

from megalith.megatron.parse import Draft

_TP, _PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
_CP = "--context-parallel-size"
_VPP = "--num-virtual-stages-per-pipeline-rank"
_LAYERS_PER_CHUNK = "--num-layers-per-virtual-pipeline-stage"
_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
_LAYOUT = "--pipeline-model-parallel-layout"
_END_LAYERS = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
_COUNTED = {
    "--account-for-embedding-in-pipeline-split": "parallel.pipeline.count_embedding",
    "--account-for-loss-in-pipeline-split": "parallel.pipeline.count_loss",
}
_CP_KIND, _CP_SIZES = "--cp-comm-type", "--hierarchical-context-parallel-sizes"
_OPTIMIZER, _TORCH = "--use-distributed-optimizer", "--use-torch-fsdp2"
_MEGATRON_FSDP, _STRATEGY = "--use-megatron-fsdp", "--data-parallel-sharding-strategy"
_INSTANCES = "--num-distributed-optimizer-instances"
_NO_RESHARD, _REDUCE = "--torch-fsdp2-no-reshard-after-forward", "--grad-reduce-in-bf16"

_CP_KINDS = {
    "p2p": "ring",
    "all_gather": "gather",
    "allgather": "gather",
    "a2a": "a2a",
    "a2a+p2p": "a2a+ring",
}
_ZERO: Mapping[str, int] = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def find_dp_size(draft: Draft, world: int | None) -> int | None:
    """Return the data-parallel size of a job of `world` ranks; None if the world is unknown."""
    if world is None:
        return None
    tp, pp, cp = (draft.number(flag) for flag in (_TP, _PP, _CP))
    if world % (tp * pp * cp) == 0:
        return world // (tp * pp * cp)
    if not draft.arguments.given("--global-batch-size"):
        draft.problems.append(
            f"{world} ranks are not a multiple of tensor · pipeline · context parallel = "
            f"{tp}·{pp}·{cp} = {tp * pp * cp}. Use --world with the number of ranks of the job."
        )
    return None


def find_world_size(draft: Draft, dp: int | None) -> int:
    """Return the ranks of the run: with `dp` data-parallel ranks, or as few as possible if `dp` is
    unknown."""
    tp, pp, cp = (draft.number(flag) for flag in (_TP, _PP, _CP))
    replicas = draft.settings.get("parallel.dp_replicate", 1)
    return tp * pp * cp * (dp or max(1, replicas))


def translate_layout(draft: Draft) -> None:
    """Translate the size of every axis, and what is sharded over data-parallel ranks."""
    arguments, tp = draft.arguments, draft.number(_TP)
    for flag in (_TP, "--ddp-bucket-size", "--distributed-timeout-minutes"):
        draft.copy(flag)
    if arguments.value("--sequence-parallel"):
        text = "" if tp > 1 else "disabled with tp 1, as in Megatron"
        draft.put("--sequence-parallel", "parallel.sp", tp > 1, text)
    if arguments.value("--tp-comm-overlap") and tp > 1:
        text = "sums are computed in the order of the ring"
        draft.put("--tp-comm-overlap", "parallel.tp_comm_overlap", True, text)
    if arguments.value("--use-tp-pp-dp-mapping"):
        draft.put("--use-tp-pp-dp-mapping", "parallel.order", "tp-cp-ep-pp-dp")
    _translate_pipeline(draft)
    _translate_context(draft)
    _translate_zero(draft)


# --- pipeline


def _translate_pipeline(draft: Draft) -> None:
    for flag in (_PP, _LAYOUT, *_END_LAYERS):
        draft.copy(flag)
    for flag, setting in _COUNTED.items():
        if draft.arguments.value(flag):
            draft.put(flag, setting, True)
    _translate_chunks(draft)
    if draft.settings.get("parallel.pipeline.vpp", 1) > 1:
        draft.copy(_GROUP)
    elif draft.arguments.given(_GROUP):
        draft.report("already", _GROUP, "takes effect only with virtual pipeline stages")


def _translate_chunks(draft: Draft) -> None:
    """Translate the model chunks per rank, which Megatron reads from one of three flags."""
    flags = (_LAYERS_PER_CHUNK, _VPP, _LAYOUT)
    given = [flag for flag in flags if draft.arguments.value(flag) is not None]
    if len(given) > 1:
        typed = ", ".join(draft.arguments.typed(flag) for flag in given)
        draft.problems.append(
            f"{typed}: each of them determines the model chunks per rank. Use one of them."
        )
    elif given == [_VPP]:
        draft.copy(_VPP)
    elif given == [_LAYERS_PER_CHUNK]:
        _translate_layers_per_chunk(draft)
    elif given == [_LAYOUT]:
        num_stages, pp = count_stages(str(draft.arguments.value(_LAYOUT))), draft.number(_PP)
        # a number of stages that pp does not divide violates a rule of the run
        vpp = num_stages // pp if num_stages % pp == 0 else 1
        text = f"{num_stages} stages on {pp} ranks"
        draft.put(_LAYOUT, "parallel.pipeline.vpp", vpp, text, of=(_PP,))


def _translate_layers_per_chunk(draft: Draft) -> None:
    """Translate the layers of each chunk to the chunks of each rank."""
    typed = draft.arguments.typed(_LAYERS_PER_CHUNK)
    if any(draft.arguments.value(flag) is not None for flag in _END_LAYERS):
        draft.problems.append(
            f"{typed}: ranks have different numbers of layers. Use {_VPP} instead, as in Megatron."
        )
        return
    flags = ("--num-layers", _PP, _LAYERS_PER_CHUNK)
    num_layers, pp, chunk_layers = (draft.number(flag) for flag in flags)
    counted = sum(bool(draft.arguments.value(flag)) for flag in _COUNTED)
    total = num_layers + counted
    if total % (pp * chunk_layers) and all(draft.sure(flag) for flag in flags):
        extra = f" and {counted} that count as one" if counted else ""
        draft.problems.append(
            f"{typed}: {num_layers} layers{extra} do not divide into chunks of {chunk_layers} on "
            f"{pp} ranks. Use a number that divides, or {_LAYOUT}."
        )
        return
    text = f"{total} layers / {pp} ranks / {chunk_layers}"
    draft.put(
        _LAYERS_PER_CHUNK, "parallel.pipeline.vpp", total // pp // chunk_layers, text, of=flags
    )


def count_stages(layout: str) -> int:
    """Return the number of stages of a layout string, one more than its bars, without expanding
    it.

    >>> count_stages("Et*3|(tt|)*29,m|L")
    32
    """
    text, previous = re.sub(r"[, ]", "", layout), ""
    while text != previous:
        previous, text = text, re.sub(r"\(([^()]*)\)(?:\*(\d+))?", _replace_group, text)
    return _count_bars(text) + 1


def _replace_group(group: re.Match[str]) -> str:
    return f"|*{_count_bars(group[1]) * int(group[2] or 1)}"


def _count_bars(text: str) -> int:
    return sum(int(count or 1) for count in re.findall(r"\|(?:\*(\d+))?", text))


# --- context


def _translate_context(draft: Draft) -> None:
    draft.copy(_CP)
    given = [flag for flag in (_CP_KIND, _CP_SIZES) if draft.arguments.given(flag)]
    kinds = _read_cp_kinds(draft)
    if draft.number(_CP) == 1:
        for flag in given:
            draft.report("already", flag, f"takes effect only with {_CP}")
        return
    if kinds:
        # of several kinds, a2a+ring is the one that needs two groups
        kind = "a2a+ring" if "a2a+ring" in kinds else kinds[0]
        draft.put(_CP_KIND, "parallel.context.kind", kind)
    if len(set(kinds)) > 1:
        draft.put(_CP_KIND, "parallel.context.layers", kinds)
    if "a2a+ring" in kinds:
        _translate_cp_sizes(draft)
    elif _CP_SIZES in given:
        draft.report("already", _CP_SIZES, f"takes effect only with {_CP_KIND} a2a+p2p")


def _read_cp_kinds(draft: Draft) -> list[str]:
    words = draft.arguments.value(_CP_KIND) or []
    for word in words:
        if word not in _CP_KINDS:
            draft.problems.append(
                f"{_CP_KIND} {word}: Megatron has no such choice. Use one of p2p, all_gather, "
                "a2a, a2a+p2p."
            )
    return [_CP_KINDS[word] for word in words if word in _CP_KINDS]


def _translate_cp_sizes(draft: Draft) -> None:
    """Translate the sizes of the all-to-all groups and of the ring across them."""
    words, cp = draft.arguments.value(_CP_SIZES) or [], draft.number(_CP)
    sizes = [int(word) for word in words if word.isdecimal()]
    if len(sizes) == len(words) == 2 and sizes[0] * sizes[1] == cp:
        draft.put(_CP_SIZES, "parallel.context.a2a", sizes[0])
        return
    typed = draft.arguments.typed(_CP_SIZES) if words else f"{_CP_SIZES} is missing"
    size = next((size for size in range(2, cp) if cp % size == 0), cp)
    draft.problems.append(
        f"{typed}: {_CP_KIND} a2a+p2p needs two numbers, the ranks of the all-to-all and those of "
        f"the ring, whose product is {_CP} {cp}. Use for example {_CP_SIZES} {size} {cp // size}."
    )


# --- data


def _translate_zero(draft: Draft) -> None:
    """Translate what is sharded over data-parallel ranks: optimizer states, gradients, weights."""
    levels = {0: ""}
    if draft.arguments.value(_OPTIMIZER):
        levels[1] = _OPTIMIZER
    if draft.arguments.value(_MEGATRON_FSDP):
        levels[_ZERO[str(draft.arguments.value(_STRATEGY))]] = _STRATEGY
    if draft.arguments.value(_TORCH):
        levels[2 if draft.arguments.given(_NO_RESHARD) else 3] = _TORCH
    zero = max(levels)
    for flag in (_OPTIMIZER, _MEGATRON_FSDP, _STRATEGY, _TORCH):
        if zero and (flag == levels[zero] or draft.arguments.value(flag) is True):
            draft.put(flag, "parallel.zero", zero)
    if draft.arguments.given(_STRATEGY) and not draft.arguments.value(_MEGATRON_FSDP):
        draft.report("already", _STRATEGY, f"takes effect only with {_MEGATRON_FSDP}")
    if zero:
        draft.copy(_INSTANCES)
    elif draft.number(_INSTANCES) > 1:
        text = f"has no effect without {_OPTIMIZER}. Add it, or remove this flag"
        draft.report("not mapped", _INSTANCES, text)
    _translate_reduce_dtype(draft, zero)


def _translate_reduce_dtype(draft: Draft, zero: int) -> None:
    if not draft.arguments.value(_REDUCE):
        return
    if zero in (1, 2):
        text = "each rank sums what it receives in fp32"
        draft.put(_REDUCE, "parallel.reduce_dtype", "bf16", text)
    else:
        case = f"without {_OPTIMIZER}" if zero == 0 else "of fully sharded weights"
        text = f"gradients {case} are summed in fp32, which is more precise"
        draft.report("explained", _REDUCE, text)


# --- activation memory

_GRANULARITY, _SELECTIVE = "--recompute-granularity", "--recompute-activations"
_METHOD, _NUM_LAYERS = "--recompute-method", "--recompute-num-layers"
_MODULES, _MOE_LAYER = "--recompute-modules", "--moe-layer-recompute"
_CHUNKS = "--mlp-chunks-for-training"
_SHARD, _OFFLOAD = "--distribute-saved-activations", "--cpu-offloading-num-layers"

_MODULE_NAMES = {"core_attn": "core_attention", "layernorm": "norm", "mlp": "mlp"}
_MODULES_OF_MODELS = {
    "moe": ("--num-experts", "mlp"),
    "shared_experts": ("--moe-shared-expert-intermediate-size", "shared_experts"),
    "mla_up_proj": ("--multi-latent-attention", "mla_up_proj"),
}
"""Modules of some models, with the flag of those models; `moe_act` is never saved."""

_MODULES_OF_OTHER_MODELS = (
    "moe_act",
    "moe",
    "shared_experts",
    "mla_up_proj",
    "gdn_norm_out",
    "gdp_in_proj",
    "gdp_qkv",
    "mhc",
)
"""Modules that a dense decoder does not have; Megatron ignores them there."""


def translate_memory(draft: Draft) -> None:
    """Translate activation checkpointing and activation offload."""
    _check_layer_count(draft, _OFFLOAD, least=0, most=draft.number("--num-layers") - 1)
    draft.copy(_OFFLOAD)
    granularity, flag = _read_granularity(draft)
    if granularity is None:
        for name in (_METHOD, _NUM_LAYERS, _MODULES, _SHARD):
            if draft.arguments.given(name):
                draft.report("already", name, f"takes effect only with {_GRANULARITY}")
        _translate_mlp_chunks(draft, [])
        return
    modules = _read_modules(draft) if granularity == "selective" else []
    _translate_mlp_chunks(draft, modules)
    if granularity == "selective" and not modules:
        draft.report("already", flag, "nothing is recomputed: the model has none of the modules")
        return
    draft.put(flag, "recompute.granularity", granularity)
    if modules:
        modules_flag = _MODULES if draft.arguments.given(_MODULES) else flag
        draft.put(modules_flag, "recompute.modules", modules)
    _check_layer_count(draft, _NUM_LAYERS, least=1, most=draft.number("--num-layers"))
    for name in (_METHOD, _NUM_LAYERS):
        draft.copy(name)
    if draft.arguments.value(_SHARD):
        draft.put(_SHARD, "recompute.shard_inputs", True)


def _read_granularity(draft: Draft) -> tuple[str | None, str]:
    """Return the granularity and the flag that determines it."""
    granularity: str | None = draft.arguments.value(_GRANULARITY)
    if granularity == "full" and draft.arguments.value(_MOE_LAYER):
        typed = draft.arguments.typed(_GRANULARITY)
        draft.problems.append(
            f"{_MOE_LAYER} with {typed}, which recomputes all layers. Use one of the two."
        )
    if granularity is not None:
        return granularity, _GRANULARITY
    for flag in (_SELECTIVE, _MOE_LAYER):
        if draft.arguments.value(flag):
            return "selective", flag
    return None, _GRANULARITY


def _translate_mlp_chunks(draft: Draft, modules: Sequence[str]) -> None:
    """Translate MLPs in chunks of tokens, which need recomputed MLPs without offload."""
    chunks = draft.arguments.value(_CHUNKS)
    if chunks is None or chunks == 1:
        return
    has_experts = draft.arguments.value("--num-experts") is not None
    if "mlp" in modules and not draft.arguments.value(_OFFLOAD) and not has_experts:
        draft.put(_CHUNKS, "recompute.mlp_chunks", chunks)
    else:
        text = (
            "has no effect on results; only recomputed dense MLPs are computed in chunks: use "
            f"{_MODULES} mlp"
        )
        draft.report("already", _CHUNKS, text)


def _check_layer_count(draft: Draft, flag: str, *, least: int, most: int) -> None:
    """Report a number of layers that the model does not have."""
    value = draft.arguments.value(flag)
    if value is None or not draft.sure("--num-layers") or least <= value <= most:
        return
    layers = draft.arguments.typed("--num-layers")
    valid = f"from {least} to {most}" if most > least else f"{least}"
    draft.problems.append(
        f"{flag} {value} with {layers}: expected {valid}. Set {flag} to one of these, or remove it."
    )


def _read_modules(draft: Draft) -> list[str]:
    """Return our names of the recomputed modules, each once."""
    names = dict(_MODULE_NAMES)
    for word, (flag, name) in _MODULES_OF_MODELS.items():
        if draft.arguments.value(flag):
            names[word] = name
    modules, missing = [], []
    words = draft.arguments.value(_MODULES) or ["core_attn"]
    for word in [*words, "moe"] if draft.arguments.value(_MOE_LAYER) else words:
        if word in names:
            modules.append(names[word])
        elif word == "moe_act" and "moe" in names:
            text = "activations between the matmuls of experts are always recomputed"
            draft.report("already", _MODULES, text)
        elif word in _MODULES_OF_OTHER_MODELS:
            missing.append(word)
        else:
            valid = ", ".join((*_MODULE_NAMES, *_MODULES_OF_OTHER_MODELS))
            draft.problems.append(
                f"{_MODULES} {word}: Megatron has no such choice. Use one of {valid}."
            )
    if missing:
        draft.report("already", _MODULES, f"this model has no {', '.join(missing)}")
    return list(dict.fromkeys(modules))

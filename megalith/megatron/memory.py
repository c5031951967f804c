"""Megatron's recomputation and offloading of activations as our `recompute` and `offload`
settings."""

from collections.abc import Sequence

from megalith.megatron.draft import Draft

_GRANULARITY, _SHORT = "--recompute-granularity", "--recompute-activations"
_METHOD, _LAYERS, _MODULES = "--recompute-method", "--recompute-num-layers", "--recompute-modules"
_OF_EXPERTS = "--moe-layer-recompute"
_SHARED = "--moe-shared-expert-intermediate-size"
_CHUNKS = "--mlp-chunks-for-training"
_SHARD, _OFFLOAD = "--distribute-saved-activations", "--cpu-offloading-num-layers"

_NAMES = {"core_attn": "core_attention", "layernorm": "norm", "mlp": "mlp"}
_OF_SOME_MODELS = {
    "moe": ("--num-experts", "mlp"),
    "shared_experts": (_SHARED, "shared_experts"),
    "mla_up_proj": ("--multi-latent-attention", "mla_up_proj"),
}
"""Where the model has them, by which flag; `moe_act` is not kept in any case."""

_OF_OTHER_MODELS = (
    "moe_act",
    "moe",
    "shared_experts",
    "mla_up_proj",
    "gdn_norm_out",
    "gdp_in_proj",
    "gdp_qkv",
    "mhc",
)
"""Modules that a dense decoder does not have; Megatron passes over them there."""


def translate_memory(draft: Draft) -> None:
    """What backward computes again, and what waits in host memory."""
    _check_range(draft, _OFFLOAD, least=0, most=draft.number("--num-layers") - 1)
    draft.copy(_OFFLOAD)
    granularity, flag = draft.arguments.value(_GRANULARITY), _GRANULARITY
    if granularity is None and draft.arguments.value(_SHORT):
        granularity, flag = "selective", _SHORT
    if granularity is None and draft.arguments.value(_OF_EXPERTS):
        granularity, flag = "selective", _OF_EXPERTS
    if granularity == "full" and draft.arguments.value(_OF_EXPERTS):
        typed = draft.arguments.typed(flag)
        draft.problems.append(
            f"{_OF_EXPERTS} with {typed}, which has all layers. Use one of the two."
        )
    if granularity is None:
        for name in (_METHOD, _LAYERS, _MODULES, _SHARD):
            if draft.arguments.given(name):
                draft.say("already", name, f"is read with {_GRANULARITY} only")
        _translate_chunks(draft, [])
        return
    modules = _modules(draft) if granularity == "selective" else []
    _translate_chunks(draft, modules)
    if granularity == "selective" and not modules:
        draft.say("already", flag, "computes nothing again: this model has none of the modules")
        return
    draft.put(flag, "recompute.granularity", granularity)
    if modules:
        draft.put(
            _MODULES if draft.arguments.given(_MODULES) else flag, "recompute.modules", modules
        )
    _check_range(draft, _LAYERS, least=1, most=draft.number("--num-layers"))
    for name in (_METHOD, _LAYERS):
        draft.copy(name)
    if draft.arguments.value(_SHARD):
        draft.put(_SHARD, "recompute.shard_inputs", True)


def _translate_chunks(draft: Draft, modules: Sequence[str]) -> None:
    """MLPs in chunks of tokens: here those that are computed again by themselves and keep nothing
    in host memory."""
    chunks = draft.arguments.value(_CHUNKS)
    if chunks is None or chunks == 1:
        return
    if (
        "mlp" in modules
        and not draft.arguments.value(_OFFLOAD)
        and draft.arguments.value("--num-experts") is None
    ):
        draft.put(_CHUNKS, "recompute.mlp_chunks", chunks)
    else:
        draft.say(
            "already",
            _CHUNKS,
            "changes no result; chunks here are of dense MLPs that are computed again: use "
            "--recompute-modules mlp",
        )


def _check_range(draft: Draft, flag: str, *, least: int, most: int) -> None:
    """A count of layers that the model has."""
    value = draft.arguments.value(flag)
    if value is None or not draft.sure("--num-layers") or least <= value <= most:
        return
    layers, range_ = (
        draft.arguments.typed("--num-layers"),
        f"from {least} to {most}" if most > least else f"{least}",
    )
    draft.problems.append(
        f"{flag} {value} with {layers}: expected {range_}. Set {flag} to one of these, or remove "
        "it."
    )


def _modules(draft: Draft) -> list[str]:
    """Our names of the modules that are recomputed, each once."""
    model_specific_names = {
        word: name for word, (flag, name) in _OF_SOME_MODELS.items() if draft.arguments.value(flag)
    }
    names, modules, others = _NAMES | model_specific_names, [], []
    words = draft.arguments.value(_MODULES) or ["core_attn"]
    for word in [*words, "moe"] if draft.arguments.value(_OF_EXPERTS) else words:
        if word in names:
            modules.append(names[word])
        elif word == "moe_act" and "moe" in model_specific_names:
            draft.say(
                "already",
                _MODULES,
                "what experts have between their matmuls is computed again in any case",
            )
        elif word in _OF_OTHER_MODELS:
            others.append(word)
        else:
            draft.problems.append(
                f"{_MODULES} {word}: Megatron has no such choice. Use one of "
                f"{', '.join((*_NAMES, *_OF_OTHER_MODELS))}."
            )
    if others:
        draft.say("already", _MODULES, f"this model has no {', '.join(others)}")
    return list(dict.fromkeys(modules))

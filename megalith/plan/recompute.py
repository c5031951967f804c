"""Activation recomputation and offload: the recomputed and offloaded layers of a stage, and the
rules of both."""

from typing import NamedTuple

from megalith.config.model import ModelConfig
from megalith.config.parallel import OffloadConfig, RecomputeConfig, RecomputedModule
from megalith.errors import PlanError, did_you_mean
from megalith.plan.devices import DEVICES, accelerator_named


def recomputed_modules(recompute: RecomputeConfig) -> tuple[RecomputedModule, ...]:
    """Return the modules of every layer that backward recomputes; `mlp` includes shared_experts.

    Raises:
        PlanError: granularity is `auto` and not resolved yet.
    """
    if recompute.granularity == "auto":
        raise PlanError(
            f"recompute.granularity={recompute.granularity} must be resolved before a model is "
            "planned or built. "
            "Use resolve_auto_recompute of megalith/estimate/advise.py, as `megalith train` "
            "does."
        )
    modules = recompute.modules if recompute.granularity == "selective" else ()
    return tuple(module for module in modules if module != "shared_experts" or "mlp" not in modules)


def mlp_in_chunks(recompute: RecomputeConfig, model: ModelConfig, layer: int) -> bool:
    """Return whether a layer's MLP is recomputed in chunks."""
    dense = model.mlp_part(layer) == "full" and not model.has_experts(layer)
    return dense and recompute.mlp_chunks > 1 and "mlp" in recomputed_modules(recompute)


class Span(NamedTuple):
    """Layers `start` to `stop` of a stage that are checkpointed or saved as one unit."""

    start: int
    stop: int
    recomputed: bool
    """Whether only the input of `start` is saved and backward recomputes the layers."""

    offloaded: bool
    """Whether their saved activations are offloaded to host memory."""


def layer_spans(
    recompute: RecomputeConfig, offload: OffloadConfig, num_layers: int, *, cut: int | None = None
) -> list[Span]:
    """Return the spans of a stage or model chunk; counts above its number of layers mean all
    layers.

    The last layer is never offloaded: backward needs it first. Recomputed layers of one span are
    offloaded together. No span crosses `cut`, the source layer of cross-layer attention.

    >>> uniform = RecomputeConfig(granularity="full", num_layers=2)
    >>> [(span.start, span.stop) for span in layer_spans(uniform, OffloadConfig(), 5)]
    [(0, 2), (2, 4), (4, 5)]
    >>> [(span.start, span.stop) for span in layer_spans(uniform, OffloadConfig(), 5, cut=3)]
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    full = recompute.granularity == "full"
    layers_per_span = recompute.num_layers if full and recompute.method == "uniform" else 1
    num_recomputed = (
        0 if not full else num_layers if recompute.method == "uniform" else recompute.num_layers
    )
    num_offloaded = min(offload.layers, num_layers - 1)
    starts = sorted({*range(0, num_layers, layers_per_span), *([] if cut is None else [cut])})
    return [
        Span(start, stop, start < num_recomputed, stop <= num_offloaded)
        for start, stop in zip(
            starts, [*starts[1:], num_layers], strict=False
        )  # a stage without layers has no span
    ]


def recompute_problems(
    recompute: RecomputeConfig,
    offload: OffloadConfig,
    *,
    tp: int,
    sp: bool,
    compiled: bool,
    stage_layers: int,
) -> list[str]:
    """Return an error text for each broken rule of recomputation and offload; stage_layers: layers
    of the smallest stage or model chunk."""
    return [
        *_setting_problems(recompute, compiled=compiled),
        *_device_problems(recompute),
        *_sharding_problems(recompute, tp=tp, sp=sp),
        *_offload_problems(offload, compiled=compiled, stage_layers=stage_layers),
    ]


def shared_experts_problems(recompute: RecomputeConfig, model: ModelConfig) -> list[str]:
    """Return an error if shared_experts are recomputed but the model has none."""
    shared = model.moe is not None and model.moe.shared_ffn_hidden_size is not None
    if shared or "shared_experts" not in recompute.modules:
        return []
    return [
        f"recompute.modules={list(recompute.modules)} has shared_experts, but the model has "
        f"none. Remove shared_experts, or set model.moe.shared_ffn_hidden_size."
    ]


def up_projection_problems(recompute: RecomputeConfig, model: ModelConfig) -> list[str]:
    """Return an error if mla_up_proj is recomputed without latent attention."""
    if model.mla is not None or "mla_up_proj" not in recompute.modules:
        return []
    return [
        f"recompute.modules={list(recompute.modules)} has mla_up_proj, but "
        f"model.mla={model.mla}: only latent "
        "attention has up-projections. Replace mla_up_proj by core_attention, or set "
        "model.mla."
    ]


def mlp_chunks_problems(
    recompute: RecomputeConfig,
    offload: OffloadConfig,
    model: ModelConfig,
    *,
    tokens: int,
    adapters_drop: bool,
) -> list[str]:
    """Return the errors of recompute.mlp_chunks for `tokens` tokens per microbatch and rank;
    `adapters_drop`: whether LoRA dropout is on."""
    chunks = recompute.mlp_chunks
    if chunks == 1:
        return []
    given = f"recompute.mlp_chunks={chunks}"
    problems = []
    if recompute.granularity != "selective" or "mlp" not in recompute.modules:
        problems.append(
            f"{given} applies to MLPs that are recomputed selectively, but "
            "recompute.granularity="
            f"{recompute.granularity} and recompute.modules={list(recompute.modules)}. Set "
            "recompute.granularity to "
            f"selective and recompute.modules to [mlp], or recompute.mlp_chunks to 1."
        )
    layers = range(model.num_layers)
    if not any(
        model.mlp_part(layer) == "full" and not model.has_experts(layer) for layer in layers
    ):
        problems.append(
            f"{given}, but no layer has a dense MLP: in chunks, load balancing and token dropping "
            "of an MoE layer would change. Set recompute.mlp_chunks to 1."
        )
    if chunks > tokens:
        problems.append(
            f"{given} is more than the {tokens} tokens of a microbatch on a rank. Set "
            f"recompute.mlp_chunks to {tokens} or less."
        )
    if offload.layers:
        problems.append(
            f"{given} with offload.layers={offload.layers}: the chunks of one tensor would be "
            "offloaded separately. Disable one of them."
        )
    if adapters_drop:
        problems.append(
            f"{given} with lora.dropout above 0: masks are made for all tokens at once. Set "
            "recompute.mlp_chunks to 1, "
            f"or lora.dropout to 0."
        )
    return problems


def _setting_problems(recompute: RecomputeConfig, *, compiled: bool) -> list[str]:
    kind, problems, defaults = recompute.granularity, [], RecomputeConfig()
    if kind != "full" and (recompute.method, recompute.num_layers) != (
        defaults.method,
        defaults.num_layers,
    ):
        problems.append(
            f"recompute.method={recompute.method} and recompute.num_layers={recompute.num_layers} "
            "count whole layers, "
            f"which recompute.granularity={kind} does not recompute. Set recompute.granularity "
            "to full, "
            "or remove them."
        )
    if kind == "selective" and not recompute.modules:
        problems.append(
            f"recompute.modules={[]} has nothing to recompute. Set recompute.modules to "
            "[core_attention], or "
            f"recompute.granularity to none."
        )
    elif kind != "selective" and recompute.modules != defaults.modules:
        problems.append(
            f"recompute.modules={list(recompute.modules)} belongs to "
            "recompute.granularity=selective, but that is "
            f"{kind}. Set recompute.granularity to selective, or remove recompute.modules."
        )
    repeated = sorted({name for name in recompute.modules if recompute.modules.count(name) > 1})
    if repeated:
        once = ", ".join(dict.fromkeys(recompute.modules))
        problems.append(
            f"recompute.modules={list(recompute.modules)} names {', '.join(repeated)} more than "
            f"once. Set recompute.modules to [{once}]."
        )
    if recompute.check and kind == "none":
        problems.append(
            "recompute.check=true compares recomputed values, but nothing is recomputed with "
            "recompute.granularity="
            f"{kind}. Set recompute.granularity to full or selective, or recompute.check to false."
        )
    if kind == "selective" and compiled:
        problems.append(
            f"recompute.granularity={kind} with train.compile=true: torch.compile decides "
            "what a layer saves. "
            f"Set recompute.granularity to full or none, or train.compile to false."
        )
    return problems


def _device_problems(recompute: RecomputeConfig) -> list[str]:
    given, known = recompute.device, f"one of {', '.join(DEVICES)}, or to the GiB of one device"
    if recompute.granularity != "auto":
        return (
            []
            if given is None
            else [
                f"recompute.device={given} is for recompute.granularity=auto, but that is "
                f"{recompute.granularity}. Set "
                f"recompute.granularity to auto, or remove recompute.device."
            ]
        )
    if given is None:
        return [
            "recompute.granularity=auto chooses by a device's memory, but "
            f"recompute.device={given}. Set "
            f"recompute.device to {known}."
        ]
    if accelerator_named(given) is None:
        advice = did_you_mean(given, list(DEVICES)) or ""
        return [
            f"recompute.device={given} is not a known device.{advice} Set recompute.device to "
            f"{known}."
        ]
    return []


def _sharding_problems(recompute: RecomputeConfig, *, tp: int, sp: bool) -> list[str]:
    if not recompute.shard_inputs:
        return []
    if recompute.granularity != "full":
        return [
            "recompute.shard_inputs=true shards the inputs of recomputed layers, but "
            "recompute.granularity="
            f"{recompute.granularity}. Set recompute.granularity to full, or "
            "recompute.shard_inputs to false."
        ]
    if sp:
        return [
            "recompute.shard_inputs=true is redundant: with parallel.sp=true each of the "
            f"parallel.tp={tp} ranks saves "
            f"only its tokens already. Set recompute.shard_inputs to false."
        ]
    if tp == 1:
        return [
            "recompute.shard_inputs=true shards inputs over tensor-parallel ranks, but "
            f"parallel.tp={tp}. Set "
            f"parallel.tp to 2 or more, or recompute.shard_inputs to false."
        ]
    return []


def _offload_problems(offload: OffloadConfig, *, compiled: bool, stage_layers: int) -> list[str]:
    problems = []
    if offload.layers >= max(stage_layers, 1):
        problems.append(
            f"offload.layers={offload.layers} must be less than the {stage_layers} "
            "layers of a stage, "
            "whose last layer backward needs first. Set offload.layers to "
            f"{max(stage_layers - 1, 0)} or less."
        )
    if offload.layers and compiled:
        problems.append(
            f"offload.layers={offload.layers} with train.compile=true: torch.compile decides "
            "what a "
            "layer saves. Disable one of them."
        )
    return problems


def recompute_notes(recompute: RecomputeConfig, *, stage_layers: int) -> list[str]:
    """Return notes on recompute.num_layers above the number of layers of a stage."""
    notes = []
    if recompute.granularity == "full" and recompute.num_layers > stage_layers:
        notes.append(
            f"recompute.num_layers={recompute.num_layers} is more than the {stage_layers} layers "
            f"of a stage: all of them are recomputed together, as with {stage_layers}"
            if recompute.method == "uniform"
            else f"recompute.num_layers={recompute.num_layers} is more than the {stage_layers} "
            "layers of a stage: "
            f"all of them are recomputed, as with {stage_layers}"
        )
    return notes

"""Which layers of a stage backward computes again, which wait in host memory, and what cannot be
combined."""

from typing import NamedTuple

from megalith.config.model import ModelConfig
from megalith.config.recompute import OffloadConfig, RecomputeConfig, RecomputedModule
from megalith.config.suggest import did_you_mean
from megalith.errors import PlanError
from megalith.plan.devices import DEVICES, accelerator_named


def modules_again(recompute: RecomputeConfig) -> tuple[RecomputedModule, ...]:
    """The parts of every layer that backward computes again on their own; `mlp` has shared_experts
    in it.

    Raises:
        PlanError: nobody has chosen them yet.
    """
    if recompute.granularity == "auto":
        raise PlanError(
            f"recompute.granularity={recompute.granularity} has to be replaced by a choice before "
            "a model is planned "
            "or built. Use chosen_recompute of megalith/plan/automatic.py, as `megalith train` "
            "does."
        )
    modules = recompute.modules if recompute.granularity == "selective" else ()
    return tuple(module for module in modules if module != "shared_experts" or "mlp" not in modules)


def mlp_in_chunks(recompute: RecomputeConfig, model: ModelConfig, layer: int) -> bool:
    """Whether a layer's MLP runs chunk by chunk."""
    dense = model.mlp_part(layer) == "full" and not model.has_experts(layer)
    return dense and recompute.mlp_chunks > 1 and "mlp" in modules_again(recompute)


class Span(NamedTuple):
    """Layers `start` to `stop` of a stage, which are kept or computed again together."""

    start: int
    stop: int
    recomputed: bool
    """Backward gets the input of `start` and runs them once more; else every layer keeps what it
    needs."""

    offloaded: bool
    """What they keep waits in host memory."""


def layer_spans(
    recompute: RecomputeConfig, offload: OffloadConfig, num_layers: int, *, cut: int | None = None
) -> list[Span]:
    """How a stage, or one model chunk of it, runs its layers; counts beyond its layers mean all of
    them.

    The last layer never waits in host memory: backward wants it at once. Recomputed layers go there
    only together. No span crosses `cut`, the layer whose input others look at.

    >>> uniform = RecomputeConfig(granularity="full", num_layers=2)
    >>> [(span.start, span.stop) for span in layer_spans(uniform, OffloadConfig(), 5)]
    [(0, 2), (2, 4), (4, 5)]
    >>> [(span.start, span.stop) for span in layer_spans(uniform, OffloadConfig(), 5, cut=3)]
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    full = recompute.granularity == "full"
    together = recompute.num_layers if full and recompute.method == "uniform" else 1
    again = 0 if not full else num_layers if recompute.method == "uniform" else recompute.num_layers
    away = min(offload.layers, num_layers - 1)
    starts = sorted({*range(0, num_layers, together), *([] if cut is None else [cut])})
    return [
        Span(start, stop, start < again, stop <= away)
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
    """Every broken rule of the two, as texts; stage_layers: of the smallest stage, or model chunk
    of one."""
    return [
        *_setting_problems(recompute, compiled=compiled),
        *_device_problems(recompute),
        *_sharding_problems(recompute, tp=tp, sp=sp),
        *_offload_problems(offload, compiled=compiled, stage_layers=stage_layers),
    ]


def shared_experts_problems(recompute: RecomputeConfig, model: ModelConfig) -> list[str]:
    """Experts for all tokens cannot run again where there are none."""
    shared = model.moe is not None and model.moe.shared_ffn_hidden_size is not None
    if shared or "shared_experts" not in recompute.modules:
        return []
    return [
        f"recompute.modules={list(recompute.modules)} names shared_experts, of which the model has "
        f"none. Remove shared_experts, or set model.moe.shared_ffn_hidden_size."
    ]


def up_projection_problems(recompute: RecomputeConfig, model: ModelConfig) -> list[str]:
    """Projections up from short vectors cannot run again where there are none."""
    if model.mla is not None or "mla_up_proj" not in recompute.modules:
        return []
    return [
        f"recompute.modules={list(recompute.modules)} names mla_up_proj, but "
        f"model.mla={model.mla}: only latent "
        "attention projects up from short vectors. Replace mla_up_proj by core_attention, or set "
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
    """What keeps MLPs from running in chunks of a rank's `tokens` of a microbatch; `adapters_drop`:
    of their inputs."""
    chunks = recompute.mlp_chunks
    if chunks == 1:
        return []
    given = f"recompute.mlp_chunks={chunks}"
    if chunks < 1:
        return [f"{given} must be at least 1. Set recompute.mlp_chunks to 1 to compute MLPs whole."]
    problems = []
    if recompute.granularity != "selective" or "mlp" not in recompute.modules:
        problems.append(
            f"{given} divides MLPs that are computed again by themselves, but "
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
            f"{given}, but no layer has an MLP that all tokens go through: chunks of a mixture "
            "would balance and "
            f"refuse otherwise. Set recompute.mlp_chunks to 1."
        )
    if chunks > tokens:
        problems.append(
            f"{given} is more than the {tokens} tokens of a microbatch that a rank has between the "
            "regions that tensor "
            f"parallelism divides. Set recompute.mlp_chunks to {tokens} or less."
        )
    if offload.layers:
        problems.append(
            f"{given} with offload.layers={offload.layers}: parts of one tensor would wait in host "
            f"memory each by itself. Set one of them off."
        )
    if adapters_drop:
        problems.append(
            f"{given} with lora.dropout above 0: masks are made for all tokens at once. Set "
            "recompute.mlp_chunks to 1, "
            f"or lora.dropout to 0."
        )
    return problems


def _setting_problems(recompute: RecomputeConfig, *, compiled: bool) -> list[str]:
    kind, problems, usual = recompute.granularity, [], RecomputeConfig()
    if recompute.num_layers < 1:
        problems.append(
            f"recompute.num_layers={recompute.num_layers} must be at least 1. Set "
            "recompute.num_layers to 1, or "
            f"recompute.granularity to none to keep everything."
        )
    elif kind != "full" and (recompute.method, recompute.num_layers) != (
        usual.method,
        usual.num_layers,
    ):
        problems.append(
            f"recompute.method={recompute.method} and recompute.num_layers={recompute.num_layers} "
            "count whole layers, "
            f"which recompute.granularity={kind} leaves alone. Set recompute.granularity to full, "
            "or remove them."
        )
    if kind == "selective" and not recompute.modules:
        problems.append(
            f"recompute.modules={[]} names nothing to compute again. Set recompute.modules to "
            "[core_attention], or "
            f"recompute.granularity to none."
        )
    elif kind != "selective" and recompute.modules != usual.modules:
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
            "recompute.check=true compares what is computed again, which is nothing with "
            "recompute.granularity="
            f"{kind}. Set recompute.granularity to full or selective, or recompute.check to false."
        )
    if kind == "selective" and compiled:
        problems.append(
            f"recompute.granularity={kind} with train.compile=true: a compiled layer decides by "
            "itself what it keeps. "
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
            f"recompute.device={given} is no device known here.{advice} Set recompute.device to "
            f"{known}."
        ]
    return []


def _sharding_problems(recompute: RecomputeConfig, *, tp: int, sp: bool) -> list[str]:
    if not recompute.shard_inputs:
        return []
    if recompute.granularity != "full":
        return [
            "recompute.shard_inputs=true divides the inputs of recomputed layers, but "
            "recompute.granularity="
            f"{recompute.granularity}. Set recompute.granularity to full, or "
            "recompute.shard_inputs to false."
        ]
    if sp:
        return [
            "recompute.shard_inputs=true is redundant: with parallel.sp=true each of the "
            f"parallel.tp={tp} ranks keeps "
            f"only its tokens already. Set recompute.shard_inputs to false."
        ]
    if tp == 1:
        return [
            "recompute.shard_inputs=true divides inputs over tensor-parallel ranks, but "
            f"parallel.tp={tp}. Set "
            f"parallel.tp to 2 or more, or recompute.shard_inputs to false."
        ]
    return []


def _offload_problems(offload: OffloadConfig, *, compiled: bool, stage_layers: int) -> list[str]:
    problems = []
    if not 0 <= offload.layers < max(stage_layers, 1):
        problems.append(
            f"offload.layers={offload.layers} must be at least 0 and less than the {stage_layers} "
            "layers of a stage, "
            "whose last one backward needs at once. Set offload.layers to "
            f"{max(stage_layers - 1, 0)} or less."
        )
    if offload.layers and compiled:
        problems.append(
            f"offload.layers={offload.layers} with train.compile=true: a compiled layer decides by "
            f"itself what it keeps. Set one of them off."
        )
    if offload.min_numel < 1:
        problems.append(
            f"offload.min_numel={offload.min_numel} must be at least 1. Use 1 to send everything."
        )
    return problems


def recompute_notes(recompute: RecomputeConfig, *, stage_layers: int) -> list[str]:
    """What is allowed but worth a word before the run starts."""
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

"""Memory saved by activation recomputation and offload on one rank, and their cost; logged at the
start of a run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megalith.config.recompute import RecomputeConfig
from megalith.config.train import TrainRun
from megalith.plan.activations import (
    ActivationSetting,
    layer_rows,
    layer_rows_without_recompute,
    stage_activations,
    total,
)
from megalith.plan.context import kind_of_layer
from megalith.plan.costs import (
    attention_flops,
    latent_flops,
    layer_flops,
    mlp_flops,
    shared_flops,
    step_flops,
)
from megalith.plan.memory import setting_of
from megalith.plan.recompute import layer_spans, recompute_notes, recomputed_modules
from megalith.plan.workload import plan_workload


@dataclass(frozen=True, slots=True)
class Saving:
    """Memory saved and work added by recomputing or offloading one part of the model."""

    region: str
    nbytes: int
    """Device bytes saved per microbatch, in one stage of one rank."""

    extra: float
    """Recomputed FLOPs as a fraction of the model FLOPs."""


def savings(setting: ActivationSetting, *, num_layers: int) -> list[Saving]:
    """Return the saving of each recomputed module, in order, and of offload, in a stage of
    `num_layers` layers."""
    if setting.recompute.granularity == "full":
        return [
            _full_recomputation_saving(setting, num_layers),
            *_offload_saving(setting, num_layers),
        ]
    results: list[Saving] = []
    before: tuple[str, ...] = ()
    for module in recomputed_modules(setting.recompute):
        after = (*before, module)
        freed = sum(
            total(layer_rows(setting, before, layer)) - total(layer_rows(setting, after, layer))
            for layer in range(setting.first_layer, setting.first_layer + num_layers)
        )
        # core_attention is part of mla_up_proj and is counted with it.
        inside = module == "core_attention" and "mla_up_proj" in setting.recompute.modules
        extra = 0.0 if module == "mlp_act" or inside else _recompute_share(setting, module)
        results.append(Saving(module, freed, extra))
        before = after
    return [*results, *_offload_saving(setting, num_layers)]


def saving_lines(setting: ActivationSetting, *, num_layers: int) -> list[str]:
    """Describe the savings in lines of text; empty without recomputation and offload."""
    lines = recompute_notes(setting.recompute, stage_layers=num_layers)
    for saving in savings(setting, num_layers=num_layers):
        change = (
            f"{_size(saving.nbytes)} less"
            if saving.nbytes >= 0
            else f"{_size(-saving.nbytes)} more"
        )
        lines.append(
            f"{saving.region}: {change} for each microbatch on this rank, "
            f"{100 * saving.extra:.1f} % "
            "more operations"
        )
        if saving.region == "core_attention" and saving.nbytes <= 0 and saving.extra > 0:
            lines.append(
                f"recompute.modules has core_attention, which frees {max(saving.nbytes, 0)} bytes "
                "here: attention saves no probabilities. Remove it to save the recomputation."
            )
    if not lines:
        return []
    actual = stage_activations(setting, num_layers=num_layers)
    plain = stage_activations(replace(setting, recompute=RecomputeConfig()), num_layers=num_layers)
    all_bytes = plain.nbytes + plain.host_bytes
    return [
        *lines,
        f"activations of a microbatch: {_size(actual.nbytes)} instead of {_size(all_bytes)} on "
        "this "
        "rank",
    ]


def describe_savings(
    run: TrainRun, world: int, *, pp_rank: int, tp_rank: int, accelerator: bool
) -> list[str]:
    """Return `saving_lines` of the first stage with layers of a rank, for a run that starts."""
    if run.recompute.granularity == "none" and not run.offload.layers:
        return []
    workload = plan_workload(run, world)
    layers = next((stage.layers for stage in workload.chunks(pp_rank) if stage.layers), range(0))
    if not layers:
        return []
    kind = kind_of_layer(run.parallel.context, layers[0])
    setting = setting_of(
        workload, tp_rank, kind=kind, accelerator=accelerator, first_layer=layers[0]
    )
    return saving_lines(setting, num_layers=len(layers))


def _full_recomputation_saving(setting: ActivationSetting, num_layers: int) -> Saving:
    spans = layer_spans(setting.recompute, setting.offload, num_layers)
    num_recomputed = sum(span.stop - span.start for span in spans if span.recomputed)
    setting_on_device = replace(setting, offload=replace(setting.offload, layers=0))
    activations = stage_activations(setting_on_device, num_layers=num_layers)
    first = setting.first_layer
    all_bytes = sum(
        total(layer_rows_without_recompute(setting, layer))
        for layer in range(first, first + num_layers)
    )
    freed = all_bytes - sum(total(rows) for rows in activations.layers)
    return Saving(
        f"{num_recomputed} of {num_layers} layers",
        freed,
        _recompute_share(setting, "layer") * num_recomputed / num_layers,
    )


def _offload_saving(setting: ActivationSetting, num_layers: int) -> Sequence[Saving]:
    if not setting.offload.layers:
        return []
    return [
        Saving("host memory", stage_activations(setting, num_layers=num_layers).host_bytes, 0.0)
    ]


def _recompute_share(setting: ActivationSetting, module: str) -> float:
    """Return the FLOPs of a second forward of this part, in every layer, as a fraction of the model
    FLOPs."""
    c, tokens, squares = (
        setting.model,
        sum(setting.lengths),
        sum(length**2 for length in setting.lengths),
    )
    again = {
        "core_attention": attention_flops,
        "mla_up_proj": latent_flops,
        "layer": layer_flops,
    }.get(module)
    matmuls = {"mlp": mlp_flops, "shared_experts": shared_flops}.get(module)
    once = 0
    for layer in range(c.num_layers):
        if again is not None:
            once += again(c, layer, tokens=tokens, squared_lengths=squares)
        elif matmuls is not None:
            once += matmuls(c, layer, tokens)
    return once / 3 / step_flops(c, tokens=tokens, squared_lengths=squares)


def _size(nbytes: int) -> str:
    """Format bytes in the largest unit of which there is at least one."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"

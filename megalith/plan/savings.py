"""What recomputation and offloading save on one rank, and what they cost: the lines that a run
begins with."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megalith.config.recompute import RecomputeConfig
from megalith.config.train import TrainRun
from megalith.plan.activations import (
    ActivationSetting,
    layer_rows,
    stage_activations,
    total,
    whole_layer,
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
from megalith.plan.recompute import layer_spans, modules_again, recompute_notes
from megalith.plan.workload import plan_workload


@dataclass(frozen=True, slots=True)
class Saving:
    """One region of the model that does not keep everything on the device."""

    region: str
    nbytes: int
    """That the device holds less of one microbatch, in one stage of one rank."""

    extra: float
    """Operations that are done a second time, as a part of all useful ones."""


def savings(setting: ActivationSetting, *, num_layers: int) -> list[Saving]:
    """What each setting saves and costs in a stage of so many layers; parts of layers in the order
    they are named."""
    if setting.recompute.granularity == "full":
        return [_full(setting, num_layers), *_offloaded(setting, num_layers)]
    found: list[Saving] = []
    before: tuple[str, ...] = ()
    for module in modules_again(setting.recompute):
        after = (*before, module)
        freed = sum(
            total(layer_rows(setting, before, layer)) - total(layer_rows(setting, after, layer))
            for layer in range(setting.first_layer, setting.first_layer + num_layers)
        )
        # A part of a layer that is named after the whole of it has nothing left to compute again.
        inside = module == "core_attention" and "mla_up_proj" in setting.recompute.modules
        extra = 0.0 if module == "mlp_act" or inside else _share(setting, module)
        found.append(Saving(module, freed, extra))
        before = after
    return [*found, *_offloaded(setting, num_layers)]


def saving_lines(setting: ActivationSetting, *, num_layers: int) -> list[str]:
    """The same in words, with everything that is worth one; nothing where everything is kept."""
    lines = recompute_notes(setting.recompute, stage_layers=num_layers)
    for saving in savings(setting, num_layers=num_layers):
        less = (
            f"{_size(saving.nbytes)} less"
            if saving.nbytes >= 0
            else f"{_size(-saving.nbytes)} more"
        )
        lines.append(
            f"{saving.region}: {less} for each microbatch on this rank, {100 * saving.extra:.1f} % "
            "more operations"
        )
        if saving.region == "core_attention" and saving.nbytes <= 0 and saving.extra > 0:
            lines.append(
                f"recompute.modules has core_attention, which frees {max(saving.nbytes, 0)} bytes "
                "here: attention "
                f"keeps no probabilities that it could drop. Remove it to save its operations."
            )
    if not lines:
        return []
    kept = stage_activations(setting, num_layers=num_layers)
    plain = stage_activations(replace(setting, recompute=RecomputeConfig()), num_layers=num_layers)
    everything = plain.nbytes + plain.host_bytes
    return [
        *lines,
        f"activations of a microbatch: {_size(kept.nbytes)} instead of {_size(everything)} on this "
        "rank",
    ]


def run_lines(
    run: TrainRun, world: int, *, pp_rank: int, tp_rank: int, accelerator: bool
) -> list[str]:
    """`saving_lines` of a rank's first stage with layers, for a run that starts."""
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


def _full(setting: ActivationSetting, num_layers: int) -> Saving:
    spans = layer_spans(setting.recompute, setting.offload, num_layers)
    again = sum(span.stop - span.start for span in spans if span.recomputed)
    here = replace(setting, offload=replace(setting.offload, layers=0))
    kept = stage_activations(here, num_layers=num_layers)
    first = setting.first_layer
    whole = sum(total(whole_layer(setting, layer)) for layer in range(first, first + num_layers))
    freed = whole - sum(total(rows) for rows in kept.layers)
    return Saving(
        f"{again} of {num_layers} layers", freed, _share(setting, "layer") * again / num_layers
    )


def _offloaded(setting: ActivationSetting, num_layers: int) -> Sequence[Saving]:
    if not setting.offload.layers:
        return []
    return [
        Saving("host memory", stage_activations(setting, num_layers=num_layers).host_bytes, 0.0)
    ]


def _share(setting: ActivationSetting, module: str) -> float:
    """A second forward pass of this part, in every layer of the model, as a part of a step's useful
    operations."""
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
    """Bytes in words, with a unit in which they are at least one."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"

"""Check whether a run fits its devices, find the cheapest settings that make it fit, and resolve
automatic recomputation."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megalith.config.kernels import default_backend
from megalith.config.parallel import RecomputeConfig
from megalith.config.train import TrainRun
from megalith.config.tree import Override, apply_overrides
from megalith.errors import PlanError, UserError
from megalith.estimate.memory import build_layer_setting, chunk_activations, memory_ledger, worst
from megalith.estimate.times import layer_share, work_seconds
from megalith.estimate.workload import (
    Workload,
    layer_rows,
    layer_rows_without_recompute,
    plan_workload,
    stage_activations,
)
from megalith.plan.context import layer_context_kind
from megalith.plan.costs import (
    attention_flops,
    latent_flops,
    layer_flops,
    mlp_flops,
    shared_flops,
    step_flops,
)
from megalith.plan.devices import GIB, USABLE, Device, accelerator_named
from megalith.plan.kernels import describe_kernel_setting
from megalith.plan.layers.base import LayerSetting, total
from megalith.plan.recompute import (
    layer_spans,
    recompute_notes,
    recompute_problems,
    recomputed_modules,
)
from megalith.plan.schedule import pairing_problems

Verdict = Literal["fits", "tight", "does not fit", "unknown"]
ALTERNATIVES: tuple[set[str], ...] = (
    set(),
    {"parallel.pp"},
    {"offload.layers"},
    {"parallel.pp", "offload.layers"},
)
"""Settings left out in turn when changes are combined: pipeline stages keep all weights gathered
under zero=3, and offloading excludes zero=3."""

Problems = Callable[[TrainRun, int], Sequence[str]]
"""Returns the broken rules of a run on a number of ranks, as rules/run.py does."""


@dataclass(frozen=True, slots=True)
class Change:
    """Settings that reduce the memory of the worst rank."""

    overrides: dict[str, str]
    price: str
    """The cost of the change, as text."""

    nbytes: int
    """Bytes on the worst rank with the change."""

    saved: int
    """Bytes that the change saves."""

    verdict: Verdict
    """Verdict with this change alone."""


def verdict(nbytes: int, device: Device) -> Verdict:
    """Return whether `nbytes` fit the device; `tight`: only beyond the fraction that a plan may
    rely on."""
    if device.memory is None:
        return "unknown"
    if nbytes > device.memory:
        return "does not fit"
    return "fits" if nbytes <= USABLE * device.memory else "tight"


def changes(workload: Workload, device: Device, problems: Problems) -> list[Change]:
    """Return all single changes that break no rule and save memory on the worst rank, cheapest
    first."""
    before = worst(memory_ledger(workload, device)).memory.total
    useful_changes = []
    for overrides, price in _list_candidate_settings(workload, device):
        nbytes = tried(workload, overrides, device, problems)
        if nbytes is not None and nbytes < before:
            useful_changes.append(
                Change(overrides, price, nbytes, before - nbytes, verdict(nbytes, device))
            )
    return useful_changes


def remedy(workload: Workload, device: Device, problems: Problems) -> Change | None:
    """Return the cheapest single change that makes the run fit; else a combination that does; else
    None.

    A change with the verdict `tight` is returned only if nothing else fits.
    """
    single = changes(workload, device, problems)
    fitting = [change for change in single if change.verdict == "fits"]
    combined = None
    for left_out in ALTERNATIVES if not fitting else ():
        allowed = [change for change in single if not left_out & change.overrides.keys()]
        combined = combined or _combine_changes(workload, device, problems, allowed)
    tight = [change for change in single if change.verdict == "tight"]
    return next(iter([*fitting, *([combined] if combined else []), *tight]), None)


def _combine_changes(
    workload: Workload, device: Device, problems: Problems, single: Sequence[Change]
) -> Change | None:
    """Combine changes, the cheapest first, until the run fits."""
    before = worst(memory_ledger(workload, device)).memory.total
    chosen: list[Change] = []
    least = before
    for change in single:
        # A change replaces earlier ones of the same settings.
        kept = [one for one in chosen if not one.overrides.keys() & change.overrides.keys()]
        overrides = {
            name: value for one in [*kept, change] for name, value in one.overrides.items()
        }
        nbytes = tried(workload, overrides, device, problems)
        if nbytes is None or nbytes >= least:
            continue
        chosen, least = [*kept, change], nbytes
        if verdict(nbytes, device) == "fits":
            return Change(
                overrides, "; ".join(one.price for one in chosen), nbytes, before - nbytes, "fits"
            )
    return None


def tried(
    workload: Workload, overrides: dict[str, str], device: Device, problems: Problems
) -> int | None:
    """Return the bytes on the worst rank with some settings changed; None if they break a rule."""
    try:
        given: dict[str, Override] = dict(overrides)
        run = apply_overrides(workload.run, given)
        if problems(run, workload.world):
            return None
        return worst(memory_ledger(plan_workload(run, workload.world), device)).memory.total
    except UserError:
        return None


def _list_candidate_settings(
    workload: Workload, device: Device
) -> Iterator[tuple[dict[str, str], str]]:
    """Yield settings to try, the cheapest first, each with its cost."""
    run, p = workload.run, workload.run.parallel
    granularity = run.recompute.granularity
    if p.tp > 1 and not p.sp:
        yield {"parallel.sp": "true"}, "the same communication volume"
    if p.zero == 0:
        yield {"parallel.zero": "1"}, "the same communication volume"
    if granularity == "none":
        yield _selective("norm"), "norms run twice: under 1 % of the work"
        yield _selective("norm, mlp_act"), "norms and activations run twice: under 1 % of the work"
    if run.train.micro_batch_size > 1:
        yield (
            {"train.micro_batch_size": str(run.train.micro_batch_size // 2)},
            "smaller matmuls",
        )
    if p.pipeline.vpp > 1 and p.pp > 1:
        yield {"parallel.pipeline.vpp": "1"}, f"a bubble {p.pipeline.vpp} times as large"
    if granularity == "none":
        yield _selective("mlp"), f"{100 * mlp_share(run) / 3:.0f} % more work"
    if run.model.moe is not None:
        yield {"parallel.ep": str(2 * p.ep)}, "tokens sent to the experts of more ranks"
    if p.tp < device.node:
        sp = {"parallel.sp": "true"} if not p.sp else {}
        yield (
            {"parallel.tp": str(2 * p.tp)} | sp,
            "more tensor-parallel communication, smaller matmuls",
        )
    yield {"parallel.cp": str(2 * p.cp)}, "keys and values sent between ranks"
    yield {"parallel.pp": str(2 * p.pp)}, "a larger bubble"
    if granularity != "full":
        yield {"recompute.granularity": "full"}, f"{100 * layer_share(run) / 3:.0f} % more work"
    if granularity == "none" and not run.offload.layers:
        spare = str(min(len(stage.layers) for stage in workload.stages) - 1)
        yield {"offload.layers": spare}, _offload_price(workload, spare, device)
    if p.zero < 2:
        yield {"parallel.zero": "2"}, f"gradients sent {workload.num_microbatches} times a step"
    if p.zero < 3:
        sends = f"gradients sent {workload.num_microbatches} times a step, weights "
        yield (
            {"parallel.zero": "3"},
            sends + ("once" if p.pp > 1 else f"{2 * workload.num_microbatches} times"),
        )


def _offload_price(workload: Workload, layers: str, device: Device) -> str:
    """Describe the cost of offloading: none while transfers take no longer than forward and
    backward."""
    words = "activation offload to host memory"
    seconds = host_seconds(
        plan_workload(apply_overrides(workload.run, {"offload.layers": layers}), workload.world),
        device,
    )
    return (
        words
        if seconds is None
        else f"{words}: {seconds[0]:.2g} s of transfer each way for {seconds[1]:.2g} s of forward"
    )


def host_seconds(workload: Workload, device: Device) -> tuple[float, float] | None:
    """Return the offload and forward times of one microbatch on a rank of the first stage; None if
    the device's rates are not known."""
    work = work_seconds(workload, device)
    if work is None or not device.host_gbs:
        return None
    offloaded_bytes = sum(
        chunk_activations(workload, stage, 0, accelerator=True).host for stage in workload.chunks(0)
    )
    return offloaded_bytes / (device.host_gbs * 1e9), work / 3 / workload.num_microbatches


def _selective(modules: str) -> dict[str, str]:
    return {"recompute.granularity": "selective", "recompute.modules": f"[{modules}]"}


def mlp_share(run: TrainRun) -> float:
    """Return the MLPs' share of the FLOPs of a step."""
    c, length = run.model, run.train.seq_len
    total = step_flops(c, tokens=length, squared_lengths=length**2)
    return sum(mlp_flops(c, n, length) for n in range(c.num_layers)) / total


def notes(workload: Workload, device: Device) -> list[str]:
    """Return notes on settings that have no effect in this run or cost more than expected."""
    run, p = workload.run, workload.run.parallel
    lines = []
    if device.accelerator and "core_attention" in recomputed_modules(run.recompute):
        saved = _saved_by_core_attention(workload, device)
        lines.append(
            f"recompute.modules={list(run.recompute.modules)}: fused attention saves no scores, so "
            f"recomputing core_attention saves {saved / GIB:.2g} GiB per rank. Use [norm, mlp_act] "
            "first."
        )
    if p.tp > device.node:
        lines.append(
            f"parallel.tp={p.tp} spans nodes of {device.node}: every layer has tensor-parallel "
            "communication between nodes. "
            f"Set parallel.tp to {device.node} and use parallel.pp or parallel.cp for the rest."
        )
    if p.pp > 1 and workload.num_microbatches < 4 * p.pp and p.pipeline.schedule == "auto":
        lines.append(
            f"{workload.num_microbatches} microbatches for parallel.pp={p.pp} stages leave a large "
            f"bubble. Use a larger train.global_batch_size, or parallel.pipeline.vpp."
        )
    lines += _expert_notes(workload, device)
    if default_backend(run.kernels) == "reference":
        lines.append(
            f"kernels={describe_kernel_setting(run.kernels)}: the reference backends save all "
            "attention scores, logits and intermediate results, and are slower; these figures are "
            "for kernels=auto. Use kernels=auto to run as estimated."
        )
    if run.train.tokens_per_microbatch is not None:
        lines.append(
            f"train.tokens_per_microbatch={run.train.tokens_per_microbatch}: these figures are for "
            "documents that all "
            f"have train.seq_len={run.train.seq_len} tokens; shorter documents need fewer "
            "microbatches. "
            "Use a smaller train.seq_len to estimate a typical step."
        )
    if run.data.document_masking and workload.document_multiple > 1:
        lines.append(_padding_note(workload))
    return [*lines, *_offload_notes(workload, device)]


def _expert_notes(workload: Workload, device: Device) -> list[str]:
    """Return notes on all-to-all between nodes, expert tensor parallelism, and overlap without
    effect."""
    grid, p, lines = workload.grid.experts, workload.run.parallel, list[str]()
    if p.overlap_experts and workload.num_microbatches == 1:
        rows = workload.run.train.micro_batch_size
        lines.append(
            f"parallel.overlap_experts=true with {workload.num_microbatches} microbatch in a step: "
            "there is no second microbatch to overlap with. "
            f"Set train.global_batch_size to {2 * rows * workload.dp} or more"
            f"{f', or train.micro_batch_size to {rows // 2}' if rows % 2 == 0 else ''}."
        )
    if grid is None or not device.accelerator:
        return lines
    moe, etp = workload.run.model.moe, grid.size("etp")
    ranks = grid.find_group(grid.offset, ("ep", "etp"))
    if len({rank // device.node for rank in ranks}) > 1:
        paired = replace(p, overlap_experts=True)
        able = not p.overlap_experts and not pairing_problems(workload.run.model, paired)
        lines.append(
            f"parallel.ep={p.ep} spans nodes of {device.node}: each layer has four all-to-alls "
            "between nodes per microbatch. "
            f"Set parallel.ep to {max(1, device.node // etp)} and use "
            "parallel.pp for the "
            f"rest, where memory allows{', or parallel.overlap_experts=true' if able else ''}."
        )
    if moe is not None and etp > 1 and moe.num_experts % (p.ep * etp) == 0:
        lines.append(
            f"parallel.etp={etp} sends every token to {etp} ranks per expert. Set "
            "parallel.etp=1 and "
            f"parallel.ep to {p.ep * etp}, which stores as few expert weights per rank."
        )
    return lines


def _offload_notes(workload: Workload, device: Device) -> list[str]:
    """Return notes on whether the offload to host memory is overlapped with forward."""
    layers, seconds = workload.run.offload.layers, host_seconds(workload, device)
    if not layers or seconds is None:
        return []
    offload, forward = seconds
    text = f"offload.layers={layers}: offload takes {offload:.2g} s per microbatch"
    if offload <= forward:
        return [f"{text}, which overlaps with {forward:.2g} s of forward."]
    fits = int(layers * forward / offload)
    less = f"Set offload.layers to {fits} or less to overlap all of it, or use" if fits else "Use"
    return [
        f"{text}, more than the {forward:.2g} s of forward: the rest is exposed. {less} "
        "recompute.granularity instead."
    ]


def _padding_note(workload: Workload) -> str:
    """Describe the padding of slicing by document, which depends on the data: about half a multiple
    per document."""
    multiple = workload.document_multiple
    return (
        f"parallel.context.slicing=document pads each document to a multiple of {multiple} tokens; "
        "the figures here "
        f"count a row as one document. Each other document of a row adds up to {multiple - 1} "
        "tokens "
        "of computation and "
        f"saved activations: with documents of {4 * multiple} tokens about "
        f"{100 * (multiple - 1) / (8 * multiple):.0f} % more. "
        "Set parallel.context.slicing=row if documents are short."
    )


def _saved_by_core_attention(workload: Workload, device: Device) -> int:
    """Return the bytes that recomputing core_attention saves on the worst rank."""
    run = workload.run
    others = tuple(module for module in run.recompute.modules if module != "core_attention")
    remaining = replace(run.recompute, modules=others) if others else RecomputeConfig()
    without = replace(workload, run=replace(run, recompute=remaining))
    return (
        worst(memory_ledger(without, device)).memory.total
        - worst(memory_ledger(workload, device)).memory.total
    )


# --- memory that recomputation and offload save on one rank, and their cost


@dataclass(frozen=True, slots=True)
class Saving:
    """Memory saved and work added by recomputing or offloading one part of the model."""

    region: str
    nbytes: int
    """Device bytes saved per microbatch, in one stage of one rank."""

    extra: float
    """Recomputed FLOPs as a fraction of the model FLOPs."""


def savings(setting: LayerSetting, *, num_layers: int) -> list[Saving]:
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
        after = *before, module
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


def saving_lines(setting: LayerSetting, *, num_layers: int) -> list[str]:
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
    kind = layer_context_kind(run.parallel.context, layers[0])
    setting = build_layer_setting(
        workload, tp_rank, kind=kind, accelerator=accelerator, first_layer=layers[0]
    )
    return saving_lines(setting, num_layers=len(layers))


def _full_recomputation_saving(setting: LayerSetting, num_layers: int) -> Saving:
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


def _offload_saving(setting: LayerSetting, num_layers: int) -> Sequence[Saving]:
    if not setting.offload.layers:
        return []
    return [
        Saving("host memory", stage_activations(setting, num_layers=num_layers).host_bytes, 0.0)
    ]


def _recompute_share(setting: LayerSetting, module: str) -> float:
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


# --- recompute.granularity=auto: the cheapest recomputation with which the run fits


def resolve_auto_recompute(run: TrainRun, world: int) -> TrainRun:
    """Return the run with `auto` replaced by the choice that adds the least work and fits; any
    other run unchanged.

    The result is the same on every rank, because it depends on the settings only. The rules of the
    run must hold. A choice with the verdict `tight` is used only if nothing else fits.

    Raises:
        PlanError: the run does not fit even with all layers recomputed.
    """
    if run.recompute.granularity != "auto":
        return run
    device = accelerator_named(run.recompute.device or "")
    assert device is not None and device.memory is not None, "a config rule requires a known device"
    least: tuple[int, TrainRun] | None = None
    for choice in choices(run, world):
        candidate = replace(run, recompute=choice)
        nbytes = worst(memory_ledger(plan_workload(candidate, world), device)).memory.total
        if verdict(nbytes, device) == "fits":
            return candidate
        least = (nbytes, candidate) if least is None or nbytes < least[0] else least
    assert least is not None, "no recomputation is always a choice"
    nbytes, candidate = least
    if verdict(nbytes, device) == "does not fit":
        raise PlanError(
            f"recompute.granularity=auto: the worst rank needs at least {nbytes / GIB:.1f} GiB, "
            f"more than the {device.memory / GIB:.1f} GiB of recompute.device="
            f"{run.recompute.device}. Use `megalith plan estimate` with "
            "recompute.granularity=full to see which other settings would help."
        )
    return candidate


def describe_auto_recompute(choice: RecomputeConfig) -> str:
    """Describe the chosen recomputation in one line.

    >>> describe_auto_recompute(RecomputeConfig(granularity="full", method="block", num_layers=8))
    'recompute.granularity=auto chose full, block, num_layers 8'
    """
    descriptions = {
        "none": "none: everything fits",
        "selective": f"selective, modules [{', '.join(choice.modules)}]",
        "full": f"full, {choice.method}, num_layers {choice.num_layers}",
    }
    return f"recompute.granularity=auto chose {descriptions[choice.granularity]}"


def choices(run: TrainRun, world: int) -> list[RecomputeConfig]:
    """Return the recomputation choices of this run, sorted by the work they add."""
    plain = replace(run, recompute=RecomputeConfig())
    workload = plan_workload(plain, world)
    num_layers = max(len(stage.layers) for stage in workload.stages)
    p = run.parallel
    allowed = [
        choice
        for choice in _all_choices(num_layers, check=run.recompute.check)
        if not recompute_problems(
            choice,
            run.offload,
            tp=p.tp,
            sp=p.sp,
            compiled=run.train.compile,
            stage_layers=num_layers,
        )
    ]
    return sorted(allowed, key=lambda choice: _more_work(workload, choice, num_layers))


def _all_choices(num_layers: int, *, check: bool) -> Iterator[RecomputeConfig]:
    """Yield no recomputation, cheap modules, the MLP, some layers in quarters, then all layers."""
    yield RecomputeConfig()
    some = RecomputeConfig(check=check)
    for modules in (("norm",), ("norm", "mlp_act"), ("norm", "mlp")):
        yield replace(some, granularity="selective", modules=modules)
    for count in sorted({-(-num_layers * quarters // 4) for quarters in (1, 2, 3)} - {num_layers}):
        yield replace(some, granularity="full", method="block", num_layers=count)
    yield replace(some, granularity="full")


def _more_work(workload: Workload, choice: RecomputeConfig, num_layers: int) -> float:
    kind = layer_context_kind(workload.run.parallel.context, 0)
    setting = replace(
        build_layer_setting(workload, 0, kind=kind, accelerator=True), recompute=choice
    )
    return sum(saving.extra for saving in savings(setting, num_layers=num_layers))

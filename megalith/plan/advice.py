"""Check whether a run fits its devices, and find the cheapest settings that make it fit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megalith.config.kernels import default_backend
from megalith.config.recompute import RecomputeConfig
from megalith.config.train import TrainRun
from megalith.config.tree import Override, apply_overrides
from megalith.errors import UserError
from megalith.plan.costs import mlp_flops, step_flops
from megalith.plan.devices import GIB, USABLE, Device
from megalith.plan.kernels import describe_kernel_setting
from megalith.plan.memory import chunk_activations, memory_ledger, worst
from megalith.plan.pairs import pairing_problems
from megalith.plan.recompute import recomputed_modules
from megalith.plan.times import layer_share, work_seconds
from megalith.plan.workload import Workload, plan_workload

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
"""Returns the broken rules of a run on a number of ranks, as train/rules.py does."""


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
        kept = [
            one for one in chosen if not one.overrides.keys() & change.overrides.keys()
        ]  # a later value overrides
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
    ranks = grid.group_of(grid.offset, ("ep", "etp"))
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

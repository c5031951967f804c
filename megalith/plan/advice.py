"""Whether a run fits its devices, and the cheapest changes that make it: each is tried on the
ledger."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megalith.config.kernels import switch_of
from megalith.config.recompute import RecomputeConfig
from megalith.config.train import TrainRun
from megalith.config.tree import Override, apply_overrides
from megalith.errors import UserError
from megalith.plan.costs import mlp_flops, step_flops
from megalith.plan.devices import GIB, USABLE, Device
from megalith.plan.kernels import describe_kernel_setting
from megalith.plan.memory import chunk_activations, memory_ledger, worst
from megalith.plan.pairs import pairing_problems
from megalith.plan.recompute import modules_again
from megalith.plan.times import layer_share, work_seconds
from megalith.plan.workload import Workload, plan_workload

Verdict = Literal["fits", "tight", "does not fit", "unknown"]
ALTERNATIVES: tuple[set[str], ...] = (
    set(),
    {"parallel.pp"},
    {"offload.layers"},
    {"parallel.pp", "offload.layers"},
)
"""Left out of a sum of changes in turn: pipelines keep all weights gathered under zero=3,
offloading excludes it."""

Problems = Callable[[TrainRun, int], Sequence[str]]
"""Broken rules of a run on a number of ranks; as train/rules.py gives them."""


@dataclass(frozen=True, slots=True)
class Change:
    """Settings that would take less memory."""

    overrides: dict[str, str]
    price: str
    """What it costs, in words."""

    nbytes: int
    """On the worst rank, with the change."""

    saved: int
    """Less than without it."""

    verdict: Verdict
    """With nothing else changed."""


def verdict(nbytes: int, device: Device) -> Verdict:
    """`tight` when the device is filled beyond what a plan may be sure of."""
    if device.memory is None:
        return "unknown"
    if nbytes > device.memory:
        return "does not fit"
    return "fits" if nbytes <= USABLE * device.memory else "tight"


def changes(workload: Workload, device: Device, problems: Problems) -> list[Change]:
    """Every single change that breaks no rule and saves memory on the worst rank, the cheapest
    first."""
    before = worst(memory_ledger(workload, device)).memory.total
    found = []
    for overrides, price in _levers(workload, device):
        nbytes = tried(workload, overrides, device, problems)
        if nbytes is not None and nbytes < before:
            found.append(Change(overrides, price, nbytes, before - nbytes, verdict(nbytes, device)))
    return found


def remedy(workload: Workload, device: Device, problems: Problems) -> Change | None:
    """The cheapest single change that makes the run fit; else the cheapest ones added up until it
    does; else None.

    Filling the device to the brim counts only where nothing else helps.
    """
    single = changes(workload, device, problems)
    fitting = [change for change in single if change.verdict == "fits"]
    together = None
    for left_out in ALTERNATIVES if not fitting else ():
        some = [change for change in single if not left_out & change.overrides.keys()]
        together = together or _together(workload, device, problems, some)
    tight = [change for change in single if change.verdict == "tight"]
    return next(iter([*fitting, *([together] if together else []), *tight]), None)


def _together(
    workload: Workload, device: Device, problems: Problems, single: Sequence[Change]
) -> Change | None:
    """Changes added up, the cheapest first, until they fit."""
    before = worst(memory_ledger(workload, device)).memory.total
    chosen: list[Change] = []
    least = before
    for change in single:
        kept = [
            one for one in chosen if not one.overrides.keys() & change.overrides.keys()
        ]  # a later value is stronger
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
    """Bytes on the worst rank with some settings changed; None where they break a rule."""
    try:
        given: dict[str, Override] = dict(overrides)
        run = apply_overrides(workload.run, given)
        if problems(run, workload.world):
            return None
        return worst(memory_ledger(plan_workload(run, workload.world), device)).memory.total
    except UserError:
        return None


def _levers(workload: Workload, device: Device) -> Iterator[tuple[dict[str, str], str]]:
    """Settings to try, the cheapest first, each with its price."""
    run, p = workload.run, workload.run.parallel
    again = run.recompute.granularity
    if p.tp > 1 and not p.sp:
        yield {"parallel.sp": "true"}, "as many bytes sent"
    if p.zero == 0:
        yield {"parallel.zero": "1"}, "as many bytes sent"
    if again == "none":
        yield _selective("norm"), "norms run twice: under 1 % of the work"
        yield _selective("norm, mlp_act"), "norms and activations run twice: under 1 % of the work"
    if run.train.micro_batch_size > 1:
        yield (
            {"train.micro_batch_size": str(run.train.micro_batch_size // 2)},
            "smaller matrix products",
        )
    if p.pipeline.vpp > 1 and p.pp > 1:
        yield {"parallel.pipeline.vpp": "1"}, f"a bubble {p.pipeline.vpp} times as large"
    if again == "none":
        yield _selective("mlp"), f"{100 * mlp_share(run) / 3:.0f} % more work"
    if run.model.moe is not None:
        yield {"parallel.ep": str(2 * p.ep)}, "rows for experts sent to more ranks"
    if p.tp < device.node:
        sp = {"parallel.sp": "true"} if not p.sp else {}
        yield (
            {"parallel.tp": str(2 * p.tp)} | sp,
            "more bytes sent inside each layer, smaller products",
        )
    yield {"parallel.cp": str(2 * p.cp)}, "keys and values sent between ranks"
    yield {"parallel.pp": str(2 * p.pp)}, "a larger bubble"
    if again != "full":
        yield {"recompute.granularity": "full"}, f"{100 * layer_share(run) / 3:.0f} % more work"
    if again == "none" and not run.offload.layers:
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
    """Free as long as the way to host memory takes no longer than forward, and the way back no
    longer than backward."""
    words = "activations go to host memory and back"
    seconds = host_seconds(
        plan_workload(apply_overrides(workload.run, {"offload.layers": layers}), workload.world),
        device,
    )
    return (
        words
        if seconds is None
        else f"{words}: {seconds[0]:.2g} s each way for {seconds[1]:.2g} s of forward"
    )


def host_seconds(workload: Workload, device: Device) -> tuple[float, float] | None:
    """Of one microbatch on a rank of the first stage: the way to host memory, and forward; None
    where nobody knows."""
    work = work_seconds(workload, device)
    if work is None or not device.host_gbs:
        return None
    kept = sum(
        chunk_activations(workload, stage, 0, accelerator=True).host for stage in workload.chunks(0)
    )
    return kept / (device.host_gbs * 1e9), work / 3 / workload.num_microbatches


def _selective(modules: str) -> dict[str, str]:
    return {"recompute.granularity": "selective", "recompute.modules": f"[{modules}]"}


def mlp_share(run: TrainRun) -> float:
    """The MLPs' part of a step's work."""
    c, length = run.model, run.train.seq_len
    whole = step_flops(c, tokens=length, squared_lengths=length**2)
    return sum(mlp_flops(c, n, length) for n in range(c.num_layers)) / whole


def notes(workload: Workload, device: Device) -> list[str]:
    """Settings that do nothing here, or cost more than people expect."""
    run, p = workload.run, workload.run.parallel
    found = []
    if device.accelerator and "core_attention" in modules_again(run.recompute):
        saved = _saved_by_core_attention(workload, device)
        found.append(
            f"recompute.modules={list(run.recompute.modules)}: fused attention keeps no scores, so "
            "running "
            f"core_attention twice saves {saved / GIB:.2g} GiB a rank. Use [norm, mlp_act] first."
        )
    if p.tp > device.node:
        found.append(
            f"parallel.tp={p.tp} spans nodes of {device.node}: every layer waits for the network. "
            f"Set parallel.tp to {device.node} and use parallel.pp or parallel.cp for the rest."
        )
    if p.pp > 1 and workload.num_microbatches < 4 * p.pp and p.pipeline.schedule == "auto":
        found.append(
            f"{workload.num_microbatches} microbatches for parallel.pp={p.pp} stages leave a large "
            f"bubble. Use a larger train.global_batch_size, or parallel.pipeline.vpp."
        )
    found += _expert_notes(workload, device)
    if switch_of(run.kernels) == "reference":
        found.append(
            f"kernels={describe_kernel_setting(run.kernels)}: plain definitions keep all scores, "
            "all "
            "logits and every step "
            "between matmuls, and take longer; these figures are for kernels=auto. Use that to "
            "run as estimated."
        )
    if run.train.tokens_per_microbatch is not None:
        found.append(
            f"train.tokens_per_microbatch={run.train.tokens_per_microbatch}: these figures are for "
            "documents that all "
            f"have train.seq_len={run.train.seq_len} tokens; shorter ones need fewer microbatches. "
            f"Use a smaller train.seq_len to see a usual step."
        )
    if run.data.document_masking and workload.document_multiple > 1:
        found.append(_padding_note(workload))
    return [*found, *_offload_notes(workload, device)]


def _expert_notes(workload: Workload, device: Device) -> list[str]:
    """Exchanges between nodes, and what a router without balance may come to."""
    grid, p, found = workload.grid.experts, workload.run.parallel, list[str]()
    if p.overlap_experts and workload.num_microbatches == 1:
        rows = workload.run.train.micro_batch_size
        found.append(
            f"parallel.overlap_experts=true with {workload.num_microbatches} microbatch in a step: "
            "there is no other "
            f"to compute beside it. Set train.global_batch_size to {2 * rows * workload.dp} or more"
            f"{f', or train.micro_batch_size to {rows // 2}' if rows % 2 == 0 else ''}."
        )
    if grid is None or not device.accelerator:
        return found
    moe, etp = workload.run.model.moe, grid.size("etp")
    ranks = grid.group_of(grid.offset, ("ep", "etp"))
    if len({rank // device.node for rank in ranks}) > 1:
        paired = replace(p, overlap_experts=True)
        able = not p.overlap_experts and not pairing_problems(workload.run.model, paired)
        found.append(
            f"parallel.ep={p.ep} spans nodes of {device.node}: rows for experts wait for the "
            "network four times in "
            f"each layer and microbatch. Set parallel.ep to {max(1, device.node // etp)} and use "
            "parallel.pp for the "
            f"rest, where memory allows{', or parallel.overlap_experts=true' if able else ''}."
        )
    if moe is not None and etp > 1 and moe.num_experts % (p.ep * etp) == 0:
        found.append(
            f"parallel.etp={etp} sends every row to as many ranks. Set parallel.etp=1 and "
            f"parallel.ep to {p.ep * etp}, "
            f"which divides experts as far."
        )
    return found


def _offload_notes(workload: Workload, device: Device) -> list[str]:
    """Whether the way to host memory hides behind forward."""
    layers, seconds = workload.run.offload.layers, host_seconds(workload, device)
    if not layers or seconds is None:
        return []
    there, forward = seconds
    told = (
        f"offload.layers={layers}: the way to host memory takes {there:.2g} s for each microbatch"
    )
    if there <= forward:
        return [f"{told}, which hides behind {forward:.2g} s of forward: it costs next to nothing."]
    fits = int(layers * forward / there)
    less = f"Set offload.layers to {fits} or less to hide all of it, or use" if fits else "Use"
    return [
        f"{told}, forward only {forward:.2g} s: the device waits for the rest. {less} "
        "recompute.granularity instead."
    ]


def _padding_note(workload: Workload) -> str:
    """What slicing by document adds that only the data can tell: every document is padded, by half
    a multiple or so."""
    multiple = workload.document_multiple
    return (
        f"parallel.context.slicing=document pads each document to a multiple of {multiple} tokens; "
        "the figures here "
        f"count a row as one document. Each further one in a row adds up to {multiple - 1} tokens "
        "that are computed "
        f"and kept: with documents of {4 * multiple} tokens about "
        f"{100 * (multiple - 1) / (8 * multiple):.0f} % more. "
        f"Set parallel.context.slicing=row where documents are short."
    )


def _saved_by_core_attention(workload: Workload, device: Device) -> int:
    """Bytes on the worst rank that are not kept because attention runs twice."""
    run = workload.run
    others = tuple(module for module in run.recompute.modules if module != "core_attention")
    left = replace(run.recompute, modules=others) if others else RecomputeConfig()
    without = replace(workload, run=replace(run, recompute=left))
    return (
        worst(memory_ledger(without, device)).memory.total
        - worst(memory_ledger(workload, device)).memory.total
    )

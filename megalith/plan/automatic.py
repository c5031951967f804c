"""Resolve `recompute.granularity=auto`: the cheapest recomputation with which the run fits its
device."""

from collections.abc import Iterator
from dataclasses import replace

from megalith.config.recompute import RecomputeConfig
from megalith.config.train import TrainRun
from megalith.errors import PlanError
from megalith.plan.advice import verdict
from megalith.plan.context import kind_of_layer
from megalith.plan.devices import GIB, accelerator_named
from megalith.plan.memory import memory_ledger, setting_of, worst
from megalith.plan.recompute import recompute_problems
from megalith.plan.savings import savings
from megalith.plan.workload import Workload, plan_workload


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
    kind = kind_of_layer(workload.run.parallel.context, 0)
    setting = replace(setting_of(workload, 0, kind=kind, accelerator=True), recompute=choice)
    return sum(saving.extra for saving in savings(setting, num_layers=num_layers))

"""Tests of megalith/estimate/advise.py: what `auto` chooses, by how much memory there is."""

from dataclasses import replace

import pytest

from megalith.config.parallel import RecomputeConfig
from megalith.config.train import TrainRun
from megalith.config.tree import apply_overrides
from megalith.errors import PlanError
from megalith.estimate.advise import choices, resolve_auto_recompute
from megalith.estimate.memory import memory_ledger, worst
from megalith.estimate.workload import plan_workload
from megalith.plan.devices import GIB, accelerator_named
from megalith.plan.recompute import recomputed_modules
from megalith.recipes import resolve
from megalith.rules.run import run_problems

WORLD = 16


def automatic(device: str, **more: str) -> TrainRun:
    """The 8B recipe, whose optimizer is divided."""
    settings = {"recompute.granularity": "auto", "recompute.device": device, "parallel.zero": "1"}
    return apply_overrides(
        resolve("llama3_8b"),
        settings | {name.replace("__", "."): value for name, value in more.items()},
    )


def held(run: TrainRun, device: str) -> float:
    return (
        worst(memory_ledger(plan_workload(run, WORLD), accelerator_named(device))).memory.total
        / GIB
    )


def test_recomputation_with_the_least_work_that_fits_is_chosen() -> None:
    places = []
    for gib in ("56", "50", "45", "40", "36"):
        run = automatic(gib)
        assert run_problems(run, WORLD) == []
        chosen, ways = resolve_auto_recompute(run, WORLD), choices(run, WORLD)
        assert run_problems(chosen, WORLD) == [] and held(chosen, gib) <= 0.94 * float(gib)
        places.append(ways.index(chosen.recompute))
        assert all(
            held(replace(run, recompute=way), gib) > 0.94 * float(gib) for way in ways[: places[-1]]
        )
    assert places == sorted(places) and places[0] == 0 and len(set(places)) >= 4, (
        "less memory, more work"
    )


def test_choices_are_sorted_by_cost() -> None:
    ways = choices(automatic("h100"), WORLD)
    assert [(way.granularity, way.method, way.num_layers) for way in ways] == [
        ("none", "uniform", 1),
        ("selective", "uniform", 1),
        ("selective", "uniform", 1),
        ("full", "block", 8),
        ("full", "block", 16),
        ("selective", "uniform", 1),
        ("full", "block", 24),
        ("full", "uniform", 1),
    ]
    assert [way.modules for way in ways if way.granularity == "selective"] == [
        ("norm",),
        ("norm", "mlp_act"),
        ("norm", "mlp"),
    ]


def test_a_compiled_run_gets_whole_layers_only_and_a_check_is_kept() -> None:
    compiled = choices(automatic("h100", train__compile="true"), WORLD)
    assert {way.granularity for way in compiled} == {"none", "full"}
    checked = resolve_auto_recompute(automatic("45", recompute__check="true"), WORLD)
    assert checked.recompute.check and checked.recompute.granularity != "none"
    assert run_problems(checked, WORLD) == []


def test_almost_full_device_is_accepted_if_nothing_else_fits() -> None:
    least = held(replace(automatic("h100"), recompute=RecomputeConfig(granularity="full")), "h100")
    tight = f"{least * 1.02:.3f}"
    assert resolve_auto_recompute(automatic(tight), WORLD).recompute == RecomputeConfig(
        granularity="full"
    )


def test_auto_recompute_that_cannot_fit_is_rejected_with_the_memory_needed() -> None:
    with pytest.raises(
        PlanError,
        match=r"recompute.granularity=auto: the worst rank needs at least \d+\.\d GiB, more than "
        r"the 12.0 GiB of recompute.device=12. Use `megalith plan estimate`",
    ):
        resolve_auto_recompute(automatic("12"), WORLD)


def test_auto_recompute_must_be_resolved_and_other_runs_are_unchanged() -> None:
    run = resolve("llama3_8b")
    assert resolve_auto_recompute(run, WORLD) is run
    with pytest.raises(
        PlanError, match="recompute.granularity=auto must be resolved before a model"
    ):
        recomputed_modules(automatic("h100").recompute)
    assert resolve_auto_recompute(automatic("h200"), WORLD).recompute == RecomputeConfig()

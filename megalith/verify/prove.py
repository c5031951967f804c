"""Runs all parts of the verification: for one run at its real size and in tiny copies, and for the
matrix of layouts."""

import time
from collections.abc import Callable
from dataclasses import replace

from megalith.config.kernels import Kernel
from megalith.config.train import TrainRun
from megalith.errors import RankError
from megalith.estimate.advise import resolve_auto_recompute
from megalith.plan.batch_assignment import count_microbatches_of_longest
from megalith.plan.kernels import describe_kernel_setting
from megalith.rules.run import run_problems
from megalith.verify.faults.plant import FAULTS
from megalith.verify.faults.table import FaultResult, judge_fault
from megalith.verify.matrix import Layout, matrix_rows
from megalith.verify.ranks import Difference, LayoutCase, compare_with_one_process
from megalith.verify.report import (
    LayoutResult,
    ReportRow,
    difference_rows,
    failure_row,
    rule_rows,
    schedule_rows,
    type_rows,
)
from megalith.verify.schedules import ScheduleReport, check_schedule
from megalith.verify.shrink import describe_copy, shrink
from megalith.verify.types import type_check, type_check_in_child


def verify_run(run: TrainRun, world: int, *, fault: str | None = None) -> list[ReportRow]:
    """Verify a run on `world` ranks; if a rule is violated, return only that. `fault`: planted in
    part (d)."""
    rows = rule_rows(run_problems(run, world))
    if not all(row.holds for row in rows):  # the other parts need a valid layout
        return rows
    run = resolve_auto_recompute(run, world)
    types = type_check_in_child(
        run.model,
        run.parallel,
        world=world,
        recompute=run.recompute,
        offload=run.offload,
        lora=run.lora,
        optim=run.optim,
    )
    words = describe_kernel_setting(run.kernels)
    notes = () if words == "auto" else (f"kernels={words}: types were checked with kernels=auto",)
    rows += type_rows(replace(types, unseen=(*types.unseen, *notes)))
    rows += schedule_rows(schedule_of(run, world))
    for case in shrink(run, world, fault=fault):
        words, differences = describe_copy(run, world, case), compare_in_float64(case)
        if isinstance(differences, str):
            rows.append(failure_row(case.world, words, differences))
        else:
            rows += difference_rows(case.world, words, differences)
    return rows


def verify_row(row: Layout, kernels: Kernel = "auto") -> LayoutResult:
    """Verify one row of the matrix; `kernels` applies to both sides of the float64 comparison."""
    started = time.perf_counter()
    case = row.case()
    case = replace(case, run=replace(case.run, kernels=kernels))
    problems = [f"a: {text}" for text in run_problems(case.run, row.world)]
    error = 0.0
    if not problems:  # the other parts need a valid layout
        types = type_check(
            row.model,
            row.parallel,
            world=row.world,
            recompute=case.run.recompute,
            offload=case.run.offload,
            lora=row.lora,
            optim=case.run.optim,
            masked=row.masks is not None,
        )
        problems += [f"b: {outcome}" for outcome in types.problems]
        schedule = schedule_of(case.run, row.world)
        problems += [f"c: {text}" for text in (schedule.problems if schedule else ())]
        outcome = compare_in_float64(case)
        problems += (
            [f"d: {outcome}"]
            if isinstance(outcome, str)
            else [_describe(difference) for difference in outcome if not difference.holds]
        )
        error = (
            float("inf")
            if isinstance(outcome, str)
            else max(difference.error for difference in outcome)
        )
    seconds = time.perf_counter() - started
    return LayoutResult(
        area=row.area,
        name=row.name,
        world=row.world,
        problems=tuple(problems),
        error=error,
        seconds=seconds,
    )


def schedule_of(run: TrainRun, world: int) -> ScheduleReport | None:
    """Check the pipeline schedule of a run; None if there is one stage."""
    p, t = run.parallel, run.train
    if p.pp * p.pipeline.vpp == 1:
        return None
    dp = p.dp or world // (p.tp * p.cp * p.pp)
    return check_schedule(
        p.pipeline,
        pp=p.pp,
        num_microbatches=count_microbatches_of_longest(t, p, dp),
        rows=t.micro_batch_size * dp,
        overlap=p.overlap,
        paired=p.overlap_experts,
    )


def compare_in_float64(case: LayoutCase) -> list[Difference] | str:
    """Return the float64 differences, or why ranks failed before the comparison."""
    try:
        return compare_with_one_process(case)
    except RankError as error:
        return str(error).split("\nthen:")[0].strip()


def _describe(difference: Difference) -> str:
    where = f" in {difference.name}" if difference.name else ""
    return f"d: {difference.what} off by {difference.error:.1e}{where}"


def verify_matrix(
    *, sample: bool, tell: Callable[[str], None], kernels: Kernel = "auto"
) -> tuple[list[LayoutResult], list[FaultResult]]:
    """Verify every row of the matrix (or the sample) with `kernels`, and every planted fault;
    `tell` logs each result.

    Faults use the default kernels, since many of them patch functions of these.
    """
    results, rows = [], matrix_rows(sample=sample)
    for number, row in enumerate(rows, 1):
        results.append(verify_row(row, kernels))
        held = "holds" if results[-1].holds else f"DOES NOT HOLD: {results[-1].problems[0]}"
        tell(f"layout {number}/{len(rows)} {row.name}: {held}, {results[-1].seconds:.1f} s")
    verdicts = []
    for number, fault in enumerate(FAULTS, 1):
        verdicts.append(judge_fault(fault))
        tell(
            f"fault {number}/{len(FAULTS)} {fault.name}: "
            f"{'rejected' if verdicts[-1].refused else 'NOT DETECTED'}"
        )
    return results, verdicts

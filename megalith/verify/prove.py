"""The whole proof, part by part: of one run at its real size and in tiny copies, and of every
layout of the matrix."""

import time
from collections.abc import Callable
from dataclasses import replace

from megalith.config.kernels import Kernel
from megalith.config.train import TrainRun
from megalith.errors import RankError
from megalith.plan.automatic import chosen_recompute
from megalith.plan.deal import microbatches_of_longest
from megalith.plan.kernels import describe_kernel_setting
from megalith.train.rules import run_problems
from megalith.verify.fault_table import Verdict, judge
from megalith.verify.faults import FAULTS
from megalith.verify.matrix import rows_of_matrix
from megalith.verify.ranks import Difference, LayoutCase, prove_layout
from megalith.verify.report import (
    LayoutResult,
    ReportRow,
    difference_rows,
    failure_row,
    rule_rows,
    schedule_rows,
    type_rows,
)
from megalith.verify.rows import Layout
from megalith.verify.schedules import ScheduleReport, check_schedule
from megalith.verify.shrink import shrink, shrunk_words
from megalith.verify.types import type_check, type_check_in_child


def prove_run(run: TrainRun, world: int, *, fault: str | None = None) -> list[ReportRow]:
    """Everything about a run on `world` ranks, as rows; with a broken rule, that alone. `fault`:
    for part (d)."""
    rows = rule_rows(run_problems(run, world))
    if not all(row.holds for row in rows):  # the other parts need a layout that can be built
        return rows
    run = chosen_recompute(run, world)
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
    other = () if words == "auto" else (f"kernels={words}: these are the types of kernels=auto",)
    rows += type_rows(replace(types, unseen=(*types.unseen, *other)))
    rows += schedule_rows(schedule_of(run, world))
    for case in shrink(run, world, fault=fault):
        words, found = shrunk_words(run, world, case), proved(case)
        if isinstance(found, str):
            rows.append(failure_row(case.world, words, found))
        else:
            rows += difference_rows(case.world, words, found)
    return rows


def prove_row(row: Layout, kernels: Kernel = "auto") -> LayoutResult:
    """Rules, types, schedules and float64 of one row; the last with both sides computed by
    `kernels`."""
    started = time.perf_counter()
    case = row.case()
    case = replace(case, run=replace(case.run, kernels=kernels))
    problems = [f"a: {text}" for text in run_problems(case.run, row.world)]
    error = 0.0
    if not problems:  # the rest needs a layout that can be built
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
        problems += [f"b: {found}" for found in types.problems]
        schedule = schedule_of(case.run, row.world)
        problems += [f"c: {text}" for text in (schedule.problems if schedule else ())]
        found = proved(case)
        problems += (
            [f"d: {found}"]
            if isinstance(found, str)
            else [_told(one) for one in found if not one.holds]
        )
        error = float("inf") if isinstance(found, str) else max(one.error for one in found)
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
    """The pipeline lists of a run, checked on paper; None where there is one stage."""
    p, t = run.parallel, run.train
    if p.pp * p.pipeline.vpp == 1:
        return None
    dp = p.dp or world // (p.tp * p.cp * p.pp)
    return check_schedule(
        p.pipeline,
        pp=p.pp,
        num_microbatches=microbatches_of_longest(t, p, dp),
        rows=t.micro_batch_size * dp,
        overlap=p.overlap,
        paired=p.overlap_experts,
    )


def proved(case: LayoutCase) -> list[Difference] | str:
    """What float64 found, or why ranks failed before there was anything to compare."""
    try:
        return prove_layout(case)
    except RankError as error:
        return str(error).split("\nthen:")[0].strip()


def _told(found: Difference) -> str:
    return f"d: {found.what} off by {found.error:.1e}{f' in {found.name}' if found.name else ''}"


def prove_all(
    *, sample: bool, tell: Callable[[str], None], kernels: Kernel = "auto"
) -> tuple[list[LayoutResult], list[Verdict]]:
    """Every row, or the sample, computed by `kernels`, and every planted fault, computed as
    always, since many are in what plain definitions replace; `tell` hears of each when it is
    done."""
    results, rows = [], rows_of_matrix(sample=sample)
    for number, row in enumerate(rows, 1):
        results.append(prove_row(row, kernels))
        held = "holds" if results[-1].holds else f"DOES NOT HOLD: {results[-1].problems[0]}"
        tell(f"layout {number}/{len(rows)} {row.name}: {held}, {results[-1].seconds:.1f} s")
    verdicts = []
    for number, fault in enumerate(FAULTS, 1):
        verdicts.append(judge(fault))
        tell(
            f"fault {number}/{len(FAULTS)} {fault.name}: "
            f"{'refused' if verdicts[-1].refused else 'NOT SEEN'}"
        )
    return results, verdicts

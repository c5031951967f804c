"""Runs all parts of the verification, for one run at its real size and in tiny copies or for the
matrix of layouts, and formats the results as tables and JSON.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

from rich import box
from rich.table import Table

from megalith.config.kernels import Kernel
from megalith.config.parallel import PipelineConfig, ScheduleName
from megalith.config.train import TrainRun
from megalith.errors import RankError
from megalith.estimate.advise import resolve_auto_recompute
from megalith.plan.batch_assignment import count_microbatches_of_longest
from megalith.plan.check_schedule import queue_problems
from megalith.plan.kernels import describe_kernel_setting
from megalith.plan.schedule import (
    Schedule,
    build_schedule,
    pair_forward_backward,
    schedule_name,
    schedule_problems,
    with_transfers,
)
from megalith.plan.shards import PARTS
from megalith.plan.simulate import Costs, find_problems, peak_activation_memory, simulate
from megalith.rules.run import run_problems
from megalith.verify.faults.plant import load_faults
from megalith.verify.faults.table import FaultResult, judge_fault
from megalith.verify.matrix import Layout, matrix_rows
from megalith.verify.ranks import Difference, LayoutCase, compare_with_one_process
from megalith.verify.shrink import describe_copy, shrink
from megalith.verify.types import TrainingSettings, TypeReport, type_check, type_check_in_child

# --- simulation of pipeline schedules: no deadlock
#
# It checks the order of actions and messages and the live activations, but no values. Messages are
# simulated twice: matched by tags, as in gloo, and as queues of blocking operations, as in NCCL.


@dataclass(frozen=True, slots=True)
class ScheduleReport:
    """Properties of a pipeline step, and whether it can run."""

    name: ScheduleName
    num_ranks: int
    num_chunks: int
    num_microbatches: int
    problems: tuple[str, ...]
    """Violated rules, or rank and action of a deadlock; empty: verified."""

    num_actions: int = 0
    """Actions of all ranks, including messages."""

    num_messages: int = 0

    bubble: Fraction | None = None
    """Idle time over compute time; None: the schedule cannot run."""

    bubble_fraction_of_total: Fraction | None = None
    """Idle time over total time."""

    peak_live: tuple[Fraction, ...] = ()
    """Per rank: the largest number of microbatches whose activations are live; one of v chunks
    counts 1/v."""

    @property
    def ok(self) -> bool:
        """Whether the schedule completes with gloo and with NCCL."""
        return not self.problems

    def summary(self) -> str:
        """Return a one-line summary."""
        where = f"{self.name} on {self.num_ranks} ranks, {self.num_microbatches} microbatches"
        if self.bubble_fraction_of_total is None:
            return f"{where}: cannot run"
        live = [float(peak) for peak in self.peak_live]
        span = f"{max(live):g}" if max(live) == min(live) else f"{min(live):g} to {max(live):g}"
        return (
            f"{where}: {self.num_actions:,} actions, {self.num_messages:,} messages, no deadlock "
            "with tags (gloo) or without (NCCL); bubble "
            f"{float(self.bubble_fraction_of_total):.1%} of the step; at most {span} live "
            "microbatches per rank"
        )


def check_schedule(
    pipeline: PipelineConfig,
    *,
    pp: int,
    num_microbatches: int,
    rows: int | None = None,
    overlap: bool = True,
    paired: bool = False,
    costs: Costs | None = None,
) -> ScheduleReport:
    """Build the schedules of training and evaluation, and simulate them.

    `rows`: see `plan/schedule.schedule_problems`. `overlap`: parallel.overlap, which determines
    where receives are posted. `paired`: parallel.overlap_experts, which computes microbatches in
    pairs; the simulation shows no speedup. `costs`: of the stages; unset: F, I and W take equally
    long, and messages no time.
    """
    name = schedule_name(pipeline)
    problems = schedule_problems(pipeline, pp=pp, num_microbatches=num_microbatches, rows=rows)
    if problems:
        return ScheduleReport(name, pp, pipeline.vpp, num_microbatches, tuple(problems))
    training, evaluation = (
        build_schedule(
            name,
            num_ranks=pp,
            num_chunks=pipeline.vpp,
            num_microbatches=num_microbatches,
            group=pipeline.group,
            forward_only=forward_only,
        )
        for forward_only in (False, True)
    )
    lists = pair_forward_backward(training) if paired else training, evaluation
    report, other = (check_lists(with_transfers(each, overlap=overlap), costs) for each in lists)
    return report if other.ok else other


def check_lists(schedule: Schedule, costs: Costs | None = None) -> ScheduleReport:
    """Simulate a given schedule, which includes its messages, with tags and without."""
    sizes = schedule.name, schedule.num_ranks, schedule.num_chunks, schedule.num_microbatches
    problems = find_problems(schedule) or queue_problems(schedule)
    if problems:
        return ScheduleReport(*sizes, tuple(problems))
    result = simulate(schedule, costs)
    return ScheduleReport(
        *sizes,
        problems=(),
        num_actions=sum(map(len, schedule.ranks)),
        num_messages=len(result.messages()),
        bubble=result.bubble,
        bubble_fraction_of_total=result.bubble_fraction_of_total,
        peak_live=tuple(
            Fraction(peak) / schedule.num_chunks for peak in peak_activation_memory(schedule)
        ),
    )


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One question of the report and its answer."""

    part: str
    """a: rules; b: types at the real size; c: schedules at the real size; d: float64 on
    processes."""

    question: str
    answer: str
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutResult:
    """Result of one layout of the matrix."""

    area: str
    name: str
    world: int

    problems: tuple[str, ...]
    """Failures as `part: text`; empty: verified."""

    error: float
    """Largest relative difference from one process."""

    seconds: float

    @property
    def holds(self) -> bool:
        """Whether all parts passed."""
        return not self.problems


def verify_run(run: TrainRun, world: int, *, fault: str | None = None) -> list[ReportRow]:
    """Verify a run on `world` ranks; if a rule is violated, return only that. `fault`: planted in
    part (d)."""
    rows = rule_rows(run_problems(run, world))
    if not all(row.holds for row in rows):  # the other parts need a valid layout
        return rows
    run = resolve_auto_recompute(run, world)
    training = TrainingSettings.of_run(run)
    types = type_check_in_child(run.model, run.parallel, world=world, training=training)
    words = describe_kernel_setting(run.kernels)
    notes = () if words == "auto" else (f"kernels={words}: types were checked with kernels=auto",)
    rows += type_rows(replace(types, untyped=(*types.untyped, *notes)))
    rows += schedule_rows(check_run_schedule(run, world))
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
            training=TrainingSettings.of_run(case.run),
            masked=row.masks is not None,
        )
        problems += [f"b: {outcome}" for outcome in types.problems]
        schedule = check_run_schedule(case.run, row.world)
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


def check_run_schedule(run: TrainRun, world: int) -> ScheduleReport | None:
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
    *, sample: bool, log: Callable[[str], None], kernels: Kernel = "auto"
) -> tuple[list[LayoutResult], list[FaultResult]]:
    """Verify every row of the matrix (or the sample) with `kernels`, and every planted fault;
    `log` receives each result.

    Faults use the default kernels, since many of them patch functions of these.
    """
    results, rows = [], matrix_rows(sample=sample)
    for number, row in enumerate(rows, 1):
        results.append(verify_row(row, kernels))
        held = "holds" if results[-1].holds else f"DOES NOT HOLD: {results[-1].problems[0]}"
        log(f"layout {number}/{len(rows)} {row.name}: {held}, {results[-1].seconds:.1f} s")
    fault_results, faults = [], load_faults()
    for number, fault in enumerate(faults, 1):
        fault_results.append(judge_fault(fault))
        log(
            f"fault {number}/{len(faults)} {fault.name}: "
            f"{'rejected' if fault_results[-1].rejected else 'NOT DETECTED'}"
        )
    return results, fault_results


# --- report of one run

LEGEND = (
    "(a), (b) and (c) check the layout itself, at its real size: (b) the reduction of every "
    "gradient, but no values, (c) "
    "the order of actions and messages. (d) compares values, scale factors, buckets, the optimizer "
    "and the checkpoint, on "
    "tiny copies."
)
"""What each part checks."""


DETAIL = "  "
"""Prefix of the questions about one kind of value."""


def rule_rows(problems: Sequence[str]) -> list[ReportRow]:
    """Return the rows of part (a)."""
    if not problems:
        return [ReportRow("a", "all rules across the settings", "hold", True)]
    return [ReportRow("a", "a rule is violated", problem, False) for problem in problems]


def type_rows(report: TypeReport) -> list[ReportRow]:
    """Return the rows of part (b)."""
    question = f"every gradient has the sums that it needs, at world size {report.world:,}"
    axes = ", ".join(_axes_as_typed(report.axes)) or "no axis"
    answer = (
        f"{axes}; ranks {', '.join(map(str, report.ranks))}; {report.parameters} parameters, "
        f"{sum(report.collectives.values())} collectives; {report.seconds:.1f} s, "
        f"{report.peak_gib:.2f} GiB"
    )
    rows = [ReportRow("b", question, answer, report.ok)]
    rows += [ReportRow("b", "type error", str(problem), False) for problem in report.problems]
    if report.unproved:
        rows.append(
            ReportRow("b", "axes of one rank are not checked", ", ".join(report.unproved), True)
        )
    rows += [
        ReportRow("b", "has no types and is checked only in (d)", text, True)
        for text in report.untyped
    ]
    return rows


def _axes_as_typed(axes: Mapping[str, int]) -> list[str]:
    """Return axes of more than one rank by the names of their settings; parts of an axis are not
    listed."""
    parts = {part for pair in PARTS.values() for part in pair}
    copies = axes.get("tp_copy", 1)
    shared = f" ({copies} ranks share each key/value head)" if copies > 1 else ""
    whole = {axis: size for axis, size in axes.items() if axis not in parts and size > 1}
    return [f"{axis} {size}{shared if axis == 'tp' else ''}" for axis, size in whole.items()]


def schedule_rows(report: ScheduleReport | None) -> list[ReportRow]:
    """Return the rows of part (c); None: there is one stage."""
    if report is None:
        return [ReportRow("c", "no deadlock", "one stage: there is no pipeline", True)]
    rows = [ReportRow("c", "no deadlock, in training and evaluation", report.summary(), report.ok)]
    return rows + [
        ReportRow("c", "the schedule cannot be run", problem, False) for problem in report.problems
    ]


def difference_rows(
    world: int, description: str, differences: Sequence[Difference]
) -> list[ReportRow]:
    """Return the rows of part (d) for one copy on `world` processes, described by `words`."""
    holds, worst = (
        all(difference.holds for difference in differences),
        max(difference.error for difference in differences),
    )
    rows = [
        ReportRow("d", _copy_words(world), f"{description}; worst difference {worst:.1e}", holds)
    ]
    for difference in differences:
        where = f" at worst, in {difference.name}" if difference.name else ""
        rows.append(
            ReportRow(
                "d",
                f"{DETAIL}{difference.what}",
                f"{difference.error:.1e}{where}",
                difference.holds,
            )
        )
    return rows


def failure_row(world: int, description: str, message: str) -> ReportRow:
    """Return the row of part (d) for a copy that failed before the comparison."""
    return ReportRow("d", _copy_words(world), f"{description}: {message}", False)


def _copy_words(world: int) -> str:
    return (
        f"a tiny copy on {world} process{'es' if world > 1 else ''} equals one process in float64"
    )


def as_table(rows: Sequence[ReportRow]) -> Table:
    """Format rows for a terminal; with several copies, kinds of values are shown only where they
    differ."""
    table = Table(box=box.SIMPLE, title="verification of the layout")
    for column in ("part", "question", "result", "holds"):
        table.add_column(column, overflow="fold")
    copies = sum(row.part == "d" and not row.question.startswith(DETAIL) for row in rows)
    for row in rows:
        if copies <= 1 or not row.holds or not row.question.startswith(DETAIL):
            table.add_row(row.part, row.question, row.answer, "yes" if row.holds else "NO")
    return table


def as_json(rows: Sequence[ReportRow]) -> dict[str, Any]:  # Any: JSON
    """Return the rows as JSON."""
    return {"holds": all(row.holds for row in rows), "rows": [asdict(row) for row in rows]}


# --- report of the matrix


def summary_table(results: Sequence[LayoutResult]) -> Table:
    """Return a table of layouts by area: how many there are, how many pass, and the largest
    difference."""
    table = Table(box=box.SIMPLE, title="every layout equals one process")
    for column in ("area", "layouts", "hold", "processes", "worst difference", "in", "seconds"):
        table.add_column(
            column, justify="left" if column in ("area", "in") else "right", overflow="fold"
        )
    for area in dict.fromkeys(result.area for result in results):
        area_results = [result for result in results if result.area == area]
        worst = max(area_results, key=lambda result: result.error)
        worlds = sorted({result.world for result in area_results})
        table.add_row(
            area,
            str(len(area_results)),
            str(sum(result.holds for result in area_results)),
            ", ".join(map(str, worlds)),
            f"{worst.error:.0e}",
            worst.name,
            f"{sum(result.seconds for result in area_results):.0f}",
        )
    return table


def fault_summary(fault_results: Sequence[FaultResult]) -> Table:
    """Return a table of planted faults, and which part detects each."""
    table = Table(box=box.SIMPLE, title="every planted fault is rejected")
    for column in ("fault", "(b) types", "(d) float64", "rejected"):
        table.add_column(column, overflow="fold")
    for result in fault_results:
        types = f"rejected at {result.by_types}" if result.by_types else "not detected"
        table.add_row(result.fault.name, types, result.numbers, "yes" if result.rejected else "NO")
    return table


def problem_lines(
    results: Sequence[LayoutResult], fault_results: Sequence[FaultResult]
) -> list[str]:
    """Return one line per failure."""
    return [
        f"{result.area}, {result.name}: {text}" for result in results for text in result.problems
    ] + [
        f"the planted fault {result.fault.name} was not detected: {result.fault.what}"
        for result in fault_results
        if not result.rejected
    ]


def matrix_json(
    results: Sequence[LayoutResult], fault_results: Sequence[FaultResult]
) -> dict[str, Any]:  # Any: JSON
    """Return both tables as JSON."""
    faults = [
        {
            "name": result.fault.name,
            "what": result.fault.what,
            "types": result.by_types,
            "numbers": result.numbers,
            "detail": result.detail,
            "rejected": result.rejected,
        }
        for result in fault_results
    ]
    return {
        "holds": all(result.holds for result in results)
        and all(result.rejected for result in fault_results),
        "layouts": [asdict(result) | {"holds": result.holds} for result in results],
        "faults": faults,
    }

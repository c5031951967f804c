"""Formats verification results as tables and JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from megalith.plan.shards import PARTS
from megalith.verify.faults.table import FaultResult
from megalith.verify.ranks import Difference
from megalith.verify.schedules import ScheduleReport
from megalith.verify.types import TypeReport

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


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One question of the report and its answer."""

    part: str
    """a: rules; b: types at the real size; c: schedules at the real size; d: float64 on
    processes."""

    question: str
    answer: str
    holds: bool


def rule_rows(problems: Sequence[str]) -> list[ReportRow]:
    """Return the rows of part (a)."""
    if not problems:
        return [ReportRow("a", "every rule across the settings", "holds", True)]
    return [ReportRow("a", "a rule is broken", problem, False) for problem in problems]


def type_rows(report: TypeReport) -> list[ReportRow]:
    """Return the rows of part (b)."""
    asked = f"every gradient meets the sum it needs, at world {report.world:,}"
    axes = ", ".join(_axes_as_typed(report.axes)) or "no axis"
    done = (
        f"{axes}; ranks {', '.join(map(str, report.ranks))}; {report.parameters} parameters, "
        f"{sum(report.collectives.values())} collectives; {report.seconds:.1f} s, "
        f"{report.peak_gib:.2f} GiB"
    )
    rows = [ReportRow("b", asked, done, report.ok)]
    rows += [ReportRow("b", "type error", str(problem), False) for problem in report.problems]
    if report.unproved:
        rows.append(
            ReportRow("b", "axes of one rank are not checked", ", ".join(report.unproved), True)
        )
    rows += [
        ReportRow("b", "has no types, and is checked only in (d)", text, True)
        for text in report.unseen
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
        ReportRow("c", "the lists cannot be run", problem, False) for problem in report.problems
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
    table = Table(box=box.SIMPLE, title="proof of the layout")
    for column in ("part", "question", "found", "holds"):
        table.add_column(column, overflow="fold")
    copies = sum(row.part == "d" and not row.question.startswith(DETAIL) for row in rows)
    for row in rows:
        if copies <= 1 or not row.holds or not row.question.startswith(DETAIL):
            table.add_row(row.part, row.question, row.answer, "yes" if row.holds else "NO")
    return table


def as_json(rows: Sequence[ReportRow]) -> dict[str, Any]:  # Any: JSON
    """Return the rows as JSON."""
    return {"holds": all(row.holds for row in rows), "rows": [asdict(row) for row in rows]}


# --- the whole matrix


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


def fault_summary(verdicts: Sequence[FaultResult]) -> Table:
    """Return a table of planted faults, and which part detects each."""
    table = Table(box=box.SIMPLE, title="every planted fault is rejected")
    for column in ("fault", "(b) types", "(d) float64", "rejected"):
        table.add_column(column, overflow="fold")
    for verdict in verdicts:
        types = f"rejected at {verdict.by_types}" if verdict.by_types else "not detected"
        table.add_row(
            verdict.fault.name, types, verdict.numbers, "yes" if verdict.rejected else "NO"
        )
    return table


def problem_lines(results: Sequence[LayoutResult], verdicts: Sequence[FaultResult]) -> list[str]:
    """Return one line per failure."""
    return [
        f"{result.area}, {result.name}: {text}" for result in results for text in result.problems
    ] + [
        f"the planted fault {verdict.fault.name} was not detected: {verdict.fault.what}"
        for verdict in verdicts
        if not verdict.rejected
    ]


def matrix_json(
    results: Sequence[LayoutResult], verdicts: Sequence[FaultResult]
) -> dict[str, Any]:  # Any: JSON
    """Return both tables as JSON."""
    faults = [
        {
            "name": verdict.fault.name,
            "what": verdict.fault.what,
            "types": verdict.by_types,
            "numbers": verdict.numbers,
            "detail": verdict.detail,
            "rejected": verdict.rejected,
        }
        for verdict in verdicts
    ]
    return {
        "holds": all(result.holds for result in results)
        and all(verdict.rejected for verdict in verdicts),
        "layouts": [asdict(result) | {"holds": result.holds} for result in results],
        "faults": faults,
    }

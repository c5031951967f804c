"""The proof of a layout as rows a person can read: what was asked, what was found, and which part proved it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from megalith.verify.ranks import Difference, LayoutCase
from megalith.verify.types import TypeReport


@dataclass(frozen=True, slots=True)
class Row:
    """One question and its answer."""

    part: str
    """a: rules; b: types at the real size; d: float64 on processes."""

    question: str
    answer: str
    holds: bool


def rule_rows(problems: Sequence[str]) -> list[Row]:
    """Part (a)."""
    if not problems:
        return [Row("a", "every rule across the settings", "holds", True)]
    return [Row("a", "a rule is broken", problem, False) for problem in problems]


def type_rows(report: TypeReport) -> list[Row]:
    """Part (b)."""
    asked = f"every gradient meets the sum it needs, at world {report.world:,}"
    axes = ", ".join(_axes_as_typed(report.axes)) or "no axis"
    done = (
        f"{axes}; ranks {', '.join(map(str, report.ranks))}; {report.parameters} parameters, "
        f"{sum(report.collectives.values())} collectives; {report.seconds:.1f} s, {report.peak_gib:.2f} GiB"
    )
    rows = [Row("b", asked, done, report.ok)]
    rows += [Row("b", "type error", str(problem), False) for problem in report.problems]
    if report.unproved:
        rows.append(Row("b", "nothing is proved about axes of one rank", ", ".join(report.unproved), True))
    return rows


def _axes_as_typed(axes: Mapping[str, int]) -> list[str]:
    """The axes of more than one rank under the names of their settings; tp is one axis to whoever sets it."""
    copies, sizes = axes["tp_copy"], {axis: size for axis, size in axes.items() if not axis.startswith("tp_")}
    sizes["tp"] = axes["tp_kv"] * copies
    shared = f" ({copies} ranks share each key/value head)" if copies > 1 else ""
    return [f"{axis} {size}{shared if axis == 'tp' else ''}" for axis, size in sizes.items() if size > 1]


def difference_rows(case: LayoutCase, differences: Sequence[Difference]) -> list[Row]:
    """Part (d)."""
    p = case.run.parallel
    size = f"a tiny copy on {case.world} processes (tp {p.tp}{', sp' if p.sp else ''}, dp {p.dp}) equals one"
    rows = [Row("d", size, "in float64, relative to the largest entry:", all(found.holds for found in differences))]
    for found in differences:
        worst = f"{found.error:.1e}{f' at worst, in {found.name}' if found.name else ''}"
        rows.append(Row("d", f"  {found.what}", worst, found.holds))
    return rows


def as_table(rows: Sequence[Row]) -> Table:
    """For a terminal."""
    table = Table(box=box.SIMPLE, title="proof of the layout")
    for column in ("part", "question", "found", "holds"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(row.part, row.question, row.answer, "yes" if row.holds else "NO")
    return table


def as_json(rows: Sequence[Row]) -> dict[str, Any]:  # Any: JSON
    """For programs."""
    return {"holds": all(row.holds for row in rows), "rows": [asdict(row) for row in rows]}

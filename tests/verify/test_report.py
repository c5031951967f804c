"""The report of the verification: rows of each part, as a table and as JSON."""

import io
import json
from dataclasses import replace
from fractions import Fraction

from rich.console import Console, RenderableType

from megalith.verify.faults.plant import find_fault
from megalith.verify.faults.table import FaultResult
from megalith.verify.prove import (
    LayoutResult,
    ReportRow,
    ScheduleReport,
    as_json,
    as_table,
    difference_rows,
    failure_row,
    fault_summary,
    matrix_json,
    problem_lines,
    rule_rows,
    schedule_rows,
    summary_table,
    type_rows,
)
from megalith.verify.ranks import Difference
from megalith.verify.types import Problem, TypeReport

REPORT = TypeReport(
    world=4096,
    axes={"dp": 512, "cp": 1, "tp": 8},
    ranks=(0, 2052, 4095),
    parameters=9,
    collectives={"copy_to_tp over tp": 4, "reduce_from_tp over tp": 5},
    problems=(),
    seconds=1.25,
    peak_gib=0.3,
)


def test_rules_are_one_row_and_each_violated_rule_one() -> None:
    assert rule_rows([]) == [ReportRow("a", "all rules across the settings", "hold", True)]
    broken = rule_rows(["one is odd. Set it to 2.", "two"])
    assert [(row.part, row.answer, row.holds) for row in broken] == [
        ("a", "one is odd. Set it to 2.", False),
        ("a", "two", False),
    ]


def test_type_row_lists_axes_ranks_and_counts() -> None:
    row, unproved = type_rows(REPORT)
    assert row.holds and row.part == "b"
    assert row.question == "every gradient has the sums that it needs, at world size 4,096"
    assert row.answer.startswith(
        "dp 512, tp 8; ranks 0, 2052, 4095; 9 parameters, 9 collectives; 1.2 s, 0.30 GiB"
    )
    assert unproved == ReportRow("b", "axes of one rank are not checked", "cp", True)


def test_operations_without_types_are_reported() -> None:
    *_, row = type_rows(
        replace(REPORT, untyped=("offload.layers=1: copies to host memory and back",))
    )
    assert row == ReportRow(
        "b",
        "has no types and is checked only in (d)",
        "offload.layers=1: copies to host memory and back",
        True,
    )


def test_tensor_parallel_axes_are_reported_as_tp() -> None:
    shared = replace(REPORT, axes={"dp": 2, "cp": 2, "tp": 12, "pp": 4, "tp_kv": 4, "tp_copy": 3})
    (row,) = type_rows(shared)
    assert row.answer.startswith(
        "dp 2, cp 2, tp 12 (3 ranks share each key/value head), pp 4; ranks 0"
    )
    alone = replace(REPORT, axes={"dp": 1, "cp": 1, "tp": 1})
    row, unproved = type_rows(alone)
    assert row.answer.startswith("no axis; ") and unproved.answer == "dp, cp, tp"


def test_each_type_problem_is_a_row() -> None:
    problem = Problem(where="layers.0", what="expects P", ranks=(3,))
    refused = TypeReport(
        **{name: getattr(REPORT, name) for name in TypeReport.__slots__} | {"problems": (problem,)}
    )
    first, second, _ = type_rows(refused)
    assert not first.holds and not second.holds
    assert second.answer == "layers.0 (rank 3): expects P"


FOUND = [
    Difference("first loss", "", 1e-16, True),
    Difference("gradients", "norm.weight", 0.5, False),
]


def test_differences_are_rows_below_their_copy() -> None:
    rows = difference_rows(6, "tp 2 of 8, sp, dp 3", FOUND)
    assert all(row.part == "d" for row in rows)
    assert (
        rows[0].question == "a tiny copy on 6 processes equals one process in float64"
        and not rows[0].holds
    )
    assert rows[0].answer == "tp 2 of 8, sp, dp 3; worst difference 5.0e-01"
    assert (rows[1].answer, rows[1].holds) == ("1.0e-16", True)
    assert (rows[2].answer, rows[2].holds) == ("5.0e-01 at worst, in norm.weight", False)
    assert difference_rows(1, "", FOUND[:1])[0].holds
    failed = failure_row(2, "tp 2", "rank 1 raised")
    assert (failed.answer, failed.holds) == ("tp 2: rank 1 raised", False)


def test_schedule_is_one_row_and_each_problem_one() -> None:
    good = ScheduleReport(
        "1f1b",
        2,
        1,
        4,
        (),
        num_actions=30,
        num_messages=8,
        bubble=Fraction(1, 4),
        bubble_fraction_of_total=Fraction(1, 5),
        peak_live=(Fraction(2), Fraction(1)),
    )
    (row,) = schedule_rows(good)
    assert row.holds and row.part == "c" and "1f1b on 2 ranks, 4 microbatches" in row.answer
    assert "bubble 20.0% of the step; at most 1 to 2 live microbatches" in row.answer
    bad = schedule_rows(ScheduleReport("1f1b", 2, 1, 4, ("rank 1 waits for ever",)))
    assert [row.holds for row in bad] == [False, False] and bad[1].answer == "rank 1 waits for ever"
    assert schedule_rows(None)[0].holds


def text_of(table: RenderableType, width: int = 200) -> str:
    """As a terminal shows it."""
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(table)
    return console.export_text()


def test_only_differences_are_shown_for_several_copies() -> None:
    good, bad = difference_rows(4, "one", FOUND[:1]), difference_rows(8, "two", FOUND)
    assert "first loss" in text_of(as_table(good))
    shown = text_of(as_table([*good, *bad]))
    assert "first loss" not in shown and "gradients" in shown and "norm.weight" in shown
    assert shown.count("a tiny copy") == 2 and "worst difference 1.0e-16" in shown


RESULTS = [
    LayoutResult(area="pipeline", name="pp2", world=2, problems=(), error=1e-15, seconds=1.0),
    LayoutResult(
        area="pipeline", name="pp3", world=3, problems=("d: loss off by 2",), error=2.0, seconds=2.0
    ),
    LayoutResult(area="shared rows", name="cp2", world=2, problems=(), error=0.0, seconds=3.0),
]
SEEN = FaultResult(find_fault("row_sum_removed"), "layers.0", "wrong loss", "loss off by 1")
UNSEEN = FaultResult(find_fault("dp_sum_averaged"), None, "no effect", "")


def test_summary_has_one_row_per_area() -> None:
    lines = [line.split() for line in text_of(summary_table(RESULTS)).splitlines() if line.strip()]
    assert ["pipeline", "2", "1", "2,", "3", "2e+00", "pp3", "3"] in lines
    assert ["shared", "rows", "1", "1", "2", "0e+00", "cp2", "3"] in lines
    faults = text_of(fault_summary([SEEN, UNSEEN]))
    assert "rejected at layers.0" in faults and "not detected" in faults and "NO" in faults


def test_failures_are_reported() -> None:
    lines = problem_lines(RESULTS, [SEEN, UNSEEN])
    assert lines[0] == "pipeline, pp3: d: loss off by 2"
    assert lines[1].startswith(
        "the planted fault dp_sum_averaged was not detected: Gradients are averaged over dp"
    )
    assert len(lines) == 2


def test_matrix_passes_only_if_every_layout_and_every_fault_does() -> None:
    document = json.loads(json.dumps(matrix_json(RESULTS, [SEEN])))
    assert document["holds"] is False and [row["holds"] for row in document["layouts"]] == [
        True,
        False,
        True,
    ]
    assert matrix_json(RESULTS[:1], [SEEN])["holds"] is True
    assert matrix_json(RESULTS[:1], [SEEN, UNSEEN])["holds"] is False
    assert (
        document["faults"][0]["types"] == "layers.0" and document["faults"][0]["rejected"] is True
    )


def test_report_is_json_and_passes_only_if_every_row_does() -> None:
    rows = [ReportRow("a", "q", "x", True), ReportRow("b", "r", "y", False)]
    document = json.loads(json.dumps(as_json(rows)))
    assert document["holds"] is False
    assert document["rows"][1] == {"part": "b", "question": "r", "answer": "y", "holds": False}
    assert as_json(rows[:1])["holds"] is True


def test_table_shows_every_row_without_truncation() -> None:
    rows = [
        ReportRow("a", "is it right " * 10, "fine " * 20, True),
        ReportRow("d", "and this", "no", False),
    ]
    text = text_of(as_table(rows), width=60)
    assert text.split().count("fine") == 20 and text.split().count("right") == 10
    assert "NO" in text and "yes" in text

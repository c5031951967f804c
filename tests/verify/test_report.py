"""The proof as rows: every question with its answer, as a table and as JSON."""

import io
import json
from dataclasses import replace

from rich.console import Console

from megalith.config.parallel import ParallelConfig
from megalith.testing.tiny import tiny_run
from megalith.verify.ranks import Difference, layout_case
from megalith.verify.report import Row, as_json, as_table, difference_rows, rule_rows, type_rows
from megalith.verify.types import Problem, TypeReport

REPORT = TypeReport(
    world=4096, axes={"dp": 512, "cp": 1, "tp_kv": 8, "tp_copy": 1}, ranks=(0, 2052, 4095), parameters=9,
    collectives={"enter over tp": 4, "leave over tp": 5}, problems=(), seconds=1.25, peak_gib=0.3,
)  # fmt: skip


def test_rules_that_hold_are_one_row_and_broken_ones_one_each() -> None:
    assert rule_rows([]) == [Row("a", "every rule across the settings", "holds", True)]
    broken = rule_rows(["one is odd. Set it to 2.", "two"])
    assert [(row.part, row.answer, row.holds) for row in broken] == [
        ("a", "one is odd. Set it to 2.", False), ("a", "two", False),
    ]  # fmt: skip


def test_the_type_check_says_what_it_looked_at() -> None:
    row, unproved = type_rows(REPORT)
    assert row.holds and row.part == "b"
    assert row.question == "every gradient meets the sum it needs, at world 4,096"
    assert row.answer.startswith("dp 512, tp 8; ranks 0, 2052, 4095; 9 parameters, 9 collectives; 1.2 s, 0.30 GiB")
    assert unproved == Row("b", "nothing is proved about axes of one rank", "cp", True)


def test_tensor_parallel_ranks_are_one_axis_as_the_user_set_them() -> None:
    shared = replace(REPORT, axes={"dp": 2, "cp": 2, "tp_kv": 4, "tp_copy": 3})
    (row,) = type_rows(shared)
    assert row.answer.startswith("dp 2, cp 2, tp 12 (3 ranks share each key/value head); ranks 0")
    alone = replace(REPORT, axes={"dp": 1, "cp": 1, "tp_kv": 1, "tp_copy": 1})
    row, unproved = type_rows(alone)
    assert row.answer.startswith("no axis; ") and unproved.answer == "dp, cp, tp"


def test_each_type_problem_is_a_row() -> None:
    problem = Problem(where="layers.0", what="expects P", ranks=(3,))
    refused = TypeReport(**{name: getattr(REPORT, name) for name in TypeReport.__slots__} | {"problems": (problem,)})
    first, second, _ = type_rows(refused)
    assert not first.holds and not second.holds
    assert second.answer == "layers.0 (rank 3): expects P"


def test_differences_are_rows_under_what_was_run() -> None:
    case = layout_case(tiny_run().model, ParallelConfig(tp=2, dp=3, sp=True), 6)
    found = [
        Difference("first loss", "", 1e-16, True), Difference("gradients", "norm.weight", 0.5, False),
    ]  # fmt: skip
    rows = difference_rows(case, found)
    assert all(row.part == "d" for row in rows)
    assert "6 processes (tp 2, sp, dp 3) equals one" in rows[0].question and not rows[0].holds
    assert (rows[1].answer, rows[1].holds) == ("1.0e-16", True)
    assert (rows[2].answer, rows[2].holds) == ("5.0e-01 at worst, in norm.weight", False)
    assert difference_rows(case, found[:1])[0].holds


def test_the_document_is_json_and_holds_only_if_every_row_does() -> None:
    rows = [Row("a", "q", "x", True), Row("b", "r", "y", False)]
    document = json.loads(json.dumps(as_json(rows)))
    assert document["holds"] is False
    assert document["rows"][1] == {"part": "b", "question": "r", "answer": "y", "holds": False}
    assert as_json(rows[:1])["holds"] is True


def test_the_table_shows_every_row_whole() -> None:
    console = Console(file=io.StringIO(), width=60, record=True)
    console.print(as_table([Row("a", "is it right " * 10, "fine " * 20, True), Row("d", "and this", "no", False)]))
    text = console.export_text()
    assert text.split().count("fine") == 20 and text.split().count("right") == 10
    assert "NO" in text and "yes" in text

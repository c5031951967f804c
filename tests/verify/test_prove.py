"""All parts of the verification run in order, and failures of each are reported."""

from dataclasses import replace

import pytest

from megalith.config.parallel import ParallelConfig, PipelineConfig
from megalith.testing.tiny import tiny_run
from megalith.verify import prove
from megalith.verify.matrix import Layout, load_matrix
from megalith.verify.prove import check_run_schedule, compare_in_float64, verify_row, verify_run
from megalith.verify.ranks import Difference, LayoutCase
from megalith.verify.types import type_check

DP2 = next(row for row in load_matrix() if row.name == "dp2")
PP2 = next(row for row in load_matrix() if row.name == "pp2 tied, as many as ranks")


def test_valid_row_has_no_problems_and_a_rounding_error() -> None:
    result = verify_row(PP2)
    assert (
        result.holds and result.problems == () and 0 < result.error < 1e-12 and result.seconds > 0
    )
    assert (result.area, result.name, result.world) == ("pipeline", PP2.name, 2)


def test_rows_are_verified_with_the_requested_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[str] = []

    def note(case: LayoutCase) -> list[Difference]:
        requested.append(case.run.kernels)
        return [Difference("first loss", "", 0.0, True)]

    monkeypatch.setattr(prove, "compare_in_float64", note)
    assert (
        verify_row(DP2, "reference").holds
        and verify_row(DP2).holds
        and requested == ["reference", "auto"]
    )


def test_report_notes_that_types_were_checked_with_other_kernels() -> None:
    rows = [
        row.answer for row in verify_run(tiny_run({"kernels": "reference"}), 1) if row.part == "b"
    ]
    assert "kernels=reference: types were checked with kernels=auto" in rows


def test_row_that_violates_a_rule_is_not_run() -> None:
    broken = replace(DP2, parallel=ParallelConfig(dp=2, dp_replicate=2))
    result = verify_row(broken)
    assert not result.holds and result.problems[0].startswith(
        "a: parallel.dp_replicate=2 with parallel.zero=0"
    )


@pytest.mark.parametrize(
    ("row", "fault", "message"),
    [
        (DP2, "dp_sum_averaged", "d: gradients off by "),
        (PP2, "tied_sum_left_out", "d: gradients off by "),
        (DP2, "no_such_fault", "d: "),
    ],
)
def test_fault_on_the_ranks_is_reported(
    row: Layout, fault: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(row.case(), fault=fault)
    monkeypatch.setattr(Layout, "case", lambda self: case)
    result = verify_row(row)
    assert any(problem.startswith(message) for problem in result.problems), result.problems
    if fault == "no_such_fault":
        assert "unknown fault" in result.problems[0] and result.error == float("inf")


def test_failure_of_a_rank_is_reported_as_a_problem() -> None:
    result = compare_in_float64(LayoutCase(DP2.case().run, 2, fault="no_such_fault"))
    assert isinstance(result, str) and "unknown fault" in result


def test_schedule_of_the_run_is_checked() -> None:
    run = tiny_run({"parallel.pp": "2", "train.micro_batch_size": "2"})
    report = check_run_schedule(run, 2)
    assert report is not None and report.ok
    assert (report.name, report.num_ranks, report.num_microbatches) == ("1f1b", 2, 6)
    assert check_run_schedule(tiny_run(), 2) is None
    wrong = replace(run, parallel=replace(run.parallel, pipeline=PipelineConfig(vpp=2, group=4)))
    padded = check_run_schedule(replace(wrong, train=replace(run.train, micro_batch_size=4)), 2)
    assert padded is not None and padded.ok and padded.num_microbatches == 4, "one is empty"
    gpipe = replace(run.parallel, pipeline=PipelineConfig(vpp=2, schedule="gpipe"))
    refused = check_run_schedule(replace(run, parallel=gpipe), 2)
    assert refused is not None and not refused.ok


def test_parts_are_reported_in_order_and_a_fault_fails_only_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # a process of its own imports torch first
    monkeypatch.setattr(prove, "type_check_in_child", type_check)
    run = tiny_run({"parallel.tp": "2", "parallel.sp": "true"})
    rows = verify_run(run, 4, fault="sp_norm_not_summed")
    assert list(dict.fromkeys(row.part for row in rows)) == ["a", "b", "c", "d"]
    assert all(row.holds for row in rows if row.part != "d")
    assert any(not row.holds and "_norm.weight" in row.answer for row in rows), [
        row.answer for row in rows
    ]
    monkeypatch.setattr(prove, "compare_in_float64", lambda case: "rank 1 raised")
    failed = verify_run(run, 2)
    assert not failed[-1].holds and failed[-1].answer.endswith("rank 1 raised")


def test_automatic_recomputation_is_verified_as_resolved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases: list[LayoutCase] = []

    def noted(case: LayoutCase) -> str:
        cases.append(case)
        return "not run"

    monkeypatch.setattr(prove, "compare_in_float64", noted)
    monkeypatch.setattr(prove, "type_check_in_child", type_check)
    verify_run(tiny_run({"recompute.granularity": "auto", "recompute.device": "80"}), 2)
    assert {case.run.recompute.granularity for case in cases} == {"none"}

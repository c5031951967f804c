"""The summary of `.ci/run` counts what ran, and fails when a planted fault was not rejected or
nothing ran."""

import json
from pathlib import Path

import pytest

from megalith.verify.faults.plant import load_faults
from tools import ci_report
from tools.ci_report import main, planted_faults, versions

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.plan.test_grid" name="a" time="1.5"/>
<testcase classname="tests.verify.test_fault_table" name="b[lost_sum]" time="4.5">
<properties><property name="rejected_fault" value="lost_sum"/></properties></testcase>
<testcase classname="tests.test_imports" name="c" time="2"><skipped message="needs an NVIDIA GPU"/></testcase>
{more}</testsuite></testsuites>"""


@pytest.fixture(autouse=True)
def one_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of planted faults has one entry."""
    monkeypatch.setattr(ci_report, "planted_faults", lambda: ["lost_sum"])


def summary(folder: Path, *, code: int = 0, more: str = "") -> int:
    (folder / "stages.tsv").write_text(f"lint\t0\t7\ntest\t{code}\t42\n")
    (folder / "test.xml").write_text(JUNIT.format(more=more))
    return main(["summary", str(folder)])


def test_stages_that_passed_are_counted_and_skips_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert summary(tmp_path) == 0
    printed = capsys.readouterr().out
    assert "test       ok           42       2       0       1" in printed
    assert "test: skipped 1: needs an NVIDIA GPU" in printed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"code": 2}, "make test ended with 2"),
        (
            {"more": '<testcase name="d"><skipped message="unconditional skip"/></testcase>'},
            "1 tests skipped without",
        ),
    ],
)
def test_failed_and_unexplained_runs_are_not_green(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object], message: str
) -> None:
    assert summary(tmp_path, **change) == 1  # type: ignore[arg-type]  # each case changes one keyword
    assert message in capsys.readouterr().out


def test_planted_faults_that_no_test_rejected_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ci_report, "planted_faults", lambda: ["lost_sum", "swapped_rows", "stale_cache"]
    )
    assert summary(tmp_path) == 1
    assert (
        "test: no test rejected 2 planted faults: swapped_rows, stale_cache"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("stage", ["test", "test-all"])
def test_stage_without_a_report_rejected_no_fault(stage: str, tmp_path: Path) -> None:
    (tmp_path / "stages.tsv").write_text(f"{stage}\t0\t1\n")
    assert main(["summary", str(tmp_path)]) == 1


def test_lint_alone_needs_no_rejected_fault(tmp_path: Path) -> None:
    (tmp_path / "stages.tsv").write_text("lint\t0\t1\n")
    assert main(["summary", str(tmp_path)]) == 0


def test_the_report_is_also_json(tmp_path: Path) -> None:
    summary(tmp_path, more='<testcase name="d"><failure/></testcase>')
    stages = json.loads((tmp_path / "ci-report.json").read_text())
    assert [(stage["name"], stage["passed"], stage["failed"]) for stage in stages] == [
        ("lint", 0, 0),
        ("test", 2, 1),
    ]
    assert [stage["rejected_faults"] for stage in stages] == [[], ["lost_sum"]]


def test_shares_of_test_time_are_printed_by_test_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert summary(tmp_path) == 0
    assert (
        "test: 8 s of tests: tests/verify 56%, tests 25%, tests/plan 19%" in capsys.readouterr().out
    )


def test_line_coverage_is_printed_by_package_and_never_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "coverage.json"
    lines = {
        "megalith/plan/grid.py": (9, 10),
        "megalith/plan/keys.py": (0, 10),
        "megalith/errors.py": (4, 4),
    }
    files = {
        name: {"summary": {"covered_lines": covered, "num_statements": all_lines}}
        for name, (covered, all_lines) in lines.items()
    }
    file.write_text(json.dumps({"files": files}))
    assert main(["coverage", str(file)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [
        ["45.0%", "20", "megalith/plan"],
        ["54.2%", "24", "all"],
        ["100.0%", "4", "megalith"],
    ]
    assert main(["coverage", str(tmp_path / "none.json")]) == 0
    assert "not measured, which needs Python 3.12" in capsys.readouterr().out


def test_versions_name_python_torch_and_the_cores() -> None:
    text = versions()
    assert "python 3." in text
    assert "torch 2." in text
    assert "cores" in text


def test_planted_faults_are_those_of_verify() -> None:
    assert planted_faults() == [fault.name for fault in load_faults()]

"""The summary of `.ci/run` counts what ran, and is not green when little or nothing did."""

import json
from pathlib import Path

import pytest

from tools.ci_report import main, read_minimum, versions

JUNIT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"/>
<testcase name="c"><skipped message="needs an NVIDIA GPU"/></testcase>
{more}</testsuite></testsuites>"""


def summary(folder: Path, *, code: int = 0, more: str = "", minimum: str = "test 2") -> int:
    (folder / "stages.tsv").write_text(f"lint\t0\t7\ntest\t{code}\t42\n")
    (folder / "test.xml").write_text(JUNIT.format(more=more))
    (folder / "minimum").write_text(f"# stage, tests\n{minimum}\n")
    return main(["summary", str(folder), "--minimum", str(folder / "minimum")])


def test_stages_that_passed_are_counted_and_skips_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert summary(tmp_path) == 0
    printed = capsys.readouterr().out
    assert "test       ok           42       2       0       1" in printed
    assert "test: skipped 1: needs an NVIDIA GPU" in printed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"code": 2}, "make test ended with 2"),
        ({"minimum": "test 3"}, "2 tests passed, expected at least 3"),
        ({"more": '<testcase name="d"><skipped message="unconditional skip"/></testcase>'}, "1 tests skipped without"),
    ],
)
def test_a_failed_a_thin_and_an_unexplained_run_are_not_green(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object], message: str
) -> None:
    assert summary(tmp_path, **change) == 1  # type: ignore[arg-type]  # each case changes one keyword
    assert message in capsys.readouterr().out


def test_a_stage_without_a_report_counts_as_no_tests(tmp_path: Path) -> None:
    (tmp_path / "stages.tsv").write_text("test\t0\t1\n")
    (tmp_path / "minimum").write_text("test 1")
    assert main(["summary", str(tmp_path), "--minimum", str(tmp_path / "minimum")]) == 1


def test_the_report_is_also_json(tmp_path: Path) -> None:
    summary(tmp_path, more='<testcase name="d"><failure/></testcase>')
    stages = json.loads((tmp_path / "ci-report.json").read_text())
    assert [(stage["name"], stage["passed"], stage["failed"]) for stage in stages] == [("lint", 0, 0), ("test", 2, 1)]


def test_versions_name_python_torch_and_the_cores() -> None:
    text = versions()
    assert "python 3." in text
    assert "torch 2." in text
    assert "cores" in text


def test_the_stored_minimum_is_readable() -> None:
    file = Path(__file__).resolve().parents[2] / ".ci" / "minimum_tests"
    assert set(read_minimum(file)) == {"test", "test-all"}

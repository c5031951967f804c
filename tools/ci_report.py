"""Reports of `.ci/run`: package versions, and a table of the stages with test counts and skips.

usage: ci_report.py versions
       ci_report.py summary FOLDER
       ci_report.py coverage FILE

FOLDER holds `stages.tsv` (stage, exit code, seconds) and, for stages that ran pytest, STAGE.xml in
JUnit form. The summary is also written there as `ci-report.json`. The exit code is 1 if a
stage failed, a test was skipped without a reason, or the tests of a stage did not reject every
planted fault of `megalith verify`. It also prints the share
of each test package in the test time, and `coverage` prints the line coverage of each package from
a JSON report of coverage.py; neither fails a run.
"""

import argparse
import json
import os
import platform
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SHOWN = (
    "torch",
    "numpy",
    "numba",
    "spmd_types",
    "tokenizers",
    "transformers",
    "pytest",
    "ruff",
    "mypy",
)
NO_REASON = ("", "unconditional skip")  # what pytest writes when nobody gave one
TEST_STAGES = ("test", "test-all")


@dataclass(frozen=True, slots=True)
class Stage:
    """Outcome of one stage; `problems` is empty if it passed."""

    name: str
    seconds: int
    passed: int = 0
    failed: int = 0
    skips: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    rejected_faults: list[str] = field(default_factory=list)
    package_seconds: dict[str, float] = field(default_factory=dict)


def versions() -> str:
    """Return the versions of packages that can change results."""
    lines = [f"python {platform.python_version()} on {platform.platform()}, {os.cpu_count()} cores"]
    for name in SHOWN:
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            lines.append(f"{name} is not installed")
    return "\n".join(lines)


def planted_faults() -> list[str]:
    """Return the names of the faults that tests must reject."""
    from megalith.verify.faults.plant import load_faults

    return [fault.name for fault in load_faults()]


def read_stages(folder: Path) -> list[Stage]:
    """Return the stages in the order they ran."""
    rows = [line.split("\t") for line in (folder / "stages.tsv").read_text().splitlines()]
    return [_read_stage(folder, name, int(code), int(seconds)) for name, code, seconds in rows]


def _read_stage(folder: Path, name: str, code: int, seconds: int) -> Stage:
    file = folder / f"{name}.xml"
    cases = list(ElementTree.parse(file).iter("testcase")) if file.exists() else []
    outcomes, skips = _count(cases)
    rejected = _rejected_faults(cases)
    problems = [f"make {name} ended with {code}"] if code else []
    problems += [
        f"{number} tests skipped without a reason"
        for why, number in skips.items()
        if why in NO_REASON
    ]
    missing = (
        [fault for fault in planted_faults() if fault not in rejected]
        if name in TEST_STAGES
        else []
    )
    if missing:
        problems.append(f"no test rejected {len(missing)} planted faults: {', '.join(missing)}")
    return Stage(
        name,
        seconds,
        outcomes["passed"],
        outcomes["failed"],
        dict(skips),
        problems,
        rejected,
        _package_seconds(cases),
    )


def _rejected_faults(cases: Sequence[ElementTree.Element]) -> list[str]:
    """Return names that passing tests recorded with `record_property("rejected_fault", name)`."""
    properties = [entry for case in cases for entry in case.iter("property")]
    return sorted(
        entry.get("value", "") for entry in properties if entry.get("name") == "rejected_fault"
    )


def _package_seconds(cases: Sequence[ElementTree.Element]) -> dict[str, float]:
    """Return the seconds of the tests per folder of tests/, the longest first."""
    seconds: dict[str, float] = {}
    for case in cases:
        parts = case.get("classname", "").split(".")
        package = "/".join(parts[:2]) if len(parts) > 2 else parts[0]
        seconds[package] = seconds.get(package, 0.0) + float(case.get("time", 0))
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _count(cases: Sequence[ElementTree.Element]) -> tuple[Counter[str], Counter[str]]:
    """Count outcomes, and skips by reason."""
    outcomes: Counter[str] = Counter()
    skips: Counter[str] = Counter()
    for case in cases:
        skipped = case.find("skipped")
        if skipped is not None:
            skips[skipped.get("message", "")] += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            outcomes["failed"] += 1
        else:
            outcomes["passed"] += 1
    return outcomes, skips


def table(stages: Sequence[Stage]) -> str:
    """Return the summary of the stages."""
    lines = [f"{'stage':10} {'result':7} {'seconds':>7} {'passed':>7} {'failed':>7} {'skipped':>7}"]
    for stage in stages:
        result = "failed" if stage.problems else "ok"
        counts = f"{stage.passed:7} {stage.failed:7} {sum(stage.skips.values()):7}"
        lines.append(f"{stage.name:10} {result:7} {stage.seconds:7} {counts}")
    for stage in stages:
        lines += [
            f"{stage.name}: skipped {number}: {why}" for why, number in sorted(stage.skips.items())
        ]
        lines += [f"{stage.name}: {problem}" for problem in stage.problems]
    return "\n".join(lines)


def time_table(stage: Stage) -> str:
    """Return each test package's share of the test time in one line."""
    total = sum(stage.package_seconds.values())
    shares = [
        f"{name} {seconds / total:.0%}" for name, seconds in stage.package_seconds.items() if total
    ]
    return f"{stage.name}: {total:.0f} s of tests: {', '.join(shares)}"


def coverage_table(file: Path) -> str:
    """Return the line coverage per package of megalith/, lowest first, from a JSON report of
    coverage.py."""
    if not file.exists():
        return (
            "line coverage: not measured, which needs Python 3.12; COVERAGE=1 measures it with "
            "an older one, slower"
        )
    lines: dict[str, Counter[str]] = {}
    for name, report in json.loads(file.read_text())["files"].items():
        parts = Path(name).parts
        package = "/".join(parts[:2]) if len(parts) > 2 else parts[0]
        summary = report["summary"]
        counts = {"covered": summary["covered_lines"], "all": summary["num_statements"]}
        lines.setdefault(package, Counter()).update(counts)
    lines["all"] = sum(lines.values(), Counter())
    shares = {
        package: counts["covered"] / max(1, counts["all"]) for package, counts in lines.items()
    }
    rows = [
        f"{share:7.1%} {lines[name]['all']:7} {name}"
        for name, share in sorted(shares.items(), key=lambda x: x[1])
    ]
    header = (
        f"{'covered':>7} {'lines':>7} package (lines that run in other processes, such as "
        "ranks, do not count)"
    )
    return "\n".join([header, *rows])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the three commands; return 1 if a stage has a problem."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("versions", "summary", "coverage"))
    parser.add_argument("path", nargs="?", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "versions":
        print(versions())
        return 0
    if options.path is None:
        needed = (
            "the folder that holds stages.tsv"
            if options.command == "summary"
            else "the JSON report"
        )
        parser.error(f"{options.command}: pass {needed}")
    if options.command == "coverage":
        print(coverage_table(options.path))
        return 0
    stages = read_stages(options.path)
    (options.path / "ci-report.json").write_text(
        json.dumps([asdict(stage) for stage in stages], indent=1) + "\n"
    )
    print(table(stages))
    for stage in stages:
        if stage.package_seconds:
            print(time_table(stage))
    return int(any(stage.problems for stage in stages))


if __name__ == "__main__":
    sys.exit(main())

"""What `.ci/run` prints: the versions it ran with, and one table of its stages, with tests counted and skips explained.

usage: ci_report.py versions
       ci_report.py summary FOLDER [--minimum FILE]

FOLDER holds `stages.tsv` (stage, exit code, seconds) and, for stages that ran pytest, STAGE.xml in JUnit form. The
summary is also written there as `ci-report.json`. Ends with 1 when a stage failed, when a test was skipped without a
reason, or when fewer tests passed than FILE asks for its stage: a run that tests nothing must not look green.
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

SHOWN = ("torch", "numpy", "numba", "spmd_types", "tokenizers", "transformers", "pytest", "ruff", "mypy")
NO_REASON = ("", "unconditional skip")  # what pytest writes when nobody gave one


@dataclass(frozen=True, slots=True)
class Stage:
    """The outcome of one stage; `problems` is empty when it passed."""

    name: str
    seconds: int
    passed: int = 0
    failed: int = 0
    skips: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def versions() -> str:
    """One line per thing whose version can change a result."""
    lines = [f"python {platform.python_version()} on {platform.platform()}, {os.cpu_count()} cores"]
    for name in SHOWN:
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            lines.append(f"{name} is not installed")
    return "\n".join(lines)


def read_minimum(file: Path) -> dict[str, int]:
    """Stage -> fewest tests that must pass, from lines such as `test 120`."""
    lines = [line.split("#")[0].split() for line in file.read_text().splitlines()]
    return {words[0]: int(words[1]) for words in lines if words}


def read_stages(folder: Path, minimum: dict[str, int]) -> list[Stage]:
    """The stages in the order they ran."""
    rows = [line.split("\t") for line in (folder / "stages.tsv").read_text().splitlines()]
    return [_stage(folder, name, int(code), int(seconds), minimum.get(name, 0)) for name, code, seconds in rows]


def _stage(folder: Path, name: str, code: int, seconds: int, minimum: int) -> Stage:
    outcomes, skips = _count(folder / f"{name}.xml")
    problems = [f"make {name} ended with {code}"] if code else []
    problems += [f"{number} tests skipped without a reason" for why, number in skips.items() if why in NO_REASON]
    if outcomes["passed"] < minimum:
        problems.append(f"{outcomes['passed']} tests passed, expected at least {minimum}")
    return Stage(name, seconds, outcomes["passed"], outcomes["failed"], dict(skips), problems)


def _count(junit: Path) -> tuple[Counter[str], Counter[str]]:
    """Outcomes, and skips by reason."""
    outcomes: Counter[str] = Counter()
    skips: Counter[str] = Counter()
    if not junit.exists():
        return outcomes, skips
    for case in ElementTree.parse(junit).iter("testcase"):
        skipped = case.find("skipped")
        if skipped is not None:
            skips[skipped.get("message", "")] += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            outcomes["failed"] += 1
        else:
            outcomes["passed"] += 1
    return outcomes, skips


def table(stages: Sequence[Stage]) -> str:
    """The summary for people."""
    lines = [f"{'stage':10} {'result':7} {'seconds':>7} {'passed':>7} {'failed':>7} {'skipped':>7}"]
    for stage in stages:
        result = "failed" if stage.problems else "ok"
        counts = f"{stage.passed:7} {stage.failed:7} {sum(stage.skips.values()):7}"
        lines.append(f"{stage.name:10} {result:7} {stage.seconds:7} {counts}")
    for stage in stages:
        lines += [f"{stage.name}: skipped {number}: {why}" for why, number in sorted(stage.skips.items())]
        lines += [f"{stage.name}: {problem}" for problem in stage.problems]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the two commands; 1 when a stage has a problem."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("versions", "summary"))
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--minimum", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "versions":
        print(versions())
        return 0
    if options.folder is None:
        parser.error("summary: pass the folder that holds stages.tsv")
    stages = read_stages(options.folder, read_minimum(options.minimum) if options.minimum else {})
    (options.folder / "ci-report.json").write_text(json.dumps([asdict(stage) for stage in stages], indent=1) + "\n")
    print(table(stages))
    return int(any(stage.problems for stage in stages))


if __name__ == "__main__":
    sys.exit(main())

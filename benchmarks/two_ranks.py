"""Models and options of the benchmarks of two ranks, and how their reports follow one another."""

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from train import tiny

from megalith.recipes import recipes

WORLD = 2
CASES = {"6m": recipes()["llama_6m"], "29m": recipes()["llama_29m"]}
RECIPES = CASES | {"tiny": tiny}
LOSS_TOLERANCE = 1e-5


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that all have."""
    argument_parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    argument_parser.add_argument(
        "--case", action="append", choices=list(RECIPES), help="again for more; 6m and 29m if unset"
    )
    argument_parser.add_argument("--rounds", type=int, default=15, help="rounds that count")
    argument_parser.add_argument(
        "--warmup", type=int, default=2, help="rounds before those that count"
    )
    argument_parser.add_argument(
        "--timeout", type=float, default=1800.0, help="seconds that a case may take"
    )
    argument_parser.add_argument(
        "--json", action="store_true", help="one JSON document instead of text"
    )
    return argument_parser


def report_each(
    names: Iterable[str],
    measure: Callable[[str], Any],
    show: Callable[[Any], None],
    *,
    as_json: bool,
) -> None:  # Any: each benchmark has a dataclass of its own
    """Measure case after case: shown for people as soon as each is there, or at the end as one JSON
    document."""
    reports = []
    for name in names:
        reports.append(measure(name))
        if not as_json:
            show(reports[-1])
    if as_json:
        print(json.dumps([asdict(report) for report in reports], indent=2))

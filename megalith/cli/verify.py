"""`megalith verify`: verify on this machine that a parallel layout gives the results of one
process."""

import sys
import time
from dataclasses import dataclass

from tyro.conf import Positional

from megalith.cli.arguments import parse_options, split_overrides
from megalith.cli.output import print_json
from megalith.config.kernels import Kernel
from megalith.config.train import TrainRun
from megalith.config.tree import apply_overrides
from megalith.errors import ConfigError
from megalith.plan.grid import min_world_size

CHECK_FAILED = 1  # exit code
RULE_VIOLATED = 2  # exit code: the run cannot be built with these settings


@dataclass(frozen=True, kw_only=True)
class VerifyCommand:
    """Verify a parallel layout: (a) all rules; (b) the sharding types of all gradients and (c) the
    pipeline schedule, both at the real world size without processes; (d) small float64 models on
    real processes match one process. Needs no GPU.

    Exit code 0: all checks pass; 1: a check failed; 2: the settings violate a rule, or the options
    are invalid.
    """

    recipe: Positional[str | None] = None
    """Name of a recipe, a YAML file, or the folder of a run."""

    world: int | None = None
    """World size of the real job; default: the smallest of the layout."""

    all: bool = False
    """Instead of one recipe: verify every layout of the matrix, and that every injected fault is
    detected. Takes about ten minutes on two cores. --kernels applies to the layouts only."""

    sample: bool = False
    """With --all: a subset of layouts that covers every feature once."""

    json: bool = False
    """Print one JSON document."""


def main(argv: list[str]) -> int:
    """Run the command; 0 if all checks pass, 1 if a check failed, 2 if the settings violate a
    rule."""
    rest, overrides = split_overrides(argv, TrainRun)
    command = parse_options(VerifyCommand, rest, prog="megalith verify", root=TrainRun)
    if command.all:
        _reject_with_all(command, [name for name in overrides if name != "kernels"])
        return _verify_all(
            sample=command.sample,
            json=command.json,
            kernels=apply_overrides(_KernelOverrides(), overrides).kernels,
        )
    if command.sample:
        raise ConfigError(f"--sample={command.sample} needs --all. Add --all, or remove it.")
    if command.recipe is None:
        raise ConfigError(
            f"recipe={command.recipe}: a recipe is required. Pass the name of a recipe, a YAML "
            "file or --all."
        )
    from megalith.recipes import resolve

    run = apply_overrides(resolve(command.recipe), overrides)
    world = command.world if command.world is not None else min_world_size(run.parallel)
    if world < 1:
        raise ConfigError(
            f"--world={world} must be at least 1. Use the world size of the real job."
        )
    return _verify(run, world, json=command.json)


def _reject_with_all(command: VerifyCommand, overrides: list[str]) -> None:
    conflicting = [command.recipe] if command.recipe is not None else []
    conflicting += [f"--world {command.world}"] if command.world is not None else []
    conflicting += [f"--{name}" for name in overrides]
    if conflicting:
        raise ConfigError(
            f"--all with {', '.join(conflicting)}: layouts of --all have fixed settings. Remove "
            "one of them."
        )


@dataclass(frozen=True, kw_only=True)
class _KernelOverrides:
    kernels: Kernel = "auto"


def _verify(run: TrainRun, world: int, *, json: bool) -> int:
    from rich.console import Console

    from megalith.verify.prove import LEGEND, as_json, as_table, verify_run

    rows = verify_run(run, world)
    if json:
        print_json(as_json(rows))
    else:
        console = Console()
        console.print(as_table(rows))
        console.print(LEGEND, highlight=False)
    if any(row.part == "a" and not row.holds for row in rows):
        return RULE_VIOLATED
    return 0 if all(row.holds for row in rows) else CHECK_FAILED


def _verify_all(*, sample: bool, json: bool, kernels: Kernel) -> int:
    from rich.console import Console

    from megalith.verify.prove import (
        fault_summary,
        matrix_json,
        problem_lines,
        summary_table,
        verify_matrix,
    )

    started = time.perf_counter()
    results, verdicts = verify_matrix(sample=sample, log=_print_progress, kernels=kernels)
    document = matrix_json(results, verdicts)
    if json:
        print_json(document)
    else:
        console = Console()
        console.print(summary_table(results))
        console.print(fault_summary(verdicts))
        for line in problem_lines(results, verdicts):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        held = sum(result.holds for result in results)
        rejected = sum(verdict.rejected for verdict in verdicts)
        console.print(
            f"{held} of {len(results)} layouts match one process, {rejected} of {len(verdicts)} "
            f"injected faults were detected; {time.perf_counter() - started:.0f} s",
            highlight=False,
        )
    return 0 if document["holds"] else CHECK_FAILED


def _print_progress(text: str) -> None:
    """Print progress to standard error."""
    print(text, file=sys.stderr, flush=True)

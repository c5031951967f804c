"""`megalith verify`: prove on this machine that a layout computes what one process computes."""

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
from megalith.plan.layout import fewest_ranks

NO = 1  # the exit code of "no"
RULE_VIOLATED = 2  # such a run cannot be built: its settings have to be changed first


@dataclass(frozen=True, kw_only=True)
class VerifyCommand:
    """Prove a layout: (a) every rule; (b) the types of every gradient and (c) the pipeline's lists,
    both at the real world size and on paper; (d) tiny copies in float64 on real processes equal one
    process. Nothing needs a GPU.

    Exit code 0: all holds; 1: a check failed; 2: the settings violate a rule, or the options are
    invalid.
    """

    recipe: Positional[str | None] = None
    """A recipe's name, a YAML file, or the folder of a run."""

    world: int | None = None
    """Ranks of the real job; default: the fewest that the layout can have."""

    all: bool = False
    """Instead of one recipe: every layout of the matrix, and every fault that can be planted,
    which must be refused. Some ten minutes on two cores. With --kernels layouts are computed so,
    and faults as always."""

    sample: bool = False
    """With --all: the layouts that together have everything once."""

    json: bool = False
    """Print one JSON document."""


def main(argv: list[str]) -> int:
    """Run the command; 0 if all holds, 1 if a check failed, 2 if the settings violate a rule."""
    rest, overrides = split_overrides(argv, TrainRun)
    command = parse_options(VerifyCommand, rest, prog="megalith verify", root=TrainRun)
    if command.all:
        _refuse_beside_all(command, [name for name in overrides if name != "kernels"])
        return _verify_all(
            sample=command.sample,
            json=command.json,
            kernels=apply_overrides(_AsComputed(), overrides).kernels,
        )
    if command.sample:
        raise ConfigError(
            f"--sample={command.sample} chooses among all layouts. Use it with --all."
        )
    if command.recipe is None:
        raise ConfigError(
            f"recipe={command.recipe}: there is nothing to verify. Pass a recipe's name, a YAML "
            "file or --all."
        )
    from megalith.recipes import resolve

    run = apply_overrides(resolve(command.recipe), overrides)
    world = command.world if command.world is not None else fewest_ranks(run.parallel)
    if world < 1:
        raise ConfigError(
            f"--world={world} must be at least 1. Use the number of ranks of the real job."
        )
    return _verify(run, world, json=command.json)


def _refuse_beside_all(command: VerifyCommand, overrides: list[str]) -> None:
    beside = [command.recipe] if command.recipe is not None else []
    beside += [f"--world {command.world}"] if command.world is not None else []
    beside += [f"--{name}" for name in overrides]
    if beside:
        raise ConfigError(
            f"--all with {', '.join(beside)}: all layouts have their own sizes. Use one or the "
            "other."
        )


@dataclass(frozen=True, kw_only=True)
class _AsComputed:
    kernels: Kernel = "auto"


def _verify(run: TrainRun, world: int, *, json: bool) -> int:
    from rich.console import Console

    from megalith.verify.prove import prove_run
    from megalith.verify.report import LEGEND, as_json, as_table

    rows = prove_run(run, world)
    if json:
        print_json(as_json(rows))
    else:
        console = Console()
        console.print(as_table(rows))
        console.print(LEGEND, highlight=False)
    if any(row.part == "a" and not row.holds for row in rows):
        return RULE_VIOLATED
    return 0 if all(row.holds for row in rows) else NO


def _verify_all(*, sample: bool, json: bool, kernels: Kernel) -> int:
    from rich.console import Console

    from megalith.verify.prove import prove_all
    from megalith.verify.report import fault_summary, matrix_json, problem_lines, summary_table

    started = time.perf_counter()
    results, verdicts = prove_all(sample=sample, tell=_tell, kernels=kernels)
    document = matrix_json(results, verdicts)
    if json:
        print_json(document)
    else:
        console = Console()
        console.print(summary_table(results))
        console.print(fault_summary(verdicts))
        for line in problem_lines(results, verdicts):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        held, refused = (
            sum(result.holds for result in results),
            sum(verdict.refused for verdict in verdicts),
        )
        console.print(
            f"{held} of {len(results)} layouts equal one process, {refused} of {len(verdicts)} "
            "planted faults are "
            f"refused; {time.perf_counter() - started:.0f} s",
            highlight=False,
        )
    return 0 if document["holds"] else NO


def _tell(text: str) -> None:
    """How far it is, beside what is printed at the end."""
    print(text, file=sys.stderr, flush=True)

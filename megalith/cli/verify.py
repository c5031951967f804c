"""`megalith verify`: prove on this machine that a layout computes what one process computes."""

from dataclasses import dataclass

from tyro.conf import Positional

from megalith.cli.arguments import parse_options, split_overrides
from megalith.cli.output import print_json
from megalith.config.train import TrainRun
from megalith.config.tree import apply_overrides
from megalith.errors import ConfigError

NO = 1  # the exit code of "no"


@dataclass(frozen=True, kw_only=True)
class VerifyCommand:
    """Prove a layout: (a) every rule; (b) the types of every gradient at the real world size, on paper; (d) a tiny copy
    in float64 on real processes equals one process. Nothing needs a GPU."""

    recipe: Positional[str]
    """A recipe's name, a YAML file, or the folder of a run."""

    world: int | None = None
    """Ranks of the real job; default: parallel.tp * parallel.dp."""

    json: bool = False
    """Print one JSON document."""


def main(argv: list[str]) -> int:
    """Run the command; 0 when all holds, 1 when something does not."""
    rest, overrides = split_overrides(argv, TrainRun)
    command = parse_options(VerifyCommand, rest, prog="megalith verify", root=TrainRun)
    from megalith.recipes import resolve

    run = apply_overrides(resolve(command.recipe), overrides)
    world = command.world if command.world is not None else run.parallel.tp * (run.parallel.dp or 1)
    if world < 1:
        raise ConfigError(f"--world={world} must be at least 1. Use the number of ranks of the real job.")
    return _verify(run, world, json=command.json)


def _verify(run: TrainRun, world: int, *, json: bool) -> int:
    from rich.console import Console

    from megalith.train.rules import run_problems
    from megalith.verify.ranks import prove_layout
    from megalith.verify.report import as_json, as_table, difference_rows, rule_rows, type_rows
    from megalith.verify.shrink import shrink
    from megalith.verify.types import type_check_in_child

    rows = rule_rows(run_problems(run, world))
    if all(row.holds for row in rows):  # the other parts need a layout that can be built
        rows += type_rows(type_check_in_child(run.model, run.parallel, world=world))
        case = shrink(run, world)
        rows += difference_rows(case, prove_layout(case))
    if json:
        print_json(as_json(rows))
    else:
        console = Console()
        console.print(as_table(rows))
        console.print(
            "(b) sees every gradient's sum at the real size, but no values; (d) sees values, scale factors, "
            "buckets, the optimizer and the checkpoint, on a tiny copy. Together they are the proof.",
            highlight=False,
        )
    return 0 if all(row.holds for row in rows) else NO

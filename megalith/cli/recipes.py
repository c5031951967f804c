"""`megalith recipes`: list the recipes with parameters and memory; `show` prints one, `diff`
compares two."""

from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from megalith.cli.arguments import parse_options, split_overrides
from megalith.cli.output import build_difference_table, build_run_table, print_json
from megalith.config.train import TrainRun
from megalith.config.tree import apply_overrides, differences, dump_yaml, to_dict
from megalith.errors import ConfigError, did_you_mean
from megalith.estimate.memory import memory_ledger, worst
from megalith.estimate.workload import plan_workload
from megalith.plan.batch_schedule import largest_batch_size
from megalith.plan.costs import num_parameters
from megalith.plan.grid import min_world_size
from megalith.recipes import build_recipe, describe_recipe, recipes, resolve


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """List the recipes with their number of parameters and memory per rank. `show NAME` prints
    one, `diff A B` compares two."""

    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """Show every setting of a run with its value, default and meaning."""

    recipe: Positional[str]
    """Name of a recipe, a YAML file, or the folder of a run."""

    yaml: bool = False
    """Print YAML that reproduces the run, as a starting point for your own file."""

    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True, kw_only=True)
class RecipeDiffOptions:
    """Show the settings that differ between two runs. Exit code 1 if there are any."""

    left: Positional[str]
    """Name of a recipe, a YAML file, or the folder of a run."""

    right: Positional[str]
    """Recipe, file or run to compare with."""

    json: bool = False
    """Print one JSON document."""


def main(argv: list[str]) -> int:
    """Run `megalith recipes`, `megalith recipes show NAME` or `megalith recipes diff A B`."""
    actions = {"list": list_recipes, "show": show_run, "diff": diff_runs}
    if not argv or argv[0].startswith("-"):
        return list_recipes(argv)
    if argv[0] not in actions:
        advice = did_you_mean(argv[0], actions)
        raise ConfigError(
            f"{argv[0]} is not a subcommand of `megalith recipes`.{advice} Use list, show or diff."
        )
    return actions[argv[0]](argv[1:])


def list_recipes(argv: list[str]) -> int:
    """Print one line per recipe."""
    options = parse_options(ListOptions, argv, prog="megalith recipes")
    rows = [recipe_summary(name) for name in recipes()]
    if options.json:
        print_json(rows)
        return 0
    table = Table("recipe", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("parameters", justify="right")
    table.add_column("GiB per rank", justify="right")
    table.add_column("description")
    for row in rows:
        ranks = f" ×{row['ranks']}" if row["ranks"] > 1 else ""
        memory = f"{row['memory_gib_per_rank']:.1f}{ranks}"
        table.add_row(row["name"], _short_count(row["parameters"]), memory, row["summary"])
    console = Console()
    console.print(table)
    console.print(
        "GiB per rank: weights, gradients, optimizer state and activations; ×8: a replica has 8 "
        "ranks."
    )
    console.print(
        "`megalith plan estimate NAME --world N` shows details, and changes that make it fit."
    )
    console.print(
        "`megalith recipes show NAME` prints every setting, `megalith train NAME` trains it."
    )
    return 0


def recipe_summary(name: str) -> dict[str, Any]:  # Any: JSON
    """Return a recipe's row of the list: sizes, memory per rank in GiB with one replica, and
    the first paragraph of its description."""
    run = build_recipe(name)
    p, t = run.parallel, run.train
    ranks = min_world_size(p)
    rows = t.micro_batch_size * ranks // (p.tp * p.cp * p.pp)
    # the number of microbatches in flight is the same
    short_step = replace(
        t,
        global_batch_size=min(largest_batch_size(t), 4 * p.pp * rows),
        batch_size_schedule=(),
    )
    memory = worst(memory_ledger(plan_workload(replace(run, train=short_step), ranks))).memory
    return {
        "name": name,
        "parameters": num_parameters(run.model),
        "memory_gib_per_rank": memory.total / 2**30,
        "ranks": ranks,
        "tokens_per_step": run.train.global_batch_size * run.train.seq_len,
        "steps": run.train.steps,
        "summary": describe_recipe(name).partition("\n\n")[0].replace("\n", " "),
    }


def show_run(argv: list[str]) -> int:
    """Print every setting of one run after overrides."""
    rest, overrides = split_overrides(argv, TrainRun)
    options = parse_options(ShowOptions, rest, prog="megalith recipes show", root=TrainRun)
    run = apply_overrides(resolve(options.recipe), overrides)
    if options.json:
        print_json(to_dict(run))
    elif options.yaml:
        print(dump_yaml(run), end="")
    else:
        Console().print(build_run_table(run))
    return 0


def diff_runs(argv: list[str]) -> int:
    """Print the settings that differ between two runs."""
    options = parse_options(RecipeDiffOptions, argv, prog="megalith recipes diff")
    rows = differences(resolve(options.left), resolve(options.right))
    if options.json:
        print_json([{"setting": path, "left": a, "right": b} for path, a, b in rows])
    elif rows:
        Console().print(build_difference_table(rows, options.left, options.right))
    else:
        print(f"{options.left} and {options.right} are the same run.")
    return 1 if rows else 0


def _short_count(count: int) -> str:
    """Format a count: 123551232 -> `124M`."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= 0.9995 * unit:  # rounds to 1 at three digits
            return f"{count / unit:.3g}{name}"
    return str(count)

"""`megalith bench overlap`: what a step's communication costs, and how much of it hides behind
computing."""

import os
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from megalith.cli.arguments import parse_options, split_overrides
from megalith.cli.output import print_json
from megalith.cli.train import must_start_workers, with_recompute_chosen
from megalith.config.suggest import did_you_mean
from megalith.config.train import TrainRun
from megalith.errors import ConfigError

if TYPE_CHECKING:
    from megalith.train.exposure import ExposedCommunication


@dataclass(frozen=True, kw_only=True)
class OverlapCommand:
    """Train a few steps on made-up data and show what each kind of communication takes, and what of
    it is exposed."""

    recipe: Positional[str]
    """A recipe's name, a YAML file, or the folder of a run."""

    nproc: int = 1
    """Processes to start on this machine; under torchrun leave it out."""

    steps: int = 5
    """Steps that count; one more comes before them."""

    latency_ms: float = 0.0
    """Pretend that every message takes so much longer."""

    gigabytes_per_second: float | None = None
    """Pretend that a rank's link carries so much; default: as fast as it is."""

    json: bool = False
    """Print one JSON document."""


def main(argv: list[str]) -> int:
    """Run `megalith bench overlap RECIPE`."""
    if not argv or argv[0] in ("-h", "--help"):
        print(
            "usage: megalith bench overlap RECIPE [--nproc N] [--latency-ms MS] "
            "[--gigabytes-per-second G] [overrides]"
            "\n\n  overlap   what each kind of communication takes in a step, and how much of it "
            "is exposed"
        )
        return 0
    if argv[0] != "overlap":
        advice = did_you_mean(argv[0], ["overlap"])
        raise ConfigError(f"{argv[0]} is not something `megalith bench` does.{advice} Use overlap.")
    rest, overrides = split_overrides(argv[1:], TrainRun)
    command = parse_options(OverlapCommand, rest, prog="megalith bench overlap", root=TrainRun)
    _check(command)
    from megalith.recipes import resolve_run

    run = resolve_run(command.recipe, overrides)
    run = replace(run, optim=replace(run.optim, nonfinite_grad="skip"))
    if must_start_workers(run, command.nproc):
        from megalith.parallel.launch import run_workers

        return run_workers(["bench", *argv], command.nproc)
    return _overlap(with_recompute_chosen(run), command)


def _check(command: OverlapCommand) -> None:
    if command.steps < 1:
        raise ConfigError(f"--steps={command.steps} must be at least 1. Use 5.")
    if not (command.latency_ms >= 0 and isfinite(command.latency_ms)):
        raise ConfigError(
            f"--latency-ms={command.latency_ms} must be a finite number and not negative. Use 0 "
            "for the link as it is."
        )
    speed = command.gigabytes_per_second
    if speed is not None and not (speed > 0 and isfinite(speed)):
        raise ConfigError(
            f"--gigabytes-per-second={speed} must be a finite number above 0. Leave it out for the "
            "link as it is."
        )


def _overlap(run: TrainRun, command: OverlapCommand) -> int:
    from megalith.train.exposure import summarize_exposed_communication
    from megalith.train.job import joined

    bandwidth = (
        float("inf") if command.gigabytes_per_second is None else command.gigabytes_per_second * 1e9
    )
    with joined(run, os.environ) as job:
        found = summarize_exposed_communication(
            run,
            job.mesh,
            job.device,
            steps=command.steps,
            latency=command.latency_ms / 1000,
            bandwidth=bandwidth,
        )
        first = job.first
    if first and command.json:
        rows = [{**asdict(each), "hidden": each.hidden} for each in found.traffic]
        print_json(
            {"step_seconds": found.step_seconds, "exposed_seconds": found.exposed, "traffic": rows}
        )
    elif first:
        _show(found)
    return 0


def _show(found: "ExposedCommunication") -> None:
    console = Console(soft_wrap=True)
    if not found.traffic:
        console.print(
            f"a step takes {found.step_seconds * 1000:.1f} ms and communicates nothing: it has one "
            "rank"
        )
        return
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("what", "over", "per step", "MB", "ms on its way", "ms exposed", "hidden"):
        table.add_column(name, justify="left" if name in ("what", "over") else "right")
    for each in found.traffic:
        table.add_row(
            each.kind,
            each.over,
            f"{each.per_step:.1f}",
            f"{each.megabytes:.3f}",
            f"{each.seconds * 1000:.1f}",
            f"{each.exposed * 1000:.1f}",
            f"{each.hidden:.0%}",
        )
    console.print(table)
    share = found.exposed / found.step_seconds
    console.print(
        f"a step takes {found.step_seconds * 1000:.1f} ms; a rank stands still for "
        f"{found.exposed * 1000:.1f} ms of it "
        f"({share:.0%}), other ranks' delays included"
    )

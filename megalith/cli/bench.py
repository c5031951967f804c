"""`megalith bench`: `overlap` measures the communication time of a training step, and how much of
it overlaps with computation; the other subcommands measure text generation."""

import os
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from megalith.cli import bench_serving
from megalith.cli.arguments import parse_options, split_overrides
from megalith.cli.output import print_json
from megalith.cli.train import must_start_workers, resolve_recompute
from megalith.config.train import TrainRun
from megalith.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from megalith.train.exposed_communication import ExposedCommunication


SUBCOMMANDS = {
    "overlap": "total and exposed time of each kind of communication in a training step",
    **bench_serving.SUBCOMMANDS,
}


@dataclass(frozen=True, kw_only=True)
class OverlapCommand:
    """Train a few steps on mock data and show the total and the exposed time of each kind of
    communication."""

    recipe: Positional[str]
    """Name of a recipe, a YAML file, or the folder of a run."""

    nproc: int = 1
    """Number of processes to start on this machine; omit under torchrun."""

    steps: int = 5
    """Number of measured steps, after one warmup step."""

    latency_ms: float = 0.0
    """Simulated additional latency of each message, in milliseconds."""

    gigabytes_per_second: float | None = None
    """Simulated bandwidth of a rank's link, in GB/s; default: no limit."""

    json: bool = False
    """Print one JSON document."""


def main(argv: list[str]) -> int:
    """Run a subcommand of `megalith bench`."""
    if not argv or argv[0] in ("-h", "--help"):
        rows = "\n".join(f"  {name:<12}{text}" for name, text in SUBCOMMANDS.items())
        print(f"usage: megalith bench SUBCOMMAND [...]\n\n{rows}")
        return 0
    if argv[0] not in SUBCOMMANDS:
        advice = did_you_mean(argv[0], SUBCOMMANDS)
        raise ConfigError(
            f"{argv[0]} is not a subcommand of `megalith bench`.{advice} "
            f"Use one of {', '.join(SUBCOMMANDS)}."
        )
    if argv[0] in bench_serving.SUBCOMMANDS:
        return bench_serving.main(argv[0], argv[1:])
    rest, overrides = split_overrides(argv[1:], TrainRun)
    command = parse_options(OverlapCommand, rest, prog="megalith bench overlap", root=TrainRun)
    _check(command)
    from megalith.recipes import resolve_run

    run = resolve_run(command.recipe, overrides)
    run = replace(run, optim=replace(run.optim, nonfinite_grad="skip"))
    if must_start_workers(run, command.nproc):
        from megalith.launch.launcher import run_workers

        return run_workers(["bench", *argv], command.nproc)
    return _overlap(resolve_recompute(run), command)


def _check(command: OverlapCommand) -> None:
    if command.steps < 1:
        raise ConfigError(f"--steps={command.steps} must be at least 1. Use 5.")
    if not (command.latency_ms >= 0 and isfinite(command.latency_ms)):
        raise ConfigError(
            f"--latency-ms={command.latency_ms} must be a finite number of at least 0. Use 0 "
            "for no added latency."
        )
    speed = command.gigabytes_per_second
    if speed is not None and not (speed > 0 and isfinite(speed)):
        raise ConfigError(
            f"--gigabytes-per-second={speed} must be a finite number above 0. Remove it for no "
            "limit."
        )


def _overlap(run: TrainRun, command: OverlapCommand) -> int:
    from megalith.train.distributed import join_job
    from megalith.train.exposed_communication import summarize_exposed_communication

    bandwidth = (
        float("inf") if command.gigabytes_per_second is None else command.gigabytes_per_second * 1e9
    )
    with join_job(run, os.environ) as job:
        exposed = summarize_exposed_communication(
            run,
            job.mesh,
            job.device,
            steps=command.steps,
            latency=command.latency_ms / 1000,
            bandwidth=bandwidth,
        )
        first = job.first
    if first and command.json:
        rows = [{**asdict(each), "hidden": each.hidden} for each in exposed.traffic]
        print_json(
            {
                "step_seconds": exposed.step_seconds,
                "exposed_seconds": exposed.exposed,
                "traffic": rows,
            }
        )
    elif first:
        _print_table(exposed)
    return 0


def _print_table(exposed: "ExposedCommunication") -> None:
    console = Console(soft_wrap=True)
    if not exposed.traffic:
        console.print(
            f"a step takes {exposed.step_seconds * 1000:.1f} ms without communication, because it "
            "has one "
            "rank"
        )
        return
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("what", "over", "per step", "MB", "ms total", "ms exposed", "hidden"):
        table.add_column(name, justify="left" if name in ("what", "over") else "right")
    for each in exposed.traffic:
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
    share = exposed.exposed / exposed.step_seconds
    console.print(
        f"a step takes {exposed.step_seconds * 1000:.1f} ms; a rank waits for "
        f"{exposed.exposed * 1000:.1f} ms of it "
        f"({share:.0%}), including delays of other ranks"
    )

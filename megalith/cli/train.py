"""`megalith train`: train a recipe, resume it, on one process or on many."""

import os
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from megalith.cli.arguments import parse_options, split_overrides
from megalith.config.train import TrainRun
from megalith.config.tree import apply_overrides
from megalith.errors import ConfigError

STOPPED = 75  # ask again: sysexits' EX_TEMPFAIL, which schedulers requeue on


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCommand:
    """Train a recipe until its last step; the same command resumes it."""

    recipe: Annotated[str, tyro.conf.Positional]
    """A recipe's name (see `megalith recipes`), a YAML file, or the folder of an earlier run."""

    run: str | None = None
    """Folder under runs/, or a path; default: the recipe's name."""

    nproc: int = 1
    """Processes to start on this machine; under torchrun leave it out."""


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code: 0 done, 75 stopped after a save."""
    rest, overrides = split_overrides(argv, TrainRun)
    command = parse_options(TrainCommand, rest, prog="megalith train", root=TrainRun)
    from megalith.parallel.launch import in_worker, run_workers
    from megalith.recipes import resolve
    from megalith.train.rules import check_run

    run = apply_overrides(resolve(command.recipe), overrides)
    if command.nproc < 1:
        raise ConfigError(f"--nproc={command.nproc} must be at least 1. Use the number of processes to start.")
    if in_worker(os.environ):
        return _work(run, command.run)
    check_run(run, command.nproc)
    if command.nproc == 1:
        return _work(run, command.run)
    return run_workers(["train", *argv], command.nproc)


def _work(run: TrainRun, name: str | None) -> int:
    """Train as one rank of the job that the environment describes."""
    from megalith.parallel.launch import Worker, connect, disconnect, set_threads
    from megalith.parallel.mesh import build_mesh, model_grid
    from megalith.train.folder import run_folder
    from megalith.train.loop import run_training
    from megalith.train.rules import check_run

    worker = Worker.from_environment(os.environ)
    check_run(run, worker.world)
    set_threads(worker, run.train.threads)
    connect(worker, timeout_seconds=run.parallel.timeout_seconds)
    try:
        mesh = build_mesh(
            model_grid(run.parallel, run.model, worker.world), rank=worker.rank,
            timeout_seconds=run.parallel.timeout_seconds,
        )  # fmt: skip
        folder = run_folder(run, name)
        outcome = run_training(run, folder, mesh, worker.device)
    finally:
        disconnect(worker)
    if worker.rank == 0:
        print(_closing_words(outcome.kind, outcome.step, outcome.reason, str(folder.path)), file=sys.stdout, flush=True)
    return 0 if outcome.kind == "done" else STOPPED


def _closing_words(kind: str, step: int, reason: str, folder: str) -> str:
    if kind == "stopped":
        return f"stopped at step {step} ({reason}) and saved; run the same command again to go on"
    return f"done at step {step}: {folder} has metrics.jsonl, plots/ and checkpoints/\ntry: megalith generate {folder}"

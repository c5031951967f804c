"""`megalith train`: train a recipe or resume a run, on one or many processes."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from megalith.cli.arguments import parse_options, split_overrides
from megalith.cli.output import format_value
from megalith.config.train import CONFIG_FILE, TrainRun, is_started, run_path
from megalith.config.tree import Override
from megalith.errors import ConfigError

if TYPE_CHECKING:
    from megalith.launch.heartbeat import RankHeartbeat
    from megalith.launch.launcher import Failure, LocalRanks
    from megalith.launch.rounds import RestartClient
    from megalith.train.callbacks.base import Outcome

STOPPED = 75  # EX_TEMPFAIL, on which schedulers requeue a job
SUSPECT = 76
"""Exit code: a machine is at fault; the same command continues the run on other machines."""

RESTART_COUNTS = "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"
"""Variables with the number of times that torchrun or Slurm has started this job again."""

SUSPECT_HOSTS = "MEGALITH_SUSPECTS"
"""Variable with the file to which the hosts of suspect machines are written, separated by commas,
for the batch system (launch/slurm.sh, launch/kubernetes.yaml)."""


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Train a recipe until its last step; the same command resumes it."""

    recipe: Positional[str]
    """Name of a recipe (see `megalith recipes`), a YAML file, or the folder of a run."""

    run: str | None = None
    """Output folder: a name under runs/, or a path with a slash or a leading dot; default: the
    name of the recipe."""

    nproc: int = 1
    """Number of processes to start on this machine; omit under torchrun."""

    restarts: int = 0
    """Number of times that the processes of --nproc are started again after a fault; they
    continue from the newest checkpoint."""

    spares: int = 0
    """Number of additional processes that are started, and wait to replace dead ranks when the run
    is restarted in place (restart.max_in_place)."""

    callback: tuple[str, ...] = ()
    """Callbacks of the run, each package.module:Class (docs/howto/callbacks.md)."""

    reset_attempts: bool = False
    """Do not count earlier starts of the run that failed; after several with the same cause, a run
    is not started."""

    print_config: bool = False
    """Print every setting with its value and its source, and do not train."""


def main(argv: list[str]) -> int:
    """Run the command and return its exit code: 0 done, 75 stopped after saving, 76 stopped because
    of a suspect machine."""
    rest, overrides = split_overrides(argv, TrainRun)
    if sum(word.partition("=")[0] == "--callback" for word in rest) > 1:
        raise ConfigError(
            "--callback is given twice, and only the last one would be used. List all callbacks "
            "after one option: --callback package.module:First package.module:Second."
        )
    command = parse_options(TrainCommand, rest, prog="megalith train", root=TrainRun)
    from megalith.recipes import resolve_run

    if command.print_config:
        print_settings(command.recipe, overrides)
        return 0
    run = resolve_run(command.recipe, overrides)
    _check_restarts(command, run)
    folder = _select_folder(run, command)
    starts_workers = must_start_workers(run, command.nproc, folder, restarts=command.restarts)
    if command.reset_attempts:
        _reset_attempts(run, command)
    if starts_workers:
        from megalith.launch.launcher import run_workers

        return run_workers(
            ["train", *argv],
            command.nproc,
            on_failure=partial(_record_failure, run, command),
            restarts=command.restarts,
            build_ranks=_build_ranks_in_place(run, command) if run.restart.max_in_place else None,
        )
    return _train(run, folder, command.callback)


def _build_ranks_in_place(
    run: TrainRun, command: TrainCommand
) -> "Callable[[list[str], int, Path, Mapping[str, str]], LocalRanks]":
    """Return the function that builds the supervisor of ranks that are restarted in place."""
    from megalith.launch.in_place import InPlacePolicy, InPlaceRanks
    from megalith.plan.grid import model_grid
    from megalith.plan.restart import list_replicas

    policy = InPlacePolicy(
        config=run.restart,
        num_spares=command.spares,
        replicas=lambda world: list_replicas(model_grid(run.parallel, run.model, world)),
        fits=lambda world: _fits(run, world),
    )
    return partial(InPlaceRanks, policy=policy)


def _fits(run: TrainRun, world: int) -> bool:
    """Return whether a run can continue with another number of ranks."""
    from megalith.rules.run import check_run

    try:
        check_run(run, world, resumes=True)
    except ConfigError:
        return False
    return True


def _check_restarts(command: TrainCommand, run: TrainRun) -> None:
    """Check that this process can start ranks again with these options.

    Raises:
        ConfigError: an option is not valid, or another launcher has started this rank.
    """
    from megalith.launch.launcher import LAUNCHER, in_worker

    max_in_place = run.restart.max_in_place
    if command.spares < 0 or (command.spares and not max_in_place):
        raise ConfigError(
            f"--spares={command.spares} with restart.max_in_place={max_in_place}: spare processes "
            "replace dead ranks when a run is restarted in place. Set restart.max_in_place to at "
            "least 1 and --spares to at least 0, or use --spares=0."
        )
    if max_in_place and in_worker(os.environ) and LAUNCHER not in os.environ:
        raise ConfigError(
            f"restart.max_in_place={max_in_place}: another launcher, such as torchrun, has started "
            "this rank, and would end it after a fault of another one. Start the run with "
            "megalith train --nproc, or set restart.max_in_place=0."
        )
    if max_in_place and command.nproc == 1 and not in_worker(os.environ):
        raise ConfigError(
            f"restart.max_in_place={max_in_place} with --nproc=1: after a fault of the only rank "
            "there is none that keeps its process. Use --restarts instead, or at least two ranks."
        )
    if command.restarts < 0:
        raise ConfigError(
            f"--restarts={command.restarts} must not be negative. Use the number of times that the "
            "processes may be started again, or 0."
        )
    if command.restarts and in_worker(os.environ) and LAUNCHER not in os.environ:
        raise ConfigError(
            f"--restarts={command.restarts}: another launcher, such as torchrun, has started this "
            "rank, and only that one can start it again. Use --restarts=0 and the launcher's own "
            "option, such as --max-restarts of torchrun."
        )


def _reset_attempts(run: TrainRun, command: TrainCommand) -> None:
    """Exclude earlier starts of the run from crash-loop detection; in the first process of the job
    only, and not again when torchrun or Slurm runs the same command after a fault.

    Raises:
        CheckpointError: the file of starts cannot be written.
    """
    from megalith.launch.launcher import LAUNCHER
    from megalith.train.start_records import reset_attempts

    is_restart = any(os.environ.get(name, "0") != "0" for name in RESTART_COUNTS)
    if LAUNCHER not in os.environ and os.environ.get("RANK", "0") == "0" and not is_restart:
        reset_attempts(_select_folder(run, command))


def _record_failure(run: TrainRun, command: TrainCommand, failure: "Failure", code: int) -> None:
    """Write into the folder of the run why its ranks have ended."""
    from megalith.train.start_records import record_failure_of_launch

    record_failure_of_launch(_select_folder(run, command), failure, code)


def print_settings(recipe: str, overrides: Mapping[str, Override]) -> None:
    """Print every setting of the run with its value and its source, sorted by name."""
    from megalith.recipes import trace_settings

    for path, value, source in trace_settings(recipe, overrides):
        print(f"{path} = {format_value(value)}  # {source}")


def _select_folder(run: TrainRun, command: TrainCommand) -> Path:
    """Return --run; else the folder of the run to resume, if the recipe is one; else runs/NAME for
    a new run."""
    folder = Path(command.recipe)
    is_run = (folder / CONFIG_FILE).is_file() and not (folder / "manifest.json").exists()
    if command.run is None and is_run:
        return folder
    return run_path(run, command.run)


def must_start_workers(
    run: TrainRun, nproc: int, folder: Path | None = None, *, restarts: int = 0
) -> bool:
    """Return whether this process only starts workers, because there are several or because they
    may have to be started again; the run is checked before that. `folder`: that of a run that may
    resume.

    Raises:
        ConfigError: --nproc is below 1, or a rule is violated.
    """
    from megalith.estimate.advise import resolve_auto_recompute
    from megalith.launch.launcher import in_worker
    from megalith.rules.run import check_run

    if nproc < 1:
        raise ConfigError(
            f"--nproc={nproc} must be at least 1. Use the number of processes to start."
        )
    if in_worker(os.environ):
        return False
    check_run(run, nproc, resumes=folder is not None and is_started(folder))
    resolve_auto_recompute(run, nproc)
    return nproc > 1 or restarts > 0


def resolve_recompute(run: TrainRun, folder: Path | None = None) -> TrainRun:
    """Return this rank's run with recompute.granularity=auto resolved; the first rank prints the
    choice. `folder`: that of a run that may resume."""
    if run.recompute.granularity != "auto":
        return run
    from megalith.estimate.advise import describe_auto_recompute, resolve_auto_recompute
    from megalith.launch.worker import Worker
    from megalith.rules.run import check_run

    worker = Worker.from_environment(os.environ)
    check_run(run, worker.world, resumes=folder is not None and is_started(folder))
    chosen = resolve_auto_recompute(run, worker.world)
    if worker.rank == 0:
        print(describe_auto_recompute(chosen.recompute), file=sys.stderr, flush=True)
    return chosen


def _train(run: TrainRun, path: Path, callback_names: Sequence[str]) -> int:
    """Train in the folder `path` as one rank of the job that the environment describes."""
    from megalith.launch.heartbeat_process import open_heartbeat
    from megalith.launch.rounds import RestartClient
    from megalith.train.callbacks.stop import record_sigusr1
    from megalith.train.restart import RestartHealthCheck, preload, train_in_rounds
    from megalith.train.resume import build_checked_tokenizer

    client = RestartClient.from_environment(os.environ)
    with record_sigusr1(), open_heartbeat(os.environ) as heartbeat:
        if client is not None:
            if int(os.environ["RANK"]) >= int(os.environ["WORLD_SIZE"]):  # a spare
                preload()
            client.wait_for_round()
        build_checked_tokenizer(run)  # before the folder is created and other ranks wait
        train = partial(_train_round, run, path, callback_names, client, heartbeat)
        if client is None:
            outcome = train()
        elif run.fault_detector.health_check_every is None:
            outcome = train_in_rounds(client, train, heartbeat)
        else:
            find_errors = RestartHealthCheck(run, path).find_errors
            outcome = train_in_rounds(client, train, heartbeat, find_errors)
    if os.environ.get("RANK", "0") == "0":
        print(_describe_outcome(outcome, str(path), run), flush=True)
        if outcome.kind == "suspect" and (file := os.environ.get(SUSPECT_HOSTS)):
            _write_suspect_hosts(path, Path(file))
    return {"done": 0, "stopped": STOPPED, "suspect": SUSPECT}[outcome.kind]


def _train_round(
    run: TrainRun,
    path: Path,
    callback_names: Sequence[str],
    client: "RestartClient | None",
    heartbeat: "RankHeartbeat",
) -> "Outcome":
    """Join the other ranks and train."""
    from megalith.train.callbacks.base import load_callbacks
    from megalith.train.callbacks.restart import RoundProgress
    from megalith.train.callbacks.stop import read_job_limits
    from megalith.train.distributed import join_job
    from megalith.train.loop import run_training
    from megalith.train.run_folder import RunFolder
    from megalith.train.starts import StartLog

    run = resolve_recompute(run, path)
    callbacks = load_callbacks(callback_names)
    progress = [] if client is None else [RoundProgress(client)]
    with join_job(run, os.environ, path, client, heartbeat) as job:
        return run_training(
            run,
            RunFolder(path),
            job.mesh,
            job.device,
            callbacks=[*callbacks, *progress],
            job_limits=read_job_limits(os.environ),
            heartbeat=heartbeat,
            starts=StartLog(
                path,
                rank=job.mesh.world.rank,
                escalates=True,
                environment=os.environ,
                current_round=None if client is None else client.round,
            ),
        )


def _write_suspect_hosts(folder: Path, file: Path) -> None:
    """Write the hosts that a run in `folder` has excluded so far, as the batch system names its
    nodes: as in MEGALITH_HOST, or without the domain, as Slurm does."""
    from megalith.observe.limits import HOST
    from megalith.train.callbacks.fault_detection import read_suspect_exits

    hosts = {host for each in read_suspect_exits(folder) for host in each.hosts}
    if HOST not in os.environ:
        hosts = {host.partition(".")[0] for host in hosts}
    file.write_text(",".join(sorted(hosts)) + "\n")


def _describe_outcome(outcome: "Outcome", folder: str, run: TrainRun) -> str:
    if outcome.kind == "suspect":
        where = "saved" if outcome.saved else "not saved; the latest checkpoint is older"
        if outcome.step >= run.train.steps:
            return (
                f"finished its last step {outcome.step}, but on a suspect machine "
                f"({outcome.reason}); {where}. {folder}/suspects.jsonl lists the suspect hosts: "
                "check the result, or train the last steps again from an older checkpoint"
            )
        return (
            f"stopped before step {outcome.step + 1} ({outcome.reason}); {where}. Run the same "
            f"command again on other machines: {folder}/suspects.jsonl lists the suspect hosts"
        )
    if outcome.kind == "stopped" and not outcome.saved:
        return (
            f"stopped at step {outcome.step} ({outcome.reason}) without saving; run the same "
            "command again to continue from the latest checkpoint"
        )
    if outcome.kind == "stopped" and outcome.tier == "local":
        return (
            f"stopped at step {outcome.step} ({outcome.reason}) and saved in the local tier; run "
            "the same command again on the same machines to continue"
        )
    if outcome.kind == "stopped":
        return (
            f"stopped at step {outcome.step} ({outcome.reason}) and saved; run the same "
            "command again to continue"
        )
    outputs = (
        "metrics.jsonl, plots/ and checkpoints/"
        if run.observe.plots
        else "metrics.jsonl and checkpoints/"
    )
    return f"done at step {outcome.step}: {folder} has {outputs}\ntry: {_next_command(folder, run)}"


def _next_command(folder: str, run: TrainRun) -> str:
    """Return the command that shows what the model has learned."""
    if run.data.sft.used():
        return f"megalith chat {folder}"
    if run.data.mock and run.tokenizer.kind != "null":  # mock documents are numbers, not text
        return "megalith quickstart, which trains on text; the mock data of this run are numbers"
    return f"megalith generate {folder}"

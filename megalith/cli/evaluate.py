"""`megalith evaluate`: loss and bits per byte of a run's latest checkpoint on held-out text."""

import os
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from math import gcd
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from megalith.cli.arguments import parse_options, split_overrides
from megalith.cli.output import print_json
from megalith.cli.train import must_start_workers
from megalith.config.moe import MoEConfig
from megalith.config.parallel import OffloadConfig, ParallelConfig, RecomputeConfig
from megalith.config.train import TrainRun
from megalith.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    """Evaluate a run's latest checkpoint on one of its splits: loss, perplexity and bits per
    byte."""

    run: Positional[str]
    """Folder of a run: a path, or its name under runs/."""

    split: Literal["valid", "test", "train"] | None = None
    """Data split; default: valid."""

    suite: str | None = None
    """Evaluation suite of the run (evaluate.NAME), in place of a split."""

    samples: int | None = None
    """Number of rows; default: the whole split."""

    role: Literal["param", "ema"] = "param"
    """Weights to evaluate. param: those of the last step; ema: their moving average
    (train.ema)."""

    nproc: int = 1
    """Number of processes to start on this machine; omit under torchrun."""

    json: bool = False
    """Print one JSON document."""


def main(argv: list[str]) -> int:
    """Run the command."""
    rest, overrides = split_overrides(argv, TrainRun)
    command = parse_options(EvaluateCommand, rest, prog="megalith evaluate", root=TrainRun)
    if command.samples is not None and command.samples < 1:
        raise ConfigError(
            f"--samples={command.samples} must be at least 1. Remove it to read the whole split."
        )
    if command.suite is not None and (command.split or command.samples):
        raise ConfigError(
            f"--suite={command.suite} has its own samples: --split and --samples do not apply. "
            f"Remove them, or set --evaluate.{command.suite}.split or "
            f"--evaluate.{command.suite}.num_samples."
        )
    from megalith.recipes import resolve_run

    folder = find_run(command.run)
    run = fit_layout_to_world(
        resolve_run(str(folder), overrides), _world(command.nproc), set(overrides)
    )
    if must_start_workers(run, command.nproc):
        from megalith.launch.launcher import run_workers

        return run_workers(["evaluate", *argv], command.nproc)
    return _evaluate(run, folder, command)


def find_run(name: str) -> Path:
    """Return the folder of a run, by path or by its name under runs/.

    Raises:
        ConfigError: there is none.
    """
    for folder in (Path(name), Path("runs") / name):
        if (folder / "config.yaml").is_file():
            return folder
    runs = sorted(file.parent.name for file in Path("runs").glob("*/config.yaml"))
    raise ConfigError(
        f"{name} is not the folder of a run. Use a path, or a name under runs/: "
        f"{', '.join(runs) or 'none yet'}."
    )


def fit_layout_to_world(run: TrainRun, world: int, given: Collection[str]) -> TrainRun:
    """Return the run with a parallel layout for `world` processes, which may differ from that of
    training.

    Settings named in `given` are kept. Otherwise, tp and sp are kept if tp divides `world`; ep and
    etp are kept if possible, else experts are not tensor parallel; context and pipeline parallelism
    are off. Weights that training sharded (zero=3) stay sharded, since they may not fit otherwise;
    all others are replicated, because there are no gradients, optimizer state or saved activations.
    dp takes the remaining ranks, and the batch is one microbatch per rank.
    """
    p, defaults = run.parallel, ParallelConfig()
    kept = {name.split(".")[1] for name in given if name.startswith("parallel.")}
    tp = p.tp if "tp" in kept or world % max(p.tp, 1) == 0 else 1
    names = [
        "cp",
        "context",
        "pp",
        "pipeline",
        "dp",
        "dp_replicate",
        "reduce_dtype",
        "tp_comm_overlap",
        "collective_matmul",
        "overlap_experts",
        *(["zero"] if p.zero < 3 else []),
    ]
    layout = replace(
        p,
        tp=tp,
        sp=p.sp if "sp" in kept else p.sp and tp > 1,
        **{name: getattr(defaults, name) for name in names if name not in kept},
    )
    layout = layout if {"ep", "etp"} & kept else fit_expert_parallel(layout, run.model.moe, world)
    ranks = max(layout.tp, 1) * max(layout.cp, 1) * max(layout.pp, 1)
    rows = run.train.micro_batch_size * max(layout.dp or world // ranks, 1)
    sections = {name.split(".")[0] for name in given}
    return replace(
        run,
        parallel=layout,
        train=replace(
            run.train, global_batch_size=rows, batch_size_schedule=(), skip_steps=(), compile=False
        ),
        recompute=run.recompute if "recompute" in sections else RecomputeConfig(),
        offload=run.offload if "offload" in sections else OffloadConfig(),
    )


def fit_expert_parallel(
    layout: ParallelConfig, moe: MoEConfig | None, world: int
) -> ParallelConfig:
    """Return the layout with expert parallelism possible for `world` processes: unchanged if it
    fits, else the largest possible ep with etp=1."""
    ranks, parts = world // max(layout.pp, 1), layout.tp if layout.etp is None else layout.etp
    if moe is None or ranks % max(layout.ep * parts, 1) == 0:
        return layout
    return replace(layout, ep=gcd(moe.num_experts, ranks), etp=1)


def _world(nproc: int) -> int:
    """Return the world size of the evaluation: that of the launcher in a worker, else `nproc`."""
    from megalith.launch.launcher import in_worker
    from megalith.launch.worker import Worker

    return Worker.from_environment(os.environ).world if in_worker(os.environ) else nproc


def _evaluate(run: TrainRun, folder: Path, command: EvaluateCommand) -> int:
    from megalith.train.distributed import join_job
    from megalith.train.evaluate import run_evaluation
    from megalith.train.run_folder import RunFolder

    if command.suite is not None:
        return _evaluate_suite(run, folder, command.suite, command)
    split = command.split or "valid"
    with join_job(run, os.environ) as job:
        result = run_evaluation(
            run,
            RunFolder(folder),
            job.mesh,
            job.device,
            split=split,
            samples=command.samples,
            show=True,
            role=command.role,
        )
        first = job.first
    if first and command.json:
        print_json(
            {
                "run": str(folder),
                "split": split,
                **asdict(result),
                "perplexity": result.perplexity,
            }
        )
    elif first:
        bits = "" if result.bits_per_byte is None else f", {result.bits_per_byte:.4f} bits per byte"
        print(
            f"{folder} on {split}: loss {result.loss:.4f}, perplexity "
            f"{result.perplexity:.2f}{bits}"
            f"{result.describe_mtp()} ({result.num_labels:,} tokens)"
        )
    return 0


def _evaluate_suite(run: TrainRun, folder: Path, name: str, command: EvaluateCommand) -> int:
    from megalith.train.distributed import join_job
    from megalith.train.run_folder import RunFolder
    from megalith.train.suites import run_suite

    with join_job(run, os.environ) as job:
        result = run_suite(
            run, RunFolder(folder), job.mesh, job.device, name=name, role=command.role
        )
        first = job.first
    if first and command.json:
        print_json({"run": str(folder), "suite": name, **result.metrics(name)})
    elif first:
        print(f"{folder} on {name}: {result.describe()}")
    return 0

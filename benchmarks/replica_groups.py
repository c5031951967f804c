"""Steps of two replica groups of one rank each, against plain data parallelism over two ranks.

    python benchmarks/replica_groups.py
    python benchmarks/replica_groups.py --rounds 20 --hidden 512
    python benchmarks/replica_groups.py --json

Two processes have both: a model on a mesh of two ranks, and the same model as one of two groups
with a coordinator in the parent process. They take turns of a few steps, in an order drawn anew
each round. The ratio of a round is the time of a step with groups divided by that of plain data
parallelism; a step with groups has a vote, and its gradients are summed after backward.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from paired import spread

from megalith.config.train import TrainRun
from megalith.parallel.mesh import Mesh, build_mesh, build_single_rank_mesh
from megalith.plan.batch_schedule import build_batch_schedule
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.callbacks.base import CallbackList
from megalith.train.loop import RunState
from megalith.train.replica_group_settings import connect_coordinator
from megalith.train.replica_groups import ReplicaGroups, ReplicaGroupSync
from megalith.train.resume import PreparedRun
from megalith.train.run_folder import RunFolder
from megalith.train.step import train_step

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.train.replica_group_jobs import RunningCoordinator

STEPS = 4
"""Steps of a turn."""


def build_run(hidden: int, layers: int, rows: int, address: str, group: str) -> TrainRun:
    """Return the settings of the run."""
    return tiny_run(
        {
            "model.hidden_size": str(hidden),
            "model.ffn_hidden_size": str(3 * hidden),
            "model.num_layers": str(layers),
            "model.head_dim": str(hidden // 4),
            "model.max_seq_len": "128",
            "train.seq_len": "128",
            "train.global_batch_size": str(rows),
            "train.micro_batch_size": "1",
            "train.steps": "2000",
            "train.eval_steps": "0",
            "replica_group.coordinator": address,
            "replica_group.id": group,
            "replica_group.min_groups": "2",
            "replica_group.max_groups": "2",
        }
    )


def measure(
    rank: int, world: int, address: str, sizes: tuple[int, int, int], rounds: int, folder: Path
) -> dict[str, list[float]]:
    """Return the seconds per step of each contender and round; runs on each of two processes."""
    device = torch.device("cpu")
    run = build_run(*sizes, address, f"g{rank}")
    assert run.replica_group is not None
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank, timeout_seconds=60)
    plain = prepare(run, mesh, folder / f"plain{rank}", device)
    single = build_single_rank_mesh()
    grouped = prepare(run, single, folder / f"group{rank}", device)
    state = RunState(grouped, CallbackList([]), build_batch_schedule(run.train))
    coordinator = connect_coordinator(run.replica_group)
    groups = ReplicaGroups(run, single, coordinator, lambda line: None)
    synchronizer = ReplicaGroupSync(groups, state)
    synchronizer.enter()
    group_loader = synchronizer.build_loader(grouped.build_loader)
    loader = plain.build_loader()

    def step_plain() -> None:
        train_step(plain.trainer, loader.next(), lr=1e-3, weight_decay=0.0)

    def step_grouped() -> None:
        train_step(
            grouped.trainer,
            synchronizer.read_batches(group_loader),
            lr=1e-3,
            weight_decay=0.0,
            synchronizer=synchronizer,
            step=state.step + 1,
        )
        grouped.state.count_step(samples=state.batch_size, tokens=0, updated=True)

    seconds = take_equal_turns({"plain": step_plain, "groups": step_grouped}, rounds)
    groups.leave()
    return seconds


def prepare(run: TrainRun, mesh: Mesh, folder: Path, device: torch.device) -> PreparedRun:
    """Build the trainer and the data."""
    return PreparedRun(run, RunFolder(folder), mesh, device, lambda line: None)


def take_equal_turns(
    contenders: Mapping[str, Callable[[], None]], rounds: int
) -> dict[str, list[float]]:
    """Return the seconds per step; both processes draw the same orders."""
    draw, seconds = random.Random(0), {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name in draw.sample([*contenders], len(contenders)):
            dist.barrier()
            started = time.perf_counter()
            for _ in range(STEPS):
                contenders[name]()
            if number:  # the first round warms up
                seconds[name].append((time.perf_counter() - started) / STEPS)
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = options.hidden, options.layers, options.rows
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with RunningCoordinator(folder / "coordinator") as coordinator:
            arguments = coordinator.address, sizes, options.rounds, folder
            seconds = run_ranks(measure, 2, *arguments, timeout=3600)[0]
    ratios = [ours / plain for ours, plain in zip(seconds["groups"], seconds["plain"], strict=True)]
    result = {
        "seconds per step, plain": asdict(spread(seconds["plain"])),
        "seconds per step, groups": asdict(spread(seconds["groups"])),
        "ratio": asdict(spread(ratios)),
    }
    if options.json:
        print(json.dumps(result))
        return
    for title, numbers in result.items():
        print(f"{title}: {numbers['median']:.3f} ({numbers['lower']:.3f}, {numbers['upper']:.3f})")


if __name__ == "__main__":
    main()

"""A run that is killed with SIGKILL at random moments, and resumed by the same command, is the run
never killed."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megalith.config.train import TrainRun
from megalith.config.tree import load_yaml
from megalith.observe.metrics import read_metrics
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_yaml
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder

FIELDS = "step", "loss", "grad_norm", "lr", "tokens", "eval_loss"
STEPS = 84
LAST_KILL = 50  # the steps left after it take longer than a busy machine lets this process wait
SETTINGS = {
    "train.steps": str(STEPS),
    "train.micro_batch_size": "6",
    "train.eval_every": "6",
    "checkpoint.every": "2",
    "checkpoint.keep": "2",
}
PATIENCE_SECONDS = 120.0


@dataclass
class Kills:
    """What became of the runs that were killed."""

    steps: list[int] = field(default_factory=list)
    """The last step that metrics.jsonl had, each time."""

    in_a_save: int = 0
    """Kills that left an unfinished checkpoint behind."""


def last_step(folder: Path) -> int:
    """The newest step in metrics.jsonl."""
    try:
        lines = (folder / "metrics.jsonl").read_bytes().splitlines()
        return max((int(json.loads(line)["step"]) for line in lines[-2:]), default=0)
    except (FileNotFoundError, ValueError):  # not there yet, or a line that is half written
        return 0


def is_saving(folder: Path) -> bool:
    """Whether a checkpoint is being written."""
    return any((folder / "checkpoints").glob("*.tmp-*"))


def wait_until(
    condition: Callable[[], bool], process: "subprocess.Popen[bytes]", *, every: float
) -> None:
    """Test the condition every so many seconds until it holds or the process has ended."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition() and process.poll() is None:
        assert time.monotonic() < deadline, "the run makes no progress"
        time.sleep(every)


def family(process: "subprocess.Popen[bytes]") -> list[int]:
    """The process and the ranks it has started."""
    file = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    # elsewhere the ranks end with their parent
    ranks = file.read_text().split() if file.exists() else []
    return [process.pid, *map(int, ranks)]


def send(processes: list[int], number: int) -> None:
    """A signal to all of them that still live."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def kill_in_a_save(folder: Path, process: "subprocess.Popen[bytes]") -> None:
    """Freeze everything when a save begins; kill it if the save is then really unfinished, else
    wait for the next."""
    while process.poll() is None:
        wait_until(lambda: is_saving(folder), process, every=0.0005)  # a save takes milliseconds
        world_group = family(process)
        send(world_group, signal.SIGSTOP)
        if is_saving(folder):
            send(world_group, signal.SIGKILL)
            return
        send(world_group, signal.SIGCONT)


def run_and_kill(command: list[str], folder: Path, target: int, delay: float | None) -> None:
    """Start the run; after step `target` was logged, kill all of it: `delay` seconds later, or in
    the next save."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        wait_until(lambda: last_step(folder) >= target, process, every=0.01)
        if delay is None:
            kill_in_a_save(folder, process)
        else:
            time.sleep(delay)
            send(family(process), signal.SIGKILL)
        # rank 0 has the same pipe, so it has ended, too
        output, _ = process.communicate(timeout=30)
    finally:
        send(family(process), signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, (
        f"the run was over before it was killed:\n{output.decode()}"
    )


def train_with_kills(file: Path, folder: Path, *, nproc: int, kills: int, seed: int) -> Kills:
    """Train by the command until it says that it is done, killing it `kills` times on the way."""
    command = [
        sys.executable,
        "-m",
        "megalith",
        "train",
        str(file),
        "--run",
        str(folder),
        "--nproc",
        str(nproc),
    ]
    draw, result = random.Random(seed), Kills()
    for number in range(kills):
        span = LAST_KILL // kills  # every kill has its own stretch of the run
        target = number * span + draw.randrange(span)
        delay = None if number % 2 == 1 else draw.uniform(0.0, 0.05)
        run_and_kill(command, folder, target, delay)
        result.steps.append(last_step(folder))
        result.in_a_save += is_saving(folder)
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    return result


def train_as_rank(rank: int, world: int, file: Path, folder: Path) -> None:
    """The same run, never killed, on ranks that have been started already."""
    run = load_yaml(file, TrainRun)
    mesh = (
        build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
        if world > 1
        else build_single_rank_mesh()
    )
    import torch

    run_training(run, RunFolder(folder), mesh, torch.device("cpu"), show=False)


def rows(folder: Path) -> list[dict[str, float | int | str | None]]:
    """metrics.jsonl without what depends on the clock."""
    return [
        {name: row[name] for name in FIELDS if name in row}
        for row in read_metrics(folder / "metrics.jsonl")
    ]


def hashes(folder: Path) -> dict[str, list[tuple[object, str]]]:
    """Box and SHA-256 of every saved tensor of every checkpoint that is left."""
    result = {}
    for manifest in sorted((folder / "checkpoints").glob("step_*/manifest.json")):
        for key, tensor in json.loads(manifest.read_text())["tensors"].items():
            result[f"{manifest.parent.name} {key}"] = [
                (box["box"], box["sha256"]) for box in tensor["boxes"]
            ]
    return result


def check_bar(
    tmp_path: Path, settings: dict[str, str], *, nproc: int, kills: int, seed: int
) -> None:
    """Kill a run as often as asked, compare it with one that was never killed, and print the
    figures."""
    file = tiny_yaml(tmp_path / "tiny.yaml", SETTINGS | settings)
    run_ranks(train_as_rank, nproc, file, tmp_path / "whole")
    started = time.monotonic()
    result = train_with_kills(file, tmp_path / "killed", nproc=nproc, kills=kills, seed=seed)
    actual, reference = rows(tmp_path / "killed"), rows(tmp_path / "whole")
    steps = [row["step"] for row in actual if "loss" in row]
    assert steps == list(range(1, STEPS + 1))
    assert actual == reference
    assert any("eval_loss" in row for row in actual)
    tensors = hashes(tmp_path / "killed")
    assert tensors == hashes(tmp_path / "whole")
    assert len(tensors) > 50
    print(
        f"{kills} kills at steps {result.steps}, {result.in_a_save} of them in a save, {nproc} "
        f"ranks: {len(actual)} rows "
        f"and {len(tensors)} tensors equal those of the run never killed "
        f"({time.monotonic() - started:.1f} s)"
    )
    assert result.in_a_save >= kills // 2


def test_run_killed_twice_is_bitwise_equal_to_an_uninterrupted_run(tmp_path: Path) -> None:
    check_bar(tmp_path, {}, nproc=1, kills=2, seed=1)


@pytest.mark.slow  # three starts; tests/checkpoint/test_crashes.py covers every point of a save
def test_run_with_asynchronous_saves_killed_twice_is_bitwise_equal(tmp_path: Path) -> None:
    check_bar(tmp_path, {"checkpoint.async_save": "true"}, nproc=1, kills=2, seed=7)


# one of the ten slowest tests: three starts of two processes; the test above has the same claim
@pytest.mark.slow
def test_bf16_ranks_killed_once_are_bitwise_equal_to_an_uninterrupted_run(tmp_path: Path) -> None:
    check_bar(tmp_path, {"precision.params": "bf16"}, nproc=2, kills=1, seed=2)


@pytest.mark.slow  # eleven starts of two processes
@pytest.mark.parametrize("nproc", [1, 2])
def test_run_killed_ten_times_is_bitwise_equal_to_an_uninterrupted_run(
    tmp_path: Path, nproc: int
) -> None:
    check_bar(tmp_path, {"precision.params": "bf16"}, nproc=nproc, kills=10, seed=3 + nproc)

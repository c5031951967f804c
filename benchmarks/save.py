"""Saves of checkpoints while training continues: synchronous and asynchronous ones, against a plain
copy of the bytes and against torch.distributed.checkpoint (DCP).

    python benchmarks/save.py                     0.4 GB, 12 rounds
    python benchmarks/save.py --rounds 24 --mb 800
    python benchmarks/save.py --json

All take turns in one process, in an order drawn anew each round. A turn is a few steps, which
compute and then change every tensor, with one save after the first of them. `blocked`: the time for
which the save delays the steps directly; `added`: the time of the turn, until the save is complete,
beyond that of a turn without a save in the same round. Compute uses one core (the other is free),
one core while another process uses the other, or none (`sleep`, as if a GPU computed).
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from paired import Spread, spread
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from megalith import storage
from megalith.checkpoint.async_save import AsyncSaver
from megalith.checkpoint.commit import Retention
from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.save import SaveReport, save_checkpoint
from megalith.parallel.group import single_rank_group
from megalith.plan.shards import Shard

WORLD = single_rank_group("world")
TENSOR_NUMEL = 2_000_000
STEPS = 4
STEP_SECONDS = 1.0
BUSY = "while True: sum(range(100_000))"


class Saving:
    """A way to save: nothing, unless overridden."""

    def __init__(self, entries: list[CheckpointEntry], folder: Path) -> None:
        self.entries, self.folder = entries, folder

    def start(self, step: int) -> None:
        """Called after the update of a step."""

    def before_update(self) -> None:
        """Called before the next update."""

    def after_step(self) -> None:
        """Called after each step."""

    def finish(self) -> None:
        """Return when the save is complete."""

    def close(self) -> None:
        """Free resources."""


class Sync(Saving):
    """Our synchronous save."""

    def start(self, step: int) -> None:
        save_checkpoint(self.folder, step, self.entries, {}, WORLD, config_text="")


class Async(Saving):
    """Our asynchronous save."""

    def __init__(self, entries: list[CheckpointEntry], folder: Path) -> None:
        super().__init__(entries, folder)
        self.saver = AsyncSaver(entries, WORLD, torch.device("cpu"))
        self.reports: list[SaveReport] = []
        time.sleep(3 * STEP_SECONDS)  # as if the first steps ran

    def start(self, step: int) -> None:
        self.saver.begin(
            self.folder, step, self.entries, {}, config_text="", retention=Retention(None)
        )

    def before_update(self) -> None:
        self.saver.wait_staged()

    def after_step(self) -> None:
        self._note(self.saver.advance(*self.saver.count_saves()))

    def finish(self) -> None:
        self._note(self.saver.drain())

    def _note(self, result: object) -> None:
        if isinstance(result, SaveReport):
            self.reports.append(result)
        elif isinstance(result, Exception):
            raise result

    def close(self) -> None:
        self.saver.close()


class Copy(Saving):
    """A copy of the bytes into memory that was used before."""

    def __init__(self, entries: list[CheckpointEntry], folder: Path) -> None:
        super().__init__(entries, folder)
        self.copies = [np.ones_like(entry.tensor.numpy()) for entry in entries]

    def start(self, step: int) -> None:
        for copy, entry in zip(self.copies, self.entries, strict=True):
            np.copyto(copy, entry.tensor.numpy())


class HashAndWrite(Saving):
    """SHA-256 and a write of the same bytes into one file, synced to disk."""

    def start(self, step: int) -> None:
        self.folder.mkdir(exist_ok=True)
        with storage.open_new(self.folder / str(step)) as file:
            for entry in self.entries:
                data = memoryview(entry.tensor.numpy()).cast("B")
                digest = hashlib.sha256()
                for first in range(0, len(data), 2**20):
                    digest.update(data[first : first + 2**20])
                    file.write(data[first : first + 2**20])
            storage.sync_file(file)


class DcpSync(Saving):
    """torch.distributed.checkpoint.save."""

    def start(self, step: int) -> None:
        state = {entry.key: entry.tensor for entry in self.entries}
        state_dict_saver.save(state, checkpoint_id=self.folder / str(step))


class DcpAsync(Saving):
    """torch.distributed.checkpoint.async_save; its call returns when the tensors are copied."""

    kind = AsyncCheckpointerType.THREAD

    def start(self, step: int) -> None:
        state = {entry.key: entry.tensor for entry in self.entries}
        self.future: Any = state_dict_saver.async_save(
            state, checkpoint_id=self.folder / str(step), async_checkpointer_type=self.kind
        )

    def finish(self) -> None:
        self.future.result()


class DcpProcess(DcpAsync):
    """The same with a process."""

    kind = AsyncCheckpointerType.PROCESS


CONTENDERS: dict[str, type[Saving]] = {
    "none": Saving,
    "sync": Sync,
    "async": Async,
    "copy": Copy,
    "hash+write": HashAndWrite,
    "dcp": DcpSync,
    "dcp thread": DcpAsync,
    "dcp process": DcpProcess,
}


@dataclass
class Times:
    """Seconds of the turns of one contender."""

    total: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)


def measure(
    names: list[str],
    entries: list[CheckpointEntry],
    compute: Callable[[], object],
    *,
    rounds: int,
    folder: Path,
) -> tuple[dict[str, Times], dict[str, Any]]:
    """Let the contenders take turns; also return facts about the asynchronous saves."""
    contenders = {name: CONTENDERS[name](entries, folder / name) for name in names}
    times = {name: Times() for name in names}
    draw = random.Random(0)
    for number in range(rounds + 1):  # the first one is not counted
        for name in draw.sample(names, len(names)):
            total, blocked = run_turn(contenders[name], entries, compute, step=number + 1)
            shutil.rmtree(folder / name, ignore_errors=True)
            if number:
                times[name].total.append(total)
                times[name].blocked.append(blocked)
    facts: dict[str, Any] = {}
    ours = contenders.get("async")
    if isinstance(ours, Async):
        seconds = [report.seconds for report in ours.reports]
        facts["first save / later saves"] = seconds[0] / statistics.median(seconds[1:])
        facts["host memory / staged bytes"] = host_memory(ours) / sum(
            entry.tensor.nbytes for entry in entries
        )
        facts["last report"] = str(ours.reports[-1])
    for contender in contenders.values():
        contender.close()
    return times, facts


def host_memory(ours: Async) -> int:
    """Bytes of the staging memory and of the writer process besides it."""
    rollup = Path(f"/proc/{ours.saver.writer_pid}/smaps_rollup").read_text()
    private = sum(
        int(line.split()[1]) * 1024
        for line in rollup.splitlines()
        if line.startswith(("Private_Clean", "Private_Dirty"))
    )
    return ours.saver._region.nbytes + private


def run_turn(
    saving: Saving, entries: list[CheckpointEntry], compute: Callable[[], object], *, step: int
) -> tuple[float, float]:
    """Return total and blocked seconds of one turn."""
    os.sync()
    started, blocked = time.perf_counter(), 0.0
    for number in range(STEPS):
        compute()
        before = time.perf_counter()
        saving.before_update()
        blocked += time.perf_counter() - before
        for entry in entries:
            entry.tensor.mul_(0.999)
        if number == 0:
            before = time.perf_counter()
            saving.start(step)
            blocked += time.perf_counter() - before
        saving.after_step()
    saving.finish()
    return time.perf_counter() - started, blocked


def added(times: dict[str, Times], name: str) -> list[float]:
    """Seconds that a save adds to the turns."""
    return [a - b for a, b in zip(times[name].total, times["none"].total, strict=True)]


def ratios(a: list[float], b: list[float]) -> Spread:
    """Ratios of values of the same round."""
    return spread([x / y for x, y in zip(a, b, strict=True)])


def ratio_of_medians(a: list[float], b: list[float]) -> float:
    """Where single differences may be near zero."""
    return statistics.median(a) / statistics.median(b)


def build_compute() -> Callable[[], object]:
    """Return matrix products of one thread that take about one step."""
    x = torch.randn(512, 512)
    before, count = time.perf_counter(), 0
    while time.perf_counter() - before < STEP_SECONDS:
        x @ x
        count += 1

    def compute() -> None:
        for _ in range(count):
            x @ x

    return compute


def run(rounds: int, nbytes: int, folder: Path) -> dict[str, Any]:
    """Run the three cases and return all figures."""
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    count = -(-nbytes // (4 * TENSOR_NUMEL))
    entries = [
        CheckpointEntry(Shard.full(f"w{n}", (TENSOR_NUMEL,)), "param", torch.randn(TENSOR_NUMEL))
        for n in range(count)
    ]
    compute = build_compute()
    figures: dict[str, Any] = {"GB": count * 4 * TENSOR_NUMEL / 1e9, "rounds": rounds}

    free, facts = measure([*CONTENDERS], entries, compute, rounds=rounds, folder=folder)
    blocked = free["async"].blocked
    figures |= facts
    figures["sync s"] = spread(free["sync"].blocked)
    figures["blocked / sync (<= 0.10)"] = ratios(blocked, free["sync"].blocked)
    figures["blocked / copy (<= 1.3)"] = ratios(blocked, free["copy"].blocked)
    figures["dcp save / sync (>= 0.9)"] = ratios(free["dcp"].blocked, free["sync"].blocked)
    figures["hash+write / sync (>= 0.8)"] = ratios(free["hash+write"].blocked, free["sync"].blocked)
    base = added(free, "sync")
    figures["core free: added / sync (<= 0.25)"] = ratio_of_medians(added(free, "async"), base)
    best = min(("dcp thread", "dcp process"), key=lambda name: statistics.median(added(free, name)))
    figures[f"blocked / {best} (<= 0.7)"] = ratios(blocked, free[best].blocked)
    figures[f"added / {best} (<= 1.0)"] = ratio_of_medians(added(free, "async"), added(free, best))

    names = ["none", "sync", "async"]
    busy = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        both, _ = measure(names, entries, compute, rounds=rounds, folder=folder)
    finally:
        busy.kill()
        busy.wait()
    figures["both cores busy: added / sync (<= 1.0)"] = ratio_of_medians(
        added(both, "async"), added(both, "sync")
    )

    asleep, _ = measure(
        ["none", "async"], entries, lambda: time.sleep(STEP_SECONDS), rounds=rounds, folder=folder
    )
    figures["sleeping: added s per save (<= 0.02)"] = statistics.median(added(asleep, "async"))
    dist.destroy_process_group()
    return figures


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rounds", type=int, default=12)
    options.add_argument("--mb", type=int, default=420, help="bytes per rank, in MB")
    options.add_argument("--folder", type=Path, help="folder to save in; default: temporary")
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        figures = run(given.rounds, given.mb * 10**6, Path(folder))
    if given.json:
        plain = {
            name: asdict(value) if isinstance(value, Spread) else value
            for name, value in figures.items()
        }
        print(json.dumps(plain, indent=1))
        return
    for name, value in figures.items():
        print(f"{name:42} {value:.3f}" if isinstance(value, float) else f"{name:42} {value}")


if __name__ == "__main__":
    main()

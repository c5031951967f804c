"""Jobs of replica groups for tests: a coordinator in a thread, and groups in processes that can be
killed and started again."""

import asyncio
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalith.config.train import TrainRun
from megalith.config.tree import Override
from megalith.launch.coordinator import CoordinatorServer, StateFolder
from megalith.parallel.mesh import Mesh, build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.testing.tiny import tiny_run
from megalith.train import replica_group_settings
from megalith.train.loop import run_training
from megalith.train.replica_groups import GroupSums, ReplicaGroups
from megalith.train.run_folder import RunFolder

TIMEOUT_SECONDS = 20.0


class CommitTimes:
    """Times of the commits of a coordinator, sampled from a thread inside the context."""

    INTERVAL_SECONDS = 0.005

    def __init__(self, coordinator: "RunningCoordinator") -> None:
        self._coordinator = coordinator
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.times: list[float] = []
        """Time of each commit that was seen, in seconds of the monotonic clock."""
        self.num_discarded = 0
        """Steps that were discarded before the last commit."""

    def _run(self) -> None:
        committed = None
        while not self._stopped.wait(self.INTERVAL_SECONDS):
            if self._coordinator.committed_step != committed:
                committed = self._coordinator.committed_step
                self.times.append(time.monotonic())
                self.num_discarded = self._coordinator.status["num_discarded"]

    @property
    def step_seconds(self) -> float:
        """Median time between two commits."""
        return statistics.median(b - a for a, b in itertools.pairwise(self.times))

    def measure_recoveries(self, losses: Sequence[float]) -> list[float]:
        """Return the time from each loss of a group to the next commit."""
        return [
            min(each for each in self.times if each > lost + self.INTERVAL_SECONDS) - lost
            for lost in losses
        ]

    def __enter__(self) -> "CommitTimes":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()


class RunningCoordinator:
    """A coordinator in a thread of this process."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        folder.mkdir(exist_ok=True)
        self.server = CoordinatorServer(
            folder=StateFolder(folder), host="127.0.0.1", port=port, status_port=0
        )
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(30)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        await self.server.start()
        self._ready.set()
        await self.server.run(self._stop)

    @property
    def address(self) -> str:
        """Address for replica_group.coordinator."""
        return self.server.address

    @property
    def committed_step(self) -> int:
        """Number of committed steps."""
        return self.server._quorum.committed_step or 0

    @property
    def status(self) -> Mapping[str, Any]:
        """Content of the status page."""
        return self.server.describe()

    def close(self) -> None:
        """End the coordinator; its state stays on disk."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()
        self.server.folder.close()

    def __enter__(self) -> "RunningCoordinator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def group_run(address: str, group: str, settings: Mapping[str, Override], folder: Path) -> TrainRun:
    """Return the run of one group; all groups save to one folder."""
    return tiny_run(
        {
            "replica_group.coordinator": address,
            "replica_group.id": group,
            "replica_group.timeout_seconds": str(TIMEOUT_SECONDS),
            "checkpoint.folder": str(folder / "checkpoints"),
        }
        | settings
    )


def train_group(
    rank: int, world: int, address: str, num_groups: int, settings: dict[str, Override], path: Path
) -> str:
    """Train as one rank of one of `num_groups` groups, for `run_ranks`."""
    size = world // num_groups
    group, group_rank = f"g{rank // size}", rank % size
    run = group_run(address, group, settings, path)
    mesh = build_single_rank_mesh()
    if size > 1:
        mesh = join_own_job(run, group_rank, size, path / f"store_{group}")
    outcome = run_training(run, RunFolder(path / group), mesh, torch.device("cpu"), show=False)
    return outcome.kind


def join_own_job(run: TrainRun, rank: int, size: int, store: Path) -> Mesh:
    """Leave the process group of all ranks and join that of one replica group."""
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    return build_mesh(model_grid(run.parallel, run.model, size), rank=rank, timeout_seconds=60)


class LostGroupError(Exception):
    """Ends the run of a group without a message to the others, as if its process were killed."""


def train_and_lose(
    rank: int,
    world: int,
    address: str,
    settings: dict[str, Override],
    path: Path,
    losses: dict[str, list["Kill"]],
    num_groups: int,
) -> tuple[dict[int, tuple[int, ...]], set[int]]:
    """Train as one rank of `num_groups` groups that are lost at some points, and join again; return
    the samples that were computed again by step, and the numbers of groups that voted."""
    size = world // num_groups
    group, group_rank = f"g{rank // size}", rank % size
    recomputed: dict[int, tuple[int, ...]] = {}
    sizes: set[int] = set()
    left = [*losses.get(group, [])]
    run = group_run(address, group, settings, path)
    mesh = build_single_rank_mesh()
    if size > 1:
        mesh = join_own_job(run, group_rank, size, path / f"store_{group}")
    while True:
        with _losing(left, recomputed, sizes):
            try:
                run_training(run, RunFolder(path / group), mesh, torch.device("cpu"), show=False)
                return recomputed, sizes
            except LostGroupError:
                left.pop(0)


@contextmanager
def _losing(
    left: Sequence["Kill"], recomputed: dict[int, tuple[int, ...]], sizes: set[int]
) -> Iterator[None]:
    """Raise LostGroupError at the first of the points that are `left`."""
    lost = left[0] if left else None

    def lose(groups: ReplicaGroups, step: int, phase: str) -> None:
        sizes.add(groups.share.num_groups)
        if lost == Kill(step, phase) and groups.share.num_groups > 1:
            raise LostGroupError

    def note(groups: ReplicaGroups, step: int) -> None:
        if groups.samples is not None:
            recomputed[step] = groups.samples

    with patch_phases(lose, note):
        yield


@contextmanager
def patch_phases(
    on_phase: Callable[[ReplicaGroups, int, str], None],
    on_read: Callable[[ReplicaGroups, int], None] = lambda groups, step: None,
) -> Iterator[None]:
    """Call `on_phase` at some points of each step, and `on_read` before its samples are read."""
    step = [0]
    sum_step, commit = ReplicaGroups.sum_step, ReplicaGroups.commit
    read_batches = ReplicaGroups.read_batches

    def read(self: ReplicaGroups) -> Any:
        step[0] = self.num_committed + 1
        on_read(self, step[0])
        return read_batches(self)

    def sum_watched(self: ReplicaGroups, *arguments: Any) -> GroupSums:
        on_phase(self, step[0], "before_exchange")
        return sum_step(self, *arguments)

    def commit_watched(self: ReplicaGroups, number: int, *, ok: bool, last: bool = False) -> bool:
        on_phase(self, step[0], "before_vote")
        result = commit(self, number, ok=ok, last=last)
        if result:
            on_phase(self, step[0], "after_vote")
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_group_settings, "CHECK_SECONDS", 1.0)
        patch.setattr(ReplicaGroups, "read_batches", read)
        patch.setattr(ReplicaGroups, "sum_step", sum_watched)
        patch.setattr(ReplicaGroups, "commit", commit_watched)
        yield


@dataclass(frozen=True)
class Kill:
    """The process of a group kills itself in a step, if another group takes part."""

    step: int
    phase: str
    """before_exchange, before_vote, after_vote."""


def run_group_process(
    address: str,
    group: str,
    settings: dict[str, Override],
    path: Path,
    kills: Sequence[Kill],
    pause_seconds: float,
) -> None:
    """Train as a group of one rank; the process of `GroupProcesses`."""
    torch.set_num_threads(1)
    run = group_run(address, group, settings, path)

    def die(groups: ReplicaGroups, step: int, phase: str) -> None:
        if Kill(step, phase) in kills and groups.share.num_groups > 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def pause(groups: ReplicaGroups, step: int) -> None:
        time.sleep(pause_seconds)

    with patch_phases(die, pause):
        run_training(
            run, RunFolder(path / group), build_single_rank_mesh(), torch.device("cpu"), show=False
        )


@dataclass
class GroupProcesses:
    """Processes of groups with one rank each, which can be started again."""

    address: str
    settings: dict[str, Override]
    path: Path
    pause_seconds: float = 0.0
    """Time that is added to each step."""
    processes: dict[str, Any] = field(default_factory=dict)  # Any: of a multiprocessing context
    kill_times: list[float] = field(default_factory=list)
    """Times at which processes ended by SIGKILL, in seconds of the monotonic clock."""

    def start(self, group: str, kills: Sequence[Kill] = ()) -> None:
        """Start the process of a group."""
        arguments = (
            *(self.address, group, self.settings, self.path, list(kills)),
            self.pause_seconds,
        )
        process = _context().Process(target=run_group_process, args=arguments, daemon=True)
        process.start()
        self.processes[group] = process

    def restart_killed(self, kills: Mapping[str, Sequence[Kill]], step: int) -> None:
        """Start the killed groups again, each with those of its `kills` that are due after the step
        that follows `step`, so that none is killed twice in a step."""
        for group, process in [*self.processes.items()]:
            if process.exitcode == -signal.SIGKILL:
                self.kill_times.append(time.monotonic())
                self.start(group, [kill for kill in kills[group] if kill.step > step + 1])

    def wait_for_any(self, seconds: float) -> None:
        """Wait until a process ends."""
        running = [each.sentinel for each in self.processes.values() if each.exitcode is None]
        multiprocessing.connection.wait(running, seconds)

    @property
    def exit_codes(self) -> set[int | None]:
        """Exit codes of the newest process of each group; None: it runs."""
        return {process.exitcode for process in self.processes.values()}

    def send_signal(self, group: str, number: signal.Signals) -> None:
        """Send a signal to the process of a group."""
        os.kill(self.processes[group].pid, number)

    def kill_all(self) -> None:
        """Kill all processes that run."""
        for process in self.processes.values():
            process.kill()
            process.join()


def _context() -> Any:  # Any: multiprocessing's contexts have no common public type
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.replica_group_jobs", "torch._dynamo"])
    return context

"""Start of one rank: joins the process group, builds the mesh, and leaves the group at the end."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from torch._C._distributed_c10d import PrefixStore

from megalith.config.train import TrainRun, is_started
from megalith.config.tree import flatten
from megalith.kernels.cpu_threads import keep_freed_memory
from megalith.launch.heartbeat import RankHeartbeat, record_waits
from megalith.launch.launcher import FAULT, Failure, end_rank
from megalith.launch.rounds import OpenedSockets, RestartClient
from megalith.launch.watchdog import Fingerprints, HangWatch, backend_timeout, name_rank, watching
from megalith.launch.worker import (
    Worker,
    abort_device_groups,
    check_consistent_settings,
    clone_store,
    connect,
    describe_slow_tp,
    disconnect,
    open_rendezvous,
    set_threads,
)
from megalith.observe.flight import FlightRecorder
from megalith.observe.rank_warnings import merge_warnings
from megalith.parallel.mesh import Mesh, build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.rules.run import check_run
from megalith.train.start_records import read_process_start, record_failure_of_rank

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """Mesh and device of this rank."""

    mesh: Mesh
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which prints and logs."""
        return self.mesh.world.rank == 0


def _end_rank(
    failure: Failure,
    after_seconds: float,
    *,
    environment: Mapping[str, str],
    folder: Path | None,
    began: float,
) -> NoReturn:
    """End this rank, which began at a time in seconds since 1970; write its failure into the run
    folder, unless another rank has failed."""
    if folder is not None and not failure.is_consequence:
        record_failure_of_rank(folder, failure, FAULT, began=began)
    end_rank(failure, after_seconds, environment=environment)


@contextmanager
def join_job(
    run: TrainRun,
    environment: Mapping[str, str],
    folder: Path | None = None,
    client: RestartClient | None = None,
    heartbeat: RankHeartbeat | None = None,
) -> Iterator[Job]:
    """Join the process group that a launcher described in `environment`, or run on one rank.

    A collective that takes longer than parallel.timeout_seconds ends this process, after a report
    of all ranks' positions was written to `folder`. `client`: of a rank that may be restarted in
    place, which leaves the round instead. `heartbeat`: of this rank; records when it waits.

    Raises:
        ConfigError: the run does not fit the number of ranks (all broken rules are listed), or
            other ranks were started with other settings.
        RankError: not all ranks joined in time.
    """
    worker = Worker.from_environment(environment)
    check_run(run, worker.world, resumes=folder is not None and is_started(folder))
    set_threads(worker, run.train.threads)
    if worker.device.type == "cpu":
        keep_freed_memory()
    if worker.world == 1:
        yield Job(build_single_rank_mesh(), worker.device)
        return
    with _abortable(client, worker) as sockets:
        yield from _join_ranks(run, worker, environment, folder, client, sockets, heartbeat)


@contextmanager
def _abortable(client: RestartClient | None, worker: Worker) -> Iterator[OpenedSockets]:
    """Let the launcher abort the round inside the context; yields the record of the connections
    that are shut down then."""
    sockets = OpenedSockets()
    if client is None:
        yield sockets
        return

    def abort() -> None:
        abort_device_groups(worker)
        sockets.shut_down()

    client.set_abort(abort)
    try:
        yield sockets
    finally:
        client.set_abort(None)


def _join_ranks(
    run: TrainRun,
    worker: Worker,
    environment: Mapping[str, str],
    folder: Path | None,
    client: RestartClient | None,
    sockets: OpenedSockets,
    heartbeat: RankHeartbeat | None,
) -> Iterator[Job]:
    """Join the other ranks, and leave them at the end."""
    grid = model_grid(run.parallel, run.model, worker.world)
    if worker.rank == 0 and (problem := describe_slow_tp(grid, worker.local_world)) is not None:
        _log.warning(problem)
    prefix = "" if client is None else f"round{client.round.number}"
    store = open_rendezvous(worker, timeout_seconds=run.parallel.timeout_seconds, prefix=prefix)
    assert store is not None
    flight = FlightRecorder()
    if run.parallel.check_collectives:
        flight.compare = Fingerprints(
            clone_store(store), worker.rank, partial(name_rank, grid)
        ).compare
    with sockets.excluded():  # the launcher's store answers the watch, which waits for no rank
        watch_store = clone_store(store)
    watch = HangWatch(
        flight,
        PrefixStore("watch", watch_store),
        worker.rank,
        worker.world,
        run.parallel.timeout_seconds,
        end=(
            partial(
                _end_rank, environment=environment, folder=folder, began=read_process_start()[0]
            )
            if client is None
            else client.report_hang
        ),
        where=partial(name_rank, grid),
        folder=folder,
        device=worker.device,
    )
    connect_timeout = backend_timeout(run.parallel.timeout_seconds)
    warning_store = PrefixStore("warnings", watch_store)
    with (
        watching(watch),
        record_waits(heartbeat or RankHeartbeat(), watch.is_waiting),
        merge_warnings(warning_store, rank=worker.rank, world=worker.world),
    ):
        try:
            world = connect(worker, timeout_seconds=connect_timeout, store=store, flight=flight)
            check_consistent_settings(flatten(run), world)
            mesh = build_mesh(
                grid, rank=worker.rank, timeout_seconds=connect_timeout, flight=flight
            )
            sockets.close_recording()
            yield Job(mesh, worker.device)
        except BaseException:
            disconnect(worker, failed=True, stays=client is not None)
            raise
        disconnect(worker)

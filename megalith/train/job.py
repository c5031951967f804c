"""One rank of a job: joins the others, builds the mesh, and leaves in order."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megalith.config.train import TrainRun
from megalith.config.tree import flatten
from megalith.kernels.memory import keep_freed_memory
from megalith.parallel.mesh import Mesh, build_mesh, mesh_of_one, model_grid
from megalith.parallel.worker import Worker, agree, connect, disconnect, set_threads
from megalith.train.rules import check_run


@dataclass(frozen=True, slots=True)
class Job:
    """My place among the ranks."""

    mesh: Mesh
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether I am the rank that speaks."""
        return self.mesh.world.rank == 0


@contextmanager
def joined(run: TrainRun, environment: Mapping[str, str]) -> Iterator[Job]:
    """Join the job that a launcher described in `environment`, or run alone.

    Raises:
        ConfigError: the run does not fit the number of ranks, all broken rules at once; or other ranks were started
            with other settings.
    """
    worker = Worker.from_environment(environment)
    check_run(run, worker.world)
    set_threads(worker, run.train.threads)
    if worker.device.type == "cpu":
        keep_freed_memory()
    if worker.world == 1:
        yield Job(mesh_of_one(), worker.device)
        return
    everyone = connect(worker, timeout_seconds=run.parallel.timeout_seconds)
    try:
        agree(flatten(run), everyone)
        grid = model_grid(run.parallel, run.model, worker.world)
        yield Job(build_mesh(grid, rank=worker.rank, timeout_seconds=run.parallel.timeout_seconds), worker.device)
    except BaseException:
        disconnect(worker, failed=True)
        raise
    disconnect(worker)

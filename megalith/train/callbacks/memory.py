"""Memory of a run: measured against estimated, the allocator's history, and the error of a rank
that runs out of memory."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import torch

from megalith.config.train import TrainRun
from megalith.errors import ConfigError, UserError
from megalith.estimate.advise import changes, remedy
from megalith.estimate.memory import RankMemory, place_memory
from megalith.estimate.workload import plan_workload
from megalith.observe.limits import available_memory
from megalith.observe.machine import peak_memory_gib
from megalith.parallel.group import gather_objects
from megalith.parallel.mesh import Mesh
from megalith.plan.devices import Device
from megalith.rules.run import run_problems
from megalith.train.callbacks.base import Callback, FinishedStep, RunView, StepMetrics

_log = logging.getLogger(__name__)

GIB = 2**30

MAX_DIFFERENCE, MAX_CPU_DIFFERENCE = 0.10, 0.15
"""Difference between measured and estimated memory, relative to the estimate, above which a
warning is logged."""

UNPLANNED_CPU_BYTES = 256 * 2**20
"""Process memory that the estimate does not contain: compiled kernels, buffers of the data and of
libraries (heuristic)."""

MAX_HISTORY_ENTRIES = 100_000  # of the allocator; about 100 MiB


class MemoryReport(Callback):
    """Logs measured and estimated memory after steps 1 and 2 and every observe.memory_every."""

    collective = True

    def on_start(self, run: RunView) -> None:
        """Receive the run."""
        self._run = run

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        """Log a line for each pipeline and tensor-parallel rank: the largest memory of its data-
        and context-parallel ranks."""
        every = self._run.config.observe.memory_every
        if finished.step > 2 and (every is None or finished.step % every):
            return
        run, mesh = self._run, self._run.mesh
        base = run.prepared.memory_before_gib
        position = mesh.pp.rank, mesh.tp.rank
        used = position, peak_memory_gib(run.device) - base
        largest: dict[tuple[int, int], float] = {}
        for each in gather_objects(used, mesh.world):
            assert isinstance(each, tuple)
            largest[each[0]] = max(each[1], largest.get(each[0], 0.0))
        if every is not None:
            metrics["memory_used_gib"] = round(max(largest.values()), 3)
        if not run.is_writer:
            return
        for (pp_rank, tp_rank), used_gib in sorted(largest.items()):
            at = f"memory after step {finished.step}, pp rank {pp_rank}, tp rank {tp_rank}: "
            try:
                estimate = estimate_rank_memory(
                    run.config, mesh.world.size, pp_rank=pp_rank, tp_rank=tp_rank
                )
            except Exception as error:  # only rank 0 estimates, and the others must not wait for it
                _log.warning("%s%.3f GiB used; there is no estimate (%r)", at, used_gib, error)
                continue
            used_nbytes = int(used_gib * GIB)
            text = at + describe_difference(used_nbytes, estimate)
            if is_large_difference(used_nbytes, estimate, is_cpu=run.device.type == "cpu"):
                _log.warning(text)
            else:
                _log.info(text)


def describe_difference(used: int, estimate: RankMemory) -> str:
    """Return used and estimated memory, and their difference, as text."""
    return (
        f"{used / GIB:.3f} GiB used, {estimate.total / GIB:.3f} GiB estimated "
        f"({describe_categories(estimate)}), difference {(used - estimate.total) / GIB:+.3f} GiB"
    )


def is_large_difference(used: int, estimate: RankMemory, *, is_cpu: bool) -> bool:
    """Return whether used and estimated bytes differ by more than is expected.

    >>> sizes = dict.fromkeys(("weights", "gradients", "master", "moments", "activations"), 2**29)
    >>> memory = RankMemory(**sizes, loss=0, working=0, messages=0)
    >>> [is_large_difference(nbytes, memory, is_cpu=False) for nbytes in (5 * 2**29, 6 * 2**29)]
    [False, True]
    """
    allowed = (MAX_CPU_DIFFERENCE if is_cpu else MAX_DIFFERENCE) * estimate.total
    allowed += UNPLANNED_CPU_BYTES if is_cpu else 0
    return abs(used - estimate.total) > allowed


def describe_categories(memory: RankMemory) -> str:
    """Return the bytes of every category that is not 0.

    >>> sizes = dict.fromkeys(("weights", "gradients", "master", "moments", "activations"), 2**29)
    >>> describe_categories(RankMemory(**sizes, loss=0, working=0, messages=0))
    'weights 0.500, gradients 0.500, master 0.500, moments 0.500, activations 0.500'
    """
    sizes = {field.name: getattr(memory, field.name) for field in fields(memory)}
    return ", ".join(f"{name} {size / GIB:.3f}" for name, size in sizes.items() if size)


def estimate_rank_memory(run: TrainRun, world: int, *, pp_rank: int, tp_rank: int) -> RankMemory:
    """Return the estimated memory of a pipeline and a tensor-parallel rank, without the memory of
    the device's libraries, which torch's allocator does not count."""
    return place_memory(plan_workload(run, world), pp_rank, tp_rank).memory


@contextmanager
def record_memory_history(folder: Path, device: torch.device, rank: int) -> Iterator[None]:
    """Record the allocations of a GPU inside the context, and write them if this rank runs out of
    memory, which may happen before the first step (observe.memory_history).

    Raises:
        ConfigError: this rank has no GPU.
    """
    if device.type == "cpu":
        raise ConfigError(
            "observe.memory_history=true records the allocator of a GPU, and the device of rank "
            f"{rank} is {device.type}. Set observe.memory_history=false."
        )
    torch.cuda.memory._record_memory_history(max_entries=MAX_HISTORY_ENTRIES)
    try:
        yield
    except BaseException as error:
        if isinstance(error, OutOfMemory) or is_out_of_memory(error):
            path = folder / "memory" / f"rank_{rank}.pickle"
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
            _log.error("the allocations of rank %d are in %s", rank, path)
        raise
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


_TEXTS = "can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED"
"""Texts of other out-of-memory errors: of torch's CPU allocator, of the CUDA driver and NCCL, and
of cuBLAS, which all are RuntimeErrors."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the device or the host has no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)
    )


class OutOfMemory(UserError):
    """A rank ran out of memory; names the largest categories and the nearest change that fits."""


def out_of_memory_error(
    run: TrainRun, mesh: Mesh, device: torch.device, error: BaseException, *, at: str
) -> OutOfMemory:
    """Return the error for users: what the rank's memory holds by the estimate, and the nearest
    change that fits; `at`: when the rank ran out of memory."""
    try:
        advice = _describe_estimate(run, mesh, device)
    except Exception as failure:  # the error to report is that of the allocation
        advice = f"There is no estimate of its memory ({failure!r}). Use more ranks."
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return OutOfMemory(f"rank {mesh.world.rank} ran out of memory {at}: {reason:.300} {advice}")


def _describe_estimate(run: TrainRun, mesh: Mesh, device: torch.device) -> str:
    """Return the estimated memory of this rank by category, and the nearest change that fits."""
    memory = estimate_rank_memory(run, mesh.world.size, pp_rank=mesh.pp.rank, tp_rank=mesh.tp.rank)
    limit = _device_limit(device, mesh)
    return (
        f"The estimate of its memory is {memory.total / GIB:.3f} GiB "
        f"({describe_categories(memory)}) of {(limit.memory or 0) / GIB:.3f}. "
        f"{_describe_fix(run, mesh, limit)}"
    )


def _device_limit(device: torch.device, mesh: Mesh) -> Device:
    if device.type != "cpu":
        total = torch.cuda.get_device_properties(device).total_memory
        return Device(name=torch.cuda.get_device_name(device), memory=total)
    share = available_memory() // mesh.world.size
    return Device(name="cpu", memory=share, accelerator=False, node=mesh.world.size)


def _describe_fix(config: TrainRun, mesh: Mesh, limit: Device) -> str:
    """Return the cheapest change that fits by the estimate; if the run should fit already, the
    cheapest one that saves memory."""
    workload = plan_workload(config, mesh.world.size)
    candidates = [remedy(workload, limit, run_problems), *changes(workload, limit, run_problems)]
    change = next((each for each in candidates if each is not None), None)
    if change is None:
        return "No single setting saves memory: use more ranks, or shorter rows."
    return (
        f"Nearest change: {_format_overrides(change.overrides)}, which saves "
        f"{change.saved / GIB:.3f} GiB ({change.price}). See `megalith plan estimate`."
    )


def _format_overrides(overrides: Mapping[str, str]) -> str:
    return " ".join(f"--{name} {value}" for name, value in overrides.items())

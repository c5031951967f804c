"""Energy of a run, summed over all devices."""

import math
import platform
import time
from pathlib import Path

import torch

from megalith.observe.energy import EnergyCounter, open_nvml_counter, open_rapl_counter
from megalith.parallel.group import all_reduce_, gather_objects
from megalith.train.callbacks.base import Callback, FinishedStep, RunView, StepMetrics


class EnergyMeter(Callback):
    """Measures the energy of all devices (observe.energy)."""

    collective = True

    def __init__(self) -> None:
        self._counter: EnergyCounter | None = None
        self._is_measured = False

    def on_start(self, run: RunView) -> None:
        """Open the counters; nothing is measured unless all ranks have one."""
        self._run = run
        world, is_gpu = run.mesh.world, run.device.type != "cpu"
        # several ranks may share a GPU, and all ranks of a machine its CPUs: the first one reads
        sources = gather_objects(describe_source(run.device), world)
        reads = sources.index(sources[world.rank]) == world.rank
        counter = None
        if reads:
            counter = open_nvml_counter(run.device) if is_gpu else open_rapl_counter()
        missing = [
            str(rank)
            for rank, has_counter in zip(
                world.ranks,
                gather_objects(counter is not None or not reads, world),
                strict=True,
            )
            if not has_counter
        ]
        if missing:
            run.log(
                "observe.energy=true: energy is not logged, because there is no readable counter "
                f"on rank {', '.join(missing[:5])}. GPUs need nvidia-ml-py, CPUs a readable "
                "/sys/class/powercap."
            )
            return
        self._is_measured, self._counter = True, counter
        self._reset(time.perf_counter(), self._read())

    def _reset(self, since: float, joules: float) -> None:
        self._num_steps = self._num_tokens = 0
        self._since, self._previous_joules = since, joules

    def _read(self) -> float:
        return 0.0 if self._counter is None else self._counter()

    def after_rollback(self, step: int) -> None:
        """Do not count discarded steps."""
        if self._is_measured:
            self._reset(time.perf_counter(), self._read())

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        """Add the energy since the last logged step, including callbacks and evaluations; stop on
        all ranks if a counter cannot be read."""
        if not self._is_measured:
            return
        self._num_steps += 1
        self._num_tokens += finished.batches.num_tokens
        joules = self._read()  # in every step, because CPU counters wrap around
        if not self._run.is_logged(finished.step):
            return
        ended = time.perf_counter()  # the wait for other ranks belongs to the next interval
        used = torch.tensor([joules - self._previous_joules], dtype=torch.float64)
        total = all_reduce_(used.to(self._run.device), self._run.mesh.world).item()
        if math.isnan(total):
            self._is_measured = False
            self._run.log(
                f"step {finished.step}: energy is no longer logged, because a counter could not "
                "be read"
            )
            return
        metrics |= {
            "energy_joules": round(total / self._num_steps, 3),
            "energy_joules_per_token": total / max(1, self._num_tokens),
            "power_watts": round(total / (ended - self._since), 3),
        }
        self._reset(ended, joules)


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def describe_source(device: torch.device) -> str:
    """Return what identifies the counter of a device: the UUID of a GPU, or the boot of the
    machine, which containers with other host names share."""
    if device.type != "cpu":
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else platform.node()

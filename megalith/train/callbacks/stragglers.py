"""Reports ranks that compute slower than ranks with the same work, or slower than before."""

import statistics
from collections.abc import Sequence

import torch

from megalith.data.loader import StepBatches
from megalith.launch.watchdog import name_rank
from megalith.observe.busy import WAITING, BusyMeter
from megalith.observe.energy import describe_gpu_health
from megalith.observe.limits import read_host_name
from megalith.parallel.group import gather_objects
from megalith.plan.stragglers import (
    Straggler,
    StragglerHistory,
    StragglerReport,
    compute_median_times,
    describe_straggler,
)
from megalith.train.callbacks.base import Callback, FinishedStep, Outcome, RunView, StepMetrics

NUM_GPU_STEPS = 10
"""Steps before each report that are measured on a GPU, where every collective and section needs two
events; their medians vary little (heuristic)."""


class StragglerDetector(Callback):
    """Gathers the busy times of all ranks every observe.straggler_check_every steps, and reports
    slow ranks."""

    collective = True

    def __init__(self) -> None:
        self._history = StragglerHistory()
        self._pending: StepMetrics = {}  # of the last report, for the next logged step
        self._num_samples = 0

    def on_start(self, run: RunView) -> None:
        """Open the meter of this rank."""
        self._run, self._meter = run, BusyMeter(run.device)
        self._every = run.config.observe.straggler_check_every
        assert self._every is not None, "the callback is used only then"
        self._step_seconds: list[float] = []
        grid = run.mesh.grid
        pp = grid.size("pp")
        # Stages have different layers; ranks of one stage compute the same.
        self._stages = [
            grid.coordinates(rank)["pp"] if pp > 1 else 0 for rank in run.mesh.world.ranks
        ]
        self._measure(is_on=self._is_measured(run.step + 1))

    def _is_measured(self, step: int) -> bool:
        assert self._every is not None
        return self._run.device.type == "cpu" or (-step) % self._every < NUM_GPU_STEPS

    def _measure(self, *, is_on: bool) -> None:
        """Switch the measurement on or off, between two steps."""
        meter = self._meter if is_on else None
        self._run.prepared.trainer.timers.meter = meter
        if self._run.mesh.world.flight is not None:
            self._run.mesh.world.flight.meter = meter

    def after_rollback(self, step: int) -> None:
        """Remove the discarded steps from the history."""
        self._meter.take()
        self._meter.discard_step()
        self._step_seconds.clear()

    def on_end(self, outcome: Outcome) -> None:
        """Stop measuring."""
        self._measure(is_on=False)

    def on_error(self, error: BaseException) -> None:
        """Stop measuring."""
        self._measure(is_on=False)

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        """Complete the measurement of a step; compare all ranks when a report is due."""
        assert self._every is not None
        self._meter.finish_step()
        self._step_seconds.append(finished.seconds)
        if finished.num_samples != self._num_samples:
            self._num_samples = finished.num_samples
            self._history.reset()
        if finished.step % self._every == 0:
            self._compare(finished)
        if self._run.is_logged(finished.step):
            metrics |= self._pending
            self._pending = {}
        self._measure(is_on=self._is_measured(finished.step + 1))

    def _count_rows(self, batches: StepBatches) -> float:
        """Return this rank's share of the rows of a step, relative to a microbatch; 0 if costs are
        balanced over ranks, so that all of them have the same work."""
        train = self._run.config.train
        if train.tokens_per_microbatch is not None or train.balance_rows:
            return 0.0
        return round(sum(batch.part for batch in batches.microbatches), 6)

    def _compare(self, finished: FinishedStep) -> None:
        """Gather the medians of all ranks and report stragglers. Collective."""
        steps = [dict(times) for times in self._meter.take() if times]
        waited = sum(times.pop(WAITING, 0.0) for times in steps)
        seconds = sum(self._step_seconds[-len(steps) :]) if steps else 0.0
        self._step_seconds.clear()
        world = self._run.mesh.world
        num_rows = self._count_rows(finished.batches)
        gathered = gather_objects((compute_median_times(steps), waited, seconds, num_rows), world)
        ranks = [each for each in gathered if isinstance(each, tuple)]
        if not all(times for times, *_ in ranks):
            return
        # ranks of a global batch that does not divide have different numbers of rows
        kinds = [(stage, rank[3]) for stage, rank in zip(self._stages, ranks, strict=True)]
        work = [sorted(set(kinds)).index(kind) for kind in kinds]
        report = self._history.add([times for times, *_ in ranks], work)
        share = sum(rank[1] for rank in ranks) / sum(rank[2] for rank in ranks)
        busy = [sum(times.values()) for times, *_ in ranks]
        # all ranks wait for the slowest, each step
        excess = len(steps) * (max(busy) - statistics.median(busy))
        self._run.record_event("waiting", {"seconds": round(excess, 4)})
        self._pending = {
            "slowest_rank": world.ranks[report.slowest_rank],
            "waiting_share": round(min(1.0, share), 4),
        }
        self._report(finished.step, report)

    def _report(self, step: int, report: StragglerReport) -> None:
        """Log new stragglers with host and device. Collective if there are any."""
        if not (report.slower_than_others or report.slower_than_before):
            return
        world = self._run.mesh.world
        devices = [str(each) for each in gather_objects(describe_device(self._run.device), world)]
        self._log(step, report.slower_than_others, devices, "on the fastest rank of the same work")
        first = f"in its first {self._every} steps"
        self._log(step, report.slower_than_before, devices, first)

    def _log(
        self, step: int, stragglers: Sequence[Straggler], devices: Sequence[str], reference: str
    ) -> None:
        for each in stragglers:
            where = name_rank(self._run.mesh.grid, self._run.mesh.world.ranks[each.rank])
            text = describe_straggler(
                each, where=f"{where} on {devices[each.rank]}", reference=reference
            )
            self._run.log(f"step {step}: {text}")


def describe_device(device: torch.device) -> str:
    """Return host and device, with the state of a GPU where NVML provides it."""
    health = "" if device.type == "cpu" else describe_gpu_health(device)
    return f"{read_host_name()}, {device}{f' ({health})' if health else ''}"

"""Device health check (fault tolerance): at the start, after a fault and every
fault_detector.health_check_every steps; machines whose devices compute wrong bits are suspect."""

import time
from dataclasses import replace
from typing import Any

import torch

from megalith.errors import DataError
from megalith.observe.health_check import check_device, time_operation
from megalith.observe.machine import DTYPES
from megalith.parallel.group import Group, gather_objects, start_receive, start_send
from megalith.plan.device_health import DeviceHealth, Outlier, find_outliers
from megalith.train.callbacks.base import Callback, FinishedStep, RunView, StepMetrics
from megalith.train.callbacks.fault_detection import read_suspect_exits, record_suspects
from megalith.train.starts import SUSPECTS
from megalith.train.step import StepRequest

MESSAGE_NBYTES = 2**20
"""Size of the messages between neighboring ranks (heuristic: a few milliseconds)."""


class HealthCheck(Callback):
    """Checks the devices of all ranks, reports outliers, and ends the run for other machines if a
    device computes wrong bits."""

    collective = True

    def __init__(self) -> None:
        self.suspect: str | None = None
        """Reason for which the run must continue on other machines; None: there is none."""
        self._is_due = False

    def on_start(self, run: RunView) -> None:
        """Check the devices before the first step. Collective.

        Raises:
            DataError: on every rank: an earlier start ended because of the same machine.
        """
        self._run = run
        if run.config.fault_detector.health_check_every is not None:
            self._check(run.step)

    def after_rollback(self, step: int) -> None:
        """Check the devices after the next step, because there was a fault."""
        self._is_due = True

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> StepRequest | None:
        """Check the devices, if it is due or the step was repeated.

        Raises:
            DataError: on every rank: an earlier start ended because of the same machine.
        """
        every = self._run.config.fault_detector.health_check_every
        if every is None:
            return None
        is_regular = every > 0 and finished.step % every == 0
        if not (is_regular or self._is_due or finished.result.num_reruns):
            return None
        self._is_due = False
        self._check(finished.step)
        return StepRequest.NONE if self.suspect is None else StepRequest.STOP_NOW

    def _check(self, step: int) -> None:
        """Check the devices of all ranks, report outliers, and set `suspect`. Collective.

        Raises:
            DataError: on every rank: an earlier exit at this step was because of the same host.
        """
        run, world = self._run, self._run.mesh.world
        started = time.perf_counter()
        dtypes = [DTYPES[run.config.precision.params], torch.float32]
        health = _check_messages(check_device(run.device, dtypes), run.device, world)
        exits = read_suspect_exits(run.folder.path) if run.is_writer else ()
        gathered: list[Any] = gather_objects((health, exits), world)  # Any: both kinds
        devices: list[DeviceHealth] = [device for device, _ in gathered]
        outliers = find_outliers(devices)
        if world.rank == 0 and outliers:
            for outlier in outliers:
                run.log(f"step {step}: device health check: {_describe(outlier, devices, world)}")
            run.log(f"device health check: {time.perf_counter() - started:.2f} s")
        wrong = [each for each in outliers if each.kind == "bits"]
        if not wrong:
            return
        self.suspect = f"device health check: {_describe(wrong[0], devices, world)}"
        hosts = {devices[each.rank].host for each in wrong}
        repeats = any(exit.step == step and exit.hosts & hosts for exit in gathered[0][1])
        if run.is_writer:
            now = round(time.time(), 3)
            for each in wrong:
                record_suspects(
                    run,
                    index=each.rank,
                    machine=(devices[each.rank].host, devices[each.rank].device_type),
                    fields={"time": now, "step": step, "kind": "health_check"},
                    reason=each.reason,
                    exits=not repeats,
                )
        if repeats:
            raise DataError(
                f"step {step}: {self.suspect}. The run has ended at this step before because of "
                f"the same host ({SUSPECTS}). Exclude {', '.join(sorted(hosts))}, or set "
                "fault_detector.health_check_every=none."
            )


def _describe(outlier: Outlier, devices: list[DeviceHealth], world: Group) -> str:
    """Return rank, host and reason of an outlier."""
    host = devices[outlier.rank].host
    return f"rank {world.ranks[outlier.rank]} (host {host}): {outlier.reason}"


def _check_messages(health: DeviceHealth, device: torch.device, world: Group) -> DeviceHealth:
    """Send a fixed message around the ring of all ranks; return the health with the errors and the
    speed of the message that this rank receives. Collective."""
    if world.size == 1:
        return health
    to, source = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    sent = torch.arange(MESSAGE_NBYTES, device=device).mul_(167).to(torch.uint8)
    received = torch.empty_like(sent)

    def exchange() -> None:
        works = [start_receive(received, world, source), start_send(sent, world, to)]
        for work in works:
            work.wait()

    seconds = time_operation(exchange, device)
    errors = health.errors
    if num_wrong := int((received != sent).sum()):
        errors += (f"{num_wrong} bytes of the message from rank {world.ranks[source]} are wrong",)
    speeds = {**health.speeds, "message": MESSAGE_NBYTES / seconds / 1e9}
    return replace(health, errors=errors, speeds=speeds)

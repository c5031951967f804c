"""Restart in place, on a rank: trains in rounds. After a fault of any rank it discards the trainer
and the process groups, checks its device, and joins the next round with the same process."""

import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from megalith.config.train import TrainRun
from megalith.errors import CollectiveError, RankError, UserError
from megalith.launch.heartbeat import RankHeartbeat
from megalith.launch.launcher import Failure, exception_failure
from megalith.launch.rounds import RestartClient
from megalith.launch.worker import Worker, set_threads
from megalith.observe.health_check import check_device
from megalith.observe.limits import read_host_name
from megalith.observe.machine import DTYPES
from megalith.plan.device_health import DeviceHealth
from megalith.train.callbacks.base import Outcome
from megalith.train.start_records import append_record
from megalith.train.starts import SUSPECTS

_log = logging.getLogger(__name__)


def train_in_rounds(
    client: RestartClient,
    train: Callable[[], Outcome],
    heartbeat: RankHeartbeat,
    find_device_errors: Callable[[], Sequence[str]] = tuple,
) -> Outcome:
    """Call `train` in each round until it returns; the first round has been assigned. Between two
    rounds the heartbeat of this rank is not monitored.

    find_device_errors: the health check of this rank's device, which runs before it joins the next
    round, so that no other rank waits for a device that fails.

    Raises:
        RankError: the device fails the health check: another process replaces this one.
        Exception: an error of this rank after which it must not continue.
    """
    while True:
        result = _train_round(client, train)
        if isinstance(result, Outcome):
            return result
        heartbeat.stop()
        release_round()
        place = client.round
        if errors := find_device_errors():
            raise RankError(
                f"rank {place.rank} does not join round {place.number + 1}: its device fails the "
                f"health check ({'; '.join(errors)}). It left round {place.number} because of: "
                f"{result.summary}"
            )
        _log.info("rank %d leaves round %d: %s", place.rank, place.number, result.summary)
        client.leave(result)


class RestartHealthCheck:
    """Device health check of a rank between two rounds. It needs no other rank: products of whole
    numbers and memory patterns have known bits, and other products those of the first check."""

    def __init__(
        self, run: TrainRun, folder: Path, environment: Mapping[str, str] = os.environ
    ) -> None:
        """Run the first check, whose errors `HealthCheck` reports at the start of the round.
        `environment`: of this process, with its rank in the current round."""
        self._run, self._folder, self._environment = run, folder, environment
        self._first = self._check()

    def find_errors(self) -> list[str]:
        """Check the device; write the errors to suspects.jsonl, and return them."""
        errors = self._find_errors()
        if errors:
            record: dict[str, object] = {
                "time": round(time.time(), 3),
                "step": None,
                "kind": "health_check",
                "rank": int(self._environment.get("RANK", "0")),
                "host": read_host_name(),
                "device": self._first.device_type,
                "coordinates": {},
                "reason": "; ".join(errors),
                "exits": False,
            }
            try:
                append_record(self._folder / SUSPECTS, record)
            except OSError as error:
                _log.warning("%s cannot be written (%s)", self._folder / SUSPECTS, error)
        return errors

    def _find_errors(self) -> list[str]:
        try:
            health = self._check()
        except RuntimeError as error:  # an error of the device, or its context is unusable
            return [f"{type(error).__name__}: {error!s:.500}"]
        errors = [*health.errors]
        if health.device_type == self._first.device_type:
            errors += [
                f"{name} has different bits than at the start of the process"
                for name, bits in health.bits.items()
                if self._first.bits.get(name, bits) != bits
            ]
        return errors

    def _check(self) -> DeviceHealth:
        worker = Worker.from_environment(self._environment)
        set_threads(worker, self._run.train.threads)  # bits depend on their number
        dtypes = [DTYPES[self._run.precision.params], torch.float32]
        return check_device(worker.device, dtypes)


def _train_round(client: RestartClient, train: Callable[[], Outcome]) -> Outcome | Failure:
    """Return the outcome of a round, or the failure because of which this rank leaves it."""
    try:
        return train()
    except Exception as error:
        if not is_recoverable(error, is_aborted=client.is_aborted):
            raise
        # the error itself holds the frames of the functions that raised it, and so the model
        return exception_failure(client.round.rank, error)


def is_recoverable(error: Exception, *, is_aborted: bool) -> bool:
    """Return whether a process can continue after an error: if it only shows that another rank has
    failed or the round was aborted, or that reading a file or a connection failed.

    After other errors a new process replaces this one; after a GPU error its context is unusable.
    """
    if is_aborted or isinstance(error, OSError | RankError):
        return True
    if isinstance(error, UserError | CollectiveError):
        return False
    return isinstance(error, RuntimeError) and exception_failure(0, error).is_consequence


def release_round() -> None:
    """Release the references that torch holds to the groups and tensors of a round."""
    if "torch.distributed.tensor" in sys.modules:
        # its caches keep device meshes alive, and so their process groups
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def preload() -> None:
    """Import what a rank imports later, so that a spare starts without delay."""
    import torch.distributed.tensor  # noqa: F401

"""What must be equal in all replica groups, the address of this machine for the others, and the
connection with the coordinator."""

import logging
import socket
import time
from collections.abc import Callable

from megalith import __version__
from megalith.checkpoint.manifest import list_complete_checkpoints
from megalith.config.replica_group import ReplicaGroupConfig
from megalith.config.train import TrainRun
from megalith.config.tree import flatten
from megalith.errors import ConfigError, UserError
from megalith.launch.coordinator_client import CoordinatorClient
from megalith.launch.coordinator_protocol import parse_address
from megalith.plan.quorum import QuorumLimits
from megalith.storage import StoragePath

_log = logging.getLogger(__name__)

MAX_LAG = 1 << 30
"""Steps that a group may have missed when an epoch begins: any number, since it then loads the
state of another participant."""

CHECK_SECONDS = 10.0
"""Interval of the checks whether the other groups have finished the run (heuristic: much longer
than a listing of an object store takes)."""

UNCOMPARED_SETTINGS = (
    "name",
    "replica_group.coordinator",
    "replica_group.id",
    "replica_group.max_groups",
    "replica_group.min_groups",
    "replica_group.timeout_seconds",
    "checkpoint.",
    "observe.",
    "profile.",
    "evaluate.",
    "callbacks.",
    "train.callbacks",
    "train.eval_",
    "train.exit_margin_minutes",
    "train.gc_interval",
    "train.log_every",
    "train.max_minutes",
    "train.sigusr1_action",
    "train.termination_grace_seconds",
    "train.threads",
    "parallel.timeout_seconds",
    "parallel.check_collectives",
    "data.cache_path",
    "data.mmap",
    "data.path",
    "data.train_path",
    "data.valid_path",
    "data.test_path",
    "data.sft.path",
    "data.sft.valid_path",
    "tokenizer.path",
    "recompute.",
    "offload.",
    "kernels",
)
"""Settings that may differ between the groups of a run: they change neither weights nor losses. The
fingerprint of the data is compared when a state is loaded."""


def list_compared_settings(run: TrainRun, world: int) -> dict[str, str]:
    """Return the settings that must be equal in all groups, as text, with the number of ranks and
    the version."""
    settings = {
        path: str(value)
        for path, value in sorted(flatten(run).items())
        if not path.startswith(UNCOMPARED_SETTINGS) and value is not None
    }
    return {"number of ranks": str(world), "version of megalith": __version__} | settings


def find_own_host(config: ReplicaGroupConfig) -> str:
    """Return the address of this machine on the network of the coordinator.

    Raises:
        ConfigError: the address of the coordinator is not valid, or it cannot be reached.
    """
    address = parse_address(config.coordinator)  # the rules have checked it
    try:
        family, kind, _, _, target = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing, but selects the interface
            host: str = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(
            f"replica_group.coordinator={config.coordinator} cannot be reached: {error}. Use the "
            "HOST:PORT that `megalith coordinate` prints."
        ) from error
    return host


class FinishedRunCheck:
    """Checks whether a run has ended, by the checkpoint of its last step; True at most once per
    `CHECK_SECONDS`, since a check lists a folder."""

    def __init__(self, checkpoints: StoragePath, last_step: int) -> None:
        self._checkpoints, self._last_step = checkpoints, last_step
        self._next_check = time.monotonic() + CHECK_SECONDS

    def __call__(self) -> bool:
        """Return whether the checkpoint of the last step is complete."""
        if time.monotonic() < self._next_check:
            return False
        self._next_check = time.monotonic() + CHECK_SECONDS
        try:
            return self._last_step in list_complete_checkpoints(self._checkpoints)
        except (OSError, UserError) as error:  # of a store: it is checked again
            _log.warning("cannot check whether the run has ended: %s", error)
            return False


def connect_coordinator(
    config: ReplicaGroupConfig, is_finished: Callable[[], bool] = lambda: False
) -> CoordinatorClient:
    """Return the connection of rank 0 with the coordinator; `join` opens it. `is_finished`: ends
    waiting for it."""
    limits = QuorumLimits(
        min_groups=config.min_groups,
        max_groups=config.max_groups,
        timeout_seconds=config.timeout_seconds,
        max_lag=MAX_LAG,
    )
    return CoordinatorClient(config.coordinator, limits=limits, should_stop=is_finished)

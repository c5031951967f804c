"""Restart in place, on a rank: trains in rounds. After a fault of any rank it discards the trainer
and the process groups, and joins the next round with the same process."""

import gc
import logging
import sys
from collections.abc import Callable

import torch

from megalith.errors import CollectiveError, RankError, UserError
from megalith.launch.heartbeat import RankHeartbeat
from megalith.launch.launcher import Failure, exception_failure
from megalith.launch.rounds import RestartClient
from megalith.train.callbacks.base import Outcome

_log = logging.getLogger(__name__)


def train_in_rounds(
    client: RestartClient, train: Callable[[], Outcome], heartbeat: RankHeartbeat
) -> Outcome:
    """Call `train` in each round until it returns; the first round has been assigned. Between two
    rounds the heartbeat of this rank is not monitored.

    Raises:
        Exception: an error of this rank after which it must not continue.
    """
    while True:
        result = _train_round(client, train)
        if isinstance(result, Outcome):
            return result
        heartbeat.stop()
        release_round()
        place = client.round
        _log.info("rank %d leaves round %d: %s", place.rank, place.number, result.summary)
        client.leave(result)


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

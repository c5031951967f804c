"""Local checkpoints during training: when they are due, and how the loop saves them."""

import logging
from collections.abc import Callable
from typing import Any

from megalith.errors import CheckpointError
from megalith.train.callbacks.base import Callback, Outcome, RunView
from megalith.train.callbacks.fault_detection import FaultDetector
from megalith.train.callbacks.health import Checkpointer

_log = logging.getLogger(__name__)


class LocalCheckpointer(Callback):
    """Saves a local checkpoint every `checkpoint.local.every` steps."""

    essential = True
    collective = True

    def __init__(self, fault_detector: FaultDetector, checkpointer: Checkpointer) -> None:
        self._fault_detector, self._checkpointer = fault_detector, checkpointer
        self._has_failed = False

    def on_start(self, run: RunView) -> None:
        """Receive the run."""
        self._run = run

    def on_end(self, outcome: Outcome) -> None:
        """Delete the local checkpoints, if a persistent one holds the last step."""
        tier = self._run.prepared.local_tier
        if tier is not None and self._checkpointer.saved_step == outcome.step:
            tier.remove()

    def is_due(self) -> bool:
        """Return whether this step is saved locally: not if a persistent checkpoint holds it, or is
        about to."""
        step, config = self._run.step, self._run.config
        every = config.checkpoint.local.every
        return (
            every is not None
            and step % every == 0
            and step < config.train.steps
            and step != self._checkpointer.saved_step
            and not self._fault_detector.diverged
            and not self._checkpointer.replica_check.differs
        )

    def save(self, callback_states: Callable[[], dict[str, Any]]) -> None:  # Any: JSON
        """Save this step locally. A failure is logged once, until a later save succeeds.
        Collective.

        Raises:
            DataError: parameters are NaN or infinite.
        """
        run = self._run.prepared
        assert run.local_tier is not None, "a local checkpoint is due"
        entries = self._checkpointer.entries()
        state = self._checkpointer.collect_state(entries, callback_states)
        try:
            report = run.local_tier.save(run.state.step, entries, state, lineage=run.rollbacks)
        except CheckpointError as error:
            if not self._has_failed:
                self._run.log(f"the run continues without this local checkpoint: {error}")
            self._has_failed = True
            return
        self._has_failed = False
        _log.info("%s", report)

"""Local checkpoints during training: when they are due, and how the loop saves them."""

from collections.abc import Callable
from typing import Any

from megalith.errors import CheckpointError
from megalith.train.callbacks.base import Callback, Outcome, RunView
from megalith.train.callbacks.fault_detection import FaultDetector
from megalith.train.callbacks.health import Checkpointer


class LocalCheckpointer(Callback):
    """Saves a local checkpoint every `checkpoint.local.every` steps."""

    essential = True
    collective = True

    def __init__(self, fault_detector: FaultDetector, checkpointer: Checkpointer) -> None:
        self._fault_detector, self._checkpointer = fault_detector, checkpointer
        self._has_skipped = False

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
        """Save this step locally; if saves are asynchronous, begin to. Collective.

        A failure is logged once, until a later save succeeds. While another asynchronous save is
        in flight, this one is left out, because training would wait.

        Raises:
            DataError: parameters are NaN or infinite.
        """
        run, saver = self._run.prepared, self._checkpointer.saver
        assert run.local_tier is not None, "a local checkpoint is due"
        step = run.state.step
        if saver is not None and saver.pending_step is not None:
            if not self._has_skipped:
                self._run.log(
                    f"step {step}: no local checkpoint, because the save of step "
                    f"{saver.pending_step} is in flight; later ones are left out without a "
                    "message. If that is too seldom, set checkpoint.local.every or "
                    "checkpoint.writer_threads to a higher number."
                )
            self._has_skipped = True
            return
        if saver is None:
            self.save_now(callback_states)
            return
        entries = self._checkpointer.entries()
        state = self._checkpointer.collect_state(entries, callback_states)
        try:
            saver.begin_local(step, entries, state, lineage=run.rollbacks)
        except CheckpointError as error:
            self._checkpointer.report_local(error)

    def save_now(self, callback_states: Callable[[], dict[str, Any]]) -> bool:  # Any: JSON
        """Save this step locally, and wait until it is saved; return False if that fails or the
        step must not be saved. No other save is in flight. Collective.

        Raises:
            DataError: parameters are NaN or infinite.
        """
        run = self._run.prepared
        assert run.local_tier is not None, "the run has a local tier"
        if self._fault_detector.diverged or self._checkpointer.replica_check.differs:
            return False
        entries = self._checkpointer.entries()
        state = self._checkpointer.collect_state(entries, callback_states)
        try:
            report = run.local_tier.save(run.state.step, entries, state, lineage=run.rollbacks)
        except CheckpointError as error:
            self._checkpointer.report_local(error)
            return False
        self._checkpointer.report_local(report)
        return True

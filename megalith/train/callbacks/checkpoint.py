"""Checkpoints and evaluations of a run: when they are due, and how the loop executes them."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.lock import RunLock
from megalith.checkpoint.save import Retention, SaveReport, save_checkpoint
from megalith.data.loader import StepBatches
from megalith.errors import CheckpointError
from megalith.parallel.group import raise_on_all_ranks
from megalith.train.callbacks.base import Callback, RunView
from megalith.train.callbacks.health import FaultDetector, find_nonfinite_parameters
from megalith.train.evaluate import Evaluation, evaluate
from megalith.train.resume import CALLBACKS
from megalith.train.step import StepRequest
from megalith.train.trainer import checkpoint_entries

_log = logging.getLogger(__name__)


class Evaluator(Callback):
    """Requests an evaluation every `train.eval_every` steps and after the last one."""

    essential = True

    def on_start(self, run: RunView) -> None:
        """Receive the run."""
        self._run = run

    def before_step(self, step: int, batches: StepBatches) -> None:
        """Request an evaluation after this step, if it is due."""
        train = self._run.config.train
        due = step == train.steps or (train.eval_every and step % train.eval_every == 0)
        if due and self.can_evaluate:
            self._run.request(StepRequest.EVALUATE)

    @property
    def can_evaluate(self) -> bool:
        """Whether the run has samples to evaluate on."""
        return (
            self._run.config.train.eval_steps > 0
            and self._run.prepared.data.splits.valid is not None
        )

    def evaluate(self) -> Evaluation:
        """Evaluate the model on `train.eval_steps` global batches. Collective."""
        run, train = self._run.prepared, self._run.config.train
        assert run.data.splits.valid is not None, "can_evaluate"
        return evaluate(
            run.trainer.pipeline_model,
            run.data.splits.valid,
            run.masks(),
            samples=train.eval_steps * train.global_batch_size,
            tokenizer=run.tokenizer,
        )


class Checkpointer(Callback):
    """Requests a save every `checkpoint.every` steps, and saves without divergent steps."""

    essential = True

    def __init__(self, fault_detector: FaultDetector, lock: RunLock | None) -> None:
        """`lock`: this process's lock of the run folder, on rank 0."""
        self._fault_detector, self._lock = fault_detector, lock
        self._num_failures = 0  # in a row
        self._is_delayed = False

    def on_start(self, run: RunView) -> None:
        """Receive the run."""
        self._run = run
        self.saved_step = run.step if run.prepared.is_resumed else -1

    def after_rollback(self, step: int) -> None:
        """Save this step again, because the position in the data has changed."""
        self.saved_step, self._is_delayed = -1, False

    def before_step(self, step: int, batches: StepBatches) -> None:
        """Request a save after this step, if it is due or was delayed."""
        every = self._run.config.checkpoint.every
        if (every > 0 and step % every == 0) or self._is_delayed:
            self._run.request(StepRequest.SAVE)

    def save(
        self,
        callback_states: Callable[[], dict[str, Any]],  # Any: JSON
        *,
        final: bool = False,
    ) -> SaveReport | CheckpointError | None:
        """Save this step and return the report, or the error of a failed save. Collective.

        Returns None if the step is already saved or is divergent. The next step that is not
        divergent is saved instead, so that retention deletes no good checkpoint. Several failed
        saves in a row, or a failed final one, end the run.

        Raises:
            DataError: parameters are NaN or infinite, which no further step would change.
        """
        run, step = self._run.prepared, self._run.step
        if self.saved_step == step:
            return None
        if self._fault_detector.diverged:
            if not self._is_delayed:
                self._run.log(
                    f"step {step}: not saved, because its loss or gradient norm is not finite; the "
                    "next step without such values is saved"
                )
            self._is_delayed = True
            return None
        self._is_delayed = False
        entries = self._entries()
        states: dict[str, Any] = {}  # Any: JSON

        def check() -> tuple[list[str], list[str]]:
            if self._lock is not None:
                self._lock.check()  # another run may have taken over the folder
            states.update(callback_states())
            return find_nonfinite_parameters(entries), list(states)

        checks = raise_on_all_ranks(check, run.mesh.world)
        if names := sorted({name for nonfinite, _ in checks for name in nonfinite}):
            more = f" and {len(names) - 5} more parameters" if names[5:] else ""
            raise self._fault_detector.divergence_error(
                f"step {step} is not saved: NaN or infinite values in {', '.join(names[:5])}{more}."
            )
        # A callback that failed on another rank has no state.
        common = {name: states[name] for name in states if all(name in each for _, each in checks)}
        return self._write(
            entries, run.state_json() | ({CALLBACKS: common} if common else {}), final
        )

    def _write(
        self,
        entries: Sequence[CheckpointEntry],
        state: dict[str, Any],  # Any: JSON
        final: bool,
    ) -> SaveReport | CheckpointError:
        run, keep = self._run.prepared, self._run.config.checkpoint
        try:
            report = save_checkpoint(
                run.folder.checkpoints,
                run.state.step,
                entries,
                state,
                run.mesh.world,
                config_text=run.tokenizer_files.config_text(run.run, "."),
                auxiliary_files=run.tokenizer_files.contents,
                retention=Retention(keep.keep, keep.keep_every, run.state.last_update),
            )
        except CheckpointError as error:
            self._num_failures += 1
            if final or self._num_failures >= keep.max_save_failures:
                raise
            self._run.log(f"the run continues without this checkpoint: {error}")
            return error
        self._num_failures, self.saved_step = 0, run.state.step
        _log.info("saved %s", report)
        return report

    def _entries(self) -> list[CheckpointEntry]:
        """Return the tensors to save; without checkpoint.save_optimizer only the weights."""
        entries = checkpoint_entries(self._run.prepared.trainer)
        if self._run.config.checkpoint.save_optimizer:
            return entries
        return [entry for entry in entries if entry.role == "param"]

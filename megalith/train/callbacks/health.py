"""Health of a run (fault tolerance): checkpoints and evaluations, and how the loop executes them;
detection of NaN or infinite parameters.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megalith.checkpoint.async_save import MIN_NBYTES, AsyncSaver, WriterSettings, check_memory
from megalith.checkpoint.commit import BestCheckpoints, Retention
from megalith.checkpoint.format import CheckpointEntry, folder_name
from megalith.checkpoint.local import LocalSaveError, LocalSaveReport
from megalith.checkpoint.lock import RunLock
from megalith.checkpoint.save import SaveReport, save_checkpoint
from megalith.config.train import SuiteConfig
from megalith.data.loader import StepBatches
from megalith.errors import CheckpointError, ConfigError, did_you_mean
from megalith.optim.ema import EMA
from megalith.parallel.group import all_reduce_, raise_on_all_ranks
from megalith.plan.batch_schedule import build_batch_schedule
from megalith.plan.rollback import list_rollback_limits
from megalith.storage import StoragePath, max_file_nbytes
from megalith.train.callbacks.base import Callback, Outcome, RunView, StepMetrics
from megalith.train.callbacks.fault_detection import FaultDetector
from megalith.train.callbacks.replicas import ReplicaCheck
from megalith.train.evaluate import VALIDATION, EvaluationStoppedError
from megalith.train.resume import CALLBACKS, HEALTHY
from megalith.train.step import (
    SaveCounts,
    StepRequest,
)
from megalith.train.suites import Suite, SuiteResult, TextSuite, check_metric_names, open_suite
from megalith.train.trainer import checkpoint_entries

_log = logging.getLogger(__name__)


def find_nonfinite_parameters(entries: Sequence[CheckpointEntry]) -> list[str]:
    """Return the names of the parameters whose weights or master weights are NaN or infinite
    somewhere.

    Checks the shards that this rank saves. The host waits for the device once.
    """
    weights = [
        e for e in entries if e.role in ("param", "master") and e.is_writer and e.tensor.numel()
    ]
    if not weights:
        return []
    # Minimum and maximum are NaN if any element is; they take a twentieth of the time of isfinite
    # (measured on a CPU).
    extremes = [
        torch.stack(torch.aminmax(entry.decode().tensor.detach())).double() for entry in weights
    ]
    finite = torch.isfinite(torch.stack(extremes)).all(dim=1).tolist()
    return sorted(
        {entry.shard.name for entry, good in zip(weights, finite, strict=True) if not good}
    )


# --- checkpoints and evaluations: when they are due, and how the loop executes them


STOP_CHECK_EVERY = 8
"""Forward passes of an evaluation between two checks whether the run stops. Heuristic: the message
of a check takes less time than a pass."""


class Evaluator(Callback):
    """Evaluates the validation split and suites, each at its steps and after the last one."""

    essential = True

    def __init__(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """`should_stop`: whether this rank must stop soon, which ends an evaluation early."""
        self._should_stop = should_stop
        self._num_passes = 0

    def on_start(self, run: RunView) -> None:
        """Open the data of the suites.

        Raises:
            DataError, ConfigError: it is missing or damaged.
        """
        self._run, prepared, train = run, run.prepared, run.config.train
        self._suites: dict[str, Suite] = {}
        valid = prepared.data.splits.valid
        if train.eval_steps > 0 and valid is not None:
            num_samples = train.eval_steps * train.global_batch_size
            config = SuiteConfig(split="valid", every=train.eval_every, num_samples=num_samples)
            self._suites[VALIDATION] = TextSuite(config, valid, num_samples)
        for name in run.config.evaluate:
            self._suites[name] = open_suite(run.config, name, prepared.tokenizer)
        check_metric_names(self._suites)

    def list_suites(self, step: int, *, is_requested: bool) -> list[str]:
        """Return the names of the suites that are due after a step; all of them if a callback
        requests an evaluation."""
        last = self._run.config.train.steps
        return [
            name
            for name, suite in self._suites.items()
            if is_requested
            or step == last
            or (
                step >= suite.config.start and suite.config.every and step % suite.config.every == 0
            )
        ]

    def evaluate(self, names: Sequence[str]) -> dict[str, SuiteResult]:
        """Evaluate some suites. Collective.

        Raises:
            EvaluationStoppedError: on every rank: a rank must stop.
        """
        prepared = self._run.prepared
        return {
            name: self._suites[name].evaluate(
                prepared.trainer.pipeline_model,
                prepared.masks(),
                prepared.tokenizer,
                lambda _num_samples: self._run.report_progress(),
                self._check_stop,
            )
            for name in names
        }

    def _check_stop(self) -> None:
        """Check every few forward passes whether a rank must stop. Collective.

        Raises:
            EvaluationStoppedError: on every rank: a rank must stop.
        """
        self._num_passes += 1
        if self._num_passes % STOP_CHECK_EVERY:
            return
        stops = torch.tensor([float(self._should_stop())], device=self._run.device)
        if all_reduce_(stops, self._run.mesh.world).item():
            raise EvaluationStoppedError


DIVERGED = "diverged"
"""Folder in that of the checkpoints with the last state of a run that has diverged."""

MAX_WAITS = 3
"""Saves in a row that waited for the one before, after which the log names the settings to change
(heuristic)."""


class Checkpointer(Callback):
    """Requests a save every `checkpoint.every` steps and before a change of the batch size, and
    saves without divergent steps."""

    essential = True
    collective = True

    def __init__(
        self, fault_detector: FaultDetector, replica_check: ReplicaCheck, lock: RunLock | None
    ) -> None:
        """`lock`: this process's lock of the run folder, on rank 0."""
        self._fault_detector, self.replica_check, self._lock = fault_detector, replica_check, lock
        self._num_failures = 0  # in a row
        self._num_waits = 0  # in a row
        self._has_failed_locally = False
        self._is_delayed = False
        self._saver: AsyncSaver | None = None
        self._restored: Mapping[str, Any] = {}  # Any: JSON
        self._best: BestCheckpoints | None = None
        self._best_before: Mapping[int, float] = {}  # before the step that was saved last
        self._evaluated: tuple[int, float] | None = (
            None  # last step with best_metric, and its value
        )

    def on_start(self, run: RunView) -> None:
        """Receive the run, and start the writer processes if saves are asynchronous. Collective.

        Raises:
            CheckpointError: on every rank: host memory does not suffice for checkpoint.async_save.
        """
        self._run = run
        is_saved = run.prepared.is_resumed and not run.prepared.is_resumed_locally
        self.saved_step = run.step if is_saved else -1
        checkpoint = run.config.checkpoint
        if checkpoint.best_metric is not None:
            self._best = BestCheckpoints(checkpoint.best_metric, checkpoint.keep_best)
            self._best.restore(self._restored)
        self._saver = self._open_saver()
        if self._saver is not None:
            run.prepared.trainer.write_guard.wait_staged = self._saver.wait_staged

    def after_evaluate(self, results: Mapping[str, SuiteResult], metrics: StepMetrics) -> None:
        """Receive the value of checkpoint.best_metric.

        Raises:
            ConfigError: its evaluation has no such metric.
        """
        if self._best is None:
            return
        name, step = self._best.metric, self._run.step
        value = metrics.get(name)
        if isinstance(value, int | float):
            self._evaluated = step, float(value)
        elif self._best_suite in results:
            names = [*results[self._best_suite].metrics(self._best_suite)]
            raise ConfigError(
                f"checkpoint.best_metric={name}: the evaluation has no such number."
                f"{did_you_mean(name, names)} Use one of {', '.join(names)}."
            )

    @property
    def _best_suite(self) -> str:
        """Name of the evaluation that checkpoint.best_metric belongs to: of several names that it
        begins with, the longest."""
        metric = self._run.config.checkpoint.best_metric or ""
        names = [VALIDATION, *self._run.config.evaluate]
        return max((name for name in names if metric.startswith(f"{name}_")), key=len, default="")

    def state_dict(self) -> dict[str, Any]:  # Any: JSON
        """Return the best values of checkpoint.best_metric."""
        return {} if self._best is None else self._best.as_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the best values of checkpoint.best_metric."""
        self._restored = state

    def on_error(self, error: BaseException) -> None:
        """Let the writers finish a save in flight."""
        self._close(failed=True)

    def on_end(self, outcome: Outcome) -> None:
        """End the writer processes."""
        self._close(failed=False)

    def _close(self, *, failed: bool) -> None:
        if self._saver is not None:
            self._run.prepared.trainer.write_guard.wait_staged = None
            self._saver.close(failed=failed)
            self._saver = None

    def _open_saver(self) -> AsyncSaver | None:
        """Return the asynchronous saves of this run; None if its saves are synchronous.
        Collective."""
        checkpoint, world = self._run.config.checkpoint, self._run.mesh.world
        if checkpoint.async_save is False:
            return None
        if checkpoint.async_save == "auto" and checkpoint.every == 0:
            return None  # only the last save, which is synchronous
        entries = self.entries()
        memory = check_memory(entries, world)
        if checkpoint.async_save == "auto" and memory.largest_rank < MIN_NBYTES:
            return None
        if not memory.suffices:
            if checkpoint.async_save is True:
                raise CheckpointError(
                    f"checkpoint.async_save=true: {memory.describe()}. Set checkpoint.async_save "
                    "to auto or false, or free some memory."
                )
            self._run.log(f"saves are synchronous (checkpoint.async_save): {memory.describe()}")
            return None
        settings = WriterSettings(
            threads=checkpoint.writer_threads,
            max_file_nbytes=max_file_nbytes(self._run.folder.checkpoints),
            timeout_seconds=checkpoint.writer_timeout_seconds,
            drain_seconds=checkpoint.drain_timeout_seconds,
        )
        saver = AsyncSaver(entries, world, self._run.device, settings)
        if self._run.prepared.local_tier is not None:
            saver.serve_local(self._run.prepared.local_tier)
        return saver

    @property
    def saver(self) -> AsyncSaver | None:
        """Asynchronous saves of this run; None if its saves are synchronous."""
        return self._saver

    def count_saves(self) -> SaveCounts:
        """Return the state of this rank's part of the asynchronous save in flight."""
        return SaveCounts() if self._saver is None else SaveCounts(*self._saver.count_saves())

    def advance(self, counts: SaveCounts) -> SaveReport | CheckpointError | None:
        """Continue the asynchronous save in flight with the counts of all ranks; return its report
        if it is complete, or its error. Communicates only after a failure.

        Raises:
            CheckpointError: too many saves in a row have failed.
        """
        if self._saver is None:
            return None
        step = self._saver.pending_step
        return self._count(self._saver.advance(*counts), step, final=False)

    def report_local(self, result: LocalSaveReport | CheckpointError) -> None:
        """Log the result of a local save: of failures only the first until a save succeeds."""
        if isinstance(result, LocalSaveReport):
            _log.info("%s", result)
        elif not self._has_failed_locally:
            self._run.log(f"the run continues without this local checkpoint: {result}")
        self._has_failed_locally = not isinstance(result, LocalSaveReport)

    def drain(self) -> SaveReport | CheckpointError | None:
        """Wait for the asynchronous save in flight, and return its report or error. Collective.

        Raises:
            CheckpointError: too many saves in a row have failed.
        """
        if self._saver is None or self._saver.pending_step is None:
            return None
        step = self._saver.pending_step
        return self._count(self._saver.drain(self._run.report_progress), step, final=False)

    def drain_before_save(self) -> SaveReport | CheckpointError | None:
        """Wait for the asynchronous save in flight, because another one is due; log the waiting
        time. Collective.

        Raises:
            CheckpointError: too many saves in a row have failed.
        """
        if self._saver is None or self._saver.pending_step is None:
            self._num_waits = 0
            return None
        step, started = self._saver.pending_step, time.monotonic()
        result = self.drain()
        self._num_waits += 1
        checkpoint, advice = self._run.config.checkpoint, ""
        if self._num_waits >= MAX_WAITS:
            advice = (
                f", as did the {self._num_waits - 1} saves before: increase checkpoint.every "
                f"({checkpoint.every} now) or checkpoint.writer_threads "
                f"({checkpoint.writer_threads} now)"
            )
        self._run.log(
            f"step {self._run.step}: waited {time.monotonic() - started:.1f} s for the save of "
            f"step {step}{advice}"
        )
        return result

    def after_rollback(self, step: int) -> None:
        """Save this step again, because the position in the data has changed."""
        self.saved_step, self._is_delayed, self._evaluated = -1, False, None
        if self._best is not None:
            self._best.remove_after(step)

    def before_step(self, step: int, batches: StepBatches) -> None:
        """Request a save after this step, if it is due or was delayed, or if the batch size or the
        data phase changes after it."""
        self.before_skipped_step(step)

    def before_skipped_step(self, step: int) -> None:
        """Request a save after this step, as after any other."""
        every = self._run.config.checkpoint.every
        is_due = every > 0 and (step % every == 0 or self._changes_batches())
        if is_due or self._is_delayed:
            self._run.request(StepRequest.SAVE)

    def _changes_batches(self) -> bool:
        """Return whether the step after the current one has another batch size, or is the first
        that reads a data phase."""
        schedule = build_batch_schedule(self._run.config.train)
        state = self._run.prepared.state
        size = schedule.get_batch_size(state.read_samples)
        next_size = schedule.get_batch_size(state.read_samples + size)
        consumed = state.consumed_samples
        next_samples = range(consumed + size, consumed + size + next_size)
        phases = self._run.config.data.phases
        return next_size != size or any(phase.samples in next_samples for phase in phases)

    def save(
        self,
        callback_states: Callable[[], dict[str, Any]],  # Any: JSON
        *,
        final: bool = False,
        overlap: bool = True,
    ) -> SaveReport | CheckpointError | None:
        """Save this step and return the report, or the error of a failed save. Collective.

        Returns None if the save is asynchronous and has only begun, or if the step is already saved
        or is divergent. The next step that is not
        divergent is saved instead, so that retention deletes no good checkpoint. Several failed
        saves in a row, or a failed final one, end the run.

        Raises:
            DataError: parameters are NaN or infinite, which no further step would change.
        """
        step = self._run.step
        if self.saved_step == step or self.replica_check.differs:
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
        if self._best is not None and self._evaluated is not None and self._evaluated[0] == step:
            self._best_before = dict(self._best.values)
            self._best.add(*self._evaluated)
        entries = self.entries()
        state = self.collect_state(entries, callback_states)
        return self._write(entries, state, final=final, overlap=overlap and not final)

    def leave_to_other_group(self) -> None:
        """Count this step as saved, because another replica group saves it."""
        self.saved_step, self._is_delayed = self._run.step, False

    def save_diverged(
        self,
        callback_states: Callable[[], dict[str, Any]],  # Any: JSON
    ) -> StoragePath | None:
        """Save the state of a run that has diverged in the folder `diverged`, from which no run
        resumes by itself, and return its path; None if this step is saved already. Collective.

        Raises:
            CheckpointError: on every rank: it cannot be saved.
        """
        run, step = self._run.prepared, self._run.step
        if self.saved_step == step:
            return None
        run.trainer.data.wait_params()
        folder, entries = run.folder.checkpoints / DIVERGED, self.entries()
        save_checkpoint(
            folder,
            step,
            entries,
            self.collect_state(entries, callback_states, is_healthy=False),
            run.mesh.world,
            config_text=run.tokenizer_files.config_text(run.run, "."),
            auxiliary_files=run.tokenizer_files.contents,
            retention=Retention(1),
            report_progress=self._run.report_progress,
        )
        return folder / folder_name(step)

    def collect_state(
        self,
        entries: Sequence[CheckpointEntry],
        callback_states: Callable[[], dict[str, Any]],  # Any: JSON
        *,
        is_healthy: bool = True,
    ) -> dict[str, Any]:  # JSON
        """Return what a checkpoint of this step holds besides tensors. Collective.

        `is_healthy`: False if the model has diverged.

        Raises:
            DataError: parameters are NaN or infinite, which no further step would change.
        """
        run, step = self._run.prepared, self._run.step
        states: dict[str, Any] = {}  # Any: JSON

        def check() -> tuple[list[str], list[str]]:
            self._check_lock()
            states.update(callback_states())
            return find_nonfinite_parameters(entries) if is_healthy else [], list(states)

        checks = raise_on_all_ranks(check, run.mesh.world)
        if names := sorted({name for nonfinite, _ in checks for name in nonfinite}):
            more = f" and {len(names) - 5} more parameters" if names[5:] else ""
            raise self._fault_detector.divergence_error(
                f"step {step} is not saved: NaN or infinite values in {', '.join(names[:5])}{more}."
            )
        # A callback that failed on another rank has no state.
        common = {name: states[name] for name in states if all(name in each for _, each in checks)}
        health = {} if is_healthy else {HEALTHY: False}
        return run.state_json() | health | ({CALLBACKS: common} if common else {})

    def _write(
        self,
        entries: Sequence[CheckpointEntry],
        state: dict[str, Any],  # Any: JSON
        *,
        final: bool,
        overlap: bool,
    ) -> SaveReport | CheckpointError | None:
        run, keep = self._run.prepared, self._run.config.checkpoint
        folder, step = run.folder.checkpoints, run.state.step
        config_text = run.tokenizer_files.config_text(run.run, ".")
        auxiliary_files = run.tokenizer_files.contents
        retention = Retention(
            keep.keep,
            keep.keep_every,
            run.state.last_update,
            list_rollback_limits(run.run.fault_detector, step),
            frozenset(() if self._best is None else self._best.values),
        )
        result: SaveReport | CheckpointError | None = None
        try:
            # There is no training that the last save could overlap with.
            if self._saver is not None and overlap and step < run.run.train.steps:
                self._saver.begin(
                    folder,
                    step,
                    entries,
                    state,
                    config_text=config_text,
                    auxiliary_files=auxiliary_files,
                    retention=retention,
                    check_lock=self._check_lock,
                )
            else:
                result = save_checkpoint(
                    folder,
                    step,
                    entries,
                    state,
                    run.mesh.world,
                    config_text=config_text,
                    auxiliary_files=auxiliary_files,
                    retention=retention,
                    report_progress=self._run.report_progress,
                )
        except CheckpointError as error:
            result = error
        return self._count(result, step, final=final)

    def _count(
        self,
        result: SaveReport | LocalSaveReport | CheckpointError | None,
        step: int | None,
        *,
        final: bool,
    ) -> SaveReport | CheckpointError | None:
        """Count successful and failed saves, and log the result of the save of `step`.

        Raises:
            CheckpointError: the final save, or too many in a row, have failed.
        """
        if isinstance(result, LocalSaveReport | LocalSaveError):
            self.report_local(result)
            return None
        if isinstance(result, CheckpointError):
            self._num_failures += 1
            if self._best is not None and step in self._best.values:
                # there is no checkpoint of the step, so the one that it replaced is kept
                self._best.values = dict(self._best_before)
            if final or self._num_failures >= self._run.config.checkpoint.max_save_failures:
                raise result
            self._run.log(f"the run continues without this checkpoint: {result}")
        elif result is not None:
            assert step is not None, "a save has a step"
            self._num_failures, self.saved_step = 0, step
            if result.staged_seconds is None:
                _log.info("saved %s", result)
            else:
                _log.info("checkpoint %s", result)
        return result

    def _check_lock(self) -> None:
        if self._lock is not None:
            self._lock.check()  # another run may have taken over the folder

    def entries(self) -> list[CheckpointEntry]:
        """Return the tensors to save; without checkpoint.save_optimizer only the weights and their
        moving average."""
        entries = checkpoint_entries(self._run.prepared.trainer)
        if self._run.config.checkpoint.save_optimizer:
            return entries
        return [entry for entry in entries if entry.role in ("param", EMA)]

"""Health of a run (fault tolerance): checkpoints and evaluations, and how the loop executes them;
detection of NaN or infinite losses, gradients and parameters, with the checkpoint to continue from;
the check that replicas start from equal weights.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megalith.checkpoint.async_save import MIN_NBYTES, AsyncSaver, WriterSettings, check_memory
from megalith.checkpoint.commit import BestCheckpoints, Retention
from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.local import LocalSaveError, LocalSaveReport
from megalith.checkpoint.lock import RunLock
from megalith.checkpoint.manifest import list_complete_checkpoints
from megalith.checkpoint.save import SaveReport, save_checkpoint
from megalith.config.train import SuiteConfig
from megalith.data.loader import StepBatches
from megalith.errors import CheckpointError, ConfigError, DataError, did_you_mean
from megalith.optim.ema import EMA
from megalith.optim.optimizers import LossScale
from megalith.parallel.grad_sync import byte_checksum
from megalith.parallel.group import gather_objects, raise_on_all_ranks
from megalith.plan.batch_schedule import build_batch_schedule
from megalith.storage import StoragePath, max_file_nbytes
from megalith.train.callbacks.base import Callback, FinishedStep, Outcome, RunView, StepMetrics
from megalith.train.evaluate import VALIDATION
from megalith.train.resume import CALLBACKS
from megalith.train.step import (
    SaveCounts,
    StepRequest,
    StepResult,
    Trainer,
    describe_nonfinite_gradients,
)
from megalith.train.suites import Suite, SuiteResult, TextSuite, check_metric_names, open_suite
from megalith.train.trainer import checkpoint_entries

_log = logging.getLogger(__name__)

MAX_SKIPPED_IN_A_ROW = 20
"""Skipped steps in a row after which the run ends (heuristic: real loss spikes last a few
steps)."""


class FaultDetector(Callback):
    """Reports skipped steps, and ends a run whose loss or gradients stay NaN or infinite."""

    collective = True

    def __init__(self) -> None:
        self.diverged = False
        """Whether the last step that had labels was divergent."""

    def on_start(self, run: RunView) -> None:
        """Receive the run."""
        self._run = run

    def after_rollback(self, step: int) -> None:
        """Forget the discarded steps."""
        self.diverged = False

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        """Report a step without an update.

        Raises:
            DataError: too many steps in a row were skipped.
        """
        result, scale = finished.result, self._run.prepared.trainer.loss_scale
        if not result.empty:
            self.diverged = is_divergent(result, scale)
        if result.updated:
            return
        if result.is_finite and not result.empty:  # the list has logged the request
            self._check_skip_requests()
            return
        lowered = "" if scale is None else f"; the loss scale is {scale.scale:g} now"
        if result.empty:
            self._run.log(f"step {finished.step}: the batch has no labels; no update")
        else:
            self._run.log(
                f"step {finished.step}: loss {result.loss}, gradient norm {result.grad_norm}; no "
                f"update{lowered}"
            )
        if scale is not None and scale.dynamic:
            if scale.exhausted:
                raise self.divergence_error(
                    f"loss scale at its minimum {scale.scale:g} for {scale.stuck} steps in a row: "
                    f"gradients are not finite whatever the scale (in {self._describe()}).",
                    more=", or set precision.params=bf16",
                )
        elif self._run.prepared.state.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            if result.empty:
                raise DataError(
                    f"{MAX_SKIPPED_IN_A_ROW} steps in a row were skipped, the last because its "
                    "batch has no labels. Use data whose loss masks leave labels "
                    "(data.sft.loss_on, data.eod_mask_loss)."
                )
            raise self.divergence_error(
                f"{MAX_SKIPPED_IN_A_ROW} steps in a row were skipped, the last with loss "
                f"{result.loss} and gradient norm {result.grad_norm} (not finite in "
                f"{self._describe()})."
            )

    def _check_skip_requests(self) -> None:
        """Check that callbacks do not skip all updates.

        Raises:
            DataError: too many steps in a row were skipped.
        """
        if self._run.prepared.state.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise DataError(
                f"{MAX_SKIPPED_IN_A_ROW} steps in a row were skipped, the last because a callback "
                "requested it. Correct the callback, or run without it."
            )

    def check_last_step(self, result: StepResult) -> None:
        """Check that the last step of the run is not divergent. Collective.

        Raises:
            DataError: it is, and therefore not saved.
        """
        if self.diverged:
            raise self.divergence_error(
                f"the last step, {self._run.step}, has loss {result.loss} and gradient norm "
                f"{result.grad_norm} and is not saved."
            )

    def divergence_error(self, problem: str, *, more: str = "") -> DataError:
        """Return the error of a divergent run, which says how to continue. Collective.

        `more`: further advice, after a comma.
        """
        run = self._run
        state, lr = run.prepared.state, run.config.schedule.lr

        def describe() -> str:
            return (
                describe_last_good_checkpoint(run.folder.checkpoints, state.last_update, lr)
                if run.is_writer
                else ""
            )

        advice = raise_on_all_ranks(describe, run.mesh.world)[0]
        return DataError(
            f"{problem} Reduce schedule.lr, check the data and the settings of the model{more}. "
            f"{advice}"
        )

    def _describe(self) -> str:
        return describe_nonfinite_gradients(self._run.prepared.trainer)


class ReplicaCheck(Callback):
    """Checks that ranks with copies of the same weights start from equal values."""

    collective = True

    def on_start(self, run: RunView) -> None:
        """Compare replicas and pipeline stages.

        Raises:
            CheckpointError: on every rank, naming the ranks that differ.
        """
        compare_replicas(run.prepared.trainer)
        compare_stages(run.prepared.trainer)


def is_divergent(result: StepResult, loss_scale: LossScale | None) -> bool:
    """Return whether a step has NaN or infinite values that a lower loss scale would not avoid.

    That is a non-finite loss, or non-finite gradients without dynamic loss scaling or at its lowest
    scale. An fp16 step that overflows at a higher scale is normal.
    """
    if result.empty:
        return False
    if not all(map(math.isfinite, (result.loss, *result.other_losses.values()))):
        return True
    return not result.is_finite and (
        loss_scale is None or not loss_scale.dynamic or loss_scale.stuck > 0
    )


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
    extremes = [torch.stack(torch.aminmax(entry.tensor.detach())).double() for entry in weights]
    finite = torch.isfinite(torch.stack(extremes)).all(dim=1).tolist()
    return sorted(
        {entry.shard.name for entry, good in zip(weights, finite, strict=True) if not good}
    )


def describe_last_good_checkpoint(folder: StoragePath, last_update: int, lr: float) -> str:
    """Describe how to continue from the newest checkpoint in `folder` before a series of skipped
    steps.

    `last_update`: the last step before the series; `lr`: schedule.lr of the run.
    """
    complete = list_complete_checkpoints(folder)
    good = next((path for step, path in reversed(complete.items()) if step <= last_update), None)
    change = f"with another setting, for example --schedule.lr {lr / 2:g} ({lr:g} now)"
    if good is None:
        where = " and in another folder (--run NAME)" if complete else ""
        return f"No checkpoint is from before that: start from the beginning {change}{where}."
    if good == list(complete.values())[-1]:
        return (
            f"The last checkpoint from before that is {good}: run the same command again {change}, "
            "and it continues from there."
        )
    return (
        f"The last checkpoint from before that is {good}: to continue from it, run the same "
        f"command again {change}, and with --run NAME --checkpoint.load {good} "
        "--checkpoint.load_mode all."
    )


def compare_replicas(trainer: Trainer) -> None:
    """Check that data-parallel ranks start from equal weights: keyed random numbers may differ
    between machine types.

    Raises:
        CheckpointError: on every rank, naming the ranks that differ.
    """
    for checksum, group in trainer.data.checksums():
        checksums = gather_objects(checksum, group)
        if len(set(checksums)) > 1:
            different_ranks = [
                rank
                for rank, value in zip(group.ranks, checksums, strict=True)
                if value != checksums[0]
            ]
            raise CheckpointError(
                f"ranks {different_ranks} start from other weights than rank {group.ranks[0]}. Use "
                "machines of one type, or set checkpoint.load to weights that all of them read."
            )


def compare_stages(trainer: Trainer) -> None:
    """Check that pipeline stages that share an embedding table start from equal copies.

    Raises:
        CheckpointError: on every rank of the pipeline, naming the table and the stages.
    """
    local_checksums = {
        param.shard.name: byte_checksum([param.weight])
        for param in trainer.data.local_params
        if len(param.shard.stages) > 1
    }
    stage_checksums = [
        checksums
        for checksums in gather_objects(local_checksums, trainer.mesh.pp)
        if isinstance(checksums, dict)
    ]
    for name in sorted({name for checksums in stage_checksums for name in checksums}):
        values = {
            rank: checksums[name]
            for rank, checksums in enumerate(stage_checksums)
            if name in checksums
        }
        if len(set(values.values())) > 1:
            raise CheckpointError(
                f"{name} is not the same on pipeline ranks {list(values)}, which share it. Use "
                "machines of one type, or set checkpoint.load to weights that all of them read."
            )


# --- checkpoints and evaluations: when they are due, and how the loop executes them


class Evaluator(Callback):
    """Evaluates the validation split and suites, each at its steps and after the last one."""

    essential = True

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
        """Evaluate some suites. Collective."""
        prepared = self._run.prepared
        return {
            name: self._suites[name].evaluate(
                prepared.trainer.pipeline_model, prepared.masks(), prepared.tokenizer
            )
            for name in names
        }


MAX_WAITS = 3
"""Saves in a row that waited for the one before, after which the log names the settings to change
(heuristic)."""


class Checkpointer(Callback):
    """Requests a save every `checkpoint.every` steps and before a change of the batch size, and
    saves without divergent steps."""

    essential = True
    collective = True

    def __init__(self, fault_detector: FaultDetector, lock: RunLock | None) -> None:
        """`lock`: this process's lock of the run folder, on rank 0."""
        self._fault_detector, self._lock = fault_detector, lock
        self._num_failures = 0  # in a row
        self._num_waits = 0  # in a row
        self._has_failed_locally = False
        self._is_delayed = False
        self._saver: AsyncSaver | None = None
        self._restored: Mapping[str, Any] = {}  # Any: JSON
        self._best: BestCheckpoints | None = None
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
        elif suites := [suite for suite in results if name.startswith(f"{suite}_")]:
            names = [*results[max(suites, key=len)].metrics(max(suites, key=len))]
            raise ConfigError(
                f"checkpoint.best_metric={name}: the evaluation has no such number."
                f"{did_you_mean(name, names)} Use one of {', '.join(names)}."
            )

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
        return self._count(self._saver.drain(), step, final=False)

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
        """Request a save after this step, if it is due or was delayed, or if the batch size
        changes after it."""
        every = self._run.config.checkpoint.every
        is_due = every > 0 and (step % every == 0 or self._changes_batch_size())
        if is_due or self._is_delayed:
            self._run.request(StepRequest.SAVE)

    def _changes_batch_size(self) -> bool:
        """Return whether the step after the current one has another batch size."""
        schedule = build_batch_schedule(self._run.config.train)
        consumed = self._run.prepared.state.consumed_samples
        size = schedule.get_batch_size(consumed)
        return schedule.get_batch_size(consumed + size) != size

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
        if self._best is not None and self._evaluated is not None and self._evaluated[0] == step:
            self._best.add(*self._evaluated)
        entries = self.entries()
        state = self.collect_state(entries, callback_states)
        return self._write(entries, state, final=final, overlap=overlap and not final)

    def collect_state(
        self,
        entries: Sequence[CheckpointEntry],
        callback_states: Callable[[], dict[str, Any]],  # Any: JSON
    ) -> dict[str, Any]:  # JSON
        """Return what a checkpoint of this step holds besides tensors. Collective.

        Raises:
            DataError: parameters are NaN or infinite, which no further step would change.
        """
        run, step = self._run.prepared, self._run.step
        states: dict[str, Any] = {}  # Any: JSON

        def check() -> tuple[list[str], list[str]]:
            self._check_lock()
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
        return run.state_json() | ({CALLBACKS: common} if common else {})

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
        best_steps = frozenset(() if self._best is None else self._best.values)
        retention = Retention(keep.keep, keep.keep_every, run.state.last_update, best_steps)
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

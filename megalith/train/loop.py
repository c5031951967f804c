"""The training loop: steps, callbacks, and the actions that callbacks request."""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith import storage
from megalith.checkpoint.commit import remove_leftovers
from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.lease import acquire_lease
from megalith.checkpoint.lock import RunLock, lock_run
from megalith.checkpoint.save import SaveReport
from megalith.config.train import TrainRun, load_run
from megalith.data.loader import Loader
from megalith.errors import CheckpointError, DivergenceError, RollbackLimitError, UserError
from megalith.launch.heartbeat import RankHeartbeat
from megalith.observe.logs import log_to
from megalith.observe.metrics import StepProgress
from megalith.optim.schedule import (
    GroupRates,
    ScheduleLengths,
    batch_size_factor,
    group_rates,
    learning_rate,
    schedule_lengths,
    weight_decay,
)
from megalith.parallel.group import gather_objects, raise_on_all_ranks
from megalith.parallel.mesh import Mesh
from megalith.plan.batch_assignment import describe_uneven_batches
from megalith.plan.batch_schedule import BatchSizeSchedule, build_batch_schedule
from megalith.storage import StoragePath
from megalith.train.callbacks.base import (
    Callback,
    CallbackList,
    FinishedStep,
    Outcome,
    RunView,
    StepMetrics,
    configure_callbacks,
    load_installed_callbacks,
)
from megalith.train.callbacks.events import EventsWriter
from megalith.train.callbacks.fault_detection import FaultDetector
from megalith.train.callbacks.fault_injector import FaultInjector
from megalith.train.callbacks.health import Checkpointer, Evaluator
from megalith.train.callbacks.health_check import HealthCheck
from megalith.train.callbacks.heartbeat import HeartbeatWriter, start_heartbeat
from megalith.train.callbacks.local_tier import LocalCheckpointer
from megalith.train.callbacks.memory import (
    is_out_of_memory,
    out_of_memory_error,
    record_memory_history,
)
from megalith.train.callbacks.metrics import (
    BatchMetrics,
    ExperimentTrackers,
    ExpertLoadMetrics,
    MetricsWriter,
    Plots,
    ProgressReporter,
    RunFiles,
    Throughput,
    write_run_files,
)
from megalith.train.callbacks.profile import Profiler, build_profiling_callbacks
from megalith.train.callbacks.replicas import ReplicaCheck
from megalith.train.callbacks.requests import RunRequests
from megalith.train.callbacks.stop import JobLimits, StopRequests
from megalith.train.callbacks.stragglers import StragglerDetector
from megalith.train.callbacks.trace import RoutingTraceWriter
from megalith.train.diloco import DilocoSync
from megalith.train.evaluate import EvaluationStoppedError
from megalith.train.moe import list_routing_sums
from megalith.train.replica_group_ranks import Coordinator, FinishedRunError
from megalith.train.replica_group_settings import FinishedRunCheck, connect_coordinator
from megalith.train.replica_groups import ReplicaGroups, ReplicaGroupSync
from megalith.train.resume import CALLBACKS, PreparedRun
from megalith.train.rollback import roll_back
from megalith.train.run_folder import (
    RunFolder,
    describe_resize,
    list_changed_settings,
    record_skipped_samples,
    remove_new_folder_on_error,
)
from megalith.train.starts import StartLog
from megalith.train.state import TrainState
from megalith.train.step import (
    StepRequest,
    count_shared_requests,
    create_zero_sums,
    read_shared_requests,
    reduce_requests,
    replay_update,
    resolve_requests,
    train_step,
)
from megalith.train.synchronizer import SINGLE_JOB, StepSynchronizer
from megalith.train.trainer import checkpoint_entries


def run_training(
    run: TrainRun,
    folder: RunFolder,
    mesh: Mesh,
    device: torch.device,
    *,
    show: bool = True,
    callbacks: Sequence[Callback] = (),
    job_limits: JobLimits | None = None,
    heartbeat: RankHeartbeat | None = None,
    starts: StartLog | None = None,
    coordinator: Coordinator | None = None,
) -> Outcome:
    """Train until the last step, a signal or the time limit, starting from the folder's newest
    checkpoint.

    Collective over the whole mesh; the caller has checked the rules. `callbacks` are called after
    the built-in ones and those of the settings. `job_limits`: of the batch system or launcher.
    `heartbeat`: of this rank, if another process checks it. `starts`:
    records this start and its exit; by default in the folder, without an older checkpoint after
    failed starts.

    Raises:
        ConfigError: the folder holds a run with other fixed settings, or the settings of a callback
            are not valid.
        CheckpointError: the folder is in use, its checkpoint is of another model, or saving failed
            too often in a row.
        DataError: the data is missing, damaged, or not what the run was started with; or the run
            has diverged.
        CallbackError: an essential callback failed on any rank.
    """
    callbacks = [*load_installed_callbacks(run.train.callbacks), *callbacks]
    run = configure_callbacks(run, callbacks)
    first = mesh.world.rank == 0
    heartbeat = heartbeat or RankHeartbeat()
    folder = replace(folder, checkpoint_folder=run.checkpoint.parse_folder())
    starts = starts or StartLog(folder.path, rank=mesh.world.rank)
    with (
        start_heartbeat(heartbeat, run, folder, mesh),
        remove_new_folder_on_error(folder) if first else nullcontext(),
        lock_run(folder.path) if first else nullcontext() as lock,
        starts.record_failure(),
        _open_log(folder, run, mesh.world.rank),
        record_memory_history(folder.path, device, mesh.world.rank)
        if run.observe.memory_history
        else nullcontext(),
        StepProgress(total=run.train.steps, show=show and first) as progress,
    ):
        if first:
            for line in list_changed_settings(folder, run):
                progress.print_line(f"changed since the run was started: {line}")
            for line in describe_uneven_batches(run, mesh.dp.size):
                progress.print_line(line)
        shared = run.replica_group is not None
        _open_checkpoints(folder.checkpoints, mesh, lock, shared=shared)
        try:
            prepared = PreparedRun(
                run, folder, mesh, device, progress.print_line, starts, heartbeat
            )
        except Exception as error:
            if is_out_of_memory(error):
                at = "while its weights and optimizer state were allocated or loaded"
                raise out_of_memory_error(run, mesh, device, error, at=at) from error
            raise
        if first and folder.config.exists():
            sizes = {"world_before": prepared.saved_world, "world": mesh.world.size}
            for line in describe_resize(load_run(folder.config), run, **sizes):
                progress.print_line(line)
        stop_requests = StopRequests(job_limits, starts.job_started)
        groups = None
        if run.replica_group is not None:
            if first and coordinator is None:
                is_finished = FinishedRunCheck(folder.checkpoints, run.train.steps)
                coordinator = connect_coordinator(run.replica_group, is_finished)
            groups = ReplicaGroups(run, mesh, coordinator, progress.print_line, heartbeat=heartbeat)
        try:
            loop = TrainLoop(prepared, progress, lock, callbacks, stop_requests, groups)
            outcome = loop.run()
        except BaseException:
            if groups is not None:
                groups.close()
            raise
        if groups is not None:
            groups.leave()
        if first:
            starts.write_exit(
                outcome.reason or outcome.kind, _EXIT_CODES[outcome.kind], step=outcome.step
            )
        return outcome


_EXIT_CODES = {"done": 0, "stopped": 75, "suspect": 76}
"""Exit code of each kind of outcome."""


def _open_checkpoints(
    folder: StoragePath, mesh: Mesh, lock: RunLock | None, *, shared: bool
) -> None:
    """Check that each rank can use an object store, acquire its lease, and remove what a killed run
    has left; not the last two if other groups may be writing (`shared`). Collective. `lock`: of the
    run folder, on rank 0.

    Raises:
        CheckpointError: on every rank: the store cannot be used, or another run writes to it.
    """
    if isinstance(folder, Path):
        if mesh.world.rank == 0 and not shared:
            remove_leftovers(folder)
        return

    def prepare() -> None:
        storage.check_writable(folder, "checkpoint.folder")
        if lock is not None and not shared:
            lock.add_lease(acquire_lease(folder, lock.path.parent))
        if mesh.world.rank == 0 and not shared:
            remove_leftovers(folder)

    raise_on_all_ranks(prepare, mesh.world)


def _open_log(folder: RunFolder, run: TrainRun, rank: int) -> AbstractContextManager[None]:
    """Return a context in which the log messages of a rank are written to its file, if it has
    one."""
    if rank == 0:
        return log_to(folder.log, run.observe)
    if not run.observe.log_ranks:
        return nullcontext()
    return log_to(folder.rank_log(rank), run.observe)


@dataclass(frozen=True, slots=True)
class StepRates:
    """Learning rates and weight decays of a step."""

    lr: float
    weight_decay: float
    groups: Mapping[str, GroupRates]


def compute_step_rates(
    run: TrainRun, state: TrainState, lengths: ScheduleLengths, *, batch_size: int
) -> StepRates:
    """Return the rates of the next step, of this batch size."""
    factor = batch_size_factor(run.schedule, size=batch_size, full_size=run.train.global_batch_size)
    position = state.scheduled_samples
    return StepRates(
        learning_rate(run.schedule, position, lengths) * factor,
        weight_decay(run.schedule, position, lengths),
        group_rates(run.optim.groups, run.schedule, position, lengths, factor=factor),
    )


@dataclass(slots=True)
class RunState:
    """State of a run between two steps, which other replica groups may load."""

    prepared: PreparedRun
    callbacks: CallbackList
    batch_schedule: BatchSizeSchedule
    is_started: bool = False
    """Whether the callbacks have received their states."""

    @property
    def step(self) -> int:
        """Number of finished steps."""
        return self.prepared.state.step

    @property
    def batch_size(self) -> int:
        """Global batch size of the next step."""
        return self.batch_schedule.get_batch_size(self.prepared.state.read_samples)

    @property
    def num_counts(self) -> int:
        """Number of label counts of a global batch."""
        return self.prepared.count_label_counts()

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """Fingerprints of the data and the tokenizer."""
        state = self.prepared.state_json()
        return {name: state[name] for name in ("data", "tokenizer")}

    def entries(self) -> list[CheckpointEntry]:
        """Return the tensors of this rank that a checkpoint holds."""
        self.prepared.trainer.data.wait_params()
        self.prepared.trainer.write_guard.wait()
        return checkpoint_entries(self.prepared.trainer)

    def export(self) -> dict[str, Any]:  # Any: JSON
        """Return what a checkpoint holds besides tensors."""
        states = self.callbacks.state_dict() if self.is_started else self.prepared.callback_states
        return self.prepared.state_json() | {CALLBACKS: dict(states)}

    def adopt(self, state: Mapping[str, Any]) -> None:  # Any: JSON
        """Continue from the state of another group; see `PreparedRun.adopt_state`."""
        self.prepared.adopt_state(state)

    def list_routing_sums(self) -> list[Tensor]:
        """Return the routing statistics of the last step."""
        trainer = self.prepared.trainer
        return list_routing_sums(trainer.pipeline_model.modules, trainer.device)

    def create_zero_sums(self) -> tuple[list[Tensor], Tensor, Tensor | None]:
        """Return gradients and routing statistics, losses and largest logit of a step without
        samples."""
        return create_zero_sums(self.prepared.trainer)

    def replay(self, gradients: Sequence[Tensor], *, scale: float, updated: bool) -> None:
        """Repeat the update of a step that other groups have computed. Collective."""
        run, state = self.prepared.run, self.prepared.state
        if state.step + 1 in run.train.skip_steps:
            state.skip_step(samples=self.batch_size, tokens=0)
            return
        lengths = schedule_lengths(
            run.schedule, batch_schedule=self.batch_schedule, total_steps=run.train.steps
        )
        rates = compute_step_rates(run, state, lengths, batch_size=self.batch_size)
        if updated:
            replay_update(
                self.prepared.trainer,
                gradients,
                scale=scale,
                lr=rates.lr,
                weight_decay=rates.weight_decay,
                groups=rates.groups,
            )
        state.count_step(samples=self.batch_size, tokens=0, updated=updated)


class TrainLoop:
    """Runs steps, and evaluates, saves and stops as callbacks of any rank request."""

    def __init__(
        self,
        prepared: PreparedRun,
        progress: StepProgress,
        lock: RunLock | None,
        callbacks: Sequence[Callback],
        stop_requests: StopRequests,
        groups: ReplicaGroups | None = None,
    ) -> None:
        """`groups`: the other jobs that this one trains with; None: it trains alone."""
        self.prepared, self.progress = prepared, progress
        run = prepared.run
        self.batch_schedule = build_batch_schedule(run.train)
        self.lengths = schedule_lengths(
            run.schedule, batch_schedule=self.batch_schedule, total_steps=run.train.steps
        )
        self.events = EventsWriter()
        self.fault_detector = FaultDetector()
        self.stop_requests = stop_requests
        self.evaluator = Evaluator(lambda: stop_requests.reason is not None)
        self.replica_check = ReplicaCheck()
        self.health_check = HealthCheck()
        self.checkpointer = Checkpointer(self.fault_detector, self.replica_check, lock)
        self.local_checkpointer = LocalCheckpointer(self.fault_detector, self.checkpointer)
        self.profiler = Profiler()
        lock_id = None if lock is None else lock.holder.id
        self.run_requests = RunRequests(lock_id, self.evaluator, self.profiler)
        uses_trackers = run.observe.wandb is not None or run.observe.mlflow is not None
        self.callbacks = CallbackList(
            [
                self.events,  # first, so that its times contain no other callback
                self.run_requests,  # its on_end runs last, when profiles are written
                HeartbeatWriter(),
                self.replica_check,
                self.health_check,
                RunFiles(),
                Throughput(),
                *build_profiling_callbacks(run, prepared.mesh.world.size, self.profiler),
                RoutingTraceWriter(),
                ExpertLoadMetrics(),
                BatchMetrics(),
                self.fault_detector,
                *([] if run.observe.straggler_check_every is None else [StragglerDetector()]),
                self.stop_requests,
                self.evaluator,
                self.checkpointer,
                self.local_checkpointer,
                Plots(),
                MetricsWriter(),
                *([ExperimentTrackers()] if uses_trackers else []),
                ProgressReporter(progress),
                *([FaultInjector(run.fault_injector)] if run.fault_injector else []),
                *callbacks,
            ]
        )
        self.callbacks.save_counts = self.checkpointer.count_saves
        self._skipped_steps = frozenset(run.train.skip_steps)
        self.timers = prepared.trainer.timers
        self._phase = "before the first step"  # for the error of a lack of memory
        self.heartbeat = prepared.heartbeat
        self.view = RunView(
            prepared,
            progress.print_line,
            self.callbacks.request,
            self.events.record,
            self.heartbeat.record,
        )
        self._group_state = RunState(prepared, self.callbacks, self.batch_schedule)
        self.synchronizer: StepSynchronizer = SINGLE_JOB
        if groups is not None and groups.is_diloco:
            self.synchronizer = DilocoSync(prepared.trainer, groups, self._group_state)
        elif groups is not None:
            self.synchronizer = ReplicaGroupSync(groups, self._group_state)
        self._loader: Loader
        """Loader of the remaining steps; set when they begin."""

    def run(self) -> Outcome:
        """Run steps until the last step or a request to stop."""
        prepared, step = self.prepared, self.prepared.state.step
        if step < prepared.run.train.steps:
            try:
                self.synchronizer.enter()
            except FinishedRunError:
                return self._describe_finished_run()
            step = prepared.state.step
        if step >= prepared.run.train.steps:
            write_run_files(prepared)
            self.progress.print_line(
                f"{prepared.folder.path} is already at step {step} of {prepared.run.train.steps}"
            )
            return Outcome("done", step)
        try:
            self.callbacks.on_start(self.view)
            self._group_state.is_started = True
            outcome = self._run_steps()
        except FinishedRunError:
            outcome = self._describe_finished_run()
        except BaseException as error:
            if isinstance(error, DivergenceError | RollbackLimitError):
                self._save_diverged()
            self.callbacks.on_error(error)
            if is_out_of_memory(error):
                raise out_of_memory_error(
                    prepared.run, prepared.mesh, self.view.device, error, at=self._phase
                ) from error
            raise
        self.heartbeat.record(
            "exit"
        )  # callbacks may upload results, which takes longer than a step
        self.callbacks.notify("on_end", outcome)
        self.callbacks.raise_failures(prepared.mesh)
        return outcome

    def _describe_finished_run(self) -> Outcome:
        """Return the outcome of a run that other replica groups have finished."""
        steps = self.prepared.run.train.steps
        self.progress.print_line(
            f"the other replica groups have finished the run: step {steps} is saved in "
            f"{self.prepared.folder.checkpoints}"
        )
        return Outcome("done", steps)

    def _run_steps(self) -> Outcome:
        """Run the remaining steps, save the last one, and return how the run ended."""
        state, num_steps = self.prepared.state, self.prepared.run.train.steps
        outcome = Outcome("done", num_steps)
        self._build_loader()
        finished: FinishedStep | None = None
        if self.health_check.suspect is not None:
            saved = self.prepared.is_resumed
            return Outcome("suspect", state.step, self.health_check.suspect, saved=saved)
        while state.step < num_steps:
            self._phase = f"in step {state.step + 1}"
            if state.step + 1 in self._skipped_steps - state.skipped_steps.keys():
                requests = self._skip_step()
                if requests is None:
                    continue
                self._synchronize()
                self.callbacks.notify("after_skipped_step", state.step, requests)
            else:
                finished = self._run_step()
                requests = finished.result.requests
                self._notify_save(self.checkpointer.advance(finished.result.save_counts))
                if (suspect := self._find_suspect()) is not None:
                    return self._exit_for_other_machines(suspect)
                if StepRequest.STOP_NOW in requests:
                    self._drain_save()
                    saved = self.checkpointer.saved_step == state.step
                    return Outcome("stopped", state.step, self._stop_reason(), saved=saved)
                if StepRequest.ROLLBACK in requests:
                    self._roll_back()
                    continue
                self._synchronize()
                self._phase = f"in callbacks after step {state.step}"
                metrics = self.callbacks.after_step(finished)
                if self.view.is_logged(finished.step):
                    self._log(metrics)
            if self._execute(requests):
                outcome = Outcome("stopped", state.step, self._stop_reason())
                break
            if self.synchronizer.changes_epoch and state.step < num_steps:
                self._enter_epoch()
        # no step follows that would execute the request of a health check
        if (suspect := self._find_suspect()) is not None:
            return self._exit_for_other_machines(suspect)
        # Wait before the process may exit: other ranks still all-gather this rank's shards.
        self.prepared.trainer.data.wait_params()
        self._drain_save()
        if outcome.kind == "done" and finished is not None:
            self.fault_detector.check_last_step(finished.result)
        return self._save_at_end(outcome)

    def _save_at_end(self, outcome: Outcome) -> Outcome:
        """Save the last step, and return the outcome with the result of the save."""
        if outcome.kind == "stopped" and self._save_in_local_tier():
            return replace(outcome, tier="local")
        self._save(final=True)
        if self.checkpointer.saved_step == self.prepared.state.step:
            return outcome
        why = "the loss or gradient norm is NaN or infinite"
        if self.replica_check.differs:
            why = "replicas differ"
        return replace(outcome, saved=False, reason=f"{outcome.reason}; {why}")

    def _combine_requests(self) -> StepRequest:
        """Return what is executed after the next step, which is skipped. Collective."""
        prepared = self.prepared
        requests = self.callbacks.before_skipped_step(prepared.state.step + 1)
        return reduce_requests(requests, prepared.mesh, prepared.trainer.device)

    def _execute(self, requests: StepRequest) -> bool:
        """Execute the requests of all ranks, and what is due, after a step; return whether the run
        stops."""
        if StepRequest.PROFILE in requests:
            self.profiler.open_window()
        is_complete = self._evaluate(is_requested=StepRequest.EVALUATE in requests)
        if (
            StepRequest.STOP in requests or not is_complete
        ) and self.prepared.state.step < self.prepared.run.train.steps:
            return True
        if StepRequest.SAVE in requests:
            self._save()
        self._save_local()
        return False

    def _find_suspect(self) -> str | None:
        """Return the reason for which the run must continue on other machines; None: there is
        none."""
        return self.fault_detector.suspect or self.health_check.suspect

    def _exit_for_other_machines(self, reason: str) -> Outcome:
        """Save the state after the last step that is not discarded, if it is valid, and return that
        the run must continue on other machines."""
        step = self.prepared.state.step
        self.prepared.trainer.data.wait_params()
        self._drain_save()
        is_valid = self.fault_detector.is_state_valid()
        if is_valid:
            self._save(final=True)
        else:
            reason += "; its weights or optimizer state are wrong"
        saved = is_valid and self.checkpointer.saved_step == step
        return Outcome("suspect", step, reason, saved=saved)

    def _run_step(self) -> FinishedStep:
        """Run the next step and update the counters."""
        run, state = self.prepared.run, self.prepared.state
        started = time.perf_counter()
        while True:
            # A group that has fallen behind continues at another step.
            num_samples = self.batch_schedule.get_batch_size(state.read_samples)
            rates = compute_step_rates(run, state, self.lengths, batch_size=num_samples)
            with self.timers.section("data"):
                read_batches = self.synchronizer.read_batches(self._loader)
            batches = self.callbacks.before_step(state.step + 1, read_batches)
            result = train_step(
                self.prepared.trainer,
                batches,
                lr=rates.lr,
                weight_decay=rates.weight_decay,
                hooks=self.callbacks,
                groups=rates.groups,
                synchronizer=self.synchronizer,
                step=state.step + 1,
            )
            if result.is_committed:
                break
            self.callbacks.restore_requests()
            self._enter_epoch()
        seconds = time.perf_counter() - started
        if not result.is_discarded:
            state.count_step(samples=num_samples, tokens=batches.num_tokens, updated=result.updated)
        return FinishedStep(
            state.step, batches, rates.lr, rates.groups, result, seconds, num_samples
        )

    def _build_loader(self) -> None:
        """Build the loader of the remaining steps."""
        self._loader = self.synchronizer.build_loader(self.prepared.build_loader)

    def _synchronize(self) -> None:
        """Synchronize what is due after a step with other replica groups. If this group has missed
        rounds of DiLoCo, it continues from the state of another one."""
        step, self._phase = self.prepared.state.step, "while the replica groups synchronized"
        if self.synchronizer.after_step():
            self._build_loader()
            if self.prepared.state.step != step:
                self.callbacks.after_rollback(self.prepared.state.step)

    def _enter_epoch(self) -> None:
        """Begin the next epoch of the replica groups, with its loader. If this group has missed
        steps, it continues from the state of another one."""
        step, self._phase = self.prepared.state.step, "while the replica groups connected"
        self.synchronizer.enter()
        self._build_loader()
        if self.prepared.state.step != step:
            self.callbacks.after_rollback(self.prepared.state.step)
        self._phase = f"in step {self.prepared.state.step + 1}"

    def _skip_step(self) -> StepRequest | None:
        """Read the next step's samples without training on them (train.skip_steps), build the
        loader of the samples that follow, and return what is executed after the step; None: the
        other replica groups have discarded it."""
        state = self.prepared.state
        requests = self._combine_requests()
        batches = self.synchronizer.read_batches(self._loader)
        before = state.as_json()
        samples = state.skip_step(
            samples=self.batch_schedule.get_batch_size(state.read_samples),
            tokens=batches.num_tokens,
        )
        self._build_loader()
        shared = self.synchronizer.skip_step(count_shared_requests(requests))
        if shared is None:
            state.restore(before)
            self.callbacks.restore_requests()
            self._enter_epoch()
            return None
        if self.prepared.is_writer:
            record_skipped_samples(
                self.prepared.folder,
                samples,
                step=state.step,
                cause="train.skip_steps",
                reason="train.skip_steps names the step",
            )
        self.progress.print_line(
            f"step {state.step}: skipped, because train.skip_steps names it; the data continues at "
            f"sample {state.consumed_samples}"
        )
        return resolve_requests(requests | read_shared_requests(shared))

    def _roll_back(self) -> None:
        """Restore the checkpoint that a callback's plan requests, by default the newest one, and
        build the loader of the samples that follow.

        The checkpoint is saved again with the new position in the data, so that a restart does not
        read the skipped samples either.
        """
        self._phase = "while an earlier checkpoint was restored"
        self._drain_save()
        with self.heartbeat.within("load"):
            roll_back(self.prepared, self.callbacks.combine_rollback_plans())
        self.callbacks.after_rollback(self.prepared.state.step)
        self._save(overlap=False)
        self._build_loader()

    def _log(self, metrics: StepMetrics) -> None:
        if self.prepared.is_writer:
            self.callbacks.notify("on_log", metrics)

    def _evaluate(self, *, is_requested: bool) -> bool:
        """Evaluate the model if an evaluation is due or requested, and log and report the results;
        return False if the evaluation has ended early, because the run must stop."""
        step = self.prepared.state.step
        names = self.evaluator.list_suites(step, is_requested=is_requested)
        if not names:
            if is_requested:
                self.progress.print_line(
                    f"step {step}: a callback requested an evaluation, and this run has no samples "
                    "for it. Set train.eval_steps to at least 1 and provide validation data."
                )
            return True
        self._phase = f"during evaluation after step {step}"
        self.callbacks.notify("before_evaluate", step)
        with self.heartbeat.within("evaluate"), self.timers.section("evaluate"):
            try:
                results = self.evaluator.evaluate(names)
            except EvaluationStoppedError:
                self.progress.print_line(
                    f"step {step}: the evaluation of {', '.join(names)} has ended without results, "
                    "because the run stops"
                )
                return False
        metrics: StepMetrics = {"step": step, **self.callbacks.section_times("evaluate")}
        for name, result in results.items():
            metrics |= result.metrics(name)
        self.callbacks.notify("after_evaluate", results, metrics)
        self._log(metrics)
        return True

    def _save(self, *, final: bool = False, overlap: bool = True) -> None:
        """Save the current step, unless it is saved or divergent, and report the result.

        `overlap`: training continues while the files are written, if saves are asynchronous.
        """
        if not self.synchronizer.is_writer:
            self.checkpointer.leave_to_other_group()
            return
        self._phase = f"while step {self.prepared.state.step} was saved"
        with (
            self.heartbeat.within("save"),
            self.timers.section("save"),
            self.events.section("drain", step=self.view.step),
        ):
            drained = self.checkpointer.drain_before_save()
        self._notify_save(drained)
        with (
            self.heartbeat.within("save"),
            self.timers.section("save"),
            self.events.section("save", step=self.view.step),
        ):
            result = self.checkpointer.save(self.callbacks.state_dict, final=final, overlap=overlap)
        self._notify_save(result)

    def _save_diverged(self) -> None:
        """Save the state of a run that has diverged, for its analysis. Collective."""
        try:
            self._drain_save()
            with self.heartbeat.within("save"):
                path = self.checkpointer.save_diverged(self.callbacks.state_dict)
        except UserError as error:  # the error of the run must be the one that is raised
            self.progress.print_line(f"the diverged state cannot be saved: {error}")
            return
        if path is not None:
            self.progress.print_line(
                f"the run has diverged; its state is saved in {path} with healthy=false, from "
                "which only checkpoint.load continues"
            )

    def _save_local(self) -> None:
        """Save a local checkpoint of the current step, if one is due."""
        if not self.local_checkpointer.is_due():
            return
        self._phase = f"while step {self.prepared.state.step} was saved locally"
        with (
            self.heartbeat.within("save"),
            self.timers.section("save"),
            self.events.section("save_local", step=self.view.step),
        ):
            self.local_checkpointer.save(self.callbacks.state_dict)

    def _save_in_local_tier(self) -> bool:
        """Save the last step of a run that is stopped in the local tier, if a persistent save would
        take longer than the processes have left on any rank; return whether it is saved there.
        Collective."""
        step, tier = self.prepared.state.step, self.prepared.local_tier
        writes = self.synchronizer.is_writer
        if tier is None or not writes or self.checkpointer.saved_step == step:
            return False
        problems = gather_objects(
            self.stop_requests.describe_lack_of_time(), self.prepared.mesh.world
        )
        problem = next((each for each in problems if each), "")
        if not problem:
            return False
        self._phase = f"while step {step} was saved locally"
        with (
            self.heartbeat.within("save"),
            self.timers.section("save"),
            self.events.section("save_local", step=self.view.step),
        ):
            is_saved = self.local_checkpointer.save_now(self.callbacks.state_dict)
        if is_saved:
            self.progress.print_line(
                f"step {step} is saved in the local tier ({tier.root}) and not in "
                f"{self.prepared.folder.checkpoints}: {problem}. The next start needs the same "
                "machines; on others it continues from the newest persistent checkpoint"
            )
        return is_saved

    def _drain_save(self) -> None:
        """Wait for the asynchronous save in flight and report its result. Collective."""
        self._phase = "while the save in flight was completed"
        with (
            self.heartbeat.within("save"),
            self.timers.section("save"),
            self.events.section("drain", step=self.view.step),
        ):
            result = self.checkpointer.drain()
        self._notify_save(result)

    def _notify_save(self, result: SaveReport | CheckpointError | None) -> None:
        """Report the result of a save that has ended."""
        if isinstance(result, SaveReport):
            self.callbacks.notify("after_save", result)
        elif result is not None:
            self.callbacks.notify("after_save_failed", result)

    def _stop_reason(self) -> str:
        own = self.stop_requests.reason or self.run_requests.stop_reason
        return own or self.callbacks.stop_reason or "another rank stopped"

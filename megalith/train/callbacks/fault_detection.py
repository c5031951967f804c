"""Numeric fault detection: NaN or infinite values and spikes of a step, their cause by reruns of
the step, the actions, and the machines that are suspect (`suspects.jsonl`)."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megalith import storage
from megalith.checkpoint.manifest import list_complete_checkpoints
from megalith.config.fault_detection import FaultAction
from megalith.data.loader import StepBatches
from megalith.errors import DataError, DivergenceError
from megalith.observe.limits import read_host_name
from megalith.optim.clip import first_replica_gradients
from megalith.optim.loss_scale import LossScale
from megalith.optim.schedule import schedule_lengths
from megalith.parallel.grad_sync import ShardedParam
from megalith.parallel.group import gather_objects, raise_on_all_ranks
from megalith.plan.batch_schedule import build_batch_schedule
from megalith.plan.fault_policy import (
    MOMENT_FACTOR,
    Action,
    Diagnosis,
    FailedCheck,
    Spike,
    StepHistory,
    SuspectExit,
    bound_moment_ratio,
    choose_action,
    choose_first_action,
    diagnose_runs,
    find_spikes,
)
from megalith.plan.rollback import RollbackPlan
from megalith.storage import StoragePath
from megalith.train.callbacks.base import Callback, FinishedStep, RunView, StepMetrics
from megalith.train.start_records import append_record, read_records
from megalith.train.starts import SUSPECTS
from megalith.train.step import (
    MAX_RERUNS,
    StepRequest,
    StepResult,
    StepStats,
    Trainer,
    describe_nonfinite_gradients,
    find_sample_shift,
)

RERUN_STATS_FILE = "rerun_stats.jsonl"
"""File of the run folder with the differences of gradients in reruns
(fault_detector.report_stats)."""

MAX_SKIPPED_IN_A_ROW = 20
"""Skipped steps in a row after which the run ends (heuristic: real loss spikes last a few
steps)."""

RERUN_TOLERANCE = 1e-3
"""Relative difference of the norms of two reruns up to which they count as equal, on devices that
add in another order each time (heuristic: fp32 sums differ by less than 1e-5, and faults that
change the statistics of a step by more)."""

# --- records of suspect machines


def read_suspect_exits(folder: Path) -> tuple[SuspectExit, ...]:
    """Return the exits of a run because of suspect machines, from its `suspects.jsonl`."""
    hosts: dict[tuple[int, float], set[str]] = {}
    for record in read_records(folder / SUSPECTS)[0]:
        if record.get("exits"):
            hosts.setdefault((record["step"], record["time"]), set()).add(record["host"])
    return tuple(SuspectExit(step, frozenset(each)) for (step, _), each in hosts.items())


def record_suspects(
    run: RunView,
    *,
    index: int,
    machine: tuple[str, str],
    fields: Mapping[str, Any],  # Any: JSON
    reason: str,
    exits: bool,
) -> None:
    """Append the machine of one rank to `suspects.jsonl`; on rank 0.

    index: of the rank among all ranks; machine: host and device; fields: time, step and kind of the
    fault; exits: whether the run ends because of it.
    """
    rank, (host, device), grid = run.mesh.world.ranks[index], machine, run.mesh.grid
    coordinates = grid.coordinates(rank)
    axes = [axis for axis in ("tp", "cp", "dp", "pp") if axis in coordinates]
    record = {
        **fields,
        "rank": rank,
        "host": host,
        "device": device,
        "coordinates": {axis: coordinates[axis] for axis in axes},
        "reason": reason,
        "exits": exits,
    }
    append_record(run.folder.path / SUSPECTS, record)


def find_suspect_start(run: RunView) -> int | None:
    """Return the step at which a run has resumed from a local checkpoint, if a persistent one could
    be loaded instead; else None. Collective."""
    if not run.prepared.is_resumed_locally:
        return None
    folder, step = run.folder.checkpoints, run.step

    def has_persistent() -> bool:
        return any(each <= step for each in list_complete_checkpoints(folder))

    exists = raise_on_all_ranks(lambda: run.is_writer and has_persistent(), run.mesh.world)[0]
    return step if exists else None


def describe_machine(device: torch.device) -> tuple[str, str]:
    """Return the host and the device of this rank."""
    if device.type == "cpu":
        return read_host_name(), device.type
    name = torch.cuda.get_device_name(device)
    return read_host_name(), f"{device.type}:{device.index or 0} {name}"


def is_deterministic(device: torch.device) -> bool:
    """Return whether a repeated step has the same bits on a device."""
    return device.type == "cpu" or torch.are_deterministic_algorithms_enabled()


# --- the callback


class FaultDetector(Callback):
    """Detects NaN or infinite values and spikes before the update of a step, finds their cause by
    reruns, and requests the action of `fault_detector`; ends a run that has diverged."""

    collective = True

    def __init__(self) -> None:
        self.diverged = False
        """Whether the last step that had labels was divergent."""
        self.suspect: str | None = None
        """Reason for which the run must continue on other machines; None: there is none."""
        self._history = StepHistory()
        self._history_settings: Sequence[object] = ()
        """Batch size and optimizer of the steps in the history."""
        self._step = 0
        self._spikes: tuple[Spike, ...] = ()
        self._failed_check: FailedCheck | None = None
        """Check that the first run of the step failed; None: it passed."""
        self._first_fault = ""
        """Description of the failed check."""
        self._passes: list[bool] = []
        """Whether each run of the step passes the checks."""
        self._is_diagnosing = False
        """Whether this callback has requested a rerun of the step."""
        self._local_start: int | None = None
        """Step of the local checkpoint that the run has resumed from, and that may be damaged."""
        self._decided: StepRequest | None = None
        """Action after the last rerun, whose result is used."""
        self._skip_reason: str | None = None
        self._planned: RollbackPlan | None = None
        """Rollback that is requested after the step, and executed in the next one."""
        self._corrupt: dict[int, Any] = {}  # Any: gathered lists of names
        """Parameters with corrupt optimizer state, by rank."""
        self._gradients: list[torch.Tensor] = []
        """Copies of the gradients of the step's run before the rerun (report_stats)."""

    def on_start(self, run: RunView) -> None:
        """Receive the run and the machines of all ranks. Collective."""
        self._run, self._config = run, run.config.fault_detector
        train = run.config.train
        self._schedule = build_batch_schedule(train)
        self._lengths = schedule_lengths(
            run.config.schedule, batch_schedule=self._schedule, total_steps=train.steps
        )
        world = run.mesh.world
        index = {rank: number for number, rank in enumerate(world.ranks)}
        self._shift = find_sample_shift(run.mesh)
        self._dp_groups = [
            cycle
            for group in run.mesh.grid.groups(("dp",))
            for cycle in self._shift.list_cycles([index[rank] for rank in group])
        ]
        trainer = run.prepared.trainer
        self._num_elements = _count_elements(trainer) if run.config.optim.count_zeros else 0
        self._local_start = find_suspect_start(run)
        exits = read_suspect_exits(run.folder.path) if run.is_writer else ()
        gathered: list[Any] = gather_objects((*describe_machine(run.device), exits), world)
        self._machines = [(host, device) for host, device, _ in gathered]
        self._exits: list[SuspectExit] = list(gathered[0][2])

    def state_dict(self) -> dict[str, Any]:  # Any: JSON
        """Return the statistics of the last steps."""
        if not self._history.values and not self._history.spike_steps:
            return {}
        return {
            "values": {name: list(values) for name, values in self._history.values.items()},
            "spike_steps": list(self._history.spike_steps),
            "num_in_a_row": self._history.num_in_a_row,
            "settings": [*self._history_settings],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: JSON
        """Restore the statistics of the last steps."""
        self._history = StepHistory(
            {name: tuple(values) for name, values in state["values"].items()},
            tuple(state["spike_steps"]),
            state["num_in_a_row"],
        )
        self._history_settings = state["settings"]

    def after_rollback(self, step: int) -> None:
        """Remove the discarded steps from the history; the state is that of a persistent checkpoint
        now."""
        self.diverged, self.rollback_plan, self._local_start = False, None, None
        self._planned = None

    def before_step(self, step: int, batches: StepBatches) -> None:
        """Prepare the checks of a step."""
        self._step, self._failed_check, self._spikes = step, None, ()
        self._decided = self._skip_reason = None
        self.rollback_plan, self._planned = self._planned, None
        self._passes = []
        optim, consumed = self._run.config.optim, self._run.prepared.state.read_samples
        settings = [self._schedule.get_batch_size(consumed), optim.kind, optim.plugin]
        if settings != [*self._history_settings]:
            self._history, self._history_settings = self._history.without_values(), settings

    def after_backward(self, local_params: Sequence[ShardedParam]) -> None:
        """Write the differences to the run before (report_stats)."""
        if not self._config.report_stats:
            return
        if self._passes:  # of an earlier run of this step
            self._write_differences(local_params)
        self._gradients = [param.gradient.detach().clone() for param in local_params]

    def before_update(self, stats: StepStats) -> StepRequest:
        """Check the statistics of a run of the step; request another run, or the action.

        Raises:
            DataError: fault_detector.nonfinite, spike or model_fault is `stop`, or a suspect
                machine has not been replaced.
        """
        if self._decided is not None:
            return self._decided
        if self.rollback_plan is not None:
            return StepRequest.NONE  # the rollback is requested already, and discards this step
        kind = self._check(stats)
        is_first = not self._passes
        self._passes.append(kind is None)
        if is_first:
            self._failed_check = kind
            return self._start(kind, stats)
        if len(stats.runs) != len(self._passes) or not self._is_diagnosing:
            return StepRequest.NONE
        diagnosis = diagnose_runs(
            stats.runs,
            self._passes,
            self._dp_groups,
            max_reruns=MAX_RERUNS,
            tolerance=None if is_deterministic(self._run.device) else RERUN_TOLERANCE,
            shift_tolerance=None if self._shift.is_exact else RERUN_TOLERANCE,
        )
        if diagnosis.cause is None:
            return StepRequest.RERUN_SHIFTED if diagnosis.shift else StepRequest.RERUN
        self._is_diagnosing = False
        if diagnosis.cause in ("model", "undecided"):
            diagnosis = self._check_state() or diagnosis
        action = choose_action(
            diagnosis,
            self._config,
            failed_check=self._failed_check,
            step=self._step,
            hosts=[host for host, _ in self._machines],
            exits=self._exits,
        )
        if diagnosis.cause == "none":
            return StepRequest.NONE
        self._record(diagnosis, action)
        return self._execute(action, stats, self._explain(diagnosis, stats))

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> StepRequest:
        """Accept the statistics of the step, check the size of its update, and report a step
        without an update.

        Raises:
            DataError: too many steps in a row were skipped, or the update is a spike and
                fault_detector.spike is `stop`.
        """
        result = finished.result
        request = self._check_update(result)
        if result.update_norm is not None:
            metrics["update_norm"] = result.update_norm
        if result.updated and self._spikes:
            self._history = self._history.add_spike(finished.step)
        elif result.updated:
            statistics = _collect_statistics(result, self._num_elements)
            self._history = self._history.accept(statistics, window=self._config.window)
        elif self._failed_check == "spike" and self._skip_reason is not None:
            self._history = self._history.add_spike(finished.step)
        if self._history.spike_steps:
            metrics["spike_rate"] = self._history.spike_rate(finished.step)
        self._report_skipped(finished)
        return request

    def _check_update(self, result: StepResult) -> StepRequest:
        """Return the request after a step whose update is a spike, and log it.

        Raises:
            DataError: fault_detector.spike is `stop`.
        """
        is_warmup = self._run.prepared.state.scheduled_samples < self._lengths.warmup
        if result.update_norm is None or is_warmup or self._spikes:
            return StepRequest.NONE
        statistics = {"update_norm": result.update_norm}
        if not math.isfinite(result.update_norm):
            return StepRequest.NONE  # NaN parameters end the run before they are saved
        self._spikes = find_spikes(self._history, statistics, sigmas=self._config.sigmas)
        if not self._spikes:
            return StepRequest.NONE
        reason, action = f"spike of {self._spikes[0]}", self._config.spike
        if action == "stop":
            raise self.divergence_error(f"step {self._step}: {reason}.")
        if action == "rollback" and self._step < self._run.config.train.steps:
            self._run.log(f"step {self._step}: {reason}")
            self._planned = RollbackPlan(self._step, self._step, reason)
            return StepRequest.ROLLBACK
        self._run.log(
            f"step {self._step}: {reason}; the update is applied (fault_detector.spike=rollback "
            "undoes it)"
        )
        return StepRequest.NONE

    # --- one step

    def _check(self, stats: StepStats) -> FailedCheck | None:
        """Return the check that a run of the step fails; None: it passes."""
        if stats.empty:
            return None
        if is_nonfinite(stats, self._run.prepared.trainer.loss_scale):
            return "nonfinite"
        if self._run.prepared.state.scheduled_samples < self._lengths.warmup:
            return None
        statistics = _collect_statistics(stats, self._num_elements)
        self._spikes = find_spikes(self._history, statistics, sigmas=self._config.sigmas)
        return "spike" if self._spikes else None

    def _start(self, kind: FailedCheck | None, stats: StepStats) -> StepRequest:
        """Return the request after the first run of the step."""
        every = self._config.rerun_every
        self._is_diagnosing = False
        self._first_fault = "" if kind is None else self._describe_fault(stats)
        if kind is None:
            self._is_diagnosing = every > 0 and self._step % every == 0 and not stats.empty
            return StepRequest.RERUN if self._is_diagnosing else StepRequest.NONE
        action: FaultAction = self._config.spike
        if kind == "nonfinite":
            if self._plan_reload():
                return StepRequest.ROLLBACK
            action = self._config.nonfinite or "rerun"
        if action == "rerun":
            self._is_diagnosing = True
            self._run.log(f"step {self._step}: {self._first_fault}; repeating the step")
            return StepRequest.RERUN
        return self._execute(choose_first_action(action), stats, self._first_fault)

    def _plan_reload(self) -> bool:
        """Plan to repeat the steps since a local checkpoint from a persistent one, if the local one
        may have been damaged; return whether this is possible. Only once per run."""
        start, num_steps = self._local_start, self._config.suspect_steps
        if start is None or self._step > start + num_steps:
            return False
        self._local_start = None
        reason = (
            f"{self._first_fault} within fault_detector.suspect_steps={num_steps} steps after the "
            f"local checkpoint of step {start}"
        )
        self._run.log(f"step {self._step}: {reason}; reloading a persistent checkpoint")
        self.rollback_plan = RollbackPlan(start + 1, self._step, reason, skips_samples=False)
        return True

    def _execute(self, action: Action, stats: StepStats, reason: str) -> StepRequest:
        """Return the request of an action, and log why; `reason`: the fault and its cause.

        Raises:
            DataError: the action is to end the run.
        """
        text = f"step {self._step}: {reason}"
        if action == "stop":
            raise self.divergence_error(f"{text}.")
        if action == "exit_again":
            raise DataError(
                f"{text}. The run has ended at this step before because of the same fault, on the "
                f"same machines or on two others ({SUSPECTS}). Exclude these hosts, or reduce "
                "schedule.lr and check the data of this step (fault_detector.nonfinite=skip "
                "continues without it)."
            )
        self._run.log(text)
        if action == "exit":
            self.suspect = reason
            return StepRequest.STOP_NOW
        if action == "rollback":
            self.rollback_plan = RollbackPlan(self._step, self._step, reason)
            return StepRequest.ROLLBACK
        is_shifted = bool(stats.runs) and stats.runs[-1].shift != 0
        raises = not stats.is_finite and self._run.config.optim.nonfinite_grad == "raise"
        uses_run = raises or (action == "update" and stats.is_finite)
        if uses_run and is_shifted and stats.num_reruns < MAX_RERUNS:
            # the update or the error is that of a run in which each rank has its own samples
            self._decided = StepRequest.NONE
            return StepRequest.RERUN
        if not stats.is_finite or (action == "update" and not is_shifted):
            return StepRequest.NONE  # without finite gradients there is no update
        self._skip_reason = self._first_fault
        return StepRequest.SKIP

    def _describe_fault(self, stats: StepStats) -> str:
        """Describe the check that the step fails."""
        if self._failed_check == "spike":
            return "spike of " + ", ".join(map(str, self._spikes))
        return f"loss {stats.loss}, gradient norm {stats.grad_norm}"

    def _explain(self, diagnosis: Diagnosis, stats: StepStats) -> str:
        """Return the fault and its cause."""
        ranks = "; ".join(self._describe_rank(rank, stats) for rank in diagnosis.ranks)
        causes = {
            "transient": f"a rerun gives other gradients, so {ranks} computed wrongly once",
            "persistent": f"the fault stays on {ranks} when it repeats the step or computes the "
            "samples of another rank, so its machine is at fault",
            "state": f"the memory of {ranks} has optimizer state that training cannot produce",
            "model": "a rerun has the same bits, and the fault moves with the samples to other "
            "ranks, so the model or its data is at fault",
            "undecided": f"a rerun has the same bits, and no other rank can compute the samples of "
            f"{ranks}",
        }
        assert diagnosis.cause is not None, "the classification is complete"
        return f"{self._first_fault or 'comparison of reruns'}: {causes[diagnosis.cause]}"

    def _describe_rank(self, rank: int, stats: StepStats) -> str:
        """Return rank, host and device, and the parameters with wrong gradients."""
        host, device = self._machines[rank]
        names = sorted({name for run in stats.runs for name in run.ranks[rank].nonfinite})
        where = f", not finite in {', '.join(names[:3])}" if names else ""
        if corrupt := self._corrupt.get(rank):
            where = f", in {', '.join(corrupt[:3])}"
        return f"rank {self._run.mesh.world.ranks[rank]} ({host}, {device}{where})"

    def _record(self, diagnosis: Diagnosis, action: Action) -> None:
        """Append the machines at fault to `suspects.jsonl`; rank 0 writes."""
        if diagnosis.cause not in ("transient", "persistent", "state", "undecided"):
            return
        if diagnosis.cause == "undecided" and action not in ("exit", "exit_again"):
            return  # the model is taken to be at fault
        if not self._run.is_writer:
            return
        fields = {"time": round(time.time(), 3), "step": self._step, "kind": diagnosis.cause}
        for index in diagnosis.ranks:
            record_suspects(
                self._run,
                index=index,
                machine=self._machines[index],
                fields=fields,
                reason=self._first_fault or "comparison of reruns",
                exits=action == "exit",
            )

    def _write_differences(self, local_params: Sequence[ShardedParam]) -> None:
        """Append the differences of all gradients between two runs to `rerun_stats.jsonl`, one line
        per parameter and rank. Collective; rank 0 writes."""
        rows = [
            (param.shard.name, *_compare_tensors(before, param.gradient))
            for before, param in zip(self._gradients, local_params, strict=True)
        ]
        world = self._run.mesh.world
        gathered: list[Any] = gather_objects(rows, world)  # Any: rows of each rank
        if not self._run.is_writer:
            return
        for rank, rank_rows in zip(world.ranks, gathered, strict=True):
            for name, numel, num_different, largest, relative in rank_rows:
                line = {
                    "step": self._step,
                    "run": len(self._passes),
                    "rank": rank,
                    "parameter": name,
                    "numel": numel,
                    "num_different": num_different,
                    "max_difference": largest,
                    "relative_norm": relative,
                }
                storage.append_line(
                    self._run.folder.path / RERUN_STATS_FILE, json.dumps(line).encode()
                )

    def _check_state(self) -> Diagnosis | None:
        """Return the ranks whose optimizer state training cannot produce, as a diagnosis; None if
        there are none. Collective."""
        names = find_corrupt_moments(self._run.prepared.trainer)
        gathered = gather_objects(names, self._run.mesh.world)
        self._corrupt = {rank: each for rank, each in enumerate(gathered) if each}
        return Diagnosis("state", tuple(self._corrupt)) if self._corrupt else None

    def is_state_valid(self) -> bool:
        """Return whether the state before the step can be saved although a machine is at fault: all
        copies of the weights are equal and finite, and the optimizer state is plausible.
        Collective."""
        if self._check_state() is not None:
            return False
        trainer = self._run.prepared.trainer
        is_valid = all(
            bool(torch.isfinite(slot.read_master()).all()) for slot in trainer.optimizer.slots
        )
        for checksum, group in trainer.data.checksums():
            is_valid &= len(set(gather_objects(checksum, group))) == 1
        return all(gather_objects(is_valid, self._run.mesh.world))

    # --- the end of a run that has diverged

    def _report_skipped(self, finished: FinishedStep) -> None:
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
            if self._skip_reason is not None:
                raise self.divergence_error(
                    f"{MAX_SKIPPED_IN_A_ROW} steps in a row were skipped, the last because of "
                    f"{self._skip_reason} (fault_detector)."
                )
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

    def divergence_error(self, problem: str, *, more: str = "") -> DivergenceError:
        """Return the error of a divergent run, with advice how to continue. Collective.

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
        return DivergenceError(
            f"{problem} Reduce schedule.lr, check the data and the settings of the model{more}. "
            f"{advice}"
        )

    def _describe(self) -> str:
        return describe_nonfinite_gradients(self._run.prepared.trainer)


def is_nonfinite(stats: StepStats, loss_scale: LossScale | None) -> bool:
    """Return whether a step has NaN or infinite values before its update that a lower loss scale
    would not avoid; see `is_divergent`."""
    if not all(map(math.isfinite, (stats.loss, *stats.other_losses.values()))):
        return True
    is_scaled = loss_scale is not None and loss_scale.dynamic
    at_minimum = loss_scale is not None and loss_scale.scale <= loss_scale.config.min
    return not stats.is_finite and (not is_scaled or at_minimum)


def find_corrupt_moments(trainer: Trainer) -> list[str]:
    """Return the parameters of this rank whose Adam moments are inconsistent, as after a bit
    flip in memory; [] for other update rules."""
    optim = trainer.run.optim
    bound = MOMENT_FACTOR * bound_moment_ratio(optim.beta1, optim.beta2)
    if math.isinf(bound):
        return []
    corrupt = []
    for slot in trainer.optimizer.slots:
        if slot.rates.rule != "adamw":
            continue
        mean, square = slot.read_state("exp_avg").double(), slot.read_state("exp_avg_sq").double()
        plausible = (square >= 0) & mean.isfinite() & square.isfinite()
        if not {"exp_avg", "exp_avg_sq"} & {*slot.encoded}:  # rounded moments exceed the bound
            # squares of small gradients underflow in fp32
            plausible &= mean.abs() <= bound * square.clamp(min=0).sqrt() + 1e-15
        if not bool(plausible.all()):
            corrupt.append(slot.shard.name)
    return corrupt


def _count_elements(trainer: Trainer) -> int:
    """Return the number of gradient elements of which zeros are counted. Collective."""
    shards = [(each.shard, each.weight) for each in trainer.data.local_params]
    local = first_replica_gradients(shards, trainer.first_replicas)
    counts = gather_objects(sum(each.numel() for each in local), trainer.mesh.world)
    return sum(int(str(each)) for each in counts)


def _collect_statistics(stats: StepStats, num_elements: int) -> dict[str, float]:
    """Return the statistics of a step whose spikes are detected, by name. `num_elements`: of the
    gradients."""
    statistics = {"loss": stats.loss, "grad_norm": stats.grad_norm}
    if stats.max_logit is not None:
        statistics["max_logit"] = stats.max_logit
    if isinstance(stats, StepResult) and stats.update_norm is not None:
        statistics["update_norm"] = stats.update_norm
    if stats.num_zeros is not None:
        statistics["zero_share"] = stats.num_zeros / max(1, num_elements)
    return statistics


def _compare_tensors(before: torch.Tensor, after: torch.Tensor) -> tuple[int, int, float, float]:
    """Return the number of elements and of different ones, and the largest and the relative
    difference of two tensors."""
    difference = (after - before).double()
    norm = float(torch.linalg.vector_norm(before.double()))
    return (
        before.numel(),
        int((before != after).sum()),
        float(difference.abs().max()) if before.numel() else 0.0,
        float(torch.linalg.vector_norm(difference)) / norm if norm else 0.0,
    )


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

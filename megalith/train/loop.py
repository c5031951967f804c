"""The training loop: resume, step, log, evaluate, save, stop."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from megalith.checkpoint.agree import raise_on_all_ranks
from megalith.checkpoint.boxes import CheckpointEntry
from megalith.checkpoint.load import Checkpoint
from megalith.checkpoint.lock import RunLock, lock_run
from megalith.checkpoint.retention import sweep
from megalith.checkpoint.save import save_checkpoint
from megalith.config.attention import attention_notes
from megalith.config.model import ModelConfig
from megalith.config.train import TrainRun, dropout_seed
from megalith.data.build import Splits, build_datasets
from megalith.data.loader import Loader, Masks, StepBatches, masks_of
from megalith.data.tokenizer import Tokenizer, build_tokenizer
from megalith.errors import CheckpointError, ConfigError, DamagedCheckpointError, DataError
from megalith.kernels.cpu import CompilationProgress
from megalith.kernels.engine import unavailable_backends
from megalith.kernels.matmul import HAS_BF16_KERNELS
from megalith.kernels.replay import Routing
from megalith.models.adapters import RECORD
from megalith.models.pretrained import (
    FORCE_LOAD_BALANCING,
    HF_SOURCE,
    compare_models,
    open_pretrained,
    read_hf_source,
    take_weights,
    trained_with_forced_balancing,
)
from megalith.nn.moe.balance import LOSS_COEFFS
from megalith.observe.logs import log_to
from megalith.observe.machine import device_peak_tflops, peak_memory_gib
from megalith.observe.metrics import MetricsFile, Row, Value, has_tensorboard
from megalith.observe.plots import plot_experts, plot_run
from megalith.observe.progress import StepProgress
from megalith.optim.schedule import (
    NO_GROUPS,
    GroupRates,
    group_rates,
    learning_rate,
    schedule_lengths,
    weight_decay,
)
from megalith.parallel.context import my_slicing
from megalith.parallel.group import barrier, gather_objects
from megalith.parallel.mesh import Mesh
from megalith.plan.adapters import trained_step_flops
from megalith.plan.buckets import zero_notes
from megalith.plan.costs import model_flops_utilization, pairs_seen, tflops_per_device
from megalith.plan.deal import budget_of, document_cost
from megalith.plan.experts import balance_notes
from megalith.plan.kernels import describe_kernels
from megalith.plan.repeated import repeated_flops
from megalith.plan.savings import run_lines
from megalith.plan.stages import plan_stages
from megalith.plan.unused import unused_notes
from megalith.posttrain.lora import load_adapters, load_base
from megalith.train.build import (
    DTYPES,
    Trainer,
    all_gather_loaded_params,
    build_trainer,
    checkpoint_entries,
    weight_entries,
)
from megalith.train.divergence import (
    describe_last_good_checkpoint,
    find_nonfinite_parameters,
    is_divergent,
)
from megalith.train.evaluate import evaluate
from megalith.train.experts import (
    collect_expert_load,
    expert_load_metrics,
    routers_of,
    with_routing,
)
from megalith.train.folder import (
    RunFolder,
    TokenizerFiles,
    changed_settings,
    left_as_found,
    read_tokenizer_files,
    set_aside_metrics,
    write_config,
    write_parameters,
)
from megalith.train.origin import (
    check_steps_left,
    describe_checkpoint_source,
    open_checkpoint_source,
)
from megalith.train.resume import fall_back, open_newest_checkpoint
from megalith.train.state import TrainState
from megalith.train.step import StepResult, train_step, where_not_finite
from megalith.train.stop import Stopper
from megalith.train.trace import RoutingTrace, cut_traces

_log = logging.getLogger(__name__)

MOST_SKIPPED = 20
"""Steps in a row that may change nothing before the run ends (a guess: real spikes last a few
steps)."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    kind: Literal["done", "stopped"]
    step: int
    reason: str = ""
    saved: bool = True
    """Whether `step` is saved; a run that is stopped after a step with a non-finite loss or
    gradient is not."""


def run_training(
    run: TrainRun, folder: RunFolder, mesh: Mesh, device: torch.device, *, show: bool = True
) -> Outcome:
    """Train until the last step, a signal or the time limit; continue where the folder's newest
    checkpoint left off.

    Collective over the whole mesh; the rules have been checked.

    Raises:
        ConfigError: the folder holds a run with other fixed settings. CheckpointError: the folder
        is in use, its checkpoint is of another model, or saving failed too often in a row.
        DataError: the data is missing, damaged, or not what the run was started with; or the run
        has diverged.
    """
    first = mesh.world.rank == 0
    with (
        left_as_found(folder) if first else nullcontext(),
        lock_run(folder.path) if first else nullcontext() as lock,
        log_to(folder.log) if first else nullcontext(),
        StepProgress(total=run.train.steps, show=show and first) as progress,
    ):
        if first:
            for line in changed_settings(folder, run):
                progress.say(f"changed since the run was started: {line}")
            sweep(folder.checkpoints)  # what a run that was killed left half written
        return _Loop(run, folder, mesh, device, progress, lock).run()


class _Loop:
    """One run of the loop: what it computes with, where it is, and where it writes."""

    def __init__(
        self,
        run: TrainRun,
        folder: RunFolder,
        mesh: Mesh,
        device: torch.device,
        progress: StepProgress,
        lock: RunLock | None,
    ) -> None:
        self.run_config, self.folder, self.mesh, self.progress, self.lock = (
            run,
            folder,
            mesh,
            progress,
            lock,
        )
        self.writer = mesh.world.rank == 0
        saved = open_newest_checkpoint(folder.checkpoints, mesh.world)
        self.checkpoint_source = (
            open_checkpoint_source(run.checkpoint, mesh.world) if saved is None else None
        )
        begun = saved or self.checkpoint_source
        self.state = _read_train_state(begun)
        if self.checkpoint_source is not None:
            check_steps_left(run, self.checkpoint_source, self.state)
        self.tokenizer = matching_tokenizer(run)
        self.data = self._open_data(begun)
        self.tokenizer_files = (
            read_tokenizer_files(run) if self.writer else TokenizerFiles(None, {})
        )
        self.trainer = build_trainer(
            run,
            mesh,
            device,
            fill=saved is None and needs_first_weights(run),
            fill_frozen=keeps_first_weights(run),
        )
        while (damage := self._load_or_find_damage(saved)) is not None:
            saved = fall_back(damage, mesh.world)
            self.state = _read_train_state(saved)
            self.data = self._open_data(saved)
            for slot in self.trainer.optimizer.slots:
                for tensor in slot.state.values():
                    # the damaged checkpoint may have filled it, and the older one may not have it
                    tensor.zero_()
        if saved is not None and self.writer:
            for warning in saved.warnings():
                _log.warning(warning)
        _compare_replicas(self.trainer)
        _compare_stages(self.trainer)
        if self.writer:
            if saved is None and (kept := set_aside_metrics(folder)) is not None:
                progress.say(
                    f"{folder.checkpoints} has no checkpoint: starting from the beginning; see "
                    f"{kept}"
                )
            write_config(folder, run, self.tokenizer_files)
            if run.observe.parameters:
                write_parameters(folder, run)
        progress.resume(self.state.step)
        barrier(mesh.world)
        self.metrics: MetricsFile | None = None  # opened by the first step
        self.trace: RoutingTrace | None = None
        self.lengths = schedule_lengths(
            run.schedule, global_batch_size=run.train.global_batch_size, total_steps=run.train.steps
        )
        self.budget = budget_of(run.train, run.parallel, run.model)
        self.flops = 0  # of the global batch, since the last logged row
        self.again = 0  # operations that recomputation repeated, beside these
        self.seconds = 0.0  # in steps, since the last logged row
        self.read = 0  # tokens, since the last logged row
        self.learned = (
            0.0,
            0.0,
        )  # share of the last step's tokens that are labels, and of its rows that are tokens
        self.assignment_stats: tuple[float | None, int] = (
            None,
            0,
        )  # imbalance over dp of the last step, and its microbatches
        pipeline, pp = run.parallel.pipeline, run.parallel.pp
        self.stages = plan_stages(
            pipeline, pp=pp, num_layers=run.model.num_layers, depths=run.model.mtp.num_layers
        )
        self.lr = 0.0
        self.groups: Mapping[str, GroupRates] = NO_GROUPS
        self.peak = run.observe.peak_tflops or device_peak_tflops(
            device, DTYPES[run.precision.params]
        )
        self.save_failures = 0
        self.diverged = False  # whether the last step that had labels was divergent
        self.save_postponed = False
        self.saved_step = self.state.step if saved is not None else -1

    def run(self) -> Outcome:
        """Steps until the end or a stop."""
        run, state = self.run_config, self.state
        if state.step >= run.train.steps:
            self.progress.say(
                f"{self.folder.path} is already at step {state.step} of {run.train.steps}"
            )
            return Outcome("done", state.step)
        outcome = Outcome("done", run.train.steps)
        self._open_metrics()
        self.trace = self._open_trace()
        place, on_gpu = self.mesh.pp.rank, self.trainer.device.type != "cpu"
        notes = unused_notes(run, self.mesh.world.size) + zero_notes(
            run.parallel, self.mesh.dp.size
        )
        notes += attention_notes(run.model.attention)
        notes += (
            [] if run.lora is not None else balance_notes(run.model)
        )  # whose routers are frozen
        notes += run_lines(
            run, self.mesh.world.size, pp_rank=place, tp_rank=self.mesh.tp.rank, accelerator=on_gpu
        )
        notes += describe_kernels(
            run, self.trainer.device.type, unavailable_backends(), bf16_kernels=HAS_BF16_KERNELS
        )
        for line in [*self.data.splits.notes, *notes]:
            self.progress.say(line)
        try:
            with (
                Stopper(max_minutes=run.train.max_minutes, say=self.progress.say) as stopper,
                CompilationProgress(self.progress.say),
            ):
                loader = self._loader()
                while state.step < run.train.steps:
                    result = self._step(loader, stop=stopper.reason is not None)
                    self._log_step(result)
                    self._evaluate_if_due()
                    if result.stop and state.step < run.train.steps:
                        outcome = Outcome(
                            "stopped",
                            state.step,
                            stopper.reason or "another rank was asked to stop",
                        )
                        break
                    due = run.checkpoint.every > 0 and state.step % run.checkpoint.every == 0
                    if due or self.save_postponed:
                        self._save()
                # before this rank leaves, others still expect its slices
                self.trainer.data.wait_params()
                if self.diverged and outcome.kind == "done":
                    raise self._divergence(
                        f"the last step, {state.step}, has loss {result.loss} and gradient norm "
                        f"{result.grad_norm} and "
                        f"is not saved."
                    )
                self._save(final=True)
                outcome = replace(outcome, saved=self.saved_step == state.step)
        finally:
            self._close_metrics()
            self._close_trace()
        if self.writer and run.observe.plots:
            plot_run(self.folder.path)
            plot_experts(self.folder.path)
        return outcome

    def _step(self, loader: Loader, *, stop: bool) -> StepResult:
        run, state = self.run_config, self.state
        self.lr = learning_rate(run.schedule, state.scheduled_samples, self.lengths)
        decay = weight_decay(run.schedule, state.scheduled_samples, self.lengths)
        self.groups = group_rates(
            run.optim.groups, run.schedule, state.scheduled_samples, self.lengths
        )
        started = time.perf_counter()
        batches = loader.next()
        routing = (
            None if self.trace is None else self.trace.begin(state.step + 1, batches.microbatches)
        )
        if routing is not None:
            batches = replace(batches, microbatches=with_routing(batches.microbatches, routing))
        result = train_step(
            self.trainer, batches, lr=self.lr, weight_decay=decay, stop=stop, groups=self.groups
        )
        self.seconds += time.perf_counter() - started
        rows = run.train.global_batch_size
        # PackedSeqParams as they were read: what slicing by document pads, or fills rows of
        # conversations, is computed, but is nobody's work.
        squares, windowed = _pairs(run.model, batches, self.mesh.dp.size)
        self.flops += trained_step_flops(
            run.model,
            run.lora,
            run.optim,
            tokens=batches.num_tokens,
            squared_lengths=squares,
            windowed=windowed,
        )
        self.again += repeated_flops(
            run, self.stages, tokens=batches.num_tokens, squared_lengths=squares, windowed=windowed
        )
        self.read += batches.num_tokens
        state.step += 1
        state.consumed_samples += rows
        state.tokens += batches.num_tokens
        if routing is not None:
            self._write_trace(routing, batches)
        if not result.empty:
            self.diverged = is_divergent(result, self.trainer.loss_scale)
        if result.updated:
            state.scheduled_samples += rows
            state.skipped_in_a_row = 0
        else:
            state.skipped += 1
            self._note_skipped(result)
        self.learned = (
            batches.num_labels / max(1, batches.num_tokens),
            batches.num_tokens / max(1, batches.num_padded_tokens),
        )
        self.assignment_stats = batches.imbalance, len(batches.microbatches)
        return result

    def _note_skipped(self, result: StepResult) -> None:
        """Say that a step changed nothing; too many in a row are no accident.

        Raises:
            DataError: so many that waiting for a better batch makes no sense.
        """
        self.state.skipped_in_a_row += 1
        scale = self.trainer.loss_scale
        lowered = "" if scale is None else f"; the loss scale is {scale.scale:g} now"
        if result.empty:
            self.progress.say(f"step {self.state.step}: no label counts in its rows; no update")
        else:
            self.progress.say(
                f"step {self.state.step}: loss {result.loss}, gradient norm {result.grad_norm}; no "
                f"update{lowered}"
            )
        if scale is not None and scale.dynamic:
            if scale.exhausted:
                raise self._divergence(
                    f"loss scale at its minimum {scale.scale:g} for {scale.stuck} steps in a row: "
                    "gradients are not "
                    f"finite whatever the scale (in {where_not_finite(self.trainer)}).",
                    more=", or set precision.params=bf16",
                )
        elif self.state.skipped_in_a_row >= MOST_SKIPPED:
            if result.empty:
                raise DataError(
                    f"{MOST_SKIPPED} steps in a row changed nothing, the last because no label "
                    "counts in its rows. Use "
                    "data whose masks leave something to learn (data.sft.loss_on, "
                    "data.eod_mask_loss)."
                )
            raise self._divergence(
                f"{MOST_SKIPPED} steps in a row changed nothing, the last with loss {result.loss} "
                "and gradient norm "
                f"{result.grad_norm} (not finite in {where_not_finite(self.trainer)})."
            )

    def _last_update(self) -> int:
        """Return the last step before the steps that were skipped since."""
        return self.state.step - self.state.skipped_in_a_row

    def _divergence(self, problem: str, *, more: str = "") -> DataError:
        """Return the error of a run that has diverged, which says how to continue. Collective.

        `more`: what else may help, after a comma.
        """
        folder, lr = self.folder.checkpoints, self.run_config.schedule.lr

        def describe() -> str:
            return (
                describe_last_good_checkpoint(folder, self._last_update(), lr)
                if self.writer
                else ""
            )

        advice = raise_on_all_ranks(describe, self.mesh.world)[0]
        return DataError(
            f"{problem} Reduce schedule.lr, check the data and the settings of the model{more}. "
            f"{advice}"
        )

    def _log_step(self, result: StepResult) -> None:
        run, state = self.run_config, self.state
        if state.step % run.train.log_every and state.step != run.train.steps:
            return
        since = (state.step - 1) % run.train.log_every + 1
        seconds, devices = self.seconds, self.mesh.world.size
        per_second = self.read / seconds
        tflops = tflops_per_device(self.flops, seconds=seconds, devices=devices)
        mfu = self.peak and model_flops_utilization(
            self.flops, seconds=seconds, devices=devices, peak_tflops=self.peak
        )
        row: dict[str, Value] = {
            "step": state.step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": self.lr,
            "tokens": state.tokens,
            "tokens_per_second": round(per_second, 1),
            "step_ms": round(seconds * 1000 / since, 3),
            "tflops_per_device": round(tflops, 6),
            "mfu": None if mfu is None else round(mfu, 4),
            "memory_gib": round(peak_memory_gib(self.trainer.device), 3),
            "skipped": state.skipped,
        }
        if result.z_loss is not None and result.max_logit is not None:
            row |= {
                "z_loss": result.z_loss,
                "max_logit": result.max_logit if math.isfinite(result.max_logit) else None,
            }
        row |= {
            f"lr_{group.name}": self.groups[group.name].lr
            for group in run.optim.groups
            if group.sets_rate
        }
        if mfu is not None and self.again:
            row["hfu"] = round(mfu * (1 + self.again / max(1, self.flops)), 4)
        if self.trainer.loss_scale is not None:
            row["loss_scale"] = self.trainer.loss_scale.scale
        row |= {f"mtp_{depth}_loss": loss for depth, loss in enumerate(result.mtp_losses, start=1)}
        if run.model.moe is not None:
            weights = [getattr(run.model.moe.aux_loss, name) for name in LOSS_COEFFS]
            uses = collect_expert_load(self.trainer.pipeline_model.modules, self.mesh)
            row |= expert_load_metrics(uses, weights, per_layer=run.observe.per_layer)
        if result.num_zeros is not None:
            row["grad_zeros"] = result.num_zeros
        uneven, packed = self.assignment_stats[0], run.train.tokens_per_microbatch is not None
        if run.data.sft.used() or packed:
            row |= {
                "supervised_share": round(self.learned[0], 4),
                "fill": round(self.learned[1], 4),
            }
        if uneven is not None:
            row["imbalance"] = round(uneven, 4)
        if packed:
            row["microbatches"] = self.assignment_stats[1]
        self.flops, self.again, self.seconds, self.read = 0, 0, 0.0, 0
        self._write(row)
        self.progress.step(
            state.step,
            {
                "loss": f"{result.loss:.4f}",
                "lr": f"{self.lr:.2e}",
                "tokens/s": f"{per_second:,.0f}",
            },
        )

    def _write(self, row: Row) -> None:
        """Add a row to metrics.jsonl. A full disk ends no run: the row waits in memory for the next
        one."""
        try:
            if self.metrics is not None:
                self.metrics.write(row)
        except OSError as error:
            self.progress.say(
                f"step {row['step']}: {self.folder.metrics} cannot be written ({error}); the run "
                "goes on"
            )

    def _open_trace(self) -> RoutingTrace | None:
        """None when no step that is still to come is traced, or this rank cannot go on from the
        lines that it has."""
        steps, done = self.run_config.observe.routing_trace, self.state.step
        try:
            cut_traces(self.folder.routing, self.mesh, resume_at=done)
        except (OSError, DataError) as error:  # of this rank alone: the others would wait for it
            if done < steps:
                _log.warning(
                    "this rank's routing trace ends at step %d, the run goes on: %s", done, error
                )
            return None
        if done >= steps:
            if (
                steps
                and self.mesh.world.rank == 0
                and not any(self.folder.routing.glob("rank_*.jsonl"))
            ):
                _log.warning(
                    "observe.routing_trace=%d: nothing is traced, since this run goes on after "
                    "step %d. Set it to %d "
                    "or more",
                    steps,
                    done,
                    done + 1,
                )
            return None
        layers, captures = (
            len([*routers_of(self.trainer.pipeline_model.modules)]),
            self.run_config.observe.routing_captures,
        )
        return RoutingTrace(
            self.folder.routing, self.mesh, steps=steps, captures=captures, layers=layers
        )

    def _write_trace(self, routing: Routing, batches: StepBatches) -> None:
        """Add this rank's lines. A full disk ends no run, but the trace."""
        assert self.trace is not None
        try:
            self.trace.write(self.state.step, routing, batches.microbatches)
        except OSError as error:
            text = "step %d: %s cannot be written (%s); the run goes on, and this rank's trace ends"
            _log.warning(text, self.state.step, self.trace.path, error)
            self.trace = None

    def _close_trace(self) -> None:
        """A step that failed leaves nothing beside the trace."""
        with suppress(OSError):
            if self.trace is not None:
                self.trace.close()

    def _close_metrics(self) -> None:
        try:
            if self.metrics is not None:
                self.metrics.close()
        except OSError as error:
            self.progress.say(f"{self.folder.metrics} lacks its last rows ({error})")

    def _evaluate_if_due(self) -> None:
        train, step = self.run_config.train, self.state.step
        due = step == train.steps or (train.eval_every and step % train.eval_every == 0)
        if not due or train.eval_steps == 0 or self.data.splits.valid is None:
            return
        found = evaluate(
            self.trainer.pipeline_model,
            self.data.splits.valid,
            self._masks(),
            samples=train.eval_steps * train.global_batch_size,
            rows=train.micro_batch_size,
            tokenizer=self.tokenizer,
            slicing=my_slicing(self.run_config.parallel, self.mesh),
            budget=self.budget,
        )
        row = {"step": step, "eval_loss": found.loss, "eval_bits_per_byte": found.bits_per_byte}
        self._write(row | found.of_depths())
        bits = "" if found.bits_per_byte is None else f", {found.bits_per_byte:.3f} bits per byte"
        self.progress.say(f"step {step}: held-out loss {found.loss:.4f}{bits}{found.depths_text()}")

    def _save(self, *, final: bool = False) -> None:
        """Save this step, unless it is saved already; a failure is announced, and only several in a
        row end the run.

        A divergent step is not saved but the next one that is not, so that retention deletes no
        good checkpoint.

        Raises:
            DataError: parameters are not finite, which no further step would change.
        """
        if self.saved_step == self.state.step:
            return
        if self.diverged:
            if not self.save_postponed:
                self.progress.say(
                    f"step {self.state.step}: not saved, because its loss or gradient norm is not "
                    "finite; the next "
                    f"step without such values is saved"
                )
            self.save_postponed = True
            return
        self.save_postponed = False
        entries = self._saved_entries()
        nonfinite = raise_on_all_ranks(lambda: self._check_before_save(entries), self.mesh.world)
        if names := sorted({name for part in nonfinite for name in part}):
            raise self._divergence(
                f"step {self.state.step} is not saved: NaN or infinite values in "
                f"{', '.join(names[:5])}"
                f"{f' and {len(names) - 5} more parameters' if names[5:] else ''}."
            )
        keep = self.run_config.checkpoint
        try:
            report = save_checkpoint(
                self.folder.checkpoints,
                self.state.step,
                entries,
                self._state_json(),
                self.mesh.world,
                config_text=self.tokenizer_files.config_text(self.run_config, "."),
                auxiliary_files=self.tokenizer_files.contents,
                keep=keep.keep,
                keep_every=keep.keep_every,
                last_update=self._last_update(),
            )
        except CheckpointError as error:
            self.save_failures += 1
            if final or self.save_failures >= keep.max_save_failures:
                raise
            self.progress.say(f"the run goes on without this checkpoint: {error}")
            return
        self.save_failures, self.saved_step = 0, self.state.step
        _log.info("saved %s", report)

    def _check_before_save(self, entries: Sequence[CheckpointEntry]) -> list[str]:
        """Return the non-finite parameters of this rank.

        Raises:
            CheckpointError: another run has taken the folder over, while this one was suspended.
        """
        if self.lock is not None:
            self.lock.check()
        return find_nonfinite_parameters(entries)

    def _saved_entries(self) -> list[CheckpointEntry]:
        entries = checkpoint_entries(self.trainer)
        return (
            entries
            if self.run_config.checkpoint.save_optimizer
            else [e for e in entries if e.role == "param"]
        )

    def _state_json(self) -> dict[str, Any]:  # Any: JSON
        assert self.data.splits.train is not None
        scale = self.trainer.loss_scale
        extra = (
            ({} if scale is None else {"loss_scale": scale.as_json()})
            | ({} if self.base is None else {RECORD: self.base})
            | (
                {FORCE_LOAD_BALANCING: list(self.force_load_balancing)}
                if self.force_load_balancing
                else {}
            )
            | ({} if self.hf_source is None else {HF_SOURCE: self.hf_source.as_json()})
        )
        return extra | {
            "train": self.state.as_json(),
            "optimizer_updates": self.trainer.optimizer.updates,
            "data": self.data.splits.train.fingerprint,
            "order_samples": self.data.orders[0],
            "order_longer": list(self.data.orders[1:]),
            "tokenizer": self.tokenizer.fingerprint,
        }

    def _load_or_find_damage(self, saved: Checkpoint | None) -> DamagedCheckpointError | None:
        """Load what the run begins with; return the error if the run's own checkpoint, `saved`, is
        damaged."""
        try:
            self._load(saved)
        except DamagedCheckpointError as error:
            if (
                saved is None or error.path != saved.path
            ):  # a checkpoint that the user has named: no other will do
                raise
            return error
        return None

    def _load(self, saved: Checkpoint | None) -> None:
        """Fill weights and moments from the run's own checkpoint, or what is asked for from the one
        it starts from."""
        run, rules = self.run_config, self.run_config.checkpoint
        self.base = self._load_base(saved)
        self.force_load_balancing = trained_with_forced_balancing(saved, run.model)
        self.hf_source = read_hf_source(saved)
        if saved is not None:
            self._take_over(saved)
            self.progress.say(f"resuming {self.folder.path} at step {self.state.step}")
        elif run.lora is not None:
            if run.lora.load is not None:
                assert self.base is not None, "a run with adapters has weights beside them"
                forced = load_adapters(
                    self._weights(), run.lora, self.mesh.world, model=run.model, record=self.base
                )
                self._published(forced)
                self.progress.say(f"adapters start from {run.lora.load}")
        elif self.checkpoint_source is not None:
            fresh = self._take_over(self.checkpoint_source)
            self.force_load_balancing = trained_with_forced_balancing(
                self.checkpoint_source, run.model
            )
            self.hf_source = read_hf_source(self.checkpoint_source)
            self.progress.say(
                describe_checkpoint_source(run, self.checkpoint_source, self.state, fresh=fresh)
            )
        elif rules.load is not None:
            loaded = take_weights(
                self._weights(), rules.load, self.mesh.world, model=run.model, rules=rules
            )
            for line in loaded.notes:
                self.progress.say(f"{rules.load}: {line}")
            self._published(loaded.forced)
            self.hf_source = loaded.hf_source
            self.progress.say(f"starting from {rules.load}")

    def _weights(self) -> list[CheckpointEntry]:
        """What a model is without the moments of its optimizer."""
        return [
            entry for entry in checkpoint_entries(self.trainer) if entry.role in ("param", "master")
        ]

    def _published(self, forced: Sequence[str]) -> None:
        """After weights were taken over from a model: what chance chose while that was trained, is
        said of this one."""
        all_gather_loaded_params(self.trainer)
        self.force_load_balancing = tuple(dict.fromkeys((*forced, *self.force_load_balancing)))

    def _take_over(self, saved: Checkpoint) -> bool:
        """Go on where a checkpoint was saved: all of it that this run is to have; True: with an
        optimizer begun anew.

        Raises:
            CheckpointError: it is of another tokenizer or model, or lacks something.
        """
        run, rules = self.run_config, self.run_config.checkpoint
        if saved.state["tokenizer"] != self.tokenizer.fingerprint:
            raise CheckpointError(
                f"{saved.path} was trained with another tokenizer ({saved.state['tokenizer']}, now "
                f"{self.tokenizer.fingerprint}). Use that one, or choose another folder with --run "
                "NAME."
            )
        anew = self.checkpoint_source is not None and rules.load_mode == "progress"
        entries = self._weights() if anew else checkpoint_entries(self.trainer)
        theirs = open_pretrained(saved.path, base=None if self.base is None else rules.load)
        padded = (
            self.checkpoint_source is not None and theirs.model.vocab_size == run.model.vocab_size
        )  # perhaps in another way
        report = saved.load_into(
            entries,
            self.mesh.world,
            rules=rules,
            purpose="start" if anew else "resume",
            vocab_size=run.model.vocab_size if padded else None,
        )
        # in a folder without settings no one has compared these
        for line in compare_models(
            theirs, run.model, allow=rules.allow_model_changes, padded=padded
        ):
            self.progress.say(f"{saved.path}: {line}")
        # Moments that begin at zero now are corrected for that, as at the beginning of a run.
        fresh = anew or report.fresh_state
        self.trainer.optimizer.set_updates(0 if fresh else int(saved.state["optimizer_updates"]))
        if self.trainer.loss_scale is not None and "loss_scale" in saved.state and not anew:
            self.trainer.loss_scale.load(saved.state["loss_scale"])
        all_gather_loaded_params(self.trainer)
        return fresh

    def _load_base(self, saved: Checkpoint | None) -> dict[str, str] | None:
        """Fill the weights that adapters are trained beside, which no checkpoint of this run
        holds."""
        run = self.run_config
        if run.lora is None:
            return None
        entries = weight_entries(self.trainer.data.frozen, self.mesh)
        record, notes = load_base(
            entries, run.checkpoint, self.mesh.world, model=run.model, saved=saved
        )
        all_gather_loaded_params(self.trainer)
        for line in notes:
            self.progress.say(f"{run.checkpoint.load}: {line}")
        self.progress.say(f"training adapters beside {record['base']}")
        return record

    def _open_data(self, saved: Checkpoint | None) -> "_RunData":
        """Build the datasets. Their order follows from a count of samples: that of the first start.

        A run that is made longer than that order goes on with further epochs; what it has read
        stays what it was. Indices are built by whoever comes first and mapped by the others.

        Raises:
            CheckpointError: the data, or its order, is not what the run was started with.
            DataError: there are too few samples, and nothing repeats.
        """
        rows = self.run_config.train.global_batch_size
        left = max(0, self.run_config.train.steps - self.state.step)
        needed = self.state.consumed_samples + left * rows
        orders = [needed]
        if saved is not None:
            orders = [
                int(count)
                for count in (saved.state["order_samples"], *saved.state.get("order_longer", ()))
            ]
        splits = self._datasets(orders)
        assert splits.train is not None
        if saved is not None:
            _check_order(saved, splits.train.fingerprint)
        there = splits.train.num_samples
        if there >= needed or self.run_config.data.sampler != "sequential":
            return _RunData(splits, tuple(orders))
        longer = _RunData(self._datasets([*orders, needed]), (*orders, needed))
        assert longer.splits.train is not None
        if (most := longer.splits.train.num_samples) < needed:
            raise DataError(
                f"train.steps={self.run_config.train.steps} reads {needed} samples, and without "
                "weights before its "
                f"prefixes data.path gives each of its {most} samples once. Set train.steps to at "
                f"most {most // rows}: "
                f"with weights the run would have begun in another order."
            )
        if longer.splits.train.fingerprint != splits.train.fingerprint:
            self.progress.say(
                f"train.steps={self.run_config.train.steps} reads {needed} samples, and the order "
                "this run began with "
                f"has {there}: further epochs follow, shuffled on their own"
            )
        return longer

    def _datasets(self, orders: Sequence[int]) -> Splits:
        run, train = self.run_config, self.run_config.train
        return build_datasets(
            run.data,
            seq_len=train.seq_len,
            seed=run.seed,
            train_samples=orders[0],
            train_longer=orders[1:],
            valid_samples=train.eval_steps * train.global_batch_size,
            test_samples=0,
            vocab_size=run.model.vocab_size,
            eod=self.tokenizer.eod,
            tokenizer=self.tokenizer,
            tokenizer_path=run.tokenizer.path,
            whole_documents=train.tokens_per_microbatch is not None,
        )

    def _masks(self) -> Masks:
        return masks_of(self.run_config.data, self.run_config.model, self.tokenizer.eod)

    def _loader(self) -> Loader:
        train = self.run_config.train
        assert self.data.splits.train is not None
        return Loader(
            self.data.splits.train,
            self._masks(),
            self.mesh.dp,
            global_batch_size=train.global_batch_size,
            micro_batch_size=train.micro_batch_size,
            consumed=self.state.consumed_samples,
            steps=train.steps - self.state.step,
            device=self.trainer.device,
            slicing=my_slicing(self.run_config.parallel, self.mesh),
            sampler=self.run_config.data.sampler,
            dropout_seed=dropout_seed(self.run_config),
            num_mtp_layers=self.run_config.model.mtp.num_layers,
            budget=self.budget,
            everyone=self.mesh.world,
            cost=document_cost(self.run_config.model),
            balanced=train.balance_rows,
        )

    def _open_metrics(self) -> None:
        """The writer's files; what keeps it from them ends the run on every rank."""
        wanted, world = self.run_config.observe.tensorboard, self.mesh.world
        there = raise_on_all_ranks(lambda: has_tensorboard() if self.writer else True, world)[0]
        if wanted and not there:
            raise ConfigError(
                f"observe.tensorboard={wanted} needs the tensorboard package. Run pip install "
                "tensorboard."
            )
        events = self.folder.tensorboard if there and wanted is not False else None

        def opened() -> None:
            self.metrics = MetricsFile(
                self.folder.metrics, resume_at=self.state.step, tensorboard=events
            )

        raise_on_all_ranks(opened if self.writer else lambda: None, world)


@dataclass(frozen=True, slots=True)
class _RunData:
    """The samples of a run, and what decided their order."""

    splits: Splits
    orders: tuple[int, ...]
    """The count of training samples that the order was built for, and those that the run was made
    longer to."""


def _read_train_state(checkpoint: Checkpoint | None) -> TrainState:
    """Return the counters of a checkpoint; those of a run that begins if there is none."""
    return TrainState() if checkpoint is None else TrainState.from_json(checkpoint.state["train"])


def needs_first_weights(run: TrainRun) -> bool:
    """Whether a run that begins now draws weights: of adapters, or any that may keep what was
    drawn."""
    return (run.lora is not None and run.lora.load is None) or keeps_first_weights(run)


def keeps_first_weights(run: TrainRun) -> bool:
    """Whether weights of the model may stay as they were drawn: none are loaded, or loading may
    leave some out."""
    checkpoint = run.checkpoint
    return checkpoint.load is None or checkpoint.missing_keys != "error" or bool(checkpoint.skip)


def _pairs(model: ModelConfig, batches: StepBatches, dp: int) -> tuple[int, int | None]:
    """Squared lengths of the step's documents, and pairs of tokens that windows leave in them,
    as `step_flops` wants them; None: nothing has a window. Where they are not known, other
    ranks' documents count like mine."""
    lengths, ranks = batches.lengths, 1
    if lengths is None:
        lengths, ranks = (
            tuple(length for batch in batches.microbatches for length in batch.lengths),
            dp,
        )
    squares = ranks * sum(length**2 for length in lengths)
    if model.attention.window is None:
        return squares, None
    return squares, ranks * sum(pairs_seen(length, model.attention) for length in lengths)


def _check_order(saved: Checkpoint, fingerprint: str) -> None:
    """Refuse other data, or the same in another order, than the checkpoint was trained on.

    Raises:
        CheckpointError: it is.
    """
    if saved.state["data"] != fingerprint:
        raise CheckpointError(
            f"{saved.path} was trained on other data or in another order:\n  then: "
            f"{saved.state['data']}\n"
            f"  now:  {fingerprint}\n"
            "Use the data and the data.num_train_samples that the run was started with, or choose "
            "another folder with "
            "--run NAME (and checkpoint.load_mode=weights, to begin at step 0 of the data there). "
            "Keep "
            "train.tokens_per_microbatch set or unset, as it was: rows and documents have orders "
            "of their own."
        )


def _compare_replicas(trainer: Trainer) -> None:
    """Make sure that data-parallel ranks start from the same weights: keyed draws are equal on
    equal machines only.

    Raises:
        CheckpointError: on every rank, naming those that differ.
    """
    for mine, group in trainer.data.checksums():
        sums = gather_objects(mine, group)
        if len(set(sums)) > 1:
            odd = [rank for rank, value in zip(group.ranks, sums, strict=True) if value != sums[0]]
            raise CheckpointError(
                f"ranks {odd} start from other weights than rank {group.ranks[0]}. Use machines of "
                "one type, or set "
                f"checkpoint.load to weights that all of them read."
            )


def _compare_stages(trainer: Trainer) -> None:
    """Make sure that stages that share a table start from the same one: equal gradients then keep
    it equal.

    Raises:
        CheckpointError: on every rank of the pipeline, naming the table and the stages.
    """
    mine = {
        param.shard.name: int(param.weight.contiguous().view(torch.uint8).sum(dtype=torch.int64))
        for param in trainer.data.local_params
        if len(param.shard.stages) > 1
    }
    found = [sums for sums in gather_objects(mine, trainer.mesh.pp) if isinstance(sums, dict)]
    for name in sorted({name for sums in found for name in sums}):
        values = {rank: sums[name] for rank, sums in enumerate(found) if name in sums}
        if len(set(values.values())) > 1:
            raise CheckpointError(
                f"{name} is not the same on pipeline ranks {list(values)}, which share it. Use "
                "machines of one type, "
                f"or set checkpoint.load to weights that all of them read."
            )


def matching_tokenizer(run: TrainRun) -> Tokenizer:
    """The run's tokenizer, whose ids the model must know.

    Raises:
        ConfigError: the tokenizer has more ids than the model.
    """
    tokenizer = build_tokenizer(run.tokenizer)
    if tokenizer.vocab_size > run.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={run.model.vocab_size} is smaller than the tokenizer's "
            f"{tokenizer.vocab_size} tokens. "
            f"Set model.vocab_size to {tokenizer.vocab_size} or more."
        )
    return tokenizer

"""The training loop: resume, train, log, evaluate, save, stop."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from megalith.checkpoint.boxes import CheckpointEntry
from megalith.checkpoint.load import Checkpoint
from megalith.checkpoint.lock import RunLock, lock_run
from megalith.checkpoint.save import remove_leftovers, save_checkpoint
from megalith.config.model import ModelConfig, list_attention_warnings
from megalith.config.train import TrainRun, dropout_seed
from megalith.data.build import Splits, build_datasets
from megalith.data.loader import Loader, MaskSettings, StepBatches, build_mask_settings
from megalith.data.tokenizer import Tokenizer, build_tokenizer
from megalith.errors import CheckpointError, ConfigError, DamagedCheckpointError, DataError
from megalith.estimate.advise import describe_savings
from megalith.estimate.times import repeated_flops
from megalith.hf.peft import RECORD
from megalith.hf.pretrained import (
    FORCE_LOAD_BALANCING,
    HF_SOURCE,
    check_same_model,
    load_weights_with_records,
    open_pretrained,
    read_hf_source,
    trained_with_forced_balancing,
)
from megalith.kernels.backend import unavailable_backends
from megalith.kernels.cpu_threads import CompilationProgress
from megalith.kernels.linear import HAS_BF16_KERNELS
from megalith.kernels.replay import RoutingRecord
from megalith.nn.router import LOSS_COEFFS
from megalith.observe.machine import device_peak_tflops, peak_memory_gib
from megalith.observe.metrics import MetricsFile, Row, Value, has_tensorboard, log_to
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
from megalith.parallel.consistency import raise_on_all_ranks
from megalith.parallel.context import local_slicing
from megalith.parallel.group import barrier, gather_objects
from megalith.parallel.mesh import Mesh
from megalith.plan.batch_assignment import build_token_budget, document_cost
from megalith.plan.buckets import zero_notes
from megalith.plan.costs import model_flops_utilization, tflops_per_device
from megalith.plan.frozen import trained_step_flops
from megalith.plan.kernels import describe_kernels
from megalith.plan.layers.base import pairs_seen
from megalith.plan.stages import plan_stages
from megalith.posttrain.lora import load_adapters, load_base
from megalith.rules.moe import balance_notes
from megalith.rules.no_effect import unused_notes
from megalith.train.divergence import (
    describe_last_good_checkpoint,
    find_nonfinite_parameters,
    is_divergent,
)
from megalith.train.evaluate import evaluate
from megalith.train.moe import (
    attach_routing,
    collect_expert_load,
    expert_load_metrics,
    iter_routers,
)
from megalith.train.resume import (
    TrainState,
    check_steps_left,
    describe_checkpoint_source,
    fall_back,
    open_checkpoint_source,
    open_newest_checkpoint,
)
from megalith.train.run_folder import (
    RunFolder,
    TokenizerFiles,
    list_changed_settings,
    read_tokenizer_files,
    remove_new_folder_on_error,
    set_aside_metrics,
    write_config,
    write_parameters,
)
from megalith.train.step import StepResult, describe_nonfinite_gradients, train_step
from megalith.train.stop import Stopper
from megalith.train.trace import RoutingTrace, cut_traces
from megalith.train.trainer import (
    DTYPES,
    Trainer,
    all_gather_loaded_params,
    build_trainer,
    checkpoint_entries,
    weight_entries,
)

_log = logging.getLogger(__name__)

MOST_SKIPPED = 20
"""Skipped steps in a row after which the run ends (heuristic: real loss spikes last a few
steps)."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How and at which step a run ended."""

    kind: Literal["done", "stopped"]
    step: int
    reason: str = ""
    saved: bool = True
    """Whether `step` is saved; a run that stops after a step with a non-finite loss or gradient is
    not."""


def run_training(
    run: TrainRun, folder: RunFolder, mesh: Mesh, device: torch.device, *, show: bool = True
) -> Outcome:
    """Train until the last step, a signal or the time limit, starting from the folder's newest
    checkpoint.

    Collective over the whole mesh; the caller has checked the rules.

    Raises:
        ConfigError: the folder holds a run with other fixed settings.
        CheckpointError: the folder is in use, its checkpoint is of another model, or saving failed
            too often in a row.
        DataError: the data is missing, damaged, or not what the run was started with; or the run
            has diverged.
    """
    first = mesh.world.rank == 0
    with (
        remove_new_folder_on_error(folder) if first else nullcontext(),
        lock_run(folder.path) if first else nullcontext() as lock,
        log_to(folder.log) if first else nullcontext(),
        StepProgress(total=run.train.steps, show=show and first) as progress,
    ):
        if first:
            for line in list_changed_settings(folder, run):
                progress.say(f"changed since the run was started: {line}")
            remove_leftovers(folder.checkpoints)  # files that a killed run left incomplete
        return _Loop(run, folder, mesh, device, progress, lock).run()


class _Loop:
    """State of the training loop: trainer, counters, and output files."""

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
        self.is_writer = mesh.world.rank == 0
        saved = open_newest_checkpoint(folder.checkpoints, mesh.world)
        self.checkpoint_source = (
            open_checkpoint_source(run.checkpoint, mesh.world) if saved is None else None
        )
        start = saved or self.checkpoint_source
        self.state = _read_train_state(start)
        if self.checkpoint_source is not None:
            check_steps_left(run, self.checkpoint_source, self.state)
        self.tokenizer = build_checked_tokenizer(run)
        self.data = self._open_data(start)
        self.tokenizer_files = (
            read_tokenizer_files(run) if self.is_writer else TokenizerFiles(None, {})
        )
        self.trainer = build_trainer(
            run,
            mesh,
            device,
            fill=saved is None and needs_initial_weights(run),
            fill_frozen=may_keep_initial_weights(run),
        )
        while (damage := self._load_or_find_damage(saved)) is not None:
            saved = fall_back(damage, mesh.world)
            self.state = _read_train_state(saved)
            self.data = self._open_data(saved)
            for slot in self.trainer.optimizer.slots:
                for tensor in slot.state.values():
                    # filled by the damaged checkpoint, and possibly missing in the older one
                    tensor.zero_()
        if saved is not None and self.is_writer:
            for warning in saved.warnings():
                _log.warning(warning)
        _compare_replicas(self.trainer)
        _compare_stages(self.trainer)
        if self.is_writer:
            if saved is None and (renamed := set_aside_metrics(folder)) is not None:
                progress.say(
                    f"{folder.checkpoints} has no checkpoint: starting from the beginning; see "
                    f"{renamed}"
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
        self.budget = build_token_budget(run.train, run.parallel, run.model)
        self.flops_since_log = 0  # of the global batch, without recomputation
        self.recomputed_flops = 0  # FLOPs of activation recomputation, in addition
        self.seconds_since_log = 0.0  # in steps, without evaluation and saving
        self.tokens_since_log = 0
        self.token_shares = (
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
        self.group_rates: Mapping[str, GroupRates] = NO_GROUPS
        self.peak_tflops = run.observe.peak_tflops or device_peak_tflops(
            device, DTYPES[run.precision.params]
        )
        self.save_failures = 0
        self.diverged = False  # whether the last step that had labels was divergent
        self.save_is_delayed = False
        self.saved_step = self.state.step if saved is not None else -1

    def run(self) -> Outcome:
        """Run steps until the last step or a request to stop."""
        run, state = self.run_config, self.state
        if state.step >= run.train.steps:
            self.progress.say(
                f"{self.folder.path} is already at step {state.step} of {run.train.steps}"
            )
            return Outcome("done", state.step)
        outcome = Outcome("done", run.train.steps)
        self._open_metrics()
        self.trace = self._open_trace()
        pp_rank, on_gpu = self.mesh.pp.rank, self.trainer.device.type != "cpu"
        notes = unused_notes(run, self.mesh.world.size) + zero_notes(
            run.parallel, self.mesh.dp.size
        )
        notes += list_attention_warnings(run.model.attention)
        notes += (
            [] if run.lora is not None else balance_notes(run.model)
        )  # LoRA freezes the routers
        notes += describe_savings(
            run,
            self.mesh.world.size,
            pp_rank=pp_rank,
            tp_rank=self.mesh.tp.rank,
            accelerator=on_gpu,
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
                    if due or self.save_is_delayed:
                        self._save()
                # other ranks still need this rank's shards
                self.trainer.data.wait_params()
                if self.diverged and outcome.kind == "done":
                    raise self._divergence(
                        f"the last step, {state.step}, has loss {result.loss} and gradient norm "
                        f"{result.grad_norm} and is not saved."
                    )
                self._save(final=True)
                outcome = replace(outcome, saved=self.saved_step == state.step)
        finally:
            self._close_metrics()
            self._close_trace()
        if self.is_writer and run.observe.plots:
            plot_run(self.folder.path)
            plot_experts(self.folder.path)
        return outcome

    def _step(self, loader: Loader, *, stop: bool) -> StepResult:
        run, state = self.run_config, self.state
        self.lr = learning_rate(run.schedule, state.scheduled_samples, self.lengths)
        decay = weight_decay(run.schedule, state.scheduled_samples, self.lengths)
        self.group_rates = group_rates(
            run.optim.groups, run.schedule, state.scheduled_samples, self.lengths
        )
        started = time.perf_counter()
        batches = loader.next()
        routing = (
            None if self.trace is None else self.trace.begin(state.step + 1, batches.microbatches)
        )
        if routing is not None:
            batches = replace(batches, microbatches=attach_routing(batches.microbatches, routing))
        result = train_step(
            self.trainer,
            batches,
            lr=self.lr,
            weight_decay=decay,
            stop=stop,
            groups=self.group_rates,
        )
        self.seconds_since_log += time.perf_counter() - started
        rows = run.train.global_batch_size
        # Only tokens that were read count as useful work, not padding of documents, of
        # context-parallel slices or of conversations.
        squared_lengths, windowed = _attention_pairs(run.model, batches, self.mesh.dp.size)
        self.flops_since_log += trained_step_flops(
            run.model,
            run.lora,
            run.optim,
            tokens=batches.num_tokens,
            squared_lengths=squared_lengths,
            windowed=windowed,
        )
        self.recomputed_flops += repeated_flops(
            run,
            self.stages,
            tokens=batches.num_tokens,
            squared_lengths=squared_lengths,
            windowed=windowed,
        )
        self.tokens_since_log += batches.num_tokens
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
        self.token_shares = (
            batches.num_labels / max(1, batches.num_tokens),
            batches.num_tokens / max(1, batches.num_padded_tokens),
        )
        self.assignment_stats = batches.imbalance, len(batches.microbatches)
        return result

    def _note_skipped(self, result: StepResult) -> None:
        """Report a skipped step.

        Raises:
            DataError: too many steps in a row were skipped.
        """
        self.state.skipped_in_a_row += 1
        scale = self.trainer.loss_scale
        lowered = "" if scale is None else f"; the loss scale is {scale.scale:g} now"
        if result.empty:
            self.progress.say(f"step {self.state.step}: the batch has no labels; no update")
        else:
            self.progress.say(
                f"step {self.state.step}: loss {result.loss}, gradient norm {result.grad_norm}; no "
                f"update{lowered}"
            )
        if scale is not None and scale.dynamic:
            if scale.exhausted:
                raise self._divergence(
                    f"loss scale at its minimum {scale.scale:g} for {scale.stuck} steps in a row: "
                    "gradients are not finite whatever the scale (in "
                    f"{describe_nonfinite_gradients(self.trainer)}).",
                    more=", or set precision.params=bf16",
                )
        elif self.state.skipped_in_a_row >= MOST_SKIPPED:
            if result.empty:
                raise DataError(
                    f"{MOST_SKIPPED} steps in a row were skipped, the last because its batch has "
                    "no labels. Use data whose loss masks leave labels (data.sft.loss_on, "
                    "data.eod_mask_loss)."
                )
            raise self._divergence(
                f"{MOST_SKIPPED} steps in a row were skipped, the last with loss {result.loss} and "
                f"gradient norm {result.grad_norm} (not finite in "
                f"{describe_nonfinite_gradients(self.trainer)})."
            )

    def _last_update(self) -> int:
        """Return the last step that updated the weights."""
        return self.state.step - self.state.skipped_in_a_row

    def _divergence(self, problem: str, *, more: str = "") -> DataError:
        """Return the error of a divergent run, which says how to continue. Collective.

        `more`: further advice, after a comma.
        """
        folder, lr = self.folder.checkpoints, self.run_config.schedule.lr

        def describe() -> str:
            return (
                describe_last_good_checkpoint(folder, self._last_update(), lr)
                if self.is_writer
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
        seconds, devices = self.seconds_since_log, self.mesh.world.size
        per_second = self.tokens_since_log / seconds
        tflops = tflops_per_device(self.flops_since_log, seconds=seconds, devices=devices)
        mfu = self.peak_tflops and model_flops_utilization(
            self.flops_since_log, seconds=seconds, devices=devices, peak_tflops=self.peak_tflops
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
            f"lr_{group.name}": self.group_rates[group.name].lr
            for group in run.optim.groups
            if group.sets_rate
        }
        if mfu is not None and self.recomputed_flops:
            row["hfu"] = round(mfu * (1 + self.recomputed_flops / max(1, self.flops_since_log)), 4)
        if self.trainer.loss_scale is not None:
            row["loss_scale"] = self.trainer.loss_scale.scale
        row |= {f"mtp_{depth}_loss": loss for depth, loss in enumerate(result.mtp_losses, start=1)}
        if run.model.moe is not None:
            weights = [getattr(run.model.moe.aux_loss, name) for name in LOSS_COEFFS]
            expert_loads = collect_expert_load(self.trainer.pipeline_model.modules, self.mesh)
            row |= expert_load_metrics(expert_loads, weights, per_layer=run.observe.per_layer)
        if result.num_zeros is not None:
            row["grad_zeros"] = result.num_zeros
        imbalance, packed = self.assignment_stats[0], run.train.tokens_per_microbatch is not None
        if run.data.sft.used() or packed:
            row |= {
                "supervised_share": round(self.token_shares[0], 4),
                "fill": round(self.token_shares[1], 4),
            }
        if imbalance is not None:
            row["imbalance"] = round(imbalance, 4)
        if packed:
            row["microbatches"] = self.assignment_stats[1]
        (
            self.flops_since_log,
            self.recomputed_flops,
            self.seconds_since_log,
            self.tokens_since_log,
        ) = 0, 0, 0.0, 0
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
        """Add a row to metrics.jsonl. If the disk is full, the run continues; the row is written
        with the next one."""
        try:
            if self.metrics is not None:
                self.metrics.write(row)
        except OSError as error:
            self.progress.say(
                f"step {row['step']}: {self.folder.metrics} cannot be written ({error}); the run "
                "continues"
            )

    def _open_trace(self) -> RoutingTrace | None:
        """Return the routing trace; None if no remaining step is traced or this rank's file is
        damaged."""
        steps, current_step = self.run_config.observe.routing_trace, self.state.step
        try:
            cut_traces(self.folder.routing, self.mesh, resume_at=current_step)
        except (
            OSError,
            DataError,
        ) as error:  # not raised, because other ranks do not fail and would wait
            if current_step < steps:
                _log.warning(
                    "this rank's routing trace ends at step %d, the run continues: %s",
                    current_step,
                    error,
                )
            return None
        if current_step >= steps:
            if (
                steps
                and self.mesh.world.rank == 0
                and not any(self.folder.routing.glob("rank_*.jsonl"))
            ):
                _log.warning(
                    "observe.routing_trace=%d: nothing is traced, because this run continues after "
                    "step %d. Set it to %d or more",
                    steps,
                    current_step,
                    current_step + 1,
                )
            return None
        layers, captures = (
            len([*iter_routers(self.trainer.pipeline_model.modules)]),
            self.run_config.observe.routing_captures,
        )
        return RoutingTrace(
            self.folder.routing, self.mesh, steps=steps, captures=captures, layers=layers
        )

    def _write_trace(self, routing: RoutingRecord, batches: StepBatches) -> None:
        """Add this rank's rows to the routing trace. If the disk is full, the run continues without
        the trace."""
        assert self.trace is not None
        try:
            self.trace.write(self.state.step, routing, batches.microbatches)
        except OSError as error:
            text = (
                "step %d: %s cannot be written (%s); the run continues without this rank's routing "
                "trace"
            )
            _log.warning(text, self.state.step, self.trace.path, error)
            self.trace = None

    def _close_trace(self) -> None:
        """Close the trace and remove the captures of an unfinished step."""
        with suppress(OSError):
            if self.trace is not None:
                self.trace.close()

    def _close_metrics(self) -> None:
        try:
            if self.metrics is not None:
                self.metrics.close()
        except OSError as error:
            self.progress.say(
                f"the last rows of {self.folder.metrics} could not be written ({error})"
            )

    def _evaluate_if_due(self) -> None:
        train, step = self.run_config.train, self.state.step
        due = step == train.steps or (train.eval_every and step % train.eval_every == 0)
        if not due or train.eval_steps == 0 or self.data.splits.valid is None:
            return
        evaluation = evaluate(
            self.trainer.pipeline_model,
            self.data.splits.valid,
            self._masks(),
            samples=train.eval_steps * train.global_batch_size,
            rows=train.micro_batch_size,
            tokenizer=self.tokenizer,
            slicing=local_slicing(self.run_config.parallel, self.mesh),
            budget=self.budget,
        )
        row = {
            "step": step,
            "eval_loss": evaluation.loss,
            "eval_bits_per_byte": evaluation.bits_per_byte,
        }
        self._write(row | evaluation.mtp_metrics())
        bits = (
            ""
            if evaluation.bits_per_byte is None
            else f", {evaluation.bits_per_byte:.3f} bits per byte"
        )
        self.progress.say(
            f"step {step}: held-out loss {evaluation.loss:.4f}{bits}{evaluation.describe_mtp()}"
        )

    def _save(self, *, final: bool = False) -> None:
        """Save this step, unless it is saved already. A failed save is reported; several in a row
        end the run.

        A divergent step is not saved; the next step that is not divergent is saved instead, so that
        retention deletes no good checkpoint.

        Raises:
            DataError: parameters are NaN or infinite, which no further step would change.
        """
        if self.saved_step == self.state.step:
            return
        if self.diverged:
            if not self.save_is_delayed:
                self.progress.say(
                    f"step {self.state.step}: not saved, because its loss or gradient norm is not "
                    "finite; the next step without such values is saved"
                )
            self.save_is_delayed = True
            return
        self.save_is_delayed = False
        entries = self._saved_entries()
        nonfinite = raise_on_all_ranks(lambda: self._check_before_save(entries), self.mesh.world)
        if names := sorted({name for part in nonfinite for name in part}):
            more = f" and {len(names) - 5} more parameters" if names[5:] else ""
            raise self._divergence(
                f"step {self.state.step} is not saved: NaN or infinite values in "
                f"{', '.join(names[:5])}{more}."
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
            self.progress.say(f"the run continues without this checkpoint: {error}")
            return
        self.save_failures, self.saved_step = 0, self.state.step
        _log.info("saved %s", report)

    def _check_before_save(self, entries: Sequence[CheckpointEntry]) -> list[str]:
        """Return the names of the non-finite parameters of this rank.

        Raises:
            CheckpointError: another run has taken over the folder, while this one was suspended.
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
            | ({} if self.lora_base is None else {RECORD: self.lora_base})
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
        """Load the initial weights and state; return the error if the run's own checkpoint,
        `saved`, is damaged."""
        try:
            self._load(saved)
        except DamagedCheckpointError as error:
            if (
                saved is None or error.path != saved.path
            ):  # the user has named this checkpoint, so there is no fallback
                raise
            return error
        return None

    def _load(self, saved: Checkpoint | None) -> None:
        """Load weights and optimizer state from the run's own checkpoint, or as `checkpoint.load`
        says."""
        run, rules = self.run_config, self.run_config.checkpoint
        self.lora_base = self._load_base(saved)
        self.force_load_balancing = trained_with_forced_balancing(saved, run.model)
        self.hf_source = read_hf_source(saved)
        if saved is not None:
            self._load_checkpoint(saved)
            self.progress.say(f"resuming {self.folder.path} at step {self.state.step}")
        elif run.lora is not None:
            if run.lora.load is not None:
                assert self.lora_base is not None, "a LoRA run has base weights"
                forced = load_adapters(
                    self._weights(),
                    run.lora,
                    self.mesh.world,
                    model=run.model,
                    record=self.lora_base,
                )
                self._gather_loaded_weights(forced)
                self.progress.say(f"adapters start from {run.lora.load}")
        elif self.checkpoint_source is not None:
            fresh = self._load_checkpoint(self.checkpoint_source)
            self.force_load_balancing = trained_with_forced_balancing(
                self.checkpoint_source, run.model
            )
            self.hf_source = read_hf_source(self.checkpoint_source)
            self.progress.say(
                describe_checkpoint_source(run, self.checkpoint_source, self.state, fresh=fresh)
            )
        elif rules.load is not None:
            loaded = load_weights_with_records(
                self._weights(), rules.load, self.mesh.world, model=run.model, rules=rules
            )
            for line in loaded.notes:
                self.progress.say(f"{rules.load}: {line}")
            self._gather_loaded_weights(loaded.forced)
            self.hf_source = loaded.hf_source
            self.progress.say(f"starting from {rules.load}")

    def _weights(self) -> list[CheckpointEntry]:
        """Return the entries of the weights and master weights, without optimizer moments."""
        return [
            entry for entry in checkpoint_entries(self.trainer) if entry.role in ("param", "master")
        ]

    def _gather_loaded_weights(self, forced: Sequence[str]) -> None:
        """All-gather loaded weights, and record which of their layers were trained with forced load
        balancing."""
        all_gather_loaded_params(self.trainer)
        self.force_load_balancing = tuple(dict.fromkeys((*forced, *self.force_load_balancing)))

    def _load_checkpoint(self, saved: Checkpoint) -> bool:
        """Load a checkpoint and continue at its step; return whether the optimizer state is new.

        Raises:
            CheckpointError: the checkpoint is of another tokenizer or model, or lacks tensors.
        """
        run, rules = self.run_config, self.run_config.checkpoint
        if saved.state["tokenizer"] != self.tokenizer.fingerprint:
            raise CheckpointError(
                f"{saved.path} was trained with another tokenizer ({saved.state['tokenizer']}, now "
                f"{self.tokenizer.fingerprint}). Use that one, or choose another folder with --run "
                "NAME."
            )
        resets_optimizer = self.checkpoint_source is not None and rules.load_mode == "progress"
        entries = self._weights() if resets_optimizer else checkpoint_entries(self.trainer)
        saved_run = open_pretrained(saved.path, base=None if self.lora_base is None else rules.load)
        padded = (
            self.checkpoint_source is not None
            and saved_run.model.vocab_size == run.model.vocab_size
        )  # possibly with other padding
        report = saved.load_into(
            entries,
            self.mesh.world,
            rules=rules,
            purpose="start" if resets_optimizer else "resume",
            vocab_size=run.model.vocab_size if padded else None,
        )
        # A folder without config.yaml was not compared by list_changed_settings.
        for line in check_same_model(
            saved_run, run.model, allow=rules.allow_model_changes, padded=padded
        ):
            self.progress.say(f"{saved.path}: {line}")
        # New moments start at zero and need bias correction from the first update.
        fresh = resets_optimizer or report.fresh_state
        self.trainer.optimizer.set_updates(0 if fresh else int(saved.state["optimizer_updates"]))
        if (
            self.trainer.loss_scale is not None
            and "loss_scale" in saved.state
            and not resets_optimizer
        ):
            self.trainer.loss_scale.load(saved.state["loss_scale"])
        all_gather_loaded_params(self.trainer)
        return fresh

    def _load_base(self, saved: Checkpoint | None) -> dict[str, str] | None:
        """Load the frozen base weights of LoRA adapters, which this run's checkpoints do not
        hold."""
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
        self.progress.say(f"training LoRA adapters on the frozen weights of {record['base']}")
        return record

    def _open_data(self, saved: Checkpoint | None) -> "_RunData":
        """Build the datasets; their order depends on the number of samples at the first start.

        If the run was made longer since, more epochs follow; the samples read so far stay the same.
        The first rank to arrive builds the indices, the others map them.

        Raises:
            CheckpointError: the data, or its order, is not what the run was started with.
            DataError: there are too few samples, and they are not repeated.
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
        num_available = splits.train.num_samples
        if num_available >= needed or self.run_config.data.sampler != "sequential":
            return _RunData(splits, tuple(orders))
        longer = _RunData(self._datasets([*orders, needed]), (*orders, needed))
        assert longer.splits.train is not None
        if (num_unique := longer.splits.train.num_samples) < needed:
            raise DataError(
                f"train.steps={self.run_config.train.steps} reads {needed} samples, and without "
                f"mixture weights data.path provides each of its {num_unique} samples only once. "
                f"Set train.steps to at most {num_unique // rows}: with weights the samples would "
                "be in another order."
            )
        if longer.splits.train.fingerprint != splits.train.fingerprint:
            self.progress.say(
                f"train.steps={self.run_config.train.steps} reads {needed} samples, and this run's "
                f"order has {num_available}: more epochs follow, each shuffled separately"
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

    def _masks(self) -> MaskSettings:
        return build_mask_settings(self.run_config.data, self.run_config.model, self.tokenizer.eod)

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
            slicing=local_slicing(self.run_config.parallel, self.mesh),
            sampler=self.run_config.data.sampler,
            dropout_seed=dropout_seed(self.run_config),
            num_mtp_layers=self.run_config.model.mtp.num_layers,
            budget=self.budget,
            everyone=self.mesh.world,
            cost=document_cost(self.run_config.model),
            balanced=train.balance_rows,
        )

    def _open_metrics(self) -> None:
        """Open the metrics files on rank 0; an error ends the run on every rank."""
        tensorboard, world = self.run_config.observe.tensorboard, self.mesh.world
        tensorboard_installed = raise_on_all_ranks(
            lambda: has_tensorboard() if self.is_writer else True, world
        )[0]
        if tensorboard and not tensorboard_installed:
            raise ConfigError(
                f"observe.tensorboard={tensorboard} needs the tensorboard package. Run pip install "
                "tensorboard."
            )
        events = (
            self.folder.tensorboard if tensorboard_installed and tensorboard is not False else None
        )

        def open_file() -> None:
            self.metrics = MetricsFile(
                self.folder.metrics, resume_at=self.state.step, tensorboard=events
            )

        raise_on_all_ranks(open_file if self.is_writer else lambda: None, world)


@dataclass(frozen=True, slots=True)
class _RunData:
    """Datasets of a run, and the sample counts that determine their order."""

    splits: Splits
    orders: tuple[int, ...]
    """Number of training samples that the order was first built for, and later extensions."""


def _read_train_state(checkpoint: Checkpoint | None) -> TrainState:
    """Return the counters of a checkpoint; zeros if there is none."""
    return TrainState() if checkpoint is None else TrainState.from_json(checkpoint.state["train"])


def needs_initial_weights(run: TrainRun) -> bool:
    """Return whether a new run initializes any weights randomly: LoRA adapters, or weights that are
    not loaded."""
    return (run.lora is not None and run.lora.load is None) or may_keep_initial_weights(run)


def may_keep_initial_weights(run: TrainRun) -> bool:
    """Return whether model weights may keep their random initialization: some or all are not
    loaded."""
    checkpoint = run.checkpoint
    return checkpoint.load is None or checkpoint.missing_keys != "error" or bool(checkpoint.skip)


def _attention_pairs(model: ModelConfig, batches: StepBatches, dp: int) -> tuple[int, int | None]:
    """Return the squared lengths of the step's documents, and the query-key pairs inside attention
    windows.

    The second is None without windows. If the other ranks' lengths are unknown, this rank's are
    used.
    """
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
    """Check that the data and its order are those of the checkpoint.

    Raises:
        CheckpointError: the fingerprints differ.
    """
    if saved.state["data"] != fingerprint:
        raise CheckpointError(
            f"{saved.path} was trained on other data or in another order:\n"
            f"  then: {saved.state['data']}\n"
            f"  now:  {fingerprint}\n"
            "Use the data and the data.num_train_samples that the run was started with, or choose "
            "another folder with --run NAME (and checkpoint.load_mode=weights, to begin at step 0 "
            "of the data there). Keep train.tokens_per_microbatch set or unset, as it was: rows "
            "and documents have orders of their own."
        )


def _compare_replicas(trainer: Trainer) -> None:
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


def _compare_stages(trainer: Trainer) -> None:
    """Check that pipeline stages that share an embedding table start from equal copies.

    Raises:
        CheckpointError: on every rank of the pipeline, naming the table and the stages.
    """
    local_checksums = {
        param.shard.name: int(param.weight.contiguous().view(torch.uint8).sum(dtype=torch.int64))
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


def build_checked_tokenizer(run: TrainRun) -> Tokenizer:
    """Build the run's tokenizer and check that its ids fit the model's vocabulary.

    Raises:
        ConfigError: the tokenizer has more ids than the model.
    """
    tokenizer = build_tokenizer(run.tokenizer)
    if tokenizer.vocab_size > run.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={run.model.vocab_size} is smaller than the tokenizer's "
            f"{tokenizer.vocab_size} tokens. Set model.vocab_size to {tokenizer.vocab_size} or "
            "more."
        )
    return tokenizer

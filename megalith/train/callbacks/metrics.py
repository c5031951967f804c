"""Metrics of a run: throughput, expert load, metrics.jsonl, TensorBoard and experiment trackers,
progress, plots."""

import math
import time
from collections.abc import Mapping
from contextlib import ExitStack

from megalith.checkpoint.save import SaveReport
from megalith.config.model import list_attention_warnings
from megalith.errors import ConfigError
from megalith.estimate.advise import describe_savings
from megalith.estimate.times import repeated_flops
from megalith.kernels.backend import unavailable_backends
from megalith.kernels.cpu_threads import CompilationProgress
from megalith.kernels.linear import HAS_BF16_KERNELS
from megalith.nn.moe import LOSS_COEFFS
from megalith.observe.machine import DTYPES, device_peak_tflops, peak_memory_gib
from megalith.observe.metrics import MetricsFile, StepProgress, Value, has_tensorboard
from megalith.observe.routing import plot_experts, plot_run
from megalith.observe.trackers import Message, TrackerThread, build_trackers
from megalith.parallel.group import barrier, raise_on_all_ranks
from megalith.plan.buckets import zero_notes
from megalith.plan.costs import model_flops_utilization, tflops_per_device
from megalith.plan.frozen import trained_step_flops
from megalith.plan.kernels import describe_kernels
from megalith.plan.stages import plan_stages
from megalith.plan.state_encodings import state_encoding_notes
from megalith.rules.moe import balance_notes
from megalith.rules.no_effect import unused_notes
from megalith.train.callbacks.base import Callback, FinishedStep, Outcome, RunView, StepMetrics
from megalith.train.evaluate import VALIDATION
from megalith.train.moe import collect_expert_load, expert_load_metrics
from megalith.train.resume import PreparedRun
from megalith.train.suites import SuiteResults


class RunFiles(Callback):
    """Writes the settings, the tokenizer and the parameter groups of the run into its folder."""

    collective = True

    def on_start(self, run: RunView) -> None:
        """Write the files."""
        write_run_files(run.prepared)


def write_run_files(prepared: PreparedRun) -> None:
    """Write the files of `RunFiles` on rank 0. Collective."""
    if prepared.is_writer:
        prepared.write_files()
    barrier(prepared.mesh.world)


class Throughput(Callback):
    """Measures loss, learning rate, tokens per second and FLOP/s since the last logged step."""

    essential = True

    def on_start(self, run: RunView) -> None:
        """Determine the peak of the device and the layers of each stage."""
        self._run, config = run, run.config
        self._stages = plan_stages(
            config.parallel.pipeline,
            pp=config.parallel.pp,
            num_layers=config.model.num_layers,
            depths=config.model.mtp.num_layers,
        )
        self._peak_tflops = config.observe.peak_tflops or device_peak_tflops(
            run.device, DTYPES[config.precision.params]
        )
        self._reset()

    def after_rollback(self, step: int) -> None:
        """Do not count discarded steps."""
        self._reset()

    def _reset(self) -> None:
        """Start to count for the next logged step."""
        self.flops = 0  # of the global batch, without recomputation
        self._recomputed_flops = 0  # FLOPs of activation recomputation, in addition
        self._num_steps, self._seconds = 0, 0.0  # in steps, without evaluation and saving
        self._tokens = 0

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        """Count the work of a step; add the metrics of a logged step."""
        config, batches = self._run.config, finished.batches
        # Only tokens that were read count as useful work, not padding of documents, of
        # context-parallel slices or of conversations.
        squared_lengths, windowed = batches.squared_lengths, batches.num_window_pairs
        self.flops += trained_step_flops(
            config.model,
            config.lora,
            config.optim,
            tokens=batches.num_tokens,
            squared_lengths=squared_lengths,
            windowed=windowed,
        )
        self._recomputed_flops += repeated_flops(
            config,
            self._stages,
            tokens=batches.num_tokens,
            squared_lengths=squared_lengths,
            windowed=windowed,
        )
        self._tokens += batches.num_tokens
        self._num_steps += 1
        self._seconds += finished.seconds
        if self._run.is_logged(finished.step):
            metrics |= self._step_metrics(finished)
            self._reset()

    def _step_metrics(self, finished: FinishedStep) -> StepMetrics:
        run, result, seconds = self._run, finished.result, self._seconds
        state, devices = run.prepared.state, run.mesh.world.size
        tflops = tflops_per_device(self.flops, seconds=seconds, devices=devices)
        mfu = self._peak_tflops and model_flops_utilization(
            self.flops, seconds=seconds, devices=devices, peak_tflops=self._peak_tflops
        )
        metrics: StepMetrics = {
            "step": finished.step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": finished.lr,
            "tokens": state.tokens,
            "tokens_per_second": round(self._tokens / seconds, 1),
            "step_ms": round(seconds * 1000 / self._num_steps, 3),
            "tflops_per_device": round(tflops, 6),
            "mfu": None if mfu is None else round(mfu, 4),
            "memory_gib": round(peak_memory_gib(run.device), 3),
            "skipped": state.skipped,
        }
        if result.z_loss is not None and result.max_logit is not None:
            metrics |= {
                "z_loss": result.z_loss,
                "max_logit": result.max_logit if math.isfinite(result.max_logit) else None,
            }
        if result.largest_score is not None:
            largest = result.largest_score
            metrics |= {
                "max_attention_logit": largest.score if math.isfinite(largest.score) else None,
                "max_attention_logit_layer": largest.attention,
                "max_attention_logit_head": largest.head,
            }
        metrics |= {
            f"lr_{group.name}": finished.group_rates[group.name].lr
            for group in run.config.optim.groups
            if group.sets_rate
        }
        if mfu is not None and self._recomputed_flops:
            metrics["hfu"] = round(mfu * (1 + self._recomputed_flops / max(1, self.flops)), 4)
        if run.prepared.trainer.loss_scale is not None:
            metrics["loss_scale"] = run.prepared.trainer.loss_scale.scale
        return metrics | dict(result.other_losses)


class ExpertLoadMetrics(Callback):
    """Measures the expert load and the aux losses of logged steps."""

    collective = True

    def on_start(self, run: RunView) -> None:
        """Receive the run."""
        self._run = run

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        """Add the metrics of the routers."""
        run, moe = self._run, self._run.config.model.moe
        if moe is None or not run.is_logged(finished.step):
            return
        coeffs = [getattr(moe.aux_loss, name) for name in LOSS_COEFFS]
        expert_loads = collect_expert_load(run.prepared.trainer.pipeline_model.modules, run.mesh)
        metrics |= expert_load_metrics(expert_loads, coeffs, per_layer=run.config.observe.per_layer)


class BatchMetrics(Callback):
    """Measures batch size, zero gradients, packing efficiency and load balance of logged steps."""

    essential = True

    def on_start(self, run: RunView) -> None:
        """Receive the run."""
        self._run = run

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        """Add the metrics of the step's batches."""
        config, batches = self._run.config, finished.batches
        if not self._run.is_logged(finished.step):
            return
        if config.train.batch_size_schedule:
            metrics["batch_size"] = finished.num_samples
        result = finished.result
        if result.num_zeros is not None:
            metrics["grad_zeros"] = result.num_zeros
        if result.unclipped_grad_norm is not None:
            metrics["unclipped_grad_norm"] = result.unclipped_grad_norm
        metrics |= {f"grad_norm_{name}": norm for name, norm in result.grad_norms.items()}
        if result.skipped_reason:
            metrics["skipped_reason"] = result.skipped_reason
        packed = config.train.tokens_per_microbatch is not None
        if config.data.sft.used() or packed:
            metrics |= {
                "supervised_share": round(batches.num_labels / max(1, batches.num_tokens), 4),
                "fill": round(batches.num_tokens / max(1, batches.num_padded_tokens), 4),
            }
        if batches.imbalance is not None:
            metrics["imbalance"] = round(batches.imbalance, 4)
        if packed:
            metrics["microbatches"] = len(batches.microbatches)


class Plots(Callback):
    """Draws the loss and the expert load at the end of a run (observe.plots)."""

    essential = True

    def on_start(self, run: RunView) -> None:
        """Receive the run."""
        self._run = run

    def on_end(self, outcome: Outcome) -> None:
        """Draw the plots from metrics.jsonl, which is closed."""
        if self._run.is_writer and self._run.config.observe.plots:
            plot_run(self._run.folder.path)
            plot_experts(self._run.folder.path)


class MetricsWriter(Callback):
    """Writes rows to metrics.jsonl and TensorBoard, on rank 0."""

    collective = True

    def __init__(self) -> None:
        self._file: MetricsFile | None = None

    def on_start(self, run: RunView) -> None:
        """Open the files; an error ends the run on every rank.

        Raises:
            CheckpointError: a file cannot be opened.
            ConfigError: observe.tensorboard is set and the package is missing.
        """
        self._run = run
        tensorboard, world = run.config.observe.tensorboard, run.mesh.world
        tensorboard_installed = raise_on_all_ranks(
            lambda: has_tensorboard() if run.is_writer else True, world
        )[0]
        if tensorboard and not tensorboard_installed:
            raise ConfigError(
                f"observe.tensorboard={tensorboard} needs the tensorboard package. Run pip install "
                "tensorboard."
            )
        self._events = (
            run.folder.tensorboard if tensorboard_installed and tensorboard is not False else None
        )
        raise_on_all_ranks(lambda: self._open() if run.is_writer else None, world)

    def after_rollback(self, step: int) -> None:
        """Remove the rows of discarded steps.

        Raises:
            CheckpointError: the file cannot be written.
        """
        self._close()
        raise_on_all_ranks(
            lambda: self._open() if self._run.is_writer else None, self._run.mesh.world
        )

    def _open(self) -> None:
        run = self._run
        self._file = MetricsFile(run.folder.metrics, resume_at=run.step, tensorboard=self._events)

    def on_log(self, metrics: Mapping[str, Value]) -> None:
        """Write a row. If the disk is full, the run continues; the row is written with the next
        one."""
        try:
            if self._file is not None:
                self._file.write(metrics)
        except OSError as error:
            self._run.log(
                f"step {metrics['step']}: {self._run.folder.metrics} cannot be written ({error}); "
                "the run continues"
            )

    def on_error(self, error: BaseException) -> None:
        """Close the files."""
        self._close()

    def on_end(self, outcome: Outcome) -> None:
        """Close the files."""
        self._close()

    def _close(self) -> None:
        try:
            if self._file is not None:
                self._file.close()
        except OSError as error:
            self._run.log(
                f"the last rows of {self._run.folder.metrics} could not be written ({error})"
            )


class ExperimentTrackers(Callback):
    """Sends rows of metrics to W&B and MLflow, on rank 0 (observe.wandb, observe.mlflow).

    Only `on_start` is collective: a later error ends the trackers, not the run.
    """

    def __init__(self) -> None:
        self.collective = True
        self._threads: list[TrackerThread] = []

    def on_start(self, run: RunView) -> None:
        """Connect, from a thread per tracker.

        Raises:
            CheckpointError: on every rank: a package is not installed.
        """
        self._run = run
        raise_on_all_ranks(lambda: self._open() if run.is_writer else None, run.mesh.world)
        self.collective = False

    def _open(self) -> None:
        config, prepared = self._run.config, self._run.prepared
        trackers = build_trackers(
            config.observe,
            config,
            self._run.folder.path,
            is_resumed=prepared.is_resumed,
        )
        self._threads = [TrackerThread(tracker, step=self._run.step) for tracker in trackers]

    def on_log(self, metrics: Mapping[str, Value]) -> None:
        """Queue a row."""
        self._put({**metrics})

    def after_save(self, report: SaveReport) -> None:
        """Queue the path of the checkpoint."""
        self._put(report.path.absolute())

    def after_rollback(self, step: int) -> None:
        """Continue after an earlier step."""
        self._put(step)

    def _put(self, message: Message) -> None:
        for thread in self._threads:
            thread.put(message)

    def on_error(self, error: BaseException) -> None:
        """End the runs as failed."""
        self._close(failed=True)

    def on_end(self, outcome: Outcome) -> None:
        """End the runs."""
        self._close(failed=False)

    def _close(self, *, failed: bool) -> None:
        for thread in self._threads:
            thread.end(failed=failed)
        deadline = time.monotonic() + self._run.config.observe.flush_seconds  # of all together
        for thread in self._threads:
            thread.close(failed=failed, seconds=deadline - time.monotonic())


class ProgressReporter(Callback):
    """Prints notes on the settings at the start, and the progress of steps and evaluations."""

    essential = True

    def __init__(self, progress: StepProgress) -> None:
        self._progress = progress
        self._stack = ExitStack()

    def on_start(self, run: RunView) -> None:
        """Print the notes; report the compilation of CPU kernels from now on."""
        self._progress.resume(run.step)
        for line in [*run.prepared.data.splits.notes, *_list_notes(run)]:
            run.log(line)
        self._stack.enter_context(CompilationProgress(run.log))

    def after_rollback(self, step: int) -> None:
        """Move the progress bar back."""
        self._progress.resume(step)

    def on_log(self, metrics: Mapping[str, Value]) -> None:
        """Report a finished step."""
        step, loss, lr = metrics["step"], metrics.get("loss"), metrics.get("lr")
        rate = metrics.get("tokens_per_second")
        if isinstance(step, int) and loss is not None:
            self._progress.step(
                step, {"loss": f"{loss:.4f}", "lr": f"{lr:.2e}", "tokens/s": f"{rate:,.0f}"}
            )

    def after_evaluate(self, results: SuiteResults, metrics: StepMetrics) -> None:
        """Print the results."""
        for name, result in results.items():
            label = "held-out" if name == VALIDATION else name
            self._progress.print_line(f"step {metrics['step']}: {label} {result.describe()}")

    def on_error(self, error: BaseException) -> None:
        """Stop reporting compilation."""
        self._stack.close()

    def on_end(self, outcome: Outcome) -> None:
        """Stop reporting compilation."""
        self._stack.close()


def _list_notes(run: RunView) -> list[str]:
    """Return notes on the settings: without effect, costly, or better on this device."""
    config, mesh = run.config, run.mesh
    notes = unused_notes(config, mesh.world.size) + zero_notes(config.parallel, mesh.dp.size)
    notes += state_encoding_notes(config.optim, config.precision)
    notes += list_attention_warnings(config.model.attention)
    if config.lora is None:  # LoRA freezes the routers
        notes += balance_notes(config.model)
    notes += describe_savings(
        config,
        mesh.world.size,
        pp_rank=mesh.pp.rank,
        tp_rank=mesh.tp.rank,
        accelerator=run.device.type != "cpu",
    )
    return notes + describe_kernels(
        config, run.device.type, unavailable_backends(), bf16_kernels=HAS_BF16_KERNELS
    )

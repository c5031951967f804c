"""The training loop: resume, step, log, evaluate, save, stop."""

import logging
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from megalith.checkpoint.load import Checkpoint, find_latest, open_checkpoint
from megalith.checkpoint.lock import lock_run
from megalith.checkpoint.retention import sweep
from megalith.checkpoint.save import save_checkpoint
from megalith.config.train import TrainRun
from megalith.config.tree import dump_yaml
from megalith.data.build import Splits, build_datasets
from megalith.data.loader import Loader, Masks
from megalith.data.tokenizer import Tokenizer, build_tokenizer
from megalith.errors import CheckpointError, ConfigError
from megalith.models.pretrained import load_pretrained
from megalith.observe.machine import device_peak_tflops, peak_memory_gib
from megalith.observe.metrics import MetricsFile, Row, has_tensorboard
from megalith.observe.plots import plot_run
from megalith.observe.progress import StepProgress
from megalith.optim.schedule import learning_rate, schedule_lengths, weight_decay
from megalith.parallel.group import barrier, gather_objects
from megalith.parallel.mesh import Mesh
from megalith.plan.costs import flops_per_token
from megalith.train.build import DTYPES, build_trainer, checkpoint_entries
from megalith.train.evaluate import evaluate
from megalith.train.folder import RunFolder, changed_settings, write_config
from megalith.train.state import TrainState
from megalith.train.step import StepResult, train_step
from megalith.train.stop import Stopper

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    kind: Literal["done", "stopped"]
    step: int
    reason: str = ""


def run_training(run: TrainRun, folder: RunFolder, mesh: Mesh, device: torch.device, *, show: bool = True) -> Outcome:
    """Train until the last step, a signal or the time limit; continue where the folder's newest checkpoint left off.

    Collective over the whole mesh; the rules have been checked.

    Raises:
        ConfigError: the folder holds a run with other fixed settings.
        CheckpointError: the folder is in use, its checkpoint is of another model, or saving failed too often in a row.
        DataError: the data is missing, damaged, or not what the run was started with.
    """
    first = mesh.world.rank == 0
    with lock_run(folder.path) if first else nullcontext():
        with StepProgress(total=run.train.steps, start=0, show=show and first) as progress:
            if first:
                for line in changed_settings(folder, run):
                    progress.say(f"changed since the run was started: {line}")
                sweep(folder.checkpoints)  # what a run that was killed left half written
            return _Loop(run, folder, mesh, device, progress).run()


class _Loop:
    """One run of the loop: what it computes with, where it is, and where it writes."""

    def __init__(
        self, run: TrainRun, folder: RunFolder, mesh: Mesh, device: torch.device, progress: StepProgress
    ) -> None:
        self.run_config, self.folder, self.mesh, self.progress = run, folder, mesh, progress
        self.writer = mesh.world.rank == 0
        found = gather_objects(find_latest(folder.checkpoints) if self.writer else None, mesh.world)[0]
        saved = open_checkpoint(found) if isinstance(found, Path) else None
        self.state = TrainState() if saved is None else TrainState.from_json(saved.state["train"])
        self.tokenizer = _matching_tokenizer(run)
        self._open_data(saved)
        self.trainer = build_trainer(run, mesh, device, fill=saved is None and run.checkpoint.load is None)
        self._load(saved)
        if self.writer:
            write_config(folder, run)
        barrier(mesh.world)
        self.metrics: MetricsFile | None = None  # opened by the first step
        self.lengths = schedule_lengths(
            run.schedule, global_batch_size=run.train.global_batch_size, total_steps=run.train.steps
        )
        self.flops = flops_per_token(run.model, run.train.seq_len)
        self.peak = run.observe.peak_tflops or device_peak_tflops(device, DTYPES[run.precision.params])
        self.save_failures = 0
        self.saved_step = self.state.step if saved is not None else -1

    def run(self) -> Outcome:
        """Steps until the end or a stop."""
        run, state = self.run_config, self.state
        if state.step >= run.train.steps:
            self.progress.say(f"{self.folder.path} is already at step {state.step} of {run.train.steps}")
            return Outcome("done", state.step)
        outcome = Outcome("done", run.train.steps)
        self.metrics = self._open_metrics() if self.writer else None
        try:
            with Stopper(max_minutes=run.train.max_minutes, say=self.progress.say) as stopper:
                loader = self._loader()
                clock = _Clock()
                while state.step < run.train.steps:
                    result = self._step(loader, stop=stopper.reason is not None)
                    self._log_step(result, clock)
                    self._evaluate_if_due()
                    if result.stop:
                        outcome = Outcome("stopped", state.step, stopper.reason or "another rank was asked to stop")
                        break
                    if run.checkpoint.every and state.step % run.checkpoint.every == 0:
                        self._save()
                self._save(final=True)
        finally:
            self._close_metrics()
        if self.writer and run.observe.plots:
            plot_run(self.folder.path)
        return outcome

    def _step(self, loader: Loader, *, stop: bool) -> StepResult:
        run, state = self.run_config, self.state
        self.lr = learning_rate(run.schedule, state.scheduled_samples, self.lengths)
        decay = weight_decay(run.schedule, state.scheduled_samples, self.lengths)
        result = train_step(self.trainer, loader.next(), lr=self.lr, weight_decay=decay, stop=stop)
        rows = run.train.global_batch_size
        state.step += 1
        state.consumed_samples += rows
        state.tokens += rows * run.train.seq_len
        if result.updated:
            state.scheduled_samples += rows
        else:
            state.skipped += 1
            self.progress.say(f"step {state.step}: gradient norm {result.grad_norm}; nothing was updated")
        return result

    def _log_step(self, result: StepResult, clock: "_Clock") -> None:
        run, state = self.run_config, self.state
        clock.steps += 1
        if state.step % run.train.log_every and state.step != run.train.steps:
            return
        seconds = clock.seconds_per_step()
        per_second = run.train.global_batch_size * run.train.seq_len / seconds
        tflops = per_second * self.flops / self.mesh.world.size / 1e12
        row = {
            "step": state.step, "loss": result.loss, "grad_norm": result.grad_norm, "lr": self.lr,
            "tokens": state.tokens, "tokens_per_second": round(per_second, 1), "step_ms": round(seconds * 1000, 3),
            "tflops_per_device": round(tflops, 6), "mfu": round(tflops / self.peak, 4) if self.peak else None,
            "memory_gib": round(peak_memory_gib(self.trainer.device), 3), "skipped": state.skipped,
        }  # fmt: skip
        self._write(row)
        self.progress.step(
            state.step, {"loss": f"{result.loss:.4f}", "lr": f"{self.lr:.2e}", "tokens/s": f"{per_second:,.0f}"}
        )

    def _write(self, row: Row) -> None:
        """Add a row to metrics.jsonl. A full disk ends no run: the row waits in memory for the next one."""
        try:
            if self.metrics is not None:
                self.metrics.write(row)
        except OSError as error:
            self.progress.say(f"step {row['step']}: {self.folder.metrics} cannot be written ({error}); the run goes on")

    def _close_metrics(self) -> None:
        try:
            if self.metrics is not None:
                self.metrics.close()
        except OSError as error:
            self.progress.say(f"{self.folder.metrics} lacks its last rows ({error})")

    def _evaluate_if_due(self) -> None:
        train, step = self.run_config.train, self.state.step
        due = step == train.steps or (train.eval_every is not None and step % train.eval_every == 0)
        if not due or train.eval_steps == 0 or self.splits.valid is None:
            return
        found = evaluate(
            self.trainer.model, self.splits.valid, self._masks(), self.mesh,
            samples=train.eval_steps * train.global_batch_size, rows=train.micro_batch_size, tokenizer=self.tokenizer,
            device=self.trainer.device,
        )  # fmt: skip
        self._write({"step": step, "eval_loss": found.loss, "eval_bits_per_byte": found.bits_per_byte})
        bits = "" if found.bits_per_byte is None else f", {found.bits_per_byte:.3f} bits per byte"
        self.progress.say(f"step {step}: held-out loss {found.loss:.4f}{bits}")

    def _save(self, *, final: bool = False) -> None:
        """Save this step, unless it is saved already; a failure is announced, and only several in a row end the run."""
        if self.saved_step == self.state.step:
            return
        keep = self.run_config.checkpoint
        try:
            report = save_checkpoint(
                self.folder.checkpoints, self.state.step, checkpoint_entries(self.trainer), self._state_json(),
                self.mesh.world, config_text=dump_yaml(self.run_config), keep=keep.keep, keep_every=keep.keep_every,
            )  # fmt: skip
        except CheckpointError as error:
            self.save_failures += 1
            if final or self.save_failures >= keep.max_save_failures:
                raise
            self.progress.say(f"the run goes on without this checkpoint: {error}")
            return
        self.save_failures, self.saved_step = 0, self.state.step
        _log.info("saved %s", report)

    def _state_json(self) -> dict[str, Any]:  # Any: JSON
        assert self.splits.train is not None
        return {
            "train": self.state.as_json(), "optimizer_updates": self.trainer.optimizer.updates,
            "data": self.splits.train.fingerprint, "order_samples": self.order_samples,
        }  # fmt: skip

    def _load(self, saved: Checkpoint | None) -> None:
        """Fill weights and moments from the run's own checkpoint, or weights from the one it starts from."""
        if saved is not None:
            assert self.splits.train is not None
            if saved.state["data"] != self.splits.train.fingerprint:
                raise CheckpointError(
                    f"{saved.path} was trained on other data or in another order:\n  then: {saved.state['data']}\n"
                    f"  now:  {self.splits.train.fingerprint}\n"
                    f"{self.way_out}, or choose another folder with --run NAME."
                )
            saved.load_into(checkpoint_entries(self.trainer), self.mesh.world)
            self.trainer.optimizer.set_updates(int(saved.state["optimizer_updates"]))
            self.progress.say(f"resuming {self.folder.path} at step {self.state.step}")
        elif self.run_config.checkpoint.load is not None:
            weights = [e for e in checkpoint_entries(self.trainer) if e.role in ("param", "master")]
            source = self.run_config.checkpoint.load
            for line in load_pretrained(weights, source, self.mesh.world, model=self.run_config.model):
                self.progress.say(f"{source}: {line}")
            self.progress.say(f"starting from {source}")

    def _open_data(self, saved: Checkpoint | None) -> None:
        """Build the datasets. Their order follows from a count of samples: that of the first start, if it suffices.

        Indices are built by whoever comes first and mapped by the others.
        """
        needed = self.run_config.train.steps * self.run_config.train.global_batch_size
        self.order_samples = needed if saved is None else int(saved.state["order_samples"])
        self.splits = self._datasets(self.order_samples)
        self.way_out = "Use the data and the data.num_train_samples that the run was started with"
        if self.splits.train is not None and self.splits.train.num_samples < needed:
            enough_for = self.splits.train.num_samples // self.run_config.train.global_batch_size
            self.way_out = f"Set train.steps to at most {enough_for}, which the order it began with has samples for"
            self.order_samples = needed
            self.splits = self._datasets(needed)

    def _datasets(self, train_samples: int) -> Splits:
        run, train = self.run_config, self.run_config.train
        return build_datasets(
            run.data, seq_len=train.seq_len, seed=run.seed, train_samples=train_samples,
            valid_samples=train.eval_steps * train.global_batch_size, test_samples=0, vocab_size=run.model.vocab_size,
            eod=self.tokenizer.eod,
        )  # fmt: skip

    def _masks(self) -> Masks:
        data = self.run_config.data
        return Masks(eod=self.tokenizer.eod, documents=data.documents, eod_mask_loss=data.eod_mask_loss)

    def _loader(self) -> Loader:
        train = self.run_config.train
        assert self.splits.train is not None
        return Loader(
            self.splits.train, self._masks(), self.mesh.dp, global_batch_size=train.global_batch_size,
            micro_batch_size=train.micro_batch_size, consumed=self.state.consumed_samples,
            steps=train.steps - self.state.step, device=self.trainer.device,
        )  # fmt: skip

    def _open_metrics(self) -> MetricsFile:
        wanted = self.run_config.observe.tensorboard
        use = has_tensorboard() if wanted is None else wanted
        if use and not has_tensorboard():
            raise ConfigError(
                f"observe.tensorboard={wanted} needs the tensorboard package. Run pip install tensorboard."
            )
        return MetricsFile(
            self.folder.metrics, resume_at=self.state.step, tensorboard=self.folder.tensorboard if use else None
        )


class _Clock:
    """Time per step since the last logged one."""

    def __init__(self) -> None:
        self.steps = 0
        self._since = time.perf_counter()

    def seconds_per_step(self) -> float:
        """Mean since the last call."""
        now = time.perf_counter()
        seconds = (now - self._since) / max(1, self.steps)
        self.steps, self._since = 0, now
        return seconds


def _matching_tokenizer(run: TrainRun) -> Tokenizer:
    """The run's tokenizer, whose ids the model must know."""
    tokenizer = build_tokenizer(run.tokenizer)
    if tokenizer.vocab_size > run.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={run.model.vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size} tokens. "
            f"Set model.vocab_size to {tokenizer.vocab_size} or more."
        )
    return tokenizer

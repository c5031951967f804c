"""Dumps of weights and gradients."""

import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith import storage
from megalith.checkpoint.safetensors import PlannedTensor, write_file
from megalith.parallel.grad_sync import ShardedParam
from megalith.train.callbacks.base import Callback, FinishedStep, Outcome, RunView, StepMetrics


class TensorDump(Callback):
    """Dumps this rank's shards of weights and gradients every few steps (observe.dump).

    A step only clones the tensors on its device; a thread copies the clones to the host and writes
    them. At most one dump is in memory.
    """

    def __init__(self) -> None:
        self._clones: dict[str, Tensor] = {}
        self._boxes: dict[str, str] = {}
        self._written: Future[None] | None = None

    def on_start(self, run: RunView) -> None:
        """Start the thread that writes; remove dumps of steps that this run repeats."""
        self._run, self._config = run, run.config.observe.dump
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dump")
        if run.is_writer:  # before any rank finishes a step; the run may have had more ranks
            for folder in self._list_later_folders(run.step):
                shutil.rmtree(folder)

    def _is_due(self, step: int) -> bool:
        assert self._config.every is not None
        return step % self._config.every == 0

    def after_backward(self, local_params: Sequence[ShardedParam]) -> None:
        """Clone the gradients without the loss scale; a rerun replaces them."""
        if self._config.gradients and self._is_due(self._run.step + 1):
            loss_scale = self._run.prepared.trainer.loss_scale
            scale = 1.0 if loss_scale is None else loss_scale.scale
            self._clone("grad", {param: param.gradient for param in self._select()}, scale)

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        """Clone the weights, and write the file from a thread."""
        if not self._is_due(finished.step):
            return
        if self._config.weights:
            self._clone("param", {param: param.weight for param in self._select()})
        self._wait()
        clones, boxes = self._clones, self._boxes
        self._clones, self._boxes = {}, {}
        is_gpu = self._run.device.type != "cpu"
        cloned = torch.cuda.current_stream(self._run.device).record_event() if is_gpu else None
        self._written = self._pool.submit(self._write, finished.step, clones, boxes, cloned)

    def _select(self) -> list[ShardedParam]:
        only = self._config.only or ("*",)
        return [
            param
            for param in self._run.local_params
            if any(fnmatchcase(param.shard.name, pattern) for pattern in only)
        ]

    def _clone(self, role: str, tensors: Mapping[ShardedParam, Tensor], scale: float = 1.0) -> None:
        """Clone tensors on their device, divided by `scale`."""
        self._wait()
        for param, tensor in tensors.items():
            name = f"{param.shard.name}/{role}"
            clone = tensor.detach().clone(memory_format=torch.contiguous_format)
            self._clones[name] = clone if scale == 1.0 else clone.div_(scale)
            self._boxes[name] = f"box {param.shard.box} elements {param.shard.flat or 'all'}"

    def _wait(self) -> None:
        """Wait for the last dump, whose error ends this callback."""
        if self._written is not None:
            self._written.result()

    def _write(
        self,
        step: int,
        clones: dict[str, Tensor],
        boxes: dict[str, str],
        cloned: Any,  # Any: torch.cuda.Event, which CPU builds lack
    ) -> None:
        """Replace the file of a step, which exists if the run has resumed at an earlier one."""
        rank = self._run.mesh.world.rank
        folder = self._run.folder.path / "dumps" / f"step_{step:07d}"
        folder.mkdir(parents=True, exist_ok=True)
        plan = [PlannedTensor(name, x.dtype, tuple(x.shape)) for name, x in clones.items()]
        file = folder / f"rank_{rank:05d}.safetensors"
        temporary = file.with_name(f"{file.name}.tmp")
        storage.remove_file(temporary)  # left by a killed run
        write_file(temporary, plan, copy_to_host(clones, cloned).values(), boxes)
        temporary.replace(file)

    def after_rollback(self, step: int) -> None:
        """Forget the gradients of a discarded step, and remove this rank's files of later steps."""
        self._clones.clear()
        self._boxes.clear()
        self._wait()
        for folder in self._list_later_folders(step):
            storage.remove_file(folder / f"rank_{self._run.mesh.world.rank:05d}.safetensors")

    def _list_later_folders(self, step: int) -> list[Path]:
        folders = (self._run.folder.path / "dumps").glob("step_*")
        return [folder for folder in folders if int(folder.name.removeprefix("step_")) > step]

    def on_error(self, error: BaseException) -> None:
        """Wait for the last dump."""
        self._pool.shutdown()

    def on_end(self, outcome: Outcome) -> None:
        """Wait for the last dump."""
        self._pool.shutdown()
        self._wait()


def copy_to_host(clones: Mapping[str, Tensor], cloned: Any) -> dict[str, Tensor]:
    """Return the tensors in host memory; `cloned`: event after which those of a GPU are complete
    (Any: torch.cuda.Event, which CPU builds lack).

    Copies from a GPU use a stream of their own, so that they do not wait for the steps that
    follow, and return when they are complete.
    """
    if cloned is None:
        return dict(clones)
    stream = torch.cuda.Stream(cloned.device)
    stream.wait_event(cloned)
    with torch.cuda.stream(stream):
        return {name: clone.to("cpu") for name, clone in clones.items()}

"""The routing trace: the experts of every token of a run's first steps, one JSON lines file per
rank, with captures of router inputs and outputs."""

import contextlib
import json
import logging
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megalith.checkpoint.format import as_bytes
from megalith.checkpoint.safetensors import PlannedTensor, padded_header
from megalith.config.observe import Captured
from megalith.data.loader import Batch, StepBatches
from megalith.errors import DataError
from megalith.kernels.layer_inputs import RoutingCapture, RoutingRecord
from megalith.observe.metrics import cut_after
from megalith.parallel.mesh import Mesh
from megalith.train.callbacks.base import Callback, FinishedStep, Outcome, RunView, StepMetrics
from megalith.train.moe import (
    attach_routing,
    iter_routers,
    iter_routing_parts,
    layer_sort_key,
    text_token_mask,
)

_log = logging.getLogger(__name__)

# Captures of the routing trace: router inputs and outputs, a safetensors file per rank and step.
#
# Tensors are named LAYER/MICROBATCH/KIND, such as `layers.3/0/hidden`, with one row per token of
# the trace row of that layer and microbatch, in the same order. Router weights are named
# LAYER/router/NAME.

WAITING = 4
"""Tensors in host memory that wait to be written before the step blocks (heuristic: the tensors of
one layer)."""

_ENTRY_NBYTES = 256
"""Upper bound of a tensor's bytes in the header: name, shape and offsets take about 150."""


class CaptureFile:
    """One captures file, written while its tensors are captured; renamed to its final name when
    complete.

    A thread writes. At most a few tensors are queued, which limits memory.
    """

    def __init__(self, path: Path, *, most: int) -> None:
        """Reserve space in front for the header of at most `most` tensors. Creates no file yet."""
        self.path, self._part = path, path.with_name(path.name + ".part")
        self._header_nbytes = 8 * (128 + most * _ENTRY_NBYTES // 8)
        self._planned: list[PlannedTensor] = []
        self._waiting: deque[Future[None]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._file: BinaryIO | None = None
        self._failed: OSError | None = None

    def put(self, name: str, values: Tensor) -> None:
        """Add a tensor in host memory, which must not change any more. `finish` raises write
        errors."""
        if self._failed is not None:
            return
        self._planned.append(PlannedTensor(name, values.dtype, tuple(values.shape)))
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="captures")
        self._waiting.append(self._pool.submit(self._write, values))
        self._wait(at_most=WAITING)

    def finish(self) -> bool:
        """Write the header and rename the file to its final name; return False if there are no
        tensors.

        Raises:
            OSError: a write failed; the file is removed.
        """
        self._wait(at_most=0)
        try:
            if self._failed is not None:
                raise self._failed
            if self._file is None:
                return False
            self._file.seek(0)
            self._file.write(padded_header(self._header_nbytes, self._planned, {"format": "pt"}))
            self._file.close()
            self._part.replace(self.path)
        except OSError:
            self.abandon()
            raise
        self._end()
        return True

    def abandon(self) -> None:
        """Remove the incomplete file."""
        self._wait(at_most=0)
        self._end()
        self._part.unlink(missing_ok=True)

    def _write(self, values: Tensor) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._part.open("wb")
            self._file.seek(self._header_nbytes)
        for data in as_bytes(values):
            self._file.write(data)

    def _wait(self, *, at_most: int) -> None:
        """Wait until at most this many tensors are queued."""
        while len(self._waiting) > at_most:
            try:
                self._waiting.popleft().result()
            except OSError as error:
                self._failed = self._failed or error

    def _end(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:  # the buffered data does not fit either
                self._failed = self._failed or error


class CaptureWriter:
    """Writes what routers expose into a captures file, once each, in the trace's order and without
    padding."""

    def __init__(
        self,
        kinds: Collection[Captured],
        capture_file: CaptureFile,
        batches: Sequence[Batch],
        mesh: Mesh,
    ) -> None:
        self._kinds, self._capture_file, self._batches, self._mesh = (
            kinds,
            capture_file,
            batches,
            mesh,
        )
        self._done: set[tuple[str, int]] = set()
        self._captured_layers: set[str] = set()  # layers whose router weights are written

    def __call__(self, capture: RoutingCapture) -> None:
        """Write a router's capture; repeated calls in activation recomputation are ignored."""
        if (capture.layer, capture.microbatch) in self._done:
            return
        self._done.add((capture.layer, capture.microbatch))
        number, count = capture.microbatch, len(capture.hidden)
        is_text = torch.from_numpy(
            text_token_mask(self._batches[number].seq_params, count, self._mesh)
        )
        for kind in ("hidden", "logits", "weights"):
            if kind in self._kinds:
                values: Tensor = (
                    getattr(capture, kind).detach().to("cpu", torch.bfloat16, copy=True)
                )
                self._capture_file.put(
                    f"{capture.layer}/{number}/{kind}", values if is_text.all() else values[is_text]
                )
        if (
            "routers" in self._kinds
            and capture.layer not in self._captured_layers
            and self._mesh.over("dp", "cp", "tp").rank == 0
        ):
            self._captured_layers.add(capture.layer)  # all ranks of a stage have the same weights
            for name, values in capture.routers.items():
                self._capture_file.put(
                    f"{capture.layer}/router/{name}", values.detach().to("cpu", copy=True)
                )


class RoutingTrace:
    """Writes a rank's trace rows during the first steps of a run; the first row creates the
    file."""

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        *,
        steps: int,
        captures: Collection[Captured] = (),
        layers: int = 0,
    ) -> None:
        """Trace the first `steps` steps; a resumed run must call `cut_traces` before.

        `captures`: the kinds of tensors to capture, of the `layers` with experts on this rank.
        """
        self.path = _trace_path(folder, mesh.world.rank)
        self._mesh, self._steps, self._captures, self._layers = mesh, steps, captures, layers
        self._capture_file: CaptureFile | None = None

    def begin(self, step: int, batches: Sequence[Batch]) -> RoutingRecord | None:
        """Return the object in which routers record their choices in a step; None if it is not
        traced."""
        if step > self._steps:
            return None
        if not self._captures:
            return RoutingRecord()
        # tensors of every microbatch, and the router's weights
        most = self._layers * (len(batches) * 3 + 4)
        self._capture_file = CaptureFile(_capture_path(self.path, step), most=most)
        return RoutingRecord(
            watch=CaptureWriter(self._captures, self._capture_file, batches, self._mesh)
        )

    def write(self, step: int, routing: RoutingRecord, batches: Sequence[Batch]) -> None:
        """Write the choices of this rank's routers in a step.

        Raises:
            OSError: writing failed; the file has no row of the step.
        """
        capture_file, self._capture_file = self._capture_file, None
        capture_path = (
            capture_file.path if capture_file is not None and capture_file.finish() else None
        )
        name = None if capture_path is None else capture_path.name
        rows = trace_rows(step, routing, batches, self._mesh, name)
        lines = [json.dumps(row, separators=(",", ":")) + "\n" for row in rows]
        if not lines:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(lines)
        except OSError:
            with contextlib.suppress(OSError, DataError):
                cut_after(self.path, step - 1)
            with contextlib.suppress(OSError):
                if capture_path is not None:
                    capture_path.unlink()
            raise

    def close(self) -> None:
        """Remove the captures of an unfinished step."""
        if self._capture_file is not None:
            self._capture_file.abandon()


def cut_traces(folder: Path, mesh: Mesh, *, resume_at: int) -> None:
    """Remove rows after step `resume_at`, which a killed run has left, and their captures.

    Every rank edits its own files, the first rank also those of ranks that no longer exist; a
    damaged file of these is kept, with a warning.

    Raises:
        DataError, OSError: this rank's own file is damaged or cannot be written; raised on this
            rank only.
    """
    last = _trace_path(folder, mesh.world.size - 1)
    for path in (
        [path for path in folder.glob("rank_*.jsonl") if path > last]
        if mesh.world.rank == 0
        else []
    ):
        try:
            _cut_trace(path, resume_at)
        except (OSError, DataError) as error:
            _log.warning(
                "a routing trace of a rank that no longer exists is damaged and is unchanged: %s",
                error,
            )
    _cut_trace(_trace_path(folder, mesh.world.rank), resume_at)


def _cut_trace(path: Path, resume_at: int) -> None:
    for capture_path in path.parent.glob(f"{path.stem}_step_*.safetensors*"):
        if capture_path.suffix == ".part" or capture_path > _capture_path(path, resume_at):
            capture_path.unlink()
    cut_after(path, resume_at)


def trace_rows(
    step: int,
    routing: RoutingRecord,
    batches: Sequence[Batch],
    mesh: Mesh,
    capture_file: str | None = None,
) -> Iterator[dict[str, Any]]:  # Any: JSON
    """Yield a trace row for each of this rank's MoE layers and microbatches, layer by layer.

    `experts` has the k choices of every token, best first, before token dropping, without padding
    and filler. Layers are named as in their parameters; `mtp` is the depth of an MTP layer; `stage`
    is the pipeline rank. Ranks of several stages with the same dp, cp and tp rank have the same
    tokens in the same order.
    """
    coordinates = {"dp": mesh.dp.rank, "cp": mesh.cp.rank, "tp": mesh.tp.rank}
    routing_parts = iter_routing_parts(routing, batches, mesh, filler=False)
    name = "sidecar"  # lint: allow old-word: field of the trace format
    captures = {} if capture_file is None else {name: capture_file}
    for part in sorted(
        routing_parts, key=lambda part: (layer_sort_key(part.layer), part.microbatch)
    ):
        is_mtp, number = layer_sort_key(part.layer)
        yield {
            "step": step,
            "stage": mesh.pp.rank,
            "layer": part.layer,
            **({"mtp": number} if is_mtp else {}),
            "rank": mesh.world.rank,
            **coordinates,
            "microbatch": part.microbatch,
            "num_tokens": len(part.experts),
            "top_k": part.experts.shape[1],
            **captures,
            "experts": part.experts.tolist(),
        }


def _trace_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.jsonl"


def _capture_path(path: Path, step: int) -> Path:
    """Return the path of a step's captures, from the path of the rank's trace."""
    return path.with_name(f"{path.stem}_step_{step:07d}.safetensors")


class RoutingTraceWriter(Callback):
    """Writes the routing trace of the first `observe.routing_trace` steps."""

    essential = True

    def __init__(self) -> None:
        self._trace: RoutingTrace | None = None
        self._routing: RoutingRecord | None = None

    def on_start(self, run: RunView) -> None:
        """Open the trace, unless no remaining step is traced or this rank's file is damaged."""
        self._run = run
        steps, step, folder = run.config.observe.routing_trace, run.step, run.folder.routing
        try:
            cut_traces(folder, run.mesh, resume_at=step)
        except (OSError, DataError) as error:  # reported, so that the run continues
            if step < steps:
                _log.warning(
                    "this rank's routing trace ends at step %d, the run continues: %s", step, error
                )
            return
        if step >= steps:
            if steps and run.is_writer and not any(folder.glob("rank_*.jsonl")):
                _log.warning(
                    "observe.routing_trace=%d: nothing is traced, because this run continues after "
                    "step %d. Set it to %d or more.",
                    steps,
                    step,
                    step + 1,
                )
            return
        num_layers = sum(1 for chunk in run.chunks for _ in iter_routers(chunk))
        captures = run.config.observe.routing_captures
        self._trace = RoutingTrace(
            folder, run.mesh, steps=steps, captures=captures, layers=num_layers
        )

    def before_step(self, step: int, batches: StepBatches) -> StepBatches | None:
        """Attach a recorder to the batches of a traced step."""
        if self._trace is None:
            return None
        self._routing = self._trace.begin(step, batches.microbatches)
        if self._routing is None:
            return None
        return replace(batches, microbatches=attach_routing(batches.microbatches, self._routing))

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        """Write the rows of this rank. If the disk is full, the run continues without the trace."""
        if self._trace is None or self._routing is None:
            return
        try:
            self._trace.write(finished.step, self._routing, finished.batches.microbatches)
        except OSError as error:
            text = (
                "step %d: %s cannot be written (%s); the run continues without this rank's routing "
                "trace"
            )
            _log.warning(text, finished.step, self._trace.path, error)
            self._trace = None

    def after_rollback(self, step: int) -> None:
        """Remove the rows of discarded steps."""
        self._close()
        self._trace = self._routing = None
        self.on_start(self._run)

    def on_error(self, error: BaseException) -> None:
        """Remove the captures of an unfinished step."""
        self._close()

    def on_end(self, outcome: Outcome) -> None:
        """Remove the captures of an unfinished step."""
        self._close()

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            if self._trace is not None:
                self._trace.close()

"""Captures of the routing trace: router inputs and outputs, a safetensors file per rank and step.

Tensors are named LAYER/MICROBATCH/KIND, such as `layers.3/0/hidden`, with one row per token of the
trace row of that layer and microbatch, in the same order. Router weights are named
LAYER/router/NAME.
"""

from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from megalith.checkpoint.boxes import as_bytes
from megalith.checkpoint.safetensors import PlannedTensor, padded_header
from megalith.config.train import Captured
from megalith.data.loader import Batch
from megalith.kernels.replay import RoutingCapture
from megalith.parallel.mesh import Mesh
from megalith.train.replay import text_token_mask

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
        self._room = 8 * (128 + most * _ENTRY_NBYTES // 8)
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
            self._file.write(padded_header(self._room, self._planned, {"format": "pt"}))
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
            self._file.seek(self._room)
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

    def __call__(self, seen: RoutingCapture) -> None:
        """Write a router's capture; repeated calls in activation recomputation are ignored."""
        if (seen.layer, seen.microbatch) in self._done:
            return
        self._done.add((seen.layer, seen.microbatch))
        number, count = seen.microbatch, len(seen.hidden)
        is_text = torch.from_numpy(text_token_mask(self._batches[number].tokens, count, self._mesh))
        for kind in ("hidden", "logits", "weights"):
            if kind in self._kinds:
                values: Tensor = getattr(seen, kind).detach().to("cpu", torch.bfloat16, copy=True)
                self._capture_file.put(
                    f"{seen.layer}/{number}/{kind}", values if is_text.all() else values[is_text]
                )
        if (
            "routers" in self._kinds
            and seen.layer not in self._captured_layers
            and self._mesh.over("dp", "cp", "tp").rank == 0
        ):
            self._captured_layers.add(seen.layer)  # all ranks of a stage have the same weights
            for name, values in seen.routers.items():
                self._capture_file.put(
                    f"{seen.layer}/router/{name}", values.detach().to("cpu", copy=True)
                )

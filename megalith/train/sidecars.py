"""Sidecars of the routing trace: what routers read and made of it, a safetensors file for each rank
and step.

Tensors are named LAYER/MICROBATCH/KIND, as in `layers.3/0/hidden`, and have a row for each token of
the trace's row of that layer and microbatch, in its order. Routers' own are LAYER/router/NAME.
"""

from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from megalith.checkpoint.boxes import as_bytes
from megalith.checkpoint.safetensors import Planned, header_in
from megalith.config.train import Captured
from megalith.data.loader import Batch
from megalith.kernels.replay import RoutingCapture
from megalith.parallel.mesh import Mesh
from megalith.train.replay import text_of

WAITING = 4
"""Tensors that wait in host memory for the disk, before the step waits for it (a guess: a layer's
worth)."""

_ENTRY_NBYTES = 256
"""Of a tensor in a header, at most: its name, shape and place take some 150."""


class CaptureFile:
    """One file that grows while its tensors are found; it has its name when it is whole.

    A thread writes, and few tensors wait for it, so that neither the step nor memory has to hold
    all of them.
    """

    def __init__(self, path: Path, *, most: int) -> None:
        """Of at most so many tensors, for whose header there is room in front. Touches nothing."""
        self.path, self._part = path, path.with_name(path.name + ".part")
        self._room = 8 * (128 + most * _ENTRY_NBYTES // 8)
        self._planned: list[Planned] = []
        self._waiting: deque[Future[None]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._file: BinaryIO | None = None
        self._failed: OSError | None = None

    def put(self, name: str, values: Tensor) -> None:
        """Add a tensor, on the host, which nobody changes any more. What the disk refuses is told
        by `finish`."""
        if self._failed is not None:
            return
        self._planned.append(Planned(name, values.dtype, tuple(values.shape)))
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="sidecar")
        self._waiting.append(self._pool.submit(self._write, values))
        self._wait(at_most=WAITING)

    def finish(self) -> bool:
        """Give the file its header and name; False where there was nothing to write.

        Raises:
            OSError: the disk refused some of it, and nothing is left.
        """
        self._wait(at_most=0)
        try:
            if self._failed is not None:
                raise self._failed
            if self._file is None:
                return False
            self._file.seek(0)
            self._file.write(header_in(self._room, self._planned, {"format": "pt"}))
            self._file.close()
            self._part.replace(self.path)
        except OSError:
            self.abandon()
            raise
        self._end()
        return True

    def abandon(self) -> None:
        """Leave nothing behind."""
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
        """StopFilter so many tensors wait."""
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
            except OSError as error:  # what is still in its buffer does not fit either
                self._failed = self._failed or error


class Watcher:
    """Puts what routers show into a sidecar, once, in the order of a trace's rows and without
    padding."""

    def __init__(
        self,
        kinds: Collection[Captured],
        capture_file: CaptureFile,
        batches: Sequence[Batch],
        mesh: Mesh,
    ) -> None:
        self._kinds, self._sidecar, self._batches, self._mesh = kinds, capture_file, batches, mesh
        self._done: set[tuple[str, int]] = set()
        self._told: set[str] = set()  # layers whose router is there

    def __call__(self, seen: RoutingCapture) -> None:
        """What is shown a second time, in recomputation, is there already."""
        if (seen.layer, seen.microbatch) in self._done:
            return
        self._done.add((seen.layer, seen.microbatch))
        number, count = seen.microbatch, len(seen.hidden)
        read = torch.from_numpy(text_of(self._batches[number].tokens, count, self._mesh))
        for kind in ("hidden", "logits", "weights"):
            if kind in self._kinds:
                values: Tensor = getattr(seen, kind).detach().to("cpu", torch.bfloat16, copy=True)
                self._sidecar.put(
                    f"{seen.layer}/{number}/{kind}", values if read.all() else values[read]
                )
        if (
            "routers" in self._kinds
            and seen.layer not in self._told
            and self._mesh.over("dp", "cp", "tp").rank == 0
        ):
            self._told.add(seen.layer)  # ranks of a stage have the same
            for name, values in seen.routers.items():
                self._sidecar.put(
                    f"{seen.layer}/router/{name}", values.detach().to("cpu", copy=True)
                )

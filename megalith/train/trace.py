"""The routing trace: the experts of every token of a run's first steps, one JSON lines file per
rank.

Captures of router inputs and outputs are written to separate files (`train/captures.py`).
"""

import contextlib
import json
import logging
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from megalith.config.train import Captured
from megalith.data.loader import Batch
from megalith.errors import DataError
from megalith.kernels.replay import RoutingRecord
from megalith.observe.metrics import cut_after
from megalith.parallel.mesh import Mesh
from megalith.train.captures import CaptureFile, CaptureWriter
from megalith.train.experts import layer_sort_key
from megalith.train.replay import parts

_log = logging.getLogger(__name__)


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
        self.path = _file_of(folder, mesh.world.rank)
        self._mesh, self._steps, self._captures, self._layers = mesh, steps, captures, layers
        self._capture_file: CaptureFile | None = None

    def begin(self, step: int, batches: Sequence[Batch]) -> RoutingRecord | None:
        """Return the object in which routers record their choices in a step; None if it is not
        traced."""
        if step > self._steps:
            return None
        if not self._captures:
            return RoutingRecord()
        most = self._layers * (
            len(batches) * 3 + 4
        )  # tensors of every microbatch, and the router's weights
        self._capture_file = CaptureFile(_capture_file_of(self.path, step), most=most)
        return RoutingRecord(
            watch=CaptureWriter(self._captures, self._capture_file, batches, self._mesh)
        )

    def write(self, step: int, routing: RoutingRecord, batches: Sequence[Batch]) -> None:
        """Write the choices of this rank's routers in a step.

        Raises:
            OSError: writing failed; the file has no row of the step.
        """
        capture_file, self._capture_file = self._capture_file, None
        beside = capture_file.path if capture_file is not None and capture_file.finish() else None
        name = None if beside is None else beside.name
        rows = rows_of(step, routing, batches, self._mesh, name)
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
                if beside is not None:
                    beside.unlink()
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
    last = _file_of(folder, mesh.world.size - 1)
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
    _cut_trace(_file_of(folder, mesh.world.rank), resume_at)


def _cut_trace(path: Path, resume_at: int) -> None:
    for beside in path.parent.glob(f"{path.stem}_step_*.safetensors*"):
        if beside.suffix == ".part" or beside > _capture_file_of(path, resume_at):
            beside.unlink()
    cut_after(path, resume_at)


def rows_of(
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
    place = {"dp": mesh.dp.rank, "cp": mesh.cp.rank, "tp": mesh.tp.rank}
    routing_parts = parts(routing, batches, mesh, filler=False)
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
            **place,
            "microbatch": part.microbatch,
            "num_tokens": len(part.experts),
            "top_k": part.experts.shape[1],
            **captures,
            "experts": part.experts.tolist(),
        }


def _file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.jsonl"


def _capture_file_of(path: Path, step: int) -> Path:
    """Return the path of a step's captures, from the path of the rank's trace."""
    return path.with_name(f"{path.stem}_step_{step:07d}.safetensors")

"""The routing trace: which experts every token of a run's first steps chose, as lines of JSON, a
file for each rank.

Beside it sidecars have what routers read and made of it, where that is asked for
(`train/sidecars.py`).
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
from megalith.kernels.replay import Routing
from megalith.observe.metrics import cut_after
from megalith.parallel.mesh import Mesh
from megalith.train.experts import in_order
from megalith.train.replay import parts
from megalith.train.sidecars import CaptureFile, Watcher

_log = logging.getLogger(__name__)


class RoutingTrace:
    """Writes a rank's lines while the first steps of a run go on; its file appears with the first
    of them."""

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        *,
        steps: int,
        captures: Collection[Captured] = (),
        layers: int = 0,
    ) -> None:
        """Of the first `steps` steps; call `cut_traces` before where a run goes on. `captures`
        go to sidecars, of the `layers` that have experts on this rank."""
        self.path = _file_of(folder, mesh.world.rank)
        self._mesh, self._steps, self._captures, self._layers = mesh, steps, captures, layers
        self._sidecar: CaptureFile | None = None

    def begin(self, step: int, batches: Sequence[Batch]) -> Routing | None:
        """What routers write their choices into during a step; None when it is not traced."""
        if step > self._steps:
            return None
        if not self._captures:
            return Routing()
        most = self._layers * (
            len(batches) * 3 + 4
        )  # tensors of every microbatch, and the router's own
        self._sidecar = CaptureFile(_capture_file_of(self.path, step), most=most)
        return Routing(watch=Watcher(self._captures, self._sidecar, batches, self._mesh))

    def write(self, step: int, routing: Routing, batches: Sequence[Batch]) -> None:
        """Add what this rank's routers chose in a step.

        Raises:
            OSError: the disk refused it, and no part of the step is there.
        """
        capture_file, self._sidecar = self._sidecar, None
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
        """Leave nothing of a step that did not come to its end."""
        if self._sidecar is not None:
            self._sidecar.abandon()


def cut_traces(folder: Path, mesh: Mesh, *, resume_at: int) -> None:
    """Cut off lines of steps after `resume_at`, left by a run that was killed, and remove their
    sidecars.

    Every rank looks after its own files, the first also after those of ranks that there are no
    more; of these, one that is damaged stays as it is and is told.

    Raises:
        DataError, OSError: this rank's own file is damaged, or the disk refused; on this rank
        alone.
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
                "the routing trace of a rank that there is no more stays as it is: %s", error
            )
    _cut_trace(_file_of(folder, mesh.world.rank), resume_at)


def _cut_trace(path: Path, resume_at: int) -> None:
    for beside in path.parent.glob(f"{path.stem}_step_*.safetensors*"):
        if beside.suffix == ".part" or beside > _capture_file_of(path, resume_at):
            beside.unlink()
    cut_after(path, resume_at)


def rows_of(
    step: int,
    routing: Routing,
    batches: Sequence[Batch],
    mesh: Mesh,
    capture_file: str | None = None,
) -> Iterator[dict[str, Any]]:  # Any: JSON
    """A row for each of this rank's layers with experts and microbatches, layer by layer.

    `experts` has the k choices of every token, best first, before experts refuse any; padding and
    filler are left out. A layer is named as its parameters are, `mtp` is the depth of one that
    predict further tokens, and `stage` is the rank's place along pp. Ranks of several stages that
    are at one place along dp, cp and tp have the same tokens, in one order.
    """
    place = {"dp": mesh.dp.rank, "cp": mesh.cp.rank, "tp": mesh.tp.rank}
    found = parts(routing, batches, mesh, filler=False)
    for part in sorted(found, key=lambda part: (in_order(part.layer), part.microbatch)):
        ahead, number = in_order(part.layer)
        yield {
            "step": step,
            "stage": mesh.pp.rank,
            "layer": part.layer,
            **({"mtp": number} if ahead else {}),
            "rank": mesh.world.rank,
            **place,
            "microbatch": part.microbatch,
            "num_tokens": len(part.experts),
            "top_k": part.experts.shape[1],
            **({} if capture_file is None else {"sidecar": capture_file}),
            "experts": part.experts.tolist(),
        }


def _file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.jsonl"


def _capture_file_of(path: Path, step: int) -> Path:
    """Of a rank's file."""
    return path.with_name(f"{path.stem}_step_{step:07d}.safetensors")

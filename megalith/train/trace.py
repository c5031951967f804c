"""The routing trace: which experts every token of a run's first steps chose, as lines of JSON, a file for each rank."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megalith.data.loader import Batch
from megalith.errors import DataError
from megalith.kernels.replay import Routing
from megalith.observe.metrics import cut_after
from megalith.parallel.mesh import Mesh
from megalith.train.experts import in_order
from megalith.train.replay import parts


class RoutingTrace:
    """Writes a rank's lines while the first steps of a run go on; its file appears with the first of them."""

    def __init__(self, folder: Path, mesh: Mesh, *, steps: int) -> None:
        """Of the first `steps` steps; call `cut_traces` before where a run goes on."""
        self.path = _file_of(folder, mesh.world.rank)
        self._mesh, self._steps = mesh, steps

    def begin(self, step: int) -> Routing | None:
        """What routers write their choices into during a step; None when it is not traced."""
        return Routing() if step <= self._steps else None

    def write(self, step: int, routing: Routing, batches: Sequence[Batch]) -> None:
        """Add what this rank's routers chose in a step.

        Raises:
            OSError: the disk refused it, and no part of the step is there.
        """
        lines = [json.dumps(row, separators=(",", ":")) + "\n" for row in rows_of(step, routing, batches, self._mesh)]
        if not lines:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(lines)
        except OSError:
            with contextlib.suppress(OSError, DataError):
                cut_after(self.path, step - 1)
            raise


def cut_traces(folder: Path, mesh: Mesh, *, resume_at: int) -> None:
    """Cut off lines of steps after `resume_at`, left by a run that was killed.

    Every rank looks after its own file, the first also after those of ranks that there are no more.

    Raises:
        DataError, OSError: a file is damaged, or the disk refused; on this rank alone.
    """
    gone = [path for path in folder.glob("rank_*.jsonl") if path > _file_of(folder, mesh.world.size - 1)]
    for path in [_file_of(folder, mesh.world.rank), *(gone if mesh.world.rank == 0 else [])]:
        cut_after(path, resume_at)


def rows_of(step: int, routing: Routing, batches: Sequence[Batch], mesh: Mesh) -> Iterator[dict[str, Any]]:  # Any: JSON
    """A row for each of this rank's layers with experts and microbatches, layer by layer.

    `experts` has the k choices of every token, best first, before experts refuse any; padding is left out. A layer is
    named as its parameters are, and `stage` is the rank's place along pp.
    """
    for part in sorted(parts(routing, batches, mesh), key=lambda part: (in_order(part.layer), part.microbatch)):
        yield {
            "step": step, "stage": mesh.pp.rank, "layer": part.layer, "rank": mesh.world.rank,
            "microbatch": part.microbatch, "num_tokens": len(part.experts), "top_k": part.experts.shape[1],
            "experts": part.experts.tolist(),
        }  # fmt: skip


def _file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.jsonl"

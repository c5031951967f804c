"""Tensors of checkpoints that other programs wrote: chunks of global tensors, read on request.

Readers of each format return these values; nothing in them depends on a model or on a layout.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megalith.checkpoint.format import (
    TensorPiece,
    describe_tiling_problem,
    inner_view,
    lengths,
    numel,
    show_box,
)
from megalith.errors import CheckpointError
from megalith.plan.shards import Box, intersect

MegatronFormat = Literal["torch_dist", "torch", "torch_dcp", "fsdp_dtensor", "zarr"]
"""Checkpoint formats of Megatron-LM, as its `--ckpt-format` names them."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorChunk:
    """A box of a global tensor, and how to read its values."""

    box: Box
    read: Callable[[], Tensor]
    """Return the values, with the shape of the box, in host memory: often a read-only view of a
    memory-mapped file. Raises CheckpointError if the file is damaged."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkedTensor:
    """A global tensor that is stored as chunks, which may overlap if they are replicas."""

    name: str
    """Name in the files, for errors."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Sequence[TensorChunk]

    def read(self, box: Box | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a box of the tensor (unset: all of it) in a new tensor of `dtype` (unset: the
        stored one).

        Raises:
            CheckpointError: the chunks do not cover the box, or a file is damaged.
        """
        box = tuple((0, size) for size in self.shape) if box is None else box
        parts = [part for chunk in self.chunks if (part := intersect(chunk.box, box)) is not None]
        distinct = list(dict.fromkeys(parts))
        moved = [
            tuple((a - start, b - start) for (a, b), (start, _) in zip(part, box, strict=True))
            for part in distinct
        ]
        if numel(box) and (problem := describe_tiling_problem(lengths(box), moved)):
            raise CheckpointError(
                f"{self.name}{show_box(box)} is not covered by the stored chunks ({problem}). "
                "Copy the checkpoint again, with all of its files."
            )
        # only now: the size of a tensor in a damaged file may be anything
        values = torch.empty(lengths(box), dtype=self.dtype if dtype is None else dtype)
        target = TensorPiece(box, values)
        for chunk in self.chunks:
            part = intersect(chunk.box, box)
            if part in distinct:
                distinct.remove(part)
                source = TensorPiece(chunk.box, chunk.read())
                inner_view(target, part).copy_(inner_view(source, part))
        return values

    def select(self, index: int, *, name: str | None = None) -> "ChunkedTensor":
        """Return the tensor at `index` of the first dim, such as one layer of stacked layers."""
        return ChunkedTensor(
            f"{self.name}[{index}]" if name is None else name,
            self.shape[1:],
            self.dtype,
            [
                TensorChunk(chunk.box[1:], _select(chunk, index - chunk.box[0][0]))
                for chunk in self.chunks
                if chunk.box[0][0] <= index < chunk.box[0][1]
            ],
        )


def _select(chunk: TensorChunk, row: int) -> Callable[[], Tensor]:
    return lambda: chunk.read()[row]


@dataclass(frozen=True, slots=True, eq=False)
class MegatronFolder:
    """Files of one Megatron checkpoint (`iter_NNNNNNN` or `release`): tensors by the names in the
    files, and everything else as plain values."""

    path: Path
    format: MegatronFormat
    tensors: Mapping[str, ChunkedTensor]
    """Names as in the files (`decoder.layers.mlp.linear_fc1.weight`, [L, 2f, h])."""

    common: Mapping[str, Any]  # values of a parsed pickle
    """Non-tensor state (Megatron's common state): `args`, `iteration`, `checkpoint_version`,
    `optimizer`, `opt_param_scheduler`, `content_metadata`; records of `safe_pickle`."""

    objects: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    """Pickled entries by key (`optimizer.distributed…/shard_0_1`), parsed on request."""

    optimizer_problem: str | None = None
    """Why the optimizer state cannot be read, if the reader found that; weights are not
    affected."""

"""Tensors that ranks save and load, as boxes of full tensors; independent of files, which
`manifest` describes."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from megalith.checkpoint.manifest import (
    CONFIG,
    DTYPE_NAMES,
    FORMAT,
    LATEST,
    MANIFEST,
    MANIFEST_SHA256,
    METADATA,
    STATE,
    Manifest,
    StoredBox,
    StoredFile,
    StoredTensor,
    describe_tiling_problem,
    divide,
    dump_manifest,
    folder_name,
    lengths,
    manifest_digest,
    merge_tensors,
    numel,
    parse_manifest,
    read_pointer,
    sha256,
    show_box,
    show_bytes,
    step_folders,
)
from megalith.observe import machine
from megalith.plan.shards import Box, Shard, split_range_into_boxes

__all__ = [
    "CONFIG",
    "DTYPES",
    "DTYPE_NAMES",
    "FORMAT",
    "LATEST",
    "MANIFEST",
    "MANIFEST_SHA256",
    "METADATA",
    "STATE",
    "CheckpointEntry",
    "EncodedValues",
    "Manifest",
    "StoredBox",
    "StoredFile",
    "StoredTensor",
    "TensorPiece",
    "as_bytes",
    "decode_for_loading",
    "describe_tiling_problem",
    "divide",
    "dump_manifest",
    "folder_name",
    "inner_view",
    "iter_pieces",
    "lengths",
    "manifest_digest",
    "merge_tensors",
    "numel",
    "parse_manifest",
    "pieces",
    "read_pointer",
    "sha256",
    "show_box",
    "show_bytes",
    "show_dtype",
    "step_folders",
    "to_row_major",
]

# --- tensors that ranks save and load, as boxes of full tensors; independent of files

ENCODED_BLOCK = 256
"""Encoded values are decoded from a multiple of this many elements on, a multiple of all block
sizes."""

_COPY_NBYTES = 4 * 2**20
"""Bytes that are copied at a time (heuristic: part of a processor's cache)."""


class EncodedValues(Protocol):
    """fp32 values that are stored in another form, such as codes and scales."""

    numel: int
    """Number of values."""

    def decode(self, start: int, stop: int) -> Tensor:
        """Return the values [start, stop) in fp32."""

    def encode(self, values: Tensor, start: int) -> None:
        """Store values from element `start` on."""


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointEntry:
    """One tensor that a rank saves or loads: its shard of a parameter in one role."""

    shard: Shard
    """The rank's part of the parameter."""

    role: str
    """`param`: weights in their own dtype; `master`, `exp_avg`, `exp_avg_sq`: optimizer state;
    `ema`: moving average of the weights."""

    tensor: Tensor
    """Elements of the shard's box (or flat range) in row-major order; contiguous, any shape. On the
    meta device (shape and dtype only) if they are encoded."""

    is_writer: bool = True
    """Whether this rank writes the shard; exactly one replica does. Loading fills it on all."""

    encoded: EncodedValues | None = None
    """The elements, if they are encoded; a checkpoint holds decoded values."""

    def decode(self) -> "CheckpointEntry":
        """Return an entry with the decoded values; this one if it is not encoded."""
        if self.encoded is None:
            return self
        values = self.encoded.decode(0, self.encoded.numel).view(self.tensor.shape)
        return replace(self, tensor=values, encoded=None)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in the checkpoint: weights have that of their shard, optimizer state any that the
        optimizer chooses."""
        return machine.DTYPES[self.shard.dtype] if self.role == "param" else self.tensor.dtype

    @property
    def key(self) -> str:
        """Name in the checkpoint, the same under every layout."""
        return (
            f"model.{self.shard.name}"
            if self.role == "param"
            else f"optimizer.{self.role}.{self.shard.name}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class TensorPiece:
    """A box of a full tensor, and its values."""

    box: Box
    values: Tensor
    """Has the box's shape; a view of the entry's tensor."""


def iter_pieces(entry: CheckpointEntry, max_numel: int) -> Iterator[TensorPiece]:
    """Yield the pieces of an entry; encoded ones are decoded one piece at a time."""
    start = 0
    for piece in pieces(entry, max_numel=max_numel):
        stop = start + piece.values.numel()
        if entry.encoded is None:
            yield piece
        else:
            # decoding begins with a whole block
            first = start - start % ENCODED_BLOCK
            last = min(entry.encoded.numel, stop - stop % -ENCODED_BLOCK)
            values = entry.encoded.decode(first, last)[start - first : stop - first]
            yield TensorPiece(piece.box, values.view(piece.values.shape))
        start = stop


@contextlib.contextmanager
def decode_for_loading(entries: Sequence[CheckpointEntry]) -> Iterator[list[CheckpointEntry]]:
    """Context manager of entries that are loaded: encoded ones have decoded tensors instead, which
    are encoded at the end, also after an error."""
    decoded = [entry.decode() for entry in entries]
    try:
        yield decoded
    finally:
        # master weights overwrite the weights that they contain
        for entry, filled in zip(entries, decoded, strict=True):
            if entry.encoded is not None:
                entry.encoded.encode(filled.tensor.detach(), 0)


def pieces(entry: CheckpointEntry, *, max_numel: int | None = None) -> list[TensorPiece]:
    """Split an entry into boxes of the full tensor of at most `max_numel` elements, in memory
    order.

    A flat range of an N-dim box becomes at most 2N - 1 boxes before they are split further; an
    empty range becomes none.
    """
    shard, tensor = entry.shard, entry.tensor.detach()
    start, stop = shard.flat or (0, shard.numel)
    assert tensor.is_contiguous() and tensor.numel() == stop - start, (
        entry.key,
        tuple(tensor.shape),
        shard,
    )
    inside = [
        part
        for box in split_range_into_boxes(shard.box_shape, start, stop)
        for part in divide(box, max_numel or stop - start)
    ]
    sizes = [numel(box) for box in inside]
    boxes = [
        tuple((o + a, o + b) for (o, _), (a, b) in zip(shard.box, box, strict=True))
        for box in inside
    ]
    return [
        TensorPiece(box, values.view(lengths(box)))
        for box, values in zip(boxes, tensor.view(-1).split(sizes) if sizes else (), strict=True)
    ]


def inner_view(piece: TensorPiece, box: Box) -> Tensor:
    """Return a view of a piece's values at `box`, which lies inside the piece's box."""
    return piece.values[
        tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(box, piece.box, strict=True))
    ]


def to_row_major(values: Tensor) -> Tensor:
    """Return the values in row-major order in memory; a copy only if they are not.

    A transposed matrix (for any grouping of dims into rows and columns) is copied with torch's
    blocked transpose: 2.1 GB/s on one core instead of 0.3 (measured, AMD EPYC, bf16).
    """
    for dim in range(1, values.ndim):
        turned = values.permute(*range(dim, values.ndim), *range(dim))
        if _follows_memory(turned) and not _follows_memory(values):
            rows, columns = math.prod(values.shape[:dim]), math.prod(values.shape[dim:])
            matrix = torch.empty(rows, columns, dtype=values.dtype, device=values.device)
            return matrix.copy_(turned.contiguous().view(columns, rows).t()).view(values.shape)
    return values.contiguous()


def _follows_memory(values: Tensor) -> bool:
    """Return whether the strides do not increase from dim to dim."""
    steps = [step for step, size in zip(values.stride(), values.shape, strict=True) if size > 1]
    return steps == sorted(steps, reverse=True)


def as_bytes(values: Tensor) -> Iterator[memoryview]:
    """Yield the elements in row-major order as bytes; copies only non-contiguous or device tensors.

    Copies are made a few rows at a time, so that they are still in the processor's cache when read.
    """
    values = values.detach().cpu()
    while values.ndim > 1 and len(values) == 1:
        values = values[0]
    rows = (
        [values]
        if values.is_contiguous()
        else values.split(max(1, _COPY_NBYTES * len(values) // values.nbytes))
    )
    for part in rows:
        flat = to_row_major(part)
        # a dim of 1 has any stride
        yield flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy().data


DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}
"""Dtypes that tensors in a checkpoint may have."""


def show_dtype(dtype: torch.dtype) -> str:
    """Return the name of a dtype: `bfloat16`."""
    return str(dtype).removeprefix("torch.")

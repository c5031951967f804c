"""The safetensors file format: reading headers and boxes, and writing tensors sequentially.

A file is eight bytes with the length of a JSON header, the header ({name: dtype, shape,
data_offsets}), and the data. It contains no code.
"""

import json
import math
import re
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalith import storage
from megalith.checkpoint.format import as_bytes
from megalith.errors import CheckpointError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes of weights; files may hold tensors of other dtypes, which are not weights."""

READABLE = DTYPES | {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
}
"""Dtypes of weights and of quantized weights."""

_CHUNK_NBYTES = 2**20
"""Bytes that are hashed and then written while they are in the processor's cache."""

MAX_HEADER = 100_000_000  # bytes; the library refuses longer ones, too


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Header entry of one tensor in a file."""

    file: Path
    dtype: str
    """Name of the dtype in the file: `BF16`."""

    shape: tuple[int, ...]
    start: int
    """Offset of its data in the file."""


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """Name, dtype and shape of a tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Length of its data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Return the tensors in a file.

    Raises:
        CheckpointError: the file cannot be read, is not a safetensors file, or is truncated
            (missing tensors are named).
    """
    try:
        nbytes = storage.file_nbytes(file)
        _check_not_lfs_pointer(file)
        (length,) = struct.unpack("<Q", storage.read_range(file, 0, 8))
        if length > min(MAX_HEADER, nbytes - 8):
            raise ValueError(
                f"a header of {length:,} bytes, expected less than the file's {nbytes:,}"
            )
        header = json.loads(storage.read_range(file, 8, length), object_pairs_hook=_unique_keys)
        header.pop("__metadata__", None)
        tensors = {str(name): _info(file, entry, 8 + length) for name, entry in header.items()}
        spans = {name: tuple(map(int, entry["data_offsets"])) for name, entry in header.items()}
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read ({error.strerror}). Copy the folder again, or use another one."
        ) from error
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
        struct.error,
        RecursionError,
    ) as error:
        raise CheckpointError(
            f"{file} is not a safetensors file ({type(error).__name__}: {error}), or it is cut "
            "off. Copy the folder again, or use another one."
        ) from error
    data = nbytes - 8 - length
    cut = sorted(name for name, (start, stop) in spans.items() if start < stop and stop > data)
    if cut:
        expected = 8 + length + max(stop for _, stop in spans.values())
        raise CheckpointError(
            f"{file} is {nbytes:,} bytes, expected {expected:,}: {show_names(cut)} cut off. Copy "
            "the folder again, or use another one."
        )
    _check_contiguous(file, spans, data)
    return tensors


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:  # Any: JSON
    """Return a JSON object of a header; keys must be unique, because readers may choose different
    duplicates.

    Raises:
        ValueError: a key occurs twice.
    """
    unique = dict(pairs)
    if len(unique) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        repeated = sorted(key for key, count in counts.items() if count > 1)
        raise ValueError(f"its header has the key {show_names(repeated)} more than once")
    return unique


def _check_contiguous(file: Path, spans: Mapping[str, tuple[int, ...]], data: int) -> None:
    """Check that the data of the tensors is contiguous, without overlaps and without remaining
    bytes.

    Raises:
        CheckpointError: it is not.
    """
    end = 0
    for name, (start, stop) in sorted(spans.items(), key=lambda item: item[1]):
        if start != end or stop < start:
            raise CheckpointError(
                f"{file}: {name} has bytes {start:,} to {stop:,} of the data, expected from "
                f"{end:,} on, where the tensor before it ends. Copy the folder again, or use "
                "another one."
            )
        end = stop
    if end != data:
        raise CheckpointError(
            f"{file} has {data:,} bytes of data, expected {end:,}, as its header says. Copy the "
            "folder again, or use another one."
        )


def _check_not_lfs_pointer(file: Path) -> None:
    """Raise if the file is a Git LFS pointer, which `git clone` leaves if Git LFS is not
    installed."""
    start = storage.read_range(file, 0, 200)
    if start.startswith(b"version https://git-lfs"):
        size = re.search(rb"\nsize (\d+)", start)
        expected = f"a file of {int(size[1]):,} bytes" if size else "a file"
        raise CheckpointError(
            f"{file} is a Git LFS pointer to {expected}, not that file. Run `git lfs pull` in "
            f"{file.parent}."
        )


def show_names(names: Sequence[str], *, limit: int = 6) -> str:
    """Format the first few names, and the number of the others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(f"{name:.200}" for name in names[:limit]) + more


def read_box(name: str, info: TensorInfo, part: tuple[slice, ...]) -> Tensor:
    """Return a box of a tensor in the file's dtype, as a read-only view of the mapped file.

    Raises:
        CheckpointError: the file cannot be read, or was truncated since its header was read.
    """
    dtype, row = READABLE[info.dtype], math.prod(info.shape[1:])
    first, stop, _ = part[0].indices(info.shape[0]) if part else (0, 1, 1)
    rows = max(0, stop - first)
    start, nbytes = info.start + first * row * dtype.itemsize, rows * row * dtype.itemsize
    try:
        data = storage.mapped(info.file, start, nbytes)
        if len(data) < nbytes:
            raise OSError(0, f"it ends before byte {start + nbytes:,}")
    except OSError as error:
        raise CheckpointError(
            f"{info.file}: {name} cannot be read ({error.strerror}). Copy the folder again, or use "
            "another one."
        ) from error
    if not nbytes:
        return torch.empty((rows, *info.shape[1:]), dtype=dtype)[:, *part[1:]]
    values = torch.frombuffer(data, dtype=dtype)
    return values.view(rows, *info.shape[1:])[:, *part[1:]] if part else values.view(())


def allocate_file(
    file: Path, plan: Sequence[PlannedTensor], metadata: Mapping[str, str]
) -> list[int]:
    """Create a file with its header and space for the planned tensors; return the offset of
    each."""
    header = _header(plan, metadata)
    starts = _starts(plan, header)
    storage.allocate_new(file, starts[-1])
    with storage.open_part(file, 0) as out:
        out.write(struct.pack("<Q", len(header)) + header)
    return starts[:-1]


def find_allocated_file(
    file: Path, plan: Sequence[PlannedTensor], metadata: Mapping[str, str]
) -> list[int] | None:
    """Return the offsets of a file that `allocate_file` has created for this plan; None if there is
    none."""
    header = _header(plan, metadata)
    starts, begin = _starts(plan, header), struct.pack("<Q", len(header)) + header
    try:
        same = (
            storage.file_nbytes(file) == starts[-1]
            and storage.read_range(file, 0, len(begin)) == begin
        )
    except FileNotFoundError:
        return None
    return starts[:-1] if same else None


def _starts(plan: Sequence[PlannedTensor], header: bytes) -> list[int]:
    """Return the offsets of the tensors of a file, and the end of the last one."""
    starts = [8 + len(header)]
    for planned in plan:
        starts.append(starts[-1] + planned.nbytes)
    return starts


class WrittenRange(NamedTuple):
    """End and checksum of a range of a file that was written."""

    stop: int
    """Offset of the end."""

    checksum: int
    """Checksum of its bytes, as in `part_checksum`."""


def write_part(file: Path, start: int, values: Iterable[Tensor]) -> WrittenRange:
    """Write tensors sequentially into an allocated file, from offset `start`.

    They are on disk after `storage.sync_written`.
    """
    checksum = 0
    with storage.open_part(file, start) as out:
        for tensor in values:
            for data in as_bytes(tensor):
                for first in range(0, len(data), _CHUNK_NBYTES):
                    chunk = data[first : first + _CHUNK_NBYTES]
                    checksum = zlib.crc32(chunk, checksum)
                    out.write(chunk)
            storage.begin_sync(out, start, tensor.nbytes)
            start += tensor.nbytes
    return WrittenRange(start, checksum)


def part_checksum(file: Path, start: int, nbytes: int) -> int:
    """Return the CRC-32 of bytes of a file, which detects data lost in a power failure, not
    manipulation."""
    return zlib.crc32(storage.mapped(file, start, nbytes))


def write_file(
    file: Path,
    plan: Sequence[PlannedTensor],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Write a new file of the planned tensors, which `tensors` yields in this order, one in memory
    at a time."""
    first = [*allocate_file(file, plan, metadata), 0][0]
    write_part(file, first, _as_planned(plan, tensors))
    storage.sync_written(file)


def padded_header(nbytes: int, plan: Sequence[PlannedTensor], metadata: Mapping[str, str]) -> bytes:
    """Return the header padded to `nbytes`, for a file whose tensors are written before all of them
    are known."""
    header, room = _header(plan, metadata), nbytes - 8
    assert len(header) <= room and room % 8 == 0, (
        f"a header of {len(header)} bytes in room for {room}"
    )
    return struct.pack("<Q", room) + header.ljust(room)


def _as_planned(plan: Sequence[PlannedTensor], tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    for planned, tensor in zip(plan, tensors, strict=True):
        assert (tuple(tensor.shape), tensor.dtype) == (planned.shape, planned.dtype), planned
        yield tensor


def _header(plan: Sequence[PlannedTensor], metadata: Mapping[str, str]) -> bytes:
    dtype_names = {dtype: dtype_name for dtype_name, dtype in DTYPES.items()}
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for planned in plan:
        stop = start + planned.nbytes
        entries[planned.name] = {
            "dtype": dtype_names[planned.dtype],
            "shape": list(planned.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    header = json.dumps(entries, separators=(",", ":")).encode()
    # readers map the data, which should start at a multiple of 8
    return header + b" " * (-len(header) % 8)


def _info(file: Path, entry: Mapping[str, Any], data: int) -> TensorInfo:
    """Parse one header entry; offsets are relative to the start of the data."""
    shape, dtype = tuple(entry["shape"]), str(entry["dtype"])
    start, stop = entry["data_offsets"]
    if not all(type(size) is int and size >= 0 for size in (*shape, start, stop)):
        raise ValueError(
            f"shape {entry['shape']} at {entry['data_offsets']}, expected whole numbers"
        )
    if dtype in READABLE and stop - start != math.prod(shape) * READABLE[dtype].itemsize:
        raise ValueError(
            f"{stop - start} bytes for {dtype} {entry['shape']}, expected those that it takes"
        )
    return TensorInfo(file, dtype, shape, data + start)

"""The safetensors file format: what a file holds, boxes of it, and writing one tensor after the other.

A file is eight bytes with the length of a JSON header, the header ({name: dtype, shape, data_offsets}), and the data.
Nothing in it can run.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megalith import storage
from megalith.errors import CheckpointError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes of weights; files may hold others, which are not weights as we know them."""

MAX_HEADER = 100_000_000  # bytes; the library refuses longer ones, too


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file, as its header says."""

    file: Path
    dtype: str
    """The file's own word: `BF16`."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Length of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors in a file.

    Raises:
        CheckpointError: it cannot be read, is no safetensors file, or ends early (what is cut off is named).
    """
    try:
        nbytes = storage.file_nbytes(file)
        (length,) = struct.unpack("<Q", storage.read_range(file, 0, 8))
        if length > min(MAX_HEADER, nbytes - 8):
            raise ValueError(f"a header of {length:,} bytes, expected less than the file's {nbytes:,}")
        header = json.loads(storage.read_range(file, 8, length))
        header.pop("__metadata__", None)
        found = {str(name): _info(file, entry) for name, entry in header.items()}
        spans = {name: tuple(map(int, entry["data_offsets"])) for name, entry in header.items()}
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read ({error.strerror}). Copy the folder again, or use another one."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error, RecursionError) as error:
        raise CheckpointError(
            f"{file} is not a safetensors file ({type(error).__name__}: {error}), or it is cut off. "
            f"Copy the folder again, or use another one."
        ) from error
    data = nbytes - 8 - length
    cut = sorted(name for name, (start, stop) in spans.items() if start < stop and stop > data)
    if cut:
        whole = 8 + length + max(stop for _, stop in spans.values())
        raise CheckpointError(
            f"{file} is {nbytes:,} bytes, expected {whole:,}: {show_names(cut)} cut off. "
            f"Copy the folder again, or use another one."
        )
    return found


def show_names(names: Sequence[str], *, limit: int = 6) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


class Reader(ExitStack):
    """Boxes of the tensors of several files, each opened once; a context."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[Path, Any] = {}  # Any: safetensors ships no types

    def read(self, name: str, info: TensorInfo, part: tuple[slice, ...]) -> Tensor:
        """One box of a tensor, on the host, in the file's dtype; no more of it is read.

        Raises:
            CheckpointError: the file does not hold what its header says.
        """
        try:
            if info.file not in self._open:
                self._open[info.file] = self.enter_context(safe_open(info.file, framework="pt"))
            values: Tensor = self._open[info.file].get_slice(name)[part]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{info.file}: {name} cannot be read ({error}). Copy the folder again, or use another one."
            ) from error
        return values


def write_file(file: Path, plan: Sequence[Planned], tensors: Iterator[Tensor], metadata: Mapping[str, str]) -> None:
    """Write a new file of the planned tensors, which `tensors` gives in this order; one is in memory at a time."""
    with storage.open_new(file) as out:
        header = _header(plan, metadata)
        out.write(struct.pack("<Q", len(header)) + header)
        for planned, tensor in zip(plan, tensors, strict=True):
            assert (tuple(tensor.shape), tensor.dtype) == (planned.shape, planned.dtype), planned
            if planned.nbytes:
                out.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        storage.sync_file(out)


def _header(plan: Sequence[Planned], metadata: Mapping[str, str]) -> bytes:
    words = {dtype: word for word, dtype in DTYPES.items()}
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for planned in plan:
        stop = start + planned.nbytes
        entries[planned.name] = {
            "dtype": words[planned.dtype], "shape": list(planned.shape), "data_offsets": [start, stop],
        }  # fmt: skip
        start = stop
    header = json.dumps(entries, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % 8)  # readers map the data, which should start at a multiple of 8


def _info(file: Path, entry: Mapping[str, Any]) -> TensorInfo:
    shape = tuple(entry["shape"])
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"shape {entry['shape']}, expected whole numbers")
    return TensorInfo(file, str(entry["dtype"]), shape)

"""Reads Megatron checkpoints in format `zarr`, which older versions of Megatron saved.

Each tensor is a folder with its name, which contains `.zarray` (JSON) and one file per chunk.
Source: zarr version 2 specification, https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html
"""

import logging
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith import storage
from megalith.checkpoint.chunks import ChunkedTensor, MegatronFolder, TensorChunk
from megalith.checkpoint.format import lengths
from megalith.checkpoint.iterations import (
    COMMON,
    COPY,
    check_iteration,
    detect_megatron_format,
    list_problems,
    read_common,
)
from megalith.checkpoint.safe_pickle import read_archive
from megalith.errors import CheckpointError
from megalith.plan.shards import Box

ARRAY = ".zarray"
"""File that describes a tensor."""

_DTYPES = {
    "<f8": torch.float64,
    "<f4": torch.float32,
    "<f2": torch.float16,
    "bfloat16": torch.bfloat16,
    "<i8": torch.int64,
    "<i4": torch.int32,
    "<i2": torch.int16,
    "|i1": torch.int8,
    "|u1": torch.uint8,
    "|b1": torch.bool,
}
_CHUNK_NAME = re.compile(r"(0|[1-9]\d{0,17})(\.(0|[1-9]\d{0,17}))*")
_OBJECT_NAME = re.compile(r"shard_[\d.]+_[\d.]+\.pt")
_MAX_DIMS = 16
"""Largest number of dims. Heuristic: Megatron's tensors have up to 5."""

_MAX_NUMEL = 2**60

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Array:
    """Contents of `.zarray`, checked."""

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    """Shape of every chunk file; those at the end of an axis are stored whole."""

    dtype: torch.dtype

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        return tuple(-(-n // size) for n, size in zip(self.shape, self.chunk_shape, strict=True))

    @property
    def chunk_nbytes(self) -> int:
        return math.prod(self.chunk_shape) * self.dtype.itemsize

    def box(self, index: tuple[int, ...]) -> Box:
        """Return the box of the tensor that a chunk contains."""
        return tuple(
            (at * size, min((at + 1) * size, n))
            for at, size, n in zip(index, self.chunk_shape, self.shape, strict=True)
        )


@dataclass(frozen=True, slots=True)
class _FileReader:
    """Reads a chunk from its file."""

    file: Path
    array: _Array
    shape: tuple[int, ...]
    """Shape without the part outside of the tensor."""

    def __call__(self) -> Tensor:
        nbytes = self.array.chunk_nbytes
        try:
            data = storage.mapped(self.file, 0, nbytes)
        except OSError as error:
            raise CheckpointError(f"cannot read {self.file}: {error.strerror}. {COPY}") from error
        if len(data) != nbytes:
            raise CheckpointError(
                f"{self.file} is {len(data):,} bytes, expected {nbytes:,}. {COPY}"
            )
        values = torch.frombuffer(data, dtype=self.array.dtype)
        return values.view(self.array.chunk_shape)[tuple(slice(n) for n in self.shape)]


def read_zarr_folder(path: Path) -> MegatronFolder:
    """Return the tensors and the other state of the iteration in `path`; values are read later.

    Raises:
        CheckpointError: the folder has another format, or files are missing, truncated, compressed
            or malformed; lists all problems of the tensors.
    """
    detected = detect_megatron_format(path)
    if detected != "zarr":
        raise CheckpointError(
            f"{path} is {f'in format {detected}' if detected else 'not a Megatron checkpoint'}, "
            "expected zarr."
        )
    common = read_common(path)
    if common is None:
        raise CheckpointError(f"{path} has no {COMMON}, which contains its arguments. {COPY}")
    check_iteration(path, common)
    tensors: dict[str, ChunkedTensor] = {}
    objects: dict[str, Callable[[], Any]] = {}
    problems: list[str] = []
    for key in storage.list_names(path):
        if key.endswith(".sync") or not (path / key).is_dir():
            continue  # folders of locks; common.pt, metadata.json
        try:
            names = storage.list_names(path / key)
            if ARRAY in names:
                tensors[key] = _open_tensor(path / key, names)
        except OSError as error:
            problems.append(f"{path.name}/{key} cannot be read ({error.strerror})")
            continue
        except ValueError as error:
            problems.append(f"{path.name}/{key}: {error}")
            continue
        for name in names:
            if _OBJECT_NAME.fullmatch(name) and (path / key / name).is_file():
                objects[f"{key}/{name.removesuffix('.pt')}"] = _make_reader(path / key / name)
    if problems:
        raise CheckpointError(f"{path}:\n{list_problems(problems)}\n{COPY}")
    return MegatronFolder(path, "zarr", tensors, common, objects)


def _make_reader(file: Path) -> Callable[[], object]:
    return lambda: read_archive(file)


def _open_tensor(folder: Path, names: list[str]) -> ChunkedTensor:
    """Return a tensor after checking its description and the lengths of its files.

    Raises:
        OSError: a file cannot be read.
        ValueError: a value is malformed, or files are missing or truncated.
    """
    array = _read_array(folder / ARRAY)
    available = {name for name in names if _CHUNK_NAME.fullmatch(name)}
    num_chunks = math.prod(array.grid)
    if num_chunks > len(available):
        first = next(
            name for name in map(_chunk_name, _chunk_indices(array.grid)) if name not in available
        )
        raise ValueError(
            f"{num_chunks - len(available):,} of {num_chunks:,} chunk files are missing, such as "
            f"{first}"
        )
    chunks = []
    for index in _chunk_indices(array.grid):
        name = _chunk_name(index)
        if name not in available:
            raise ValueError(f"chunk file {name} is missing")
        nbytes = storage.file_nbytes(folder / name)
        if nbytes != array.chunk_nbytes:
            raise ValueError(
                f"{name} is {nbytes:,} bytes, expected {array.chunk_nbytes:,} → checkpoint "
                "incomplete"
            )
        box = array.box(index)
        chunks.append(TensorChunk(box, _FileReader(folder / name, array, lengths(box))))
    if len(available) > num_chunks:
        unused = len(available) - num_chunks
        _log.info("%s: %d files are outside of the tensor; they are not read", folder, unused)
    return ChunkedTensor(folder.name, array.shape, array.dtype, chunks)


def _chunk_indices(grid: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the positions in a grid in row-major order; the grid may be huge, so it is not
    listed."""
    for number in range(math.prod(grid)):
        index = []
        for parts in reversed(grid):
            number, at = divmod(number, parts)
            index.append(at)
        yield tuple(reversed(index))


def _chunk_name(index: tuple[int, ...]) -> str:
    """Return the file of a chunk; a tensor without axes has one, named 0."""
    return ".".join(map(str, index)) or "0"


def _read_array(file: Path) -> _Array:
    """Parse `.zarray` and check that its values are those that Megatron writes.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is malformed, or uses a feature that is not read.
    """
    try:
        content = storage.parse_json(storage.read_text(file, max_nbytes=2**20))
    except RecursionError as error:
        raise ValueError(f"{ARRAY} is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError(f"{ARRAY} has {type(content).__name__}, expected an object")
    shape, chunk_shape = (_require_sizes(content.get(name), name) for name in ("shape", "chunks"))
    if len(shape) != len(chunk_shape) or 0 in chunk_shape:
        raise ValueError(f"{ARRAY} has chunks {list(chunk_shape)} for shape {list(shape)}")
    expected = {
        "zarr_format": 2,
        "compressor": None,
        "filters": None,
        "order": "C",
        "dimension_separator": ".",
    }
    defaults = {"filters": None, "dimension_separator": "."}
    for name, value in expected.items():
        stored = content.get(name, defaults.get(name, "missing"))
        if stored != value:
            kind = stored.get("id", stored) if isinstance(stored, dict) else stored
            raise ValueError(f"{name} is {str(kind)[:80]}, and only {value} is read")
    dtype = content.get("dtype")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"dtype is {str(dtype)[:80]!r}, expected one of {', '.join(_DTYPES)}")
    return _Array(shape, chunk_shape, _DTYPES[dtype])


def _require_sizes(value: Any, name: str) -> tuple[int, ...]:  # JSON
    """Return the value after checking that it is a short list of integers from 0 on."""
    if (
        not isinstance(value, list)
        or len(value) > _MAX_DIMS
        or not all(type(n) is int and 0 <= n <= _MAX_NUMEL for n in value)
        or math.prod(value) > _MAX_NUMEL
    ):
        raise ValueError(f"{name} is {str(value)[:80]}, expected a list of sizes")
    return tuple(value)

"""Reads folders of `torch.distributed.checkpoint` (DCP), as Megatron saves them: `torch_dist`,
`torch_dcp` and `fsdp_dtensor`.

`.metadata` is a pickle, which is parsed without executing it. Every value in it is checked before
it is used: shapes, positions of chunks, and the byte ranges of the data files.
"""

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from megalith import storage
from megalith.checkpoint import format as layout
from megalith.checkpoint.chunks import (
    ChunkedTensor,
    MegatronFolder,
    MegatronFormat,
    TensorChunk,
)
from megalith.checkpoint.format import lengths, numel, show_box
from megalith.checkpoint.iterations import (
    COMMON,
    COPY,
    check_common,
    check_iteration,
    detect_megatron_format,
    list_problems,
    read_common,
)
from megalith.checkpoint.safe_pickle import ArchiveTensor, Record, parse_archive, parse_pickle
from megalith.errors import CheckpointError
from megalith.plan.shards import Box, split_range_into_boxes

COMMON_ENTRY = "common_state/shard_0_1"
"""Byte entry of the newest versions of Megatron with the contents of `common.pt`."""

_TRUE_SHAPE = "nd_reformulated_orig_global_shape"
"""Field of `mcore_data`: shape of a tensor that is stored as flat ranges."""

_SKIPPED_ENTRIES = re.compile(r"rng_state|rerun_state_machine|.*_extra_state")
"""Byte entries that are skipped: random state, fp8 state of Transformer Engine."""

_DATA_SUFFIX = ".distcp"
_MAX_DIMS = 16
"""Largest number of dims. Heuristic: Megatron's tensors have up to 5."""

_MAX_NUMEL = 2**60
_MAX_AGE_SECONDS = 3600
"""Difference between the modification times of data files that is reported. Heuristic: one save
takes minutes."""

_MAX_SHOWN = 5
"""Maximum number of files or problems that a message lists. Heuristic."""

_DTYPES = frozenset(layout.DTYPES.values()) | {
    getattr(torch, name)
    for name in ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")
    if hasattr(torch, name)
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Location:
    """Bytes of one entry in a data file."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _StoredChunk:
    """A chunk of a tensor, in the coordinates of the stored tensor."""

    box: Box
    location: _Location


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """A tensor of `.metadata` whose values have been checked."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[_StoredChunk]
    true_shape: tuple[int, ...] | None
    """Shape of the tensor if it is stored as flat ranges of boxes."""


@dataclass(frozen=True, slots=True)
class _Metadata:
    """Contents of `.metadata`: where each tensor and each byte entry is."""

    tensors: Mapping[str, _StoredTensor]
    entries: Mapping[str, _Location]
    paths: Mapping[str, tuple[str | int, ...]]
    """Position of each entry in the nested dict that was saved; empty for `torch_dist`."""


def read_dcp_folder(path: Path) -> MegatronFolder:
    """Return the tensors and the other state of the iteration in `path`; values are read later.

    Tensors whose optimizer state is stored as flat ranges (`fully_sharded_model_space`) have their
    true shape. An entry of `objects` returns the saved value.

    Raises:
        CheckpointError: the folder has another format, or files are missing, truncated or
            malformed; lists all problems of the data files.
    """
    detected = detect_megatron_format(path)
    if detected not in ("torch_dist", "torch_dcp", "fsdp_dtensor"):
        raise CheckpointError(
            f"{path} is {f'in format {detected}' if detected else 'not a Megatron checkpoint'}, "
            f"expected one with {layout.METADATA}, in torch_dist, torch_dcp or fsdp_dtensor."
        )
    metadata = _read_metadata(path / layout.METADATA)
    _check_files(path, metadata)
    unwrap = detected == "torch_dist"
    objects = {key: _EntryReader(path, key, at, unwrap) for key, at in metadata.entries.items()}
    common, optimizer_problem = _collect_common(path, detected, objects, metadata.paths)
    check_iteration(path, common)
    return MegatronFolder(
        path,
        _refine_format(detected, common),
        {key: _build_tensor(path, key, stored) for key, stored in metadata.tensors.items()},
        common,
        {key: read for key, read in objects.items() if key != COMMON_ENTRY},
        optimizer_problem,
    )


def _refine_format(detected: MegatronFormat, common: Mapping[str, Any]) -> MegatronFormat:
    """Return `fsdp_dtensor` for a folder without `metadata.json` whose `args` say so."""
    args = common.get("args")
    state = args.state if isinstance(args, Record) else {}
    says_fsdp = state.get("ckpt_format") == "fsdp_dtensor" or state.get("use_megatron_fsdp") is True
    return "fsdp_dtensor" if detected == "torch_dcp" and says_fsdp else detected


# --- .metadata


def _read_metadata(file: Path) -> _Metadata:
    """Parse and check `.metadata`."""
    try:
        data = storage.read_bytes(file)
    except FileNotFoundError:
        raise CheckpointError(
            f"{file.parent} has no {file.name}, which names its tensors. Tools that skip names "
            f"with a leading dot do not copy it. {COPY}"
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}. {COPY}") from error
    content = parse_pickle(data, source=str(file))
    try:
        return _parse_metadata(content)
    except ValueError as error:
        raise CheckpointError(f"cannot read {file}: {error}. {COPY}") from error


def _parse_metadata(content: object) -> _Metadata:
    """Return the checked contents of the pickle.

    Raises:
        ValueError: a value has another type, is out of bounds, or is missing.
    """
    state = _read_attributes(content, "Metadata")
    tensors: dict[str, _StoredTensor] = {}
    entries: dict[str, _Location] = {}
    locations = dict(_parse_locations(_require_dict(state.get("storage_data"), "storage_data")))
    reshaped = state.get("mcore_data")
    reshaped = {} if reshaped is None else _require_dict(reshaped, "mcore_data")
    for key, value in _require_dict(
        state.get("state_dict_metadata"), "state_dict_metadata"
    ).items():
        if not isinstance(key, str):
            raise ValueError(f"a key of state_dict_metadata is {_show(key)}, expected a name")
        if _is_record(value, "BytesStorageMetadata"):
            entries[key] = _find_location(locations, key, None)
        else:
            tensors[key] = _parse_tensor(key, value, locations, reshaped.get(key))
    return _Metadata(tensors, entries, dict(_parse_paths(state.get("planner_data"))))


def _parse_locations(
    content: Mapping[object, object],
) -> Iterator[tuple[tuple[str, tuple[int, ...] | None], _Location]]:
    """Yield (key, offset of the chunk) and its bytes, for each entry of `storage_data`."""
    for index, info in content.items():
        position = _read_attributes(index, "MetadataIndex")
        key, offset = position.get("fqn"), position.get("offset")
        if not isinstance(key, str):
            raise ValueError(f"an index of storage_data is {_show(key)}, expected a name")
        storage_info = _read_attributes(info, "_StorageInfo")
        if storage_info.get("transform_descriptors"):
            raise ValueError(
                f"{key} is stored with {_show(storage_info['transform_descriptors'])}; "
                "compressed entries are not read"
            )
        file = storage_info.get("relative_path")
        if not isinstance(file, str) or not _is_file_name(file):
            raise ValueError(f"{key} is in file {_show(file)}, expected a name in the folder")
        (start,) = _require_sizes([storage_info.get("offset")], f"position of {key}")
        (nbytes,) = _require_sizes([storage_info.get("length")], f"length of {key}")
        at = None if offset is None else _require_sizes(offset, f"index of {key}")
        yield (key, at), _Location(file, start, nbytes)


def _is_file_name(name: str) -> bool:
    """Return whether the name is one of a file directly in a folder."""
    return (
        bool(name) and len(name) < 256 and name not in (".", "..") and not set(name) & set("/\\\0")
    )


def _find_location(
    locations: Mapping[tuple[str, tuple[int, ...] | None], _Location],
    key: str,
    offset: tuple[int, ...] | None,
) -> _Location:
    location = locations.get((key, offset))
    if location is None:
        where = "" if offset is None else f" at {list(offset)}"
        raise ValueError(f"storage_data lacks {_shorten(key)}{where}")
    return location


def _parse_tensor(
    key: str,
    value: object,
    locations: Mapping[tuple[str, tuple[int, ...] | None], _Location],
    reshaped: object,
) -> _StoredTensor:
    """Return the checked description of one tensor."""
    state = _read_attributes(value, "TensorStorageMetadata", key)
    dtype = _read_attributes(state.get("properties"), "TensorProperties", key).get("dtype")
    if not isinstance(dtype, torch.dtype) or dtype not in _DTYPES:
        raise ValueError(f"{_shorten(key)} is of dtype {_show(dtype)}, which is not read")
    shape = _require_sizes(state.get("size"), f"shape of {key}")
    chunks = state.get("chunks")
    if not isinstance(chunks, (list, tuple)):
        raise ValueError(f"chunks of {_shorten(key)} are {_show(chunks)}, expected a list")
    stored = []
    for chunk in chunks:
        fields = _read_attributes(chunk, "ChunkStorageMetadata", key)
        offset = _require_sizes(fields.get("offsets"), f"offset of {key}", len(shape))
        sizes = _require_sizes(fields.get("sizes"), f"size of {key}", len(shape))
        box = tuple((start, start + size) for start, size in zip(offset, sizes, strict=True))
        if any(stop > size for (_, stop), size in zip(box, shape, strict=True)):
            raise ValueError(f"chunk {show_box(box)} of {_shorten(key)} is outside {list(shape)}")
        location = _find_location(locations, key, offset)
        if math.prod(sizes) * dtype.itemsize > location.nbytes:
            raise ValueError(
                f"chunk {show_box(box)} of {_shorten(key)} has {location.nbytes:,} bytes, expected "
                f"at least {math.prod(sizes) * dtype.itemsize:,}"
            )
        stored.append(_StoredChunk(box, location))
    true_shape = None if reshaped is None else _parse_true_shape(key, reshaped, shape)
    if true_shape is not None and any(n != 1 for part in stored for n in lengths(part.box)[:-1]):
        raise ValueError(f"{_shorten(key)} has chunks that are not flat ranges of its parts")
    return _StoredTensor(shape, dtype, stored, true_shape)


def _parse_true_shape(key: str, reshaped: object, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor that is stored as [X/x, Y/y, …, x·y·…] flat ranges."""
    fields = reshaped.state if isinstance(reshaped, Record) else reshaped
    content = _require_dict(fields, f"mcore_data of {key}")
    true_shape = _require_sizes(content.get(_TRUE_SHAPE), f"{_TRUE_SHAPE} of {key}")
    grid = shape[:-1]
    if (
        len(grid) != len(true_shape)
        or any(parts == 0 or n % parts for n, parts in zip(true_shape, grid, strict=True))
        or math.prod(true_shape) != math.prod(shape)
    ):
        raise ValueError(
            f"{_shorten(key)} is stored as {list(shape)}, which are not flat parts of its shape "
            f"{list(true_shape)}"
        )
    return true_shape


def _parse_paths(content: object) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    """Yield the position of each entry in the nested dict that was saved, where it is known."""
    if not isinstance(content, dict):
        return
    for key, path in content.items():
        if (
            isinstance(key, str)
            and isinstance(path, tuple)
            and 0 < len(path) <= _MAX_DIMS
            and all(type(part) in (str, int) for part in path)
        ):
            yield key, cast(tuple[str | int, ...], path)


def _is_record(value: object, class_name: str) -> bool:
    return isinstance(value, Record) and value.name.rpartition(".")[2] == class_name


def _read_attributes(value: object, class_name: str, key: str = "") -> Mapping[str, object]:
    """Return the attributes of a record of DCP; Megatron's subclass has `MCore` before its name."""
    if _is_record(value, class_name) or _is_record(value, f"MCore{class_name}"):
        return cast(Record, value).state
    of = f" of {_shorten(key)}" if key else ""
    raise ValueError(f"found {_show(value)}{of}, expected {class_name}")


def _require_dict(value: object, what: str) -> Mapping[Any, object]:  # keys: see the caller
    if isinstance(value, dict):
        return value
    raise ValueError(f"{_shorten(what)} is {_show(value)}, expected a dict")


def _require_sizes(value: object, what: str, count: int | None = None) -> tuple[int, ...]:
    """Return the value after checking that it is a short sequence of integers from 0 on."""
    if (
        not isinstance(value, (tuple, list))
        or len(value) > _MAX_DIMS
        or count not in (None, len(value))
        or not all(type(n) is int and 0 <= n <= _MAX_NUMEL for n in value)
        or math.prod(value) > _MAX_NUMEL
    ):
        raise ValueError(f"{_shorten(what)} is {_show(value)}, expected sizes from 0 on")
    return tuple(value)


def _show(value: object) -> str:
    """Return a short description of a value, which may be large."""
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype)):
        return repr(value)[:80]
    if isinstance(value, (tuple, list)) and len(value) <= _MAX_DIMS:
        return f"[{', '.join(_show(part) if type(part) is int else '…' for part in value)}]"
    name = getattr(value, "name", None)
    return _shorten(name) if isinstance(name, str) else type(value).__name__


def _shorten(name: str) -> str:
    return name if len(name) <= 200 else f"{name[:200]}…"


# --- data files


def _check_files(path: Path, metadata: _Metadata) -> None:
    """Check the lengths of the data files; report files that `.metadata` does not name.

    Raises:
        CheckpointError: files are missing or shorter than needed; lists them.
    """
    needed: dict[str, int] = {}
    counts: dict[str, int] = {}
    locations = [(at.file, at) for at in metadata.entries.values()]
    for tensor in metadata.tensors.values():
        locations += [(chunk.location.file, chunk.location) for chunk in tensor.chunks]
        for file in {chunk.location.file for chunk in tensor.chunks}:
            counts[file] = counts.get(file, 0) + 1
    for file, at in locations:
        needed[file] = max(needed.get(file, 0), at.offset + at.nbytes)
    problems = []
    times = []
    for file, nbytes in sorted(needed.items()):
        try:
            status = (path / file).stat()
        except OSError as error:
            reason = "is missing" if isinstance(error, FileNotFoundError) else error.strerror
            problems.append(
                f"{path.name}/{file} {reason}: parts of {counts.get(file, 0)} tensors are in it"
            )
            continue
        if status.st_size < nbytes:
            problems.append(
                f"{path.name}/{file} is {status.st_size:,} bytes, metadata needs {nbytes:,} → "
                "checkpoint incomplete"
            )
        times.append(status.st_mtime)
    if problems:
        raise CheckpointError(f"{path}:\n{list_problems(problems)}\n{COPY}")
    _report_files(path, set(needed), times)


def _report_files(path: Path, needed: set[str], times: list[float]) -> None:
    """Log data files that are not needed, and large differences between modification times."""
    unused = [
        name
        for name in storage.list_names(path)
        if name.endswith(_DATA_SUFFIX) and name not in needed
    ]
    if unused:
        more = f" and {len(unused) - _MAX_SHOWN} more" if len(unused) > _MAX_SHOWN else ""
        _log.info(
            "%s: %d data files are not named by %s, such as those of a save by another number of "
            "processes; they are not read: %s%s",
            path,
            len(unused),
            layout.METADATA,
            ", ".join(unused[:_MAX_SHOWN]),
            more,
        )
    spread = max(times, default=0.0) - min(times, default=0.0)
    if spread > _MAX_AGE_SECONDS:
        _log.warning(
            "%s: data files differ by %.0f h in age; possible interrupted overwrite. If they were "
            "not copied at different times, use another iteration.",
            path,
            spread / 3600,
        )


# --- values


def _build_tensor(path: Path, key: str, stored: _StoredTensor) -> ChunkedTensor:
    """Return a tensor whose chunks are read on request."""
    chunks = [
        TensorChunk(chunk.box, _ChunkReader(path, key, stored.dtype, chunk))
        for chunk in stored.chunks
    ]
    if stored.true_shape is None:
        return ChunkedTensor(key, stored.shape, stored.dtype, chunks)
    parts = [part for chunk in chunks for part in _split_flat_chunk(chunk, stored)]
    return ChunkedTensor(key, stored.true_shape, stored.dtype, parts)


def _split_flat_chunk(chunk: TensorChunk, stored: _StoredTensor) -> Iterable[TensorChunk]:
    """Yield the boxes of the true tensor that a flat range of one of its parts covers.

    A tensor [X, Y] of parts [x, y] is stored as [X/x, Y/y, x·y].
    """
    assert stored.true_shape is not None
    grid = stored.shape[:-1]
    part_shape = tuple(n // parts for n, parts in zip(stored.true_shape, grid, strict=True))
    *cell, (first, stop) = chunk.box
    start = 0
    for box in split_range_into_boxes(part_shape, first, stop):
        moved = tuple(
            (at * size + low, at * size + high)
            for (at, _), size, (low, high) in zip(cell, part_shape, box, strict=True)
        )
        yield TensorChunk(moved, _RangeReader(chunk, start, lengths(box)))
        start += numel(box)


@dataclass(frozen=True, slots=True)
class _RangeReader:
    """Reads a box from a flat range."""

    chunk: TensorChunk
    start: int
    """First element of the box in the chunk."""

    shape: tuple[int, ...]

    def __call__(self) -> Tensor:
        flat = self.chunk.read().view(-1)
        return flat[self.start : self.start + math.prod(self.shape)].view(self.shape)


@dataclass(frozen=True, slots=True)
class _ChunkReader:
    """Reads a chunk: a tensor in an archive of `torch.save`."""

    path: Path
    key: str
    dtype: torch.dtype
    chunk: _StoredChunk

    def __call__(self) -> Tensor:
        at, shape = self.chunk.location, lengths(self.chunk.box)
        source = (
            f"{self.path / at.file}: the {at.nbytes:,} bytes from {at.offset:,} on "
            f"({_shorten(self.key)} {show_box(self.chunk.box)})"
        )
        tensor = parse_archive(_map_entry(self.path, at, source), source=source)
        if not isinstance(tensor, ArchiveTensor):
            raise CheckpointError(f"{source} hold {_show(tensor)}, expected a tensor. {COPY}")
        if (tensor.shape, tensor.dtype) != (shape, self.dtype):
            raise CheckpointError(
                f"{source} hold {list(tensor.shape)} {tensor.dtype}; expected {list(shape)} "
                f"{self.dtype}. {COPY}"
            )
        return tensor.read()


@dataclass(frozen=True, slots=True)
class _EntryReader:
    """Parses a byte entry: an archive of `torch.save`. Megatron wraps values in a list of one
    element, which is removed."""

    path: Path
    key: str
    at: _Location
    unwrap: bool

    def __call__(self) -> Any:  # a parsed pickle
        source = f"{self.path.name}/{self.at.file} ({_shorten(self.key)})"
        value = parse_archive(_map_entry(self.path, self.at, source), source=source)
        wrapped = self.unwrap and isinstance(value, list) and len(value) == 1
        return cast(list[object], value)[0] if wrapped else value


def _map_entry(path: Path, at: _Location, source: str) -> memoryview:
    """Memory-map the bytes of an entry; `source` names them in errors."""
    try:
        data = storage.mapped(path / at.file, at.offset, at.nbytes)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{source} cannot be read ({error}). {COPY}") from error
    if len(data) != at.nbytes:
        raise CheckpointError(f"{source}: the file ends after {len(data):,} of them. {COPY}")
    return data


# --- non-tensor state


def _collect_common(
    path: Path,
    detected: MegatronFormat,
    objects: Mapping[str, Callable[[], object]],
    paths: Mapping[str, tuple[str | int, ...]],
) -> tuple[dict[str, Any], str | None]:  # values of parsed pickles
    """Return the non-tensor state: `common.pt`, its byte entry, or the byte entries of a
    folder that DCP wrote without Megatron's library; and why that of the optimizer cannot be
    read."""
    common = read_common(path)
    if common is None and COMMON_ENTRY in objects:
        common = check_common(objects[COMMON_ENTRY](), f"{path.name}/{COMMON_ENTRY}")
    if common is not None:
        return common, None
    if detected == "torch_dist":
        raise CheckpointError(
            f"{path} has neither {COMMON} nor the entry {COMMON_ENTRY}, which contain its "
            f"arguments. {COPY}"
        )
    nested: dict[str | int, Any] = {}
    problem: str | None = None
    for key, read in objects.items():
        position = paths.get(key, (key,))
        if _SKIPPED_ENTRIES.match(key):
            continue
        try:
            _insert(nested, position, read(), f"{path.name}/{layout.METADATA}")
        except CheckpointError as error:
            if not key.startswith("optimizer."):
                raise
            problem = problem or str(error)  # does not affect the weights
    return check_common(nested, str(path)), problem


def _insert(
    nested: dict[Any, Any], position: tuple[str | int, ...], value: object, source: str
) -> None:
    """Set a value of nested dicts; an element of a list has a number as key."""
    for part in position[:-1]:
        nested = nested.setdefault(part, {})
        if not isinstance(nested, dict):
            raise CheckpointError(f"{source} has two values at {_show(position)}. {COPY}")
    nested[position[-1]] = value

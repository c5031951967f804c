"""Pickles and `torch.save` archives of untrusted files, parsed without executing anything.

A pickle is a program, which may call any function that Python can import. Here, names on an
allowlist become plain values or a `Record`, and the result of any other call becomes a
`Placeholder`, which holds the name and the arguments.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from megalith import storage
from megalith.checkpoint.pickle_interpreter import (
    LEAVES,
    Global,
    Interpreter,
    MalformedPickleError,
    Placeholder,
    Record,
    iter_children,
    show_name,
)
from megalith.checkpoint.pickle_names import (
    NAMES,
    STORAGE_DTYPES,
    ArchiveStorage,
    ArchiveTensor,
)
from megalith.errors import CheckpointError

__all__ = (
    "ArchiveStorage",
    "ArchiveTensor",
    "Global",
    "Placeholder",
    "Record",
    "parse_archive",
    "parse_pickle",
    "read_archive",
    "require_plain",
)

_T = TypeVar("_T")


def parse_pickle(
    data: bytes | memoryview,
    *,
    source: str,
    load_persistent: Callable[[object], object] | None = None,
) -> object:
    """Return the object in a pickle of protocol 0 to 5. Nothing is imported or called.

    The result has plain Python values, `Record` for objects on the allowlist, `Placeholder` for
    everything else. A dtype becomes a `torch.dtype`, a `torch.Size` a tuple, an `OrderedDict` a
    dict, a path a string. `load_persistent` returns the value of a persistent id.

    Raises:
        CheckpointError: the data is malformed, cyclic, or exceeds the limits of this module.
    """
    return _name_source(source, lambda: Interpreter(data, NAMES, load_persistent).run())


def _name_source(source: str, parse: Callable[[], _T]) -> _T:
    """Call a parser; errors of malformed data become CheckpointErrors that name the source."""
    try:
        return parse()
    except MalformedPickleError as error:
        reason = str(error)
    except (LookupError, TypeError, ValueError, ArithmeticError, struct.error) as error:
        reason = f"malformed pickle ({show_name(str(error))})"
    raise CheckpointError(f"cannot read {source}: {reason}")


# --- values that are needed


def require_plain(value: _T, *, what: str, source: str) -> _T:
    """Return a value after checking that it contains no placeholder.

    Raises:
        CheckpointError: it does; names the class, and `what` was read.
    """
    pending: list[object] = [value]
    visited: set[int] = set()
    while pending:
        node = pending.pop()
        if isinstance(node, Placeholder):
            raise CheckpointError(
                f"{source} references {show_name(node.name)}, which is not a plain value, so "
                f"{what} cannot be read. Save it again with plain values only."
            )
        if not isinstance(node, LEAVES) and id(node) not in visited:
            visited.add(id(node))
            pending.extend(iter_children(node))
    return value


# --- archives of torch.save


_END_RECORD = struct.Struct("<4s4xHHIIH")
_END_LOCATOR_64 = struct.Struct("<4sIQI")
_END_RECORD_64 = struct.Struct("<4s20xQQQQ")
_ENTRY = struct.Struct("<4s4xHH8xIIHHH8xI")
_LOCAL_ENTRY = struct.Struct("<4s22xHH")
_LEGACY_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
"""Start of a file that torch before 1.6 saved: the pickled magic number."""

_MAX_DIRECTORY_NBYTES = 2**28
"""Largest directory of an archive. Heuristic: one of a million storages has 100 MB."""


@dataclass(frozen=True, slots=True)
class _ZipFileInfo:
    """One file in a zip archive."""

    header: int
    """Offset of its local header."""

    nbytes: int
    is_stored: bool
    """Whether its bytes are neither compressed nor encrypted."""


@dataclass(frozen=True, slots=True, eq=False)
class _Archive:
    """Zip archive whose entries are read on request."""

    nbytes: int
    read: Callable[[int, int], memoryview]
    """Return bytes [start, start + nbytes) of the archive."""

    map: Callable[[int, int], memoryview]
    """The same for large ranges, memory-mapped and writable."""


def read_archive(path: Path, *, source: str | None = None) -> object:
    """Return the object that `torch.save` wrote into a file; nothing in it is executed.

    Values are those of `parse_pickle`. Tensors become `ArchiveTensor`, whose values are
    memory-mapped when they are read; a subclass of Tensor and a sparse tensor become placeholders.

    Raises:
        CheckpointError: the file cannot be read, is not such an archive, or is malformed.
    """
    source = str(path) if source is None else source

    def read(start: int, nbytes: int) -> memoryview:
        return memoryview(storage.read_range(path, start, nbytes))

    def map_range(start: int, nbytes: int) -> memoryview:
        try:
            data = storage.mapped(path, start, nbytes)
        except OSError as error:
            raise CheckpointError(f"cannot read {source}: {error.strerror}") from error
        if len(data) < nbytes:
            raise CheckpointError(f"cannot read {source}: it was truncated while it was read")
        return data

    if not path.is_file():
        raise CheckpointError(f"cannot read {source}: it is not a regular file, or does not exist")
    try:
        archive = _Archive(storage.file_nbytes(path), read, map_range)
        return _name_source(source, lambda: _parse_archive(archive))
    except OSError as error:
        raise CheckpointError(f"cannot read {source}: {error.strerror}") from error


def parse_archive(data: memoryview, *, source: str) -> object:
    """Return the object that `torch.save` wrote into memory, as `read_archive` does for a file.

    Raises:
        CheckpointError: the data is not such an archive, or is malformed.
    """
    data = data.cast("B")

    def read(start: int, nbytes: int) -> memoryview:
        return data[start : start + nbytes]

    def read_writable(start: int, nbytes: int) -> memoryview:
        part = data[start : start + nbytes]
        return memoryview(bytearray(part)) if part.readonly else part  # torch warns of read-only

    return _name_source(source, lambda: _parse_archive(_Archive(len(data), read, read_writable)))


def _parse_archive(archive: _Archive) -> object:
    """Parse the pickle of an archive; its persistent ids are storages."""
    entries = _read_directory(archive)
    prefix = next(iter(entries), "").partition("/")[0]
    if f"{prefix}/data.pkl" not in entries:
        raise MalformedPickleError("a zip archive without data.pkl, expected one of torch.save")
    if f"{prefix}/byteorder" in entries:
        order = bytes(_read_entry(archive, entries, f"{prefix}/byteorder"))
        if order != b"little":
            name = show_name(order.decode("latin1"))
            raise MalformedPickleError(
                f"an archive of byte order {name}, expected little. Save it again on a "
                "little-endian machine"
            )

    def load_storage(key: object) -> ArchiveStorage | Placeholder:
        match key:
            case ("storage", Global() as kind, str() as number, str(), int() as numel):
                dtype = STORAGE_DTYPES.get(kind.name.replace("torch.cuda.", "torch."))
            case _:
                raise MalformedPickleError("malformed pickle (a storage without name and length)")
        if dtype is None:
            return Placeholder(kind.name, (number, numel))
        if not 0 <= numel < 2**63:
            raise MalformedPickleError("malformed pickle (a storage without name and length)")
        name = f"{prefix}/data/{number}"
        start, nbytes = _find_entry(archive, entries, name)
        if numel * dtype.itemsize > nbytes:
            raise MalformedPickleError(
                f"{show_name(name)} has {nbytes:,} bytes, expected {numel:,} elements of {dtype}"
            )
        return ArchiveStorage(
            dtype,
            numel * dtype.itemsize,
            lambda first, length: archive.map(start + first, length),
        )

    pickled = _read_entry(archive, entries, f"{prefix}/data.pkl")
    return Interpreter(pickled, NAMES, load_storage).run()


def _read_directory(archive: _Archive) -> dict[str, _ZipFileInfo]:
    """Return the entries of a zip archive, in order."""
    tail_start = max(0, archive.nbytes - 2**16 - 22 - _END_LOCATOR_64.size)
    tail = bytes(archive.read(tail_start, archive.nbytes - tail_start))
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _END_RECORD.size > len(tail):
        raise MalformedPickleError(_describe_other_file(archive))
    _, _, count, size, start, _ = _END_RECORD.unpack_from(tail, at)
    at -= _END_LOCATOR_64.size
    if at >= 0 and tail[at : at + 4] == b"PK\x06\x07":
        _, _, record_start, _ = _END_LOCATOR_64.unpack_from(tail, at)
        if record_start + _END_RECORD_64.size > archive.nbytes:
            raise MalformedPickleError("a zip archive whose directory is damaged")
        record = archive.read(record_start, _END_RECORD_64.size)
        signature, _, count, size, start = _END_RECORD_64.unpack(record)
        if signature != b"PK\x06\x06":
            raise MalformedPickleError("a zip archive whose directory is damaged")
    if start + size > archive.nbytes or size > _MAX_DIRECTORY_NBYTES:
        raise MalformedPickleError("a zip archive whose directory is damaged, or a truncated file")
    directory = bytes(archive.read(start, size))
    entries: dict[str, _ZipFileInfo] = {}
    at = 0
    for _ in range(min(count, size // _ENTRY.size)):
        name, entry, at = _parse_entry(directory, at)
        if name in entries:
            raise MalformedPickleError(f"a zip archive with two entries {show_name(name)}")
        entries[name] = entry
    return entries


def _parse_entry(directory: bytes, at: int) -> tuple[str, _ZipFileInfo, int]:
    """Return name and entry at an offset of the directory, and the offset of the next one."""
    signature, flags, method, packed, nbytes, *lengths, header = _ENTRY.unpack_from(directory, at)
    name_start = at + _ENTRY.size
    extra_start = name_start + lengths[0]
    stop = extra_start + lengths[1] + lengths[2]
    if signature != b"PK\x01\x02" or stop > len(directory):
        raise MalformedPickleError("a zip archive whose directory is damaged")
    extra = directory[extra_start : extra_start + lengths[1]]
    sizes = [nbytes, packed, header]
    long_sizes = iter(_find_long_sizes(extra))
    sizes = [next(long_sizes, value) if value == 0xFFFFFFFF else value for value in sizes]
    name = directory[name_start:extra_start].decode()
    is_stored = method == 0 and not flags & 1 and sizes[0] == sizes[1]
    return name, _ZipFileInfo(sizes[2], sizes[0], is_stored), stop


def _find_long_sizes(extra: bytes) -> list[int]:
    """Return the 64-bit sizes in the extra field of an entry."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            data = extra[at + 4 : at + 4 + length]
            return [value for (value,) in struct.iter_unpack("<Q", data[: len(data) // 8 * 8])]
        at += 4 + length
    return []


def _find_entry(
    archive: _Archive, entries: Mapping[str, _ZipFileInfo], name: str
) -> tuple[int, int]:
    """Return the offset and length of an entry's bytes."""
    entry = entries.get(name)
    if entry is None:
        raise MalformedPickleError(f"a zip archive without {show_name(name)}")
    if not entry.is_stored:
        raise MalformedPickleError(
            f"{show_name(name)} is compressed, expected stored as by torch.save"
        )
    if entry.header + _LOCAL_ENTRY.size > archive.nbytes:
        raise MalformedPickleError(f"the zip entry {show_name(name)} is beyond the end of the file")
    header = archive.read(entry.header, _LOCAL_ENTRY.size)
    signature, name_nbytes, extra_nbytes = _LOCAL_ENTRY.unpack(header)
    start = entry.header + _LOCAL_ENTRY.size + name_nbytes + extra_nbytes
    if signature != b"PK\x03\x04" or start + entry.nbytes > archive.nbytes:
        raise MalformedPickleError(
            f"the zip entry {show_name(name)} is damaged, or the file is truncated"
        )
    return start, entry.nbytes


def _read_entry(archive: _Archive, entries: Mapping[str, _ZipFileInfo], name: str) -> memoryview:
    start, nbytes = _find_entry(archive, entries, name)
    return archive.read(start, nbytes)


def _describe_other_file(archive: _Archive) -> str:
    """Return why a file that is not a zip archive cannot be read."""
    start = bytes(archive.read(0, 512))
    if start.startswith(_LEGACY_MAGIC) or start[257:262] == b"ustar":
        return (
            "an archive of torch before 1.6, which is not read. Load it with torch, and save it "
            "again with torch.save"
        )
    return "not an archive of torch.save, or a truncated one"

"""File system access with durability: writes that survive a power failure; knows nothing about
tensors.

Functions that take a `StoragePath` work on local paths and on objects in a store; the others need a
local or mounted file system.
"""

import errno
import json
import mmap
import os
import re
import secrets
import shutil
import stat
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, cast

from megalith import object_store
from megalith.errors import CheckpointError
from megalith.object_store import DEFAULT_OPTIONS, StoreFile, StoreOptions, StorePath

CANNOT_SYNC = errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS
"""Error codes of fsync on file systems without it; some mounts support it for files but not for
folders."""

MAX_NBYTES = 2**30
"""Largest file that is read into memory. Heuristic: tokenizers and manifests have up to tens of
MB."""

MAX_TEXT_NBYTES = 2**24
"""Largest text file of settings, prompts or templates. Heuristic: a thousand times a typical
length."""

MAX_OBJECT_NBYTES = 2**26
"""Length after which another object is begun. Heuristic: stores transfer 50 to 100 MB/s per
connection, so an error costs about a second."""

_MADV_POPULATE_READ = 22
"""From Linux' mman.h; Python has no name for it."""


StoragePath = Path | StorePath
"""Path of a file or folder, or of an object or prefix in a store."""


def parse_path(text: str, options: StoreOptions = DEFAULT_OPTIONS) -> StoragePath:
    """Return the path that a text names: a URL of an object store, or a local path.

    Raises:
        ConfigError: the URL cannot be used.
    """
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    if object_store.is_url(text) or object_store.describe_url_problem(text) is not None:
        return object_store.parse_url(text, options)
    return Path(text).expanduser()


def open_new(path: StoragePath) -> BinaryIO:
    """Create a file and open it for writing bytes; an existing file is an error.

    An object is stored by `sync_file`; if the file is closed before, it does not appear.
    """
    if isinstance(path, StorePath):
        return cast(BinaryIO, StoreFile(path))  # it has what writers use
    return open(path, "xb")


def allocate_new(path: Path, nbytes: int) -> None:
    """Create a file of `nbytes` bytes, whose parts are written later by `open_part`."""
    with open_new(path) as file:
        file.truncate(nbytes)


def open_part(path: Path, start: int) -> BinaryIO:
    """Open an allocated file for writing bytes from `start` on."""
    file = open(path, "r+b")  # noqa: SIM115 - the caller closes it
    file.seek(start)
    return file


def begin_sync(file: BinaryIO, start: int, nbytes: int) -> None:
    """Ask the system to start writing bytes to disk, so that `sync_file` takes less time."""
    if isinstance(file, StoreFile):
        return
    file.flush()
    if hasattr(os, "posix_fadvise"):  # Linux starts writing dirty pages and drops clean ones
        os.posix_fadvise(file.fileno(), start, nbytes, os.POSIX_FADV_DONTNEED)


def sync_written(path: Path) -> None:
    """Return when everything written to a file, by any process, is on disk."""
    with open(path, "rb") as file:
        _sync(file.fileno(), path)


def sync_file(file: BinaryIO) -> None:
    """Return when everything written to `file` is on disk, or in the store."""
    if isinstance(file, StoreFile):
        file.put()
        return
    file.flush()
    _sync(file.fileno(), Path(file.name))


def sync_folder(folder: StoragePath) -> None:
    """Return when the names in `folder` are on disk: a rename is durable only after this."""
    if isinstance(folder, StorePath):  # objects are durable when they appear
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        _sync(handle, folder)
    finally:
        os.close(handle)


def _sync(handle: int, path: Path) -> None:
    """Call fsync. Warns once if the file system does not support it.

    Raises:
        OSError: the data is not on disk.
    """
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise
        place = next(
            folder
            for folder in (path.absolute(), *path.absolute().parents)
            if os.path.ismount(folder)
        )
        warnings.warn(
            f"{place}: this file system does not support fsync ({error.strerror}). After a power "
            "failure its files may be incomplete: check them, or use another file system.",
            RuntimeWarning,
            stacklevel=2,
        )


def write_new(path: StoragePath, data: bytes | memoryview) -> None:
    """Create a file with `data`, on disk when this returns."""
    with open_new(path) as file:
        file.write(data)
        sync_file(file)


def append_line(path: Path, line: bytes) -> None:
    """Append a line to a file, created if missing, with a single call: a kill truncates at most
    this line."""
    with open(path, "ab", buffering=0) as file:
        file.write(line + b"\n")


def replace_file(path: StoragePath, data: bytes) -> None:
    """Replace the contents of `path` atomically: a reader sees all of the old or all of the new."""
    if isinstance(path, StorePath):
        object_store.put_object(path, data)
        return
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    remove_file(temporary)  # left by a killed process with the same id
    try:
        write_new(temporary, data)
        _replace(temporary, path)
    except OSError:
        remove_file(temporary)
        raise
    sync_folder(path.parent)


def _replace(source: Path, target: Path) -> None:
    """Rename a file over another one."""
    os.replace(source, target)


def rename(source: Path, target: Path) -> None:
    """Move within one file system atomically; a non-empty target is not overwritten."""
    os.rename(source, target)


def make_folder(folder: StoragePath) -> None:
    """Create a folder and its parents; an existing folder is an error. A store has no folders."""
    if isinstance(folder, StorePath):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    os.mkdir(folder)


def remove_file(path: StoragePath) -> None:
    """Delete a file, if it exists."""
    if isinstance(path, StorePath):
        object_store.delete_object(path)
        return
    path.unlink(missing_ok=True)


def remove_tree(folder: StoragePath) -> None:
    """Delete a folder and everything in it, if it exists. Links are removed, not followed."""
    if isinstance(folder, StorePath):
        for path in object_store.list_object_lengths(folder):
            object_store.delete_object(path)
        return
    if folder.is_symlink() or folder.exists():
        shutil.rmtree(folder)


def list_names(folder: StoragePath) -> list[str]:
    """Return the names in `folder`, sorted; none if there is no such folder. The listing of a store
    may be old."""
    if isinstance(folder, StorePath):
        return object_store.list_object_names(folder)
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def exists(path: StoragePath) -> bool:
    """Return whether there is a file or folder, or in a store an object of this name."""
    if not isinstance(path, StorePath):
        return path.exists()
    try:
        object_store.object_nbytes(path)
    except FileNotFoundError:
        return False
    return True


def is_folder(path: StoragePath) -> bool:
    """Return whether there is a folder, or in a store any object under this prefix."""
    return path.is_dir() if isinstance(path, Path) else bool(list_names(path))


def is_link(path: StoragePath) -> bool:
    """Return whether a path is a symbolic link; a store has none."""
    return isinstance(path, Path) and path.is_symlink()


def file_lengths(folder: StoragePath, names: Iterable[str]) -> dict[str, int | OSError]:
    """Return the length of each file in a folder, or why it cannot be read.

    A store lists the folder, and is asked about the files that are not in the list by name.
    """
    listed: dict[str, int] = {}
    if isinstance(folder, StorePath):
        lengths = object_store.list_object_lengths(folder)
        listed = {path.name: nbytes for path, nbytes in lengths.items() if path.parent == folder}
    result: dict[str, int | OSError] = {}
    for name in names:
        try:
            result[name] = listed[name] if name in listed else file_nbytes(folder / name)
        except OSError as error:
            result[name] = error
    return result


def read_bytes(
    path: StoragePath, *, max_nbytes: int = MAX_NBYTES, allow_pipe: bool = False
) -> bytes:
    """Read a whole regular file of at most `max_nbytes` bytes; with `allow_pipe` also a named or
    anonymous pipe.

    Raises:
        OSError: the file cannot be read, is a device or another special file, or is larger than the
        limit.
    """
    if isinstance(path, StorePath):
        return _read_whole_object(path, max_nbytes)
    status = path.stat()
    allowed = stat.S_ISREG(status.st_mode) or (allow_pipe and stat.S_ISFIFO(status.st_mode))
    if not allowed and not stat.S_ISDIR(status.st_mode):
        # opening a directory raises a clear error below
        raise OSError(errno.EINVAL, "not a regular file, but a device, pipe or socket", str(path))
    too_large = _too_large(path, max_nbytes)
    if status.st_size > max_nbytes:
        raise too_large
    with open(path, "rb") as file:
        data = file.read(max_nbytes + 1) if stat.S_ISFIFO(status.st_mode) else file.read()
    if len(data) > max_nbytes:
        raise too_large
    return data


def _too_large(path: StoragePath, max_nbytes: int) -> OSError:
    return OSError(errno.EFBIG, f"larger than the limit of {max_nbytes:,} bytes", str(path))


def _read_whole_object(path: StorePath, max_nbytes: int) -> bytes:
    nbytes = object_store.object_nbytes(path)
    if nbytes > max_nbytes:
        raise _too_large(path, max_nbytes)
    return bytes(object_store.read_object(path, 0, nbytes))


def read_text(
    path: StoragePath, *, max_nbytes: int = MAX_TEXT_NBYTES, allow_pipe: bool = False
) -> str:
    """Read a whole UTF-8 text file under the same conditions as `read_bytes`; line ends become
    `\\n`.

    Raises:
        OSError: as for `read_bytes`.
        UnicodeDecodeError: the file is not UTF-8.
    """
    text = read_bytes(path, max_nbytes=max_nbytes, allow_pipe=allow_pipe).decode()
    return text.replace("\r\n", "\n").replace("\r", "\n")


def parse_json(text: str | bytes) -> Any:  # JSON
    """Parse a JSON document.

    Raises:
        ValueError: the text is not JSON, or its values are nested too deeply for the parser.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("arrays or objects are nested too deeply") from None


def read_range(path: StoragePath, start: int, nbytes: int) -> bytes:
    """Return bytes [start, start + nbytes) of a file; fewer if the file ends before."""
    if isinstance(path, StorePath):
        return bytes(object_store.read_object(path, start, nbytes))
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(nbytes)


def mapped(path: StoragePath, start: int, nbytes: int) -> memoryview:
    """Return bytes [start, start + nbytes) of a file as a memory map; writing to it does not change
    the file.

    The file must not be truncated before the last view is freed: the system kills a process that
    reads beyond its end. Bytes of an object are read into memory.
    """
    if isinstance(path, StorePath):
        return memoryview(object_store.read_object(path, start, nbytes))
    with open(path, "rb") as file:
        stop = min(start + nbytes, os.fstat(file.fileno()).st_size)
        if stop <= start:
            return memoryview(b"")
        first = start - start % mmap.ALLOCATIONGRANULARITY
        pages = mmap.mmap(file.fileno(), stop - first, access=mmap.ACCESS_COPY, offset=first)
    _read_ahead(pages)
    return memoryview(pages)[start - first :]


def _read_ahead(pages: mmap.mmap) -> None:
    """Read all pages now: faster than page by page, and a read error is an exception instead of a
    signal.

    Raises:
        OSError: the disk cannot read them.
    """
    if sys.platform != "linux":
        return
    pages.madvise(mmap.MADV_WILLNEED)  # starts many reads, for which the next line waits
    try:
        pages.madvise(_MADV_POPULATE_READ)
    except OSError as error:
        if error.errno != errno.EINVAL:  # not supported before Linux 5.14
            raise OSError(errno.EIO, os.strerror(errno.EIO)) from error


_NETWORK_FILE_SYSTEMS = re.compile(
    r"nfs4?|cifs|smb3|lustre|gpfs|ceph|beegfs|glusterfs|9p|afs|orangefs|wekafs|panfs|fuse\..*"
)
"""Types of file systems in /proc/self/mountinfo that several machines may share."""


def is_network_folder(path: Path) -> bool:
    """Return whether a folder is on a file system that several machines share; False where the
    system does not list them (macOS)."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    kind = parse_file_system_type(mounts, path.resolve())
    return _NETWORK_FILE_SYSTEMS.fullmatch(kind) is not None


def parse_file_system_type(mounts: Iterable[str], path: Path) -> str:
    """Return the type of the file system that holds `path`; "" if none does.

    mounts: lines of /proc/self/mountinfo; of several mounts at one place the last counts.

    >>> lines = ["25 1 8:1 / / rw - ext4 /dev/sda1 rw", "30 25 0:4 / /data rw - nfs4 host:/ rw"]
    >>> parse_file_system_type(lines, Path("/data/run")), parse_file_system_type(lines, Path("/a"))
    ('nfs4', 'ext4')
    """
    longest, kind = -1, ""
    for line in mounts:
        fields, _, description = line.partition(" - ")
        place = Path(fields.split()[4].encode().decode("unicode_escape"))
        if path.is_relative_to(place) and len(place.parts) >= longest:
            longest, kind = len(place.parts), description.split()[0]
    return kind


def file_nbytes(path: StoragePath) -> int:
    """Return the length of a file."""
    if isinstance(path, StorePath):
        return object_store.object_nbytes(path)
    return path.stat().st_size


def free_nbytes(folder: StoragePath) -> int:
    """Return the number of bytes that can still be written under `folder`; a store is never
    full."""
    return sys.maxsize if isinstance(folder, StorePath) else shutil.disk_usage(folder).free


def max_file_nbytes(folder: StoragePath) -> int:
    """Return the length after which a writer of many boxes begins another file. Objects are
    limited, because they are in memory until they are stored, and are stored again as a whole after
    an error."""
    return MAX_OBJECT_NBYTES if isinstance(folder, StorePath) else sys.maxsize


def check_writable(folder: StorePath, setting: str) -> None:
    """Write, read and delete a probe object.

    Raises:
        CheckpointError: one of them fails; the text names `setting` and the bucket.
    """
    probe, data = folder / f".probe-{secrets.token_hex(4)}", secrets.token_bytes(16)
    bucket = f"the bucket {folder.bucket}" if folder.bucket else "the store"
    try:
        object_store.put_object(probe, data)
        if object_store.read_object(probe, 0, len(data)) != data:
            raise OSError(errno.EIO, "a probe object has other contents than written", str(probe))
        object_store.delete_object(probe)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{setting}={folder}: {bucket} does not exist ({error.strerror}). Create it, or set "
            f"{setting} to a bucket that exists."
        ) from None
    except PermissionError as error:
        raise CheckpointError(
            f"{setting}={folder}: {bucket} cannot be used: {error.strerror}. A probe object is "
            "written, read and deleted before the first step. Permit this, set the credentials of "
            f"the store's client, or set {setting} to another bucket."
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{setting}={folder}: {bucket} cannot be used: {error.strerror}. Correct this, or set "
            f"{setting} to another bucket."
        ) from None

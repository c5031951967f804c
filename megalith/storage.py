"""File system access with durability: writes that survive a power failure; knows nothing about
tensors.

All paths are local or on a mounted file system. Another kind of storage would implement the same
functions.
"""

import errno
import json
import mmap
import os
import shutil
import stat
import sys
import warnings
from pathlib import Path
from typing import Any, BinaryIO

CANNOT_SYNC = errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS
"""Error codes of fsync on file systems without it; some mounts support it for files but not for
folders."""

MAX_NBYTES = 2**30
"""Largest file that is read into memory. Heuristic: tokenizers and manifests have up to tens of
MB."""

MAX_TEXT_NBYTES = 2**24
"""Largest text file of settings, prompts or templates. Heuristic: a thousand times a typical
length."""

_MADV_POPULATE_READ = 22
"""From Linux' mman.h; Python has no name for it."""


def open_new(path: Path) -> BinaryIO:
    """Create a file and open it for writing bytes; an existing file is an error."""
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
    file.flush()
    if hasattr(os, "posix_fadvise"):  # Linux starts writing dirty pages and drops clean ones
        os.posix_fadvise(file.fileno(), start, nbytes, os.POSIX_FADV_DONTNEED)


def sync_written(path: Path) -> None:
    """Return when everything written to a file, by any process, is on disk."""
    with open(path, "rb") as file:
        _sync(file.fileno(), path)


def sync_file(file: BinaryIO) -> None:
    """Return when everything written to `file` is on disk."""
    file.flush()
    _sync(file.fileno(), Path(file.name))


def sync_folder(folder: Path) -> None:
    """Return when the names in `folder` are on disk: a rename is durable only after this."""
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


def write_new(path: Path, data: bytes) -> None:
    """Create a file with `data`, on disk when this returns."""
    with open_new(path) as file:
        file.write(data)
        sync_file(file)


def append_line(path: Path, line: bytes) -> None:
    """Append a line to a file, created if missing, with a single call: a kill truncates at most
    this line."""
    with open(path, "ab", buffering=0) as file:
        file.write(line + b"\n")


def replace_file(path: Path, data: bytes) -> None:
    """Replace the contents of `path` atomically: a reader sees all of the old or all of the new."""
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


def make_folder(folder: Path) -> None:
    """Create a folder and its parents; an existing folder is an error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    os.mkdir(folder)


def remove_file(path: Path) -> None:
    """Delete a file, if it exists."""
    path.unlink(missing_ok=True)


def remove_tree(folder: Path) -> None:
    """Delete a folder and everything in it, if it exists. Links are removed, not followed."""
    if folder.is_symlink() or folder.exists():
        shutil.rmtree(folder)


def list_names(folder: Path) -> list[str]:
    """Return the names in `folder`, sorted; none if there is no such folder."""
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def read_bytes(path: Path, *, max_nbytes: int = MAX_NBYTES, allow_pipe: bool = False) -> bytes:
    """Read a whole regular file of at most `max_nbytes` bytes; with `allow_pipe` also a named or
    anonymous pipe.

    Raises:
        OSError: the file cannot be read, is a device or another special file, or is larger than the
        limit.
    """
    status = path.stat()
    allowed = stat.S_ISREG(status.st_mode) or (allow_pipe and stat.S_ISFIFO(status.st_mode))
    if not allowed and not stat.S_ISDIR(status.st_mode):
        # opening a directory raises a clear error below
        raise OSError(errno.EINVAL, "not a regular file, but a device, pipe or socket", str(path))
    too_large = OSError(errno.EFBIG, f"larger than the limit of {max_nbytes:,} bytes", str(path))
    if status.st_size > max_nbytes:
        raise too_large
    with open(path, "rb") as file:
        data = file.read(max_nbytes + 1) if stat.S_ISFIFO(status.st_mode) else file.read()
    if len(data) > max_nbytes:
        raise too_large
    return data


def read_text(path: Path, *, max_nbytes: int = MAX_TEXT_NBYTES, allow_pipe: bool = False) -> str:
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


def read_range(path: Path, start: int, nbytes: int) -> bytes:
    """Return bytes [start, start + nbytes) of a file; fewer if the file ends before."""
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(nbytes)


def mapped(path: Path, start: int, nbytes: int) -> memoryview:
    """Return bytes [start, start + nbytes) of a file as a memory map; writing to it does not change
    the file.

    The file must not be truncated before the last view is freed: the system kills a process that
    reads beyond its end.
    """
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


def file_nbytes(path: Path) -> int:
    """Return the length of a file."""
    return path.stat().st_size


def free_nbytes(folder: Path) -> int:
    """Return the number of bytes that can still be written under `folder`."""
    return shutil.disk_usage(folder).free

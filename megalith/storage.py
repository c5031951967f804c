"""The disk, as far as a run needs it: every call that must survive a power cut, and nothing that
knows about tensors.

All paths are local or on a mounted file system. A second kind of storage would offer these same
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

CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""What fsync answers where a file system has no such thing; some mounts have it for files and not
for folders."""

MAX_NBYTES = 2**30
"""Largest file that is read into memory as a whole. Heuristic: tokenizers and manifests have up to
tens of MB."""

MAX_TEXT_NBYTES = 2**24
"""Largest text file of settings, prompts or templates. Heuristic: a thousand times the usual
length."""

_MADV_POPULATE_READ = 22
"""Of Linux' mman.h; Python has no name for it."""


def open_new(path: Path) -> BinaryIO:
    """A new file, open for writing bytes; a file that exists is never written into."""
    return open(path, "xb")


def allocate_new(path: Path, nbytes: int) -> None:
    """A new file of so many bytes, whose parts are then written by whoever has them."""
    with open_new(path) as file:
        file.truncate(nbytes)


def open_part(path: Path, start: int) -> BinaryIO:
    """A file that was allocated, open for writing bytes from `start` on."""
    file = open(path, "r+b")  # noqa: SIM115 - whoever asked closes it
    file.seek(start)
    return file


def begin_sync(file: BinaryIO, start: int, nbytes: int) -> None:
    """Let the disk begin with bytes that were written, so that `sync_file` has less to wait for."""
    file.flush()
    if hasattr(
        os, "posix_fadvise"
    ):  # Linux begins to write what is not on the disk, and forgets what is
        os.posix_fadvise(file.fileno(), start, nbytes, os.POSIX_FADV_DONTNEED)


def sync_written(path: Path) -> None:
    """Return when everything written to a file, by whomever, is on the disk."""
    with open(path, "rb") as file:
        _sync(file.fileno(), path)


def sync_file(file: BinaryIO) -> None:
    """Return when everything written to `file` is on the disk."""
    file.flush()
    _sync(file.fileno(), Path(file.name))


def sync_folder(folder: Path) -> None:
    """Return when the names in `folder` are on the disk: a rename is safe only after this."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        _sync(handle, folder)
    finally:
        os.close(handle)


def _sync(handle: int, path: Path) -> None:
    """Wait for the disk. A file system that cannot be asked is told about, once; whatever a disk
    refuses is an error.

    Raises:
        OSError: something written is not on the disk.
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
            f"{place}: this file system cannot be asked to write to its disk what it was given "
            f"({error.strerror}). "
            f"After a power cut, files there may be incomplete: check them, or use another place.",
            RuntimeWarning,
            stacklevel=2,
        )


def write_new(path: Path, data: bytes) -> None:
    """A new file holding `data`, on the disk when this returns."""
    with open_new(path) as file:
        file.write(data)
        sync_file(file)


def append_line(path: Path, line: bytes) -> None:
    """Add a line to a file, which is made if there is none: all of it with one call, so that a kill
    cuts at most it."""
    with open(path, "ab", buffering=0) as file:
        file.write(line + b"\n")


def replace_file(path: Path, data: bytes) -> None:
    """Give `path` new contents at once: a reader sees all of the old or all of the new."""
    aside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    remove_file(aside)  # left by a process that was killed and whose number we now have
    try:
        write_new(aside, data)
        os.replace(aside, path)
    except OSError:
        remove_file(aside)
        raise
    sync_folder(path.parent)


def rename(source: Path, target: Path) -> None:
    """Move within one folder or file system, at once; a target that holds anything is not
    overwritten."""
    os.rename(source, target)


def make_folder(folder: Path) -> None:
    """A new folder and its parents; a folder that exists is an error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    os.mkdir(folder)


def remove_file(path: Path) -> None:
    """Delete a file; no error when there is none."""
    path.unlink(missing_ok=True)


def remove_tree(folder: Path) -> None:
    """Delete a folder and everything in it; no error when there is none. Links are removed, not
    followed."""
    if folder.is_symlink() or folder.exists():
        shutil.rmtree(folder)


def list_names(folder: Path) -> list[str]:
    """Names in `folder`, sorted; none when there is no such folder."""
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
    if not allowed and not stat.S_ISDIR(
        status.st_mode
    ):  # opening a directory raises a clear error below
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
    """Bytes [start, start + nbytes) of a file; fewer when the file ends before."""
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(nbytes)


def mapped(path: Path, start: int, nbytes: int) -> memoryview:
    """The same bytes without a copy, as the system has read them; writing to them changes no file.

    The file must stay as long as it is until the last view of them is gone: the system kills a
    process that looks at bytes which were cut off.
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
    """Read all pages now: at once instead of a few at each fault, and with an error where a fault
    would be a signal.

    Raises:
        OSError: the disk cannot read them.
    """
    if sys.platform != "linux":
        return
    pages.madvise(mmap.MADV_WILLNEED)  # many reads in flight, for which the next line waits
    try:
        pages.madvise(_MADV_POPULATE_READ)
    except OSError as error:
        if error.errno != errno.EINVAL:  # before Linux 5.14 there is no such advice
            raise OSError(errno.EIO, os.strerror(errno.EIO)) from error


def file_nbytes(path: Path) -> int:
    """Length of a file."""
    return path.stat().st_size


def free_nbytes(folder: Path) -> int:
    """Bytes that can still be written under `folder`."""
    return shutil.disk_usage(folder).free

"""Cache of built index arrays: one process builds them, the others map the same files.

An entry consists of .npy files and a .json that is written last, with what the arrays were built
from and the hash of each file. An entry that does not match its .json is rebuilt with a warning.
"""

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.data.indexed import file_digest
from megalith.errors import ConfigError, DataError

Arrays = dict[str, NDArray[Any]]

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.1
_LOG_SECONDS = 30.0


def load_or_build(folder: Path | None, description: str, build: Callable[[], Arrays]) -> Arrays:
    """Return the arrays of `description`, mapped from `folder` or else built and saved.

    `description` is the cache key, and must name everything that the arrays depend on. Without a
    folder, the arrays are built in memory.

    Raises:
        ConfigError: the folder is not writable.
        DataError: the files cannot be written.
    """
    if folder is None:
        return build()
    entry = _CachedArrays(folder, description)
    arrays = entry.load()
    if arrays is not None:
        return arrays
    _make_folder(folder)
    with _build_lock(entry.path(".lock")):
        # another process may have built it while this one waited for the lock
        arrays = entry.load()
        if arrays is None:
            entry.save(build())
            arrays = entry.load()
    assert arrays is not None, f"an index just written cannot be read back: {entry.path('.json')}"
    return arrays


class _CachedArrays:
    """Files of one cache entry."""

    def __init__(self, folder: Path, description: str) -> None:
        self._folder = folder
        self._description = description
        self._key = hashlib.blake2b(description.encode(), digest_size=16).hexdigest()

    def path(self, suffix: str) -> Path:
        return self._folder / f"{self._key}{suffix}"

    def load(self) -> Arrays | None:
        """Return the mapped arrays; None if there is no entry or it is damaged."""
        if not self.path(".json").is_file():
            return None
        try:
            files = json.loads(self.path(".json").read_text())["files"]
            return {name: self._load_array(name, digest) for name, digest in files.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("%s is damaged (%s): building the index again", self.path(".json"), error)
            return None

    def _load_array(self, name: str, digest: str) -> NDArray[Any]:
        path = self.path(f"-{name}.npy")
        if file_digest(path) != digest:
            raise ValueError(f"the hash of {path.name} is not {digest}")
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        return array

    def save(self, arrays: Arrays) -> None:
        try:
            for name, array in arrays.items():
                _write_atomically(self.path(f"-{name}.npy"), array)
            files = {name: file_digest(self.path(f"-{name}.npy")) for name in arrays}
            _write_atomically(
                self.path(".json"),
                json.dumps({"built_from": self._description, "files": files}, indent=1),
            )
        except OSError as error:
            raise DataError(
                f"{self._folder}: the sample index cannot be written ({error}). Free some space, "
                "or "
                f"set data.cache_path to another folder."
            ) from error


def _write_atomically(path: Path, content: NDArray[Any] | str) -> None:
    """Write a temporary file, flush it to disk and rename it."""
    temporary = path.with_name(f"{path.name}.writing-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            if isinstance(content, str):
                file.write(content.encode())
            else:
                np.save(file, content, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise ConfigError(
            f"data.cache_path: indices cannot be written to {folder}, which is not writable. Set "
            f"data.cache_path to a writable folder that all ranks can read."
        )


@contextmanager
def _build_lock(lock: Path) -> Iterator[None]:
    """Hold the lock of an entry while building it; log a warning every 30 s while waiting."""
    with lock.open("w") as file:
        started = last_log = time.monotonic()
        while not _try_lock(file.fileno(), lock):
            time.sleep(_POLL_SECONDS)
            if time.monotonic() - last_log > _LOG_SECONDS:
                last_log = time.monotonic()
                _log.warning(
                    "waiting %.0f s for another process to build %s", last_log - started, lock.stem
                )
        yield  # closing the file releases the lock, and so does the end of the process


def _try_lock(descriptor: int, lock: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # Files are replaced by renaming, so without locks processes only repeat the same work.
        _log.warning(
            "%s: no file locks on this file system (%s): every process builds the index",
            lock,
            error,
        )
    return True

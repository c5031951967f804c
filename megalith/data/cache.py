"""Built indices kept on disk: one process builds, the others map the same files.

An entry is some .npy files and a .json that is written last and says what they were built from, how
large they are and what they hash to. An entry that does not match its .json is built again, with a
warning.
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
_SAY_SECONDS = 30.0


def load_or_build(folder: Path | None, description: str, build: Callable[[], Arrays]) -> Arrays:
    """The arrays that belong to `description`: mapped from `folder` if they are there, else built
    and kept.

    Without a folder they are built in memory. `description` names everything they depend on, so it
    is the key.

    Raises:
        ConfigError: the folder cannot be written.
        DataError: the disk is full.
    """
    if folder is None:
        return build()
    entry = _CachedArrays(folder, description)
    arrays = entry.load()
    if arrays is not None:
        return arrays
    _make_folder(folder)
    with _only_builder(entry.path(".lock")):
        arrays = entry.load()  # another process may have built it while this one waited
        if arrays is None:
            entry.save(build())
            arrays = entry.load()
    assert arrays is not None, f"an index just written cannot be read back: {entry.path('.json')}"
    return arrays


class _CachedArrays:
    """The files of one description."""

    def __init__(self, folder: Path, description: str) -> None:
        self._folder = folder
        self._description = description
        self._key = hashlib.blake2b(description.encode(), digest_size=16).hexdigest()

    def path(self, ending: str) -> Path:
        return self._folder / f"{self._key}{ending}"

    def load(self) -> Arrays | None:
        """The arrays, mapped; None when there is no entry or it is damaged."""
        if not self.path(".json").is_file():
            return None
        try:
            files = json.loads(self.path(".json").read_text())["files"]
            return {name: self._load_array(name, digest) for name, digest in files.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("%s is damaged (%s): the index is built again", self.path(".json"), error)
            return None

    def _load_array(self, name: str, digest: str) -> NDArray[Any]:
        path = self.path(f"-{name}.npy")
        if file_digest(path) != digest:
            raise ValueError(
                f"{path.name} is not the file that was written; expected hash {digest}"
            )
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        return array

    def save(self, arrays: Arrays) -> None:
        try:
            for name, array in arrays.items():
                _write_whole(self.path(f"-{name}.npy"), array)
            files = {name: file_digest(self.path(f"-{name}.npy")) for name in arrays}
            _write_whole(
                self.path(".json"),
                json.dumps({"built_from": self._description, "files": files}, indent=1),
            )
        except OSError as error:
            raise DataError(
                f"{self._folder}: the index of samples cannot be kept ({error}). Free some space, "
                f"or set data.cache_path to another folder."
            ) from error


def _write_whole(path: Path, content: NDArray[Any] | str) -> None:
    """Write to a name of this process, flush, rename: the file is whole whenever it is there."""
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
            f"data.cache_path: indices cannot be kept in {folder}, which this user cannot write. "
            f"Set data.cache_path to a folder that all ranks can read and this one can write."
        )


@contextmanager
def _only_builder(lock: Path) -> Iterator[None]:
    """Wait until no other process builds the same entry; say so every 30 s."""
    with lock.open("w") as file:
        started = said = time.monotonic()
        while not _try_lock(file.fileno(), lock):
            time.sleep(_POLL_SECONDS)
            if time.monotonic() - said > _SAY_SECONDS:
                said = time.monotonic()
                _log.warning(
                    "waiting %.0f s for another process to build %s", said - started, lock.stem
                )
        yield  # closing the file gives the lock back, as does the end of the process


def _try_lock(descriptor: int, lock: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # Renames keep every file whole, so without locks several processes merely do the same work.
        _log.warning(
            "%s: no locks on this file system (%s): every process builds for itself", lock, error
        )
    return True

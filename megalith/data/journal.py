"""Stores that are being written: files that only grow, and a note of how much of them counts.

They lie in a folder of their own until they are whole. `state.json` in it names the place in the
input that was reached and the size of every file at that moment; going on means cutting the files
there and reading on from that place.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from megalith.data.corpus import Position, Source
from megalith.data.indexed import index_path, tokens_path, write_index
from megalith.errors import DataError

_SAVE_SECONDS = 10.0  # what a crash costs at most
_EXAMPLES = 5


@dataclass(slots=True)
class Totals:
    """What has been read and written so far."""

    documents: int = 0
    empty_documents: int = 0
    sequences: int = 0
    tokens: int = 0
    text_bytes: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)  # the first rejected lines, in words

    def __add__(self, other: "Totals") -> "Totals":
        reasons = dict.fromkeys([*self.rejected, *other.rejected])
        return Totals(
            documents=self.documents + other.documents,
            empty_documents=self.empty_documents + other.empty_documents,
            sequences=self.sequences + other.sequences,
            tokens=self.tokens + other.tokens,
            text_bytes=self.text_bytes + other.text_bytes,
            rejected={
                reason: self.rejected.get(reason, 0) + other.rejected.get(reason, 0)
                for reason in reasons
            },
            examples=(self.examples + other.examples)[:_EXAMPLES],
        )

    def reject(self, reason: str, message: str) -> None:
        """Count one line or file that is no document."""
        self.rejected[reason] = self.rejected.get(reason, 0) + 1
        self.examples = [*self.examples, message][:_EXAMPLES]


@dataclass(frozen=True, slots=True)
class EncodedKey:
    """The tokens of one key of some documents."""

    ids: NDArray[Any]  # in the store's type
    lengths: NDArray[np.int32]  # tokens of each sequence
    sequences: NDArray[np.int32]  # sequences of each document, 0 for an empty one


@dataclass(frozen=True, slots=True)
class _Done:
    """A moment at which everything up to a place in the input was written: replaced as a whole,
    never changed."""

    position: Position
    totals: Totals
    sizes: tuple[tuple[int, ...], ...]  # bytes of the growing files of each store


class _GrowingStore:
    """The three growing files of one store, and the index made of them at the end."""

    def __init__(self, folder: Path, key: str) -> None:
        self.tokens, self.lengths, self.sequences = (
            folder / f"{key}.{name}" for name in ("tokens", "lengths", "sequences")
        )
        self.index = folder / f"{key}.idx"
        self._files: list[BinaryIO] = []

    def open(self, sizes: Sequence[int]) -> None:
        """Cut the files to the sizes that count, and go on behind them.

        Raises:
            DataError: a file is shorter than it was.
        """
        for path, size in zip((self.tokens, self.lengths, self.sequences), sizes):
            file = path.open("ab")
            self._files.append(file)
            if file.tell() < size:
                raise DataError(
                    f"{path}: {file.tell()} bytes, {size} expected. Pass --overwrite to start "
                    "again."
                )
            file.truncate(size)

    def append(self, encoded: EncodedKey) -> tuple[int, ...]:
        """Write one block; returns the sizes of the files after it."""
        for file, values in zip(self._files, (encoded.ids, encoded.lengths, encoded.sequences)):
            file.write(np.ascontiguousarray(values).data)
        return tuple(file.tell() for file in self._files)

    def sync(self) -> None:
        """Wait until all of it is on the disk."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())

    def write_index(self, dtype: np.dtype[Any]) -> None:
        lengths = np.fromfile(self.lengths, "<i4")
        sequences = np.fromfile(self.sequences, "<i4")
        document_index = np.zeros(len(sequences) + 1, np.int64)
        np.cumsum(sequences, dtype=np.int64, out=document_index[1:])
        with self.index.open("wb") as file:
            write_index(file, dtype=dtype, lengths=lengths, document_index=document_index)
            file.flush()
            os.fsync(file.fileno())

    def publish(self, prefix: str) -> None:
        """Move both files to their names, .idx last; doing it twice is harmless."""
        if self.tokens.exists():
            index_path(prefix).unlink(missing_ok=True)
            self.tokens.replace(tokens_path(prefix))
        if self.index.exists():
            self.index.replace(index_path(prefix))

    def close(self) -> None:
        for file in self._files:
            with suppress(OSError):  # a full disk was reported already; closing flushes once more
                file.close()


class PrepareJournal:
    """The stores of one `prepare`, one per key, and the place in the input up to which they are
    safe."""

    def __init__(
        self, folder: Path, keys: Sequence[str], settings: dict[str, Any], sources: Sequence[Source]
    ) -> None:
        """`settings` is all that decides the tokens besides the input; a run that goes on must have
        the same."""
        self.finished = False
        self._done = _Done(Position(), Totals(), ((0, 0, 0),) * len(keys))
        self._folder = folder
        self._settings = settings
        self._sources = [asdict(source) for source in sources]
        self._stores = [_GrowingStore(folder, key) for key in keys]
        self._state = folder / "state.json"
        self._saved = time.monotonic()
        self._lock: BinaryIO | None = None
        self._fits = False  # what is in the folder is known to be of this run

    @property
    def position(self) -> Position:
        """Where in the input to go on."""
        return self._done.position

    @property
    def totals(self) -> Totals:
        """What has been written, in this run and those before it."""
        return self._done.totals

    def start(self, *, resume: bool, overwrite: bool) -> None:
        """Take the folder: a fresh one, what is left of an earlier run with `resume`, or its place
        with `overwrite`.

        Raises:
            DataError: it is another process's, holds unfinished work, does not fit these settings,
            or cannot be made.
        """
        there = os.path.exists(
            self._folder
        )  # unlike Path.exists, no error where looking is not allowed
        lock = _take(self._folder)
        if there and not (resume or overwrite):
            lock.close()
            raise DataError(
                f"{self._folder} holds an unfinished run. Pass --resume to go on, or --overwrite "
                "to start again."
            )
        self._lock = lock
        if overwrite:
            self._state.unlink(missing_ok=True)
        if self._state.exists():
            self._load()
        self._fits = True
        if not self.finished:
            for store, sizes in zip(self._stores, self._done.sizes):
                store.open(sizes)

    def _load(self) -> None:
        state = json.loads(self._state.read_text())
        differing = [
            name for name, value in self._settings.items() if state["settings"].get(name) != value
        ]
        position = Position(**state["position"])
        begun = position.sources + (position.lines > 0)
        if differing or state["sources"][:begun] != self._sources[:begun]:
            what = ", ".join(differing) or "the files read so far"
            raise DataError(
                f"{self._folder} was begun with other settings or files ({what} differ). Use the "
                "same ones to resume, "
                f"or pass --overwrite to start again."
            )
        self.finished = state["finished"]
        self._done = _Done(
            position, Totals(**state["totals"]), tuple(tuple(sizes) for sizes in state["sizes"])
        )

    def append(self, end: Position, keys: Sequence[EncodedKey], totals: Totals) -> None:
        """Add the documents up to `end`; from time to time, make sure that they are safe.

        Raises:
            DataError: the disk is full.
        """
        try:
            sizes = tuple(store.append(encoded) for store, encoded in zip(self._stores, keys))
            # One assignment: an interrupt before it leaves bytes that do not count, and never a
            # count without bytes.
            self._done = _Done(end, self.totals + totals, sizes)
            if time.monotonic() - self._saved > _SAVE_SECONDS:
                self.save()
        except OSError as error:
            raise DataError(
                f"{self._folder}: {error}. Free some space, and pass --resume to go on."
            ) from error

    def save(self) -> None:
        """Note what is on the disk now."""
        for store in self._stores:
            store.sync()
        state = {
            "settings": self._settings,
            "sources": self._sources,
            "finished": self.finished,
            **asdict(self._done),
        }
        temporary = self._state.with_suffix(".writing")
        with temporary.open("w") as file:
            json.dump(state, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._state)
        self._saved = time.monotonic()

    def finish(self, dtype: np.dtype[Any]) -> None:
        """Write the indices; from here on only renames are left, which a later run can make up
        for."""
        try:
            for store in self._stores:
                store.sync()
                store.write_index(dtype)
            self.finished = True
            self.save()
        except OSError as error:
            raise DataError(
                f"{self._folder}: {error}. Free some space, and pass --resume to go on."
            ) from error

    def publish(self, prefixes: Sequence[str]) -> None:
        """Give the stores their names and remove the folder."""
        for store, prefix in zip(self._stores, prefixes):
            store.publish(prefix)
        shutil.rmtree(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._lock is None:
            return
        interrupted = kind is not None and not issubclass(kind, DataError)
        if interrupted and not self.finished and self.position != Position():
            self.save()
        for store in self._stores:
            store.close()
        useful = self._state.exists() and (self.totals.tokens or not self._fits)
        if kind is not None and not useful:
            shutil.rmtree(
                self._folder, ignore_errors=True
            )  # nothing in it that a later run could use
        self._lock.close()


def _take(folder: Path) -> BinaryIO:
    """Make the folder if it is missing, and hold it until the file is closed.

    Raises:
        DataError: another process holds it, or it cannot be made or locked.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("wb")
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be written ({error}). Use an output in a folder you can write to."
        ) from error
    try:
        fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise DataError(
            f"{folder}: another process is writing it ({error}). Wait for it, or use another "
            "output."
        ) from error
    except OSError as error:
        lock.close()
        raise DataError(
            f"{folder}: cannot be locked ({error}). Use an output on a file system with locks."
        ) from error
    return lock

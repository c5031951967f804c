"""Operations on token stores: summarize, merge, write with resume, and record the tokenizer that
wrote them."""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from megalith import storage
from megalith.config.data import TokenizerConfig
from megalith.config.tree import dump_yaml, load_yaml
from megalith.data.corpus import Position, Source
from megalith.data.indexed import (
    IndexedDataset,
    IndexedDatasetBuilder,
    index_path,
    store_exists,
    tokens_path,
    write_index,
)
from megalith.data.tokenizer import Tokenizer, build_tokenizer
from megalith.errors import DataError

_MAX_SAMPLED_DOCUMENTS = 100_000  # documents whose last token is read: seconds on a slow disk


@dataclass(frozen=True, slots=True)
class StoreSummary:
    """Statistics of one store, printed by `megalith data info`."""

    prefix: str
    token_type: str
    multimodal: bool
    documents: int
    empty_documents: int
    sequences: int
    tokens: int
    shortest: int
    mean_length: float
    longest: int
    common_last_token: int | None  # of documents; None when all are empty
    common_last_share: float  # of non-empty documents: 1 if each ends with the end token
    bin_nbytes: int
    idx_nbytes: int


def summarize(store: IndexedDataset) -> StoreSummary:
    """Compute the statistics of one store. Lengths are in tokens per sequence."""
    lengths = store.sequence_lengths
    token, share = _common_last_token(store)
    return StoreSummary(
        prefix=store.path_prefix,
        token_type=store.dtype.name,
        multimodal=store.multimodal,
        documents=store.num_documents,
        empty_documents=int((np.diff(store.document_indices) == 0).sum()),
        sequences=len(store),
        tokens=store.num_tokens,
        shortest=int(lengths.min()) if len(store) else 0,
        mean_length=float(lengths.mean()) if len(store) else 0.0,
        longest=int(lengths.max()) if len(store) else 0,
        common_last_token=token,
        common_last_share=share,
        bin_nbytes=tokens_path(store.path_prefix).stat().st_size,
        idx_nbytes=index_path(store.path_prefix).stat().st_size,
    )


def _common_last_token(store: IndexedDataset) -> tuple[int | None, float]:
    """Return the most frequent last token of documents, and its share among the sampled ones."""
    ends = store.document_indices[1:][np.diff(store.document_indices) > 0]
    step = max(1, len(ends) // _MAX_SAMPLED_DOCUMENTS)
    lasts = [
        int(store.get(int(end) - 1)[-1]) for end in ends[::step] if store.sequence_lengths[end - 1]
    ]
    if not lasts:
        return None, 0.0
    values, counts = np.unique(lasts, return_counts=True)
    best = int(counts.argmax())
    return int(values[best]), int(counts[best]) / len(lasts)


def find_stores(place: str) -> list[str]:
    """Return the prefix itself, or every store of a folder sorted by name.

    Raises:
        DataError: there is none, or a store lacks one of its two files.
    """
    if store_exists(place) or not Path(place).is_dir():
        # A store may have the same name as a folder: training creates PREFIX/cache next to it.
        return [place]
    stems = sorted(
        {
            str(path.with_suffix(""))
            for suffix in ("idx", "bin")
            for path in Path(place).glob(f"*.{suffix}")
        }
    )
    broken = [stem for stem in stems if not store_exists(stem)]
    if broken or not stems:
        what = f"{broken[0]} has only one of its two files" if broken else "no .idx and .bin files"
        raise DataError(f"{place}: {what}. Use a folder of complete stores.")
    return stems


def merge_stores(prefixes: Sequence[str], output: str, *, overwrite: bool = False) -> None:
    """Write one store with the documents of several, in order, as if all texts had been prepared at
    once.

    Raises:
        DataError: there is no store, the stores have different token types, or the output exists.
    """
    if not prefixes:
        raise DataError(
            f"nothing to merge into {output}. Use one or more prefixes or folders of stores."
        )
    # os.path.exists, unlike Path.exists, raises no PermissionError
    if os.path.exists(index_path(output)) and not overwrite:
        raise DataError(
            f"output {output}: the store already exists. Use another name, or pass --overwrite."
        )
    stores = [IndexedDataset(prefix) for prefix in prefixes]
    _check_same_type(stores)
    with IndexedDatasetBuilder(output, stores[0].dtype, multimodal=stores[0].multimodal) as builder:
        for prefix in prefixes:
            builder.add_index(prefix)
        builder.finalize()
    records = [_read_record(prefix) for prefix in prefixes]
    if records[0] is None or any(record != records[0] for record in records):
        storage.remove_file(tokenizer_record(output))  # of a store that was replaced
    else:
        write_tokenizer_record(output, records[0].tokenizer, records[0].fingerprint)


def _check_same_type(stores: Sequence[IndexedDataset]) -> None:
    kinds = [f"{store.dtype.name}{' with modes' if store.multimodal else ''}" for store in stores]
    others = [
        f"{store.path_prefix} ({kind})" for store, kind in zip(stores, kinds) if kind != kinds[0]
    ]
    if others:
        raise DataError(
            f"{', '.join(others)}: not the token type of {stores[0].path_prefix} "
            f"({kinds[0]}). Use stores of one tokenizer."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTokenizer:
    """Tokenizer that wrote a store: the contents of PREFIX.tokenizer.yaml."""

    fingerprint: str
    """Changes when the ids of any text would."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """A path to files is relative to the folder of the store."""


def tokenizer_record(prefix: str) -> Path:
    """Return the path of the tokenizer record of a store."""
    return Path(f"{prefix}.tokenizer.yaml")


def write_tokenizer_record(prefix: str, config: TokenizerConfig, fingerprint: str) -> None:
    """Record which tokenizer wrote a store."""
    file = tokenizer_record(prefix)
    if config.path is not None and Path(config.path).exists():  # else it is a hub name
        config = replace(config, path=os.path.relpath(config.path, file.parent))
    storage.replace_file(
        file, dump_yaml(StoreTokenizer(fingerprint=fingerprint, tokenizer=config)).encode()
    )


def read_store_tokenizer(prefix: str) -> Tokenizer:
    """Build the tokenizer that wrote a store; bytes if none is recorded.

    Raises:
        ConfigError: the record is damaged.
        DataError: the tokenizer is missing or has changed.
    """
    record = _read_record(prefix)
    if record is None:
        return build_tokenizer(TokenizerConfig())
    tokenizer = build_tokenizer(record.tokenizer)
    if tokenizer.fingerprint != record.fingerprint:
        raise DataError(
            f"{tokenizer_record(prefix)}: the store was written by the tokenizer "
            f"{record.fingerprint}, and "
            f"{record.tokenizer.path} is {tokenizer.fingerprint} now. Pass --tokenizer with the "
            "original tokenizer, or --ids."
        )
    return tokenizer


def _read_record(prefix: str) -> StoreTokenizer | None:
    """Return the record of a store with the tokenizer path made relative to the working directory;
    None without one."""
    file = tokenizer_record(prefix)
    if not file.is_file():
        return None
    record = load_yaml(file, StoreTokenizer)
    path = record.tokenizer.path
    if path is None or not (file.parent / path).exists():
        return record
    return replace(
        record, tokenizer=replace(record.tokenizer, path=os.path.normpath(file.parent / path))
    )


# Resumable writing of token stores: append-only files and a record of how much of them is valid.
#
# The files are in a temporary folder until they are complete. Its `state.json` stores the position
# in the input and the size of every file at that moment; to resume, the files are truncated to
# these sizes and the input is read from that position.

_SAVE_SECONDS = 10.0  # work that a crash loses at most
_MAX_EXAMPLES = 5


@dataclass(slots=True)
class Totals:
    """Counts of what was read and written so far."""

    documents: int = 0
    empty_documents: int = 0
    sequences: int = 0
    tokens: int = 0
    text_bytes: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)  # messages about the first rejected lines

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
            examples=(self.examples + other.examples)[:_MAX_EXAMPLES],
        )

    def reject(self, reason: str, message: str) -> None:
        """Count one line or file that is not a document."""
        self.rejected[reason] = self.rejected.get(reason, 0) + 1
        self.examples = [*self.examples, message][:_MAX_EXAMPLES]


@dataclass(frozen=True, slots=True)
class EncodedKey:
    """Tokens of some documents for one key."""

    ids: NDArray[Any]  # in the token type of the store
    lengths: NDArray[np.int32]  # tokens per sequence
    sequences: NDArray[np.int32]  # sequences per document, 0 for an empty one


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """Position in the input and the file sizes at that position; immutable, replaced atomically."""

    position: Position
    totals: Totals
    sizes: tuple[tuple[int, ...], ...]  # bytes of the three files of each store


class _GrowingStore:
    """Three append-only files of one store, and the index that is built from them."""

    def __init__(self, folder: Path, key: str) -> None:
        self.tokens, self.lengths, self.sequences = (
            folder / f"{key}.{name}" for name in ("tokens", "lengths", "sequences")
        )
        self.index = folder / f"{key}.idx"
        self._files: list[BinaryIO] = []

    def open(self, sizes: Sequence[int]) -> None:
        """Truncate the files to the recorded sizes and open them for appending.

        Raises:
            DataError: a file is shorter than recorded.
        """
        for path, size in zip((self.tokens, self.lengths, self.sequences), sizes):
            file = path.open("ab")
            self._files.append(file)
            if file.tell() < size:
                raise DataError(
                    f"{path}: {file.tell()} bytes, {size} expected. Pass --overwrite to restart."
                )
            file.truncate(size)

    def append(self, encoded: EncodedKey) -> tuple[int, ...]:
        """Append one block; return the sizes of the files."""
        for file, values in zip(self._files, (encoded.ids, encoded.lengths, encoded.sequences)):
            file.write(np.ascontiguousarray(values).data)
        return tuple(file.tell() for file in self._files)

    def sync(self) -> None:
        """Flush the files to disk."""
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
        """Rename both files to their final names, .idx last; idempotent."""
        if self.tokens.exists():
            index_path(prefix).unlink(missing_ok=True)
            self.tokens.replace(tokens_path(prefix))
        if self.index.exists():
            self.index.replace(index_path(prefix))

    def close(self) -> None:
        for file in self._files:
            with suppress(OSError):  # a full disk was reported already, and closing flushes again
                file.close()


class PrepareJournal:
    """Stores of one `prepare` run, one per key, and the input position up to which they are
    saved."""

    def __init__(
        self, folder: Path, keys: Sequence[str], settings: dict[str, Any], sources: Sequence[Source]
    ) -> None:
        """`settings`: everything besides the input that determines the tokens; a resumed run must
        have the same."""
        self.finished = False
        self._checkpoint = _Checkpoint(Position(), Totals(), ((0, 0, 0),) * len(keys))
        self._folder = folder
        self._settings = settings
        self._sources = [asdict(source) for source in sources]
        self._stores = [_GrowingStore(folder, key) for key in keys]
        self._state = folder / "state.json"
        self._saved = time.monotonic()
        self._lock: BinaryIO | None = None
        self._is_own_folder = False  # the contents of the folder are known to belong to this run

    @property
    def position(self) -> Position:
        """Position in the input to continue from."""
        return self._checkpoint.position

    @property
    def totals(self) -> Totals:
        """Counts of this run and of the runs that it resumes."""
        return self._checkpoint.totals

    def start(self, *, resume: bool, overwrite: bool) -> None:
        """Lock the folder; create it, resume from it, or overwrite it.

        Raises:
            DataError: another process holds the lock, the folder contains an unfinished run or one
                with other settings, or it cannot be created.
        """
        exists = os.path.exists(self._folder)  # unlike Path.exists, no PermissionError
        lock = _lock_folder(self._folder)
        if exists and not (resume or overwrite):
            lock.close()
            raise DataError(
                f"{self._folder} contains an unfinished run. Pass --resume to continue it, or "
                "--overwrite to restart it."
            )
        self._lock = lock
        if overwrite:
            self._state.unlink(missing_ok=True)
        if self._state.exists():
            self._load()
        self._is_own_folder = True
        if not self.finished:
            for store, sizes in zip(self._stores, self._checkpoint.sizes):
                store.open(sizes)

    def _load(self) -> None:
        state = json.loads(self._state.read_text())
        differing = [
            name for name, value in self._settings.items() if state["settings"].get(name) != value
        ]
        position = Position(**state["position"])
        num_started = position.sources + (position.lines > 0)
        if differing or state["sources"][:num_started] != self._sources[:num_started]:
            what = ", ".join(differing) or "the files read so far"
            raise DataError(
                f"{self._folder} was written with other settings or files ({what} differ). Use the "
                "same ones to resume, or pass --overwrite to restart."
            )
        self.finished = state["finished"]
        self._checkpoint = _Checkpoint(
            position, Totals(**state["totals"]), tuple(tuple(sizes) for sizes in state["sizes"])
        )

    def append(self, end: Position, keys: Sequence[EncodedKey], totals: Totals) -> None:
        """Append the documents up to `end`; save periodically.

        Raises:
            DataError: the files cannot be written.
        """
        try:
            sizes = tuple(store.append(encoded) for store, encoded in zip(self._stores, keys))
            # One assignment: an interrupt before it leaves extra bytes, which are truncated on
            # resume, but never counts missing bytes.
            self._checkpoint = _Checkpoint(end, self.totals + totals, sizes)
            if time.monotonic() - self._saved > _SAVE_SECONDS:
                self.save()
        except OSError as error:
            raise DataError(
                f"{self._folder}: {error}. Free some space, and pass --resume to continue."
            ) from error

    def save(self) -> None:
        """Flush the files and save the state."""
        for store in self._stores:
            store.sync()
        state = {
            "settings": self._settings,
            "sources": self._sources,
            "finished": self.finished,
            **asdict(self._checkpoint),
        }
        temporary = self._state.with_suffix(".writing")
        with temporary.open("w") as file:
            json.dump(state, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._state)
        self._saved = time.monotonic()

    def finish(self, dtype: np.dtype[Any]) -> None:
        """Write the indices; afterwards only renames remain, which a resumed run can repeat."""
        try:
            for store in self._stores:
                store.sync()
                store.write_index(dtype)
            self.finished = True
            self.save()
        except OSError as error:
            raise DataError(
                f"{self._folder}: {error}. Free some space, and pass --resume to continue."
            ) from error

    def publish(self, prefixes: Sequence[str]) -> None:
        """Rename the stores to their final names and remove the folder."""
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
        useful = self._state.exists() and (self.totals.tokens or not self._is_own_folder)
        if kind is not None and not useful:
            shutil.rmtree(self._folder, ignore_errors=True)  # nothing to resume from
        self._lock.close()


def _lock_folder(folder: Path) -> BinaryIO:
    """Create the folder if it is missing, and lock it until the returned file is closed.

    Raises:
        DataError: another process holds the lock, or the folder cannot be created or locked.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("wb")
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be written ({error}). Use an output in a writable folder."
        ) from error
    try:
        fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise DataError(
            f"{folder}: another process is writing to it ({error}). Wait for it, or use another "
            "output."
        ) from error
    except OSError as error:
        lock.close()
        raise DataError(
            f"{folder}: cannot be locked ({error}). Use an output on a file system that supports "
            "locks."
        ) from error
    return lock

"""Token stores: .idx/.bin file pairs in Megatron's format, byte for byte, read through memory maps.

`PREFIX.bin` contains raw tokens. `PREFIX.idx` is, little-endian and packed: 9 bytes of magic,
version, a code for the token type, the number n of sequences, the length m of the document index,
int32 lengths [n], int64 byte offsets [n], int64 document index [m] (the sequence at which each
document ends, after a leading 0), and one mode byte per sequence in multimodal files (0 tokens, 1
an image).
"""

import difflib
import hashlib
import mmap
import os
import struct
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megalith.errors import DataError

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")  # 34 bytes
DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in enumerate(["u1", "i1", "i2", "i4", "i8", "f8", "f4", "u2"], start=1)
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
_MAX_FULLY_HASHED_NBYTES = 64 << 20  # of larger files, _NUM_HASHED_PIECES of 1 MiB are hashed
_NUM_HASHED_PIECES = 64
_CHECK_CHUNK = 1 << 20  # sequences checked at once: some tens of MiB


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the token type: uint16 below 65500 ids, else int32, as in Megatron."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def index_path(prefix: str) -> Path:
    """Return the path `PREFIX.idx`."""
    return Path(f"{prefix}.idx")


def tokens_path(prefix: str) -> Path:
    """Return the path `PREFIX.bin`."""
    return Path(f"{prefix}.bin")


def store_exists(prefix: str) -> bool:
    """Return whether both files of a store exist."""
    return index_path(prefix).is_file() and tokens_path(prefix).is_file()


def file_digest(path: Path) -> str:
    """Return a hash of a file's size and contents; of a file above 64 MiB, of 64 evenly spaced
    MiB."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        if size <= _MAX_FULLY_HASHED_NBYTES:
            digest.update(file.read())
            return digest.hexdigest()
        for piece in range(_NUM_HASHED_PIECES):
            file.seek((size - (1 << 20)) * piece // (_NUM_HASHED_PIECES - 1))
            digest.update(file.read(1 << 20))
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Layout:
    """Header of an .idx, and the byte ranges of its arrays."""

    dtype: np.dtype[Any]
    num_sequences: int
    num_ends: int  # documents + 1
    multimodal: bool

    @property
    def lengths(self) -> slice:
        return slice(HEADER.size, HEADER.size + 4 * self.num_sequences)

    @property
    def pointers(self) -> slice:
        return slice(self.lengths.stop, self.lengths.stop + 8 * self.num_sequences)

    @property
    def documents(self) -> slice:
        return slice(self.pointers.stop, self.pointers.stop + 8 * self.num_ends)

    @property
    def modes(self) -> slice:
        return slice(
            self.documents.stop, self.documents.stop + self.num_sequences * self.multimodal
        )


def missing_store_message(prefix: str) -> str | None:
    """Return why a prefix cannot be opened, with similar names; None if both files exist."""
    if store_exists(prefix):
        return None
    folder = Path(prefix).parent
    prefixes = sorted(
        str(path.with_suffix(""))
        for path in folder.glob("*.idx")
        if path.with_suffix(".bin").is_file()
    )
    similar = [name for name in prefixes if Path(name).name.startswith(Path(prefix).name)]
    similar += [
        name
        for name in difflib.get_close_matches(prefix, prefixes, cutoff=0.5)
        if name not in similar
    ]
    missing = " and ".join(
        str(path) for path in (index_path(prefix), tokens_path(prefix)) if not path.is_file()
    )
    if similar:
        hint = f"Use one of {similar[:4]}."
    elif prefix.endswith((".bin", ".idx")):
        hint = f"Use the prefix without the file extension: {prefix[:-4]}."
    else:
        hint = "Set the path to a prefix that `megalith prepare --output` wrote."
    return f"{prefix}: {missing} not found. {hint}"


def _read_layout(path: Path, contents: bytes | mmap.mmap, multimodal: bool | None) -> _Layout:
    """Read and check the header.

    Raises:
        DataError: it is not an index, or its size does not match the header.
    """
    if len(contents) < HEADER.size:
        raise DataError(
            f"{path}: {len(contents)} bytes, but the header alone has {HEADER.size}. It is a "
            f"truncated copy: copy the file again, or run `megalith prepare` again."
        )
    magic, version, code, num_sequences, num_ends = HEADER.unpack(contents[: HEADER.size])
    if magic != MAGIC:
        raise DataError(
            f"{path}: starts with {magic!r}, expected {MAGIC!r}. It is not the index of a token "
            f"store: use a prefix that `megalith prepare` wrote."
        )
    if version != 1:
        raise DataError(
            f"{path}: version {version}, expected 1. Run `megalith prepare` again to write version "
            "1."
        )
    if code not in DTYPES:
        raise DataError(
            f"{path}: token type code {code}, expected one of {sorted(DTYPES)}. The header is "
            f"corrupt: copy the file again, or run `megalith prepare` again."
        )
    plain = HEADER.size + 12 * num_sequences + 8 * num_ends
    if multimodal is None:
        multimodal = len(contents) == plain + num_sequences != plain
    layout = _Layout(DTYPES[code], num_sequences, num_ends, multimodal)
    _check_size(path, len(contents), layout.modes.stop, (plain, plain + num_sequences))
    return layout


def _check_size(
    path: Path, actual: int, expected: int, without_and_with_modes: tuple[int, int]
) -> None:
    if actual == expected:
        return
    if actual in without_and_with_modes:
        cause = (
            "multimodal does not match the file: pass multimodal=None to detect it from the size"
        )
    elif actual < expected:
        cause = "a truncated copy: copy the file again, or run `megalith prepare` again"
    else:
        cause = (
            "the header or the end is corrupt: copy the file again, or run `megalith prepare` again"
        )
    raise DataError(
        f"{path}: {actual} bytes found, {expected} expected from its header. Likely {cause}."
    )


def _map(path: Path) -> mmap.mmap | bytes:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return b""  # an empty file cannot be mapped
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class IndexedDataset:
    """Token store with random access to sequences. It is pickled by its arguments, and reopened."""

    def __init__(self, prefix: str, *, multimodal: bool | None = None, mmap: bool = True) -> None:
        """Open `PREFIX.idx` and `PREFIX.bin` and check that they match.

        `multimodal`: None detects it from the file size. `mmap`: False reads .bin with pread
        instead of a memory map.

        Raises:
            DataError: a file is missing, truncated, corrupt or not a token store. Lengths and
                offsets of all sequences are checked, which takes a second per hundred million.
        """
        problem = missing_store_message(prefix)
        if problem:
            raise DataError(f"data {problem}")
        self._arguments: dict[str, Any] = {"prefix": prefix, "multimodal": multimodal, "mmap": mmap}
        self.path_prefix = prefix
        index = _map(index_path(prefix))
        layout = _read_layout(index_path(prefix), index, multimodal)
        self.dtype = layout.dtype
        self.multimodal = layout.multimodal
        self.sequence_lengths = _view(index, layout.lengths, np.int32)
        self.sequence_pointers = _view(index, layout.pointers, np.int64)
        self.document_indices = _view(index, layout.documents, np.int64)
        self.sequence_modes = _view(index, layout.modes, np.int8) if layout.multimodal else None
        broken = self._end_problems() or self._sum_problems()
        if broken:
            raise DataError(f"{broken[0]}. Copy both files again, or run `megalith prepare` again.")
        self._read = (
            _mapped_reader(tokens_path(prefix)) if mmap else _positioned_reader(tokens_path(prefix))
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self._arguments,)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    @property
    def name(self) -> str:
        """Prefix of the store, for messages."""
        return self.path_prefix

    @cached_property
    def fingerprint(self) -> str:
        """Hash of both files; of a large .bin, of samples."""
        index, tokens = (file_digest(path(self.path_prefix)) for path in (index_path, tokens_path))
        return f"idx-{index} bin-{tokens}"

    @property
    def num_documents(self) -> int:
        """Number of documents, including empty ones."""
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all sequences."""
        return self._expected_nbytes() // self.dtype.itemsize

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return `length` tokens of sequence `index` from `offset` on; length None: to its end.

        Raises:
            IndexError: there is no such sequence, or it is shorter.
            DataError: .bin is too short, because it changed after it was opened.
        """
        if not 0 <= index < len(self):
            raise IndexError(
                f"sequence {index} of {self.path_prefix}, which has {len(self)}: use a smaller one"
            )
        total = int(self.sequence_lengths[index])
        count = total - offset if length is None else length
        if offset < 0 or count < 0 or offset + count > total:
            raise IndexError(
                f"tokens {offset} to {offset + count} of sequence {index} of {self.path_prefix}: "
                f"use 0 to {total}"
            )
        itemsize = self.dtype.itemsize
        start = int(self.sequence_pointers[index]) + offset * itemsize
        contents = self._read(start, count * itemsize) if start >= 0 else b""
        if start < 0 or len(contents) != count * itemsize:
            raise DataError(
                f"{tokens_path(self.path_prefix)}: {len(contents)} bytes of sequence {index} "
                "found at "
                f"byte {start}, "
                f"{count * itemsize} expected. Copy both files again, or run `megalith prepare` "
                "again."
            )
        return np.frombuffer(contents, dtype=self.dtype)

    def __getitem__(self, key: int | slice) -> NDArray[Any] | list[NDArray[Any]]:
        if isinstance(key, slice):
            if key.step not in (None, 1):
                raise ValueError(
                    f"slice step {key.step}: only neighboring sequences can be sliced, use step 1"
                )
            return [self.get(index) for index in range(*key.indices(len(self)))]
        return self.get(key + len(self) if key < 0 else key)

    def document(self, number: int) -> NDArray[Any]:
        """Return all tokens of one document."""
        if not 0 <= number < self.num_documents:
            raise DataError(
                f"{self.path_prefix} has no document {number}: choose one of 0 to "
                f"{self.num_documents - 1}."
            )
        first, last = self.document_indices[number : number + 2].tolist()
        return np.concatenate(
            [np.empty(0, self.dtype), *(self.get(index) for index in range(first, last))]
        )

    def verify(self) -> list[str]:
        """Return descriptions of broken invariants, including those that opening the store does not
        check."""
        problems = self._end_problems()
        path = index_path(self.path_prefix)
        decreases = np.flatnonzero(np.diff(self.document_indices) < 0)
        if len(decreases):
            problems.append(f"{path}: the document index decreases after document {decreases[0]}")
        return problems

    def _expected_nbytes(self) -> int:
        if not len(self):
            return 0
        return (
            int(self.sequence_pointers[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize
        )

    def _end_problems(self) -> list[str]:
        path, tokens = index_path(self.path_prefix), tokens_path(self.path_prefix)
        if not len(self.document_indices):
            return [
                f"{path}: the document index is empty, expected at least a 0; the index is corrupt"
            ]
        problems = []
        first, last = int(self.document_indices[0]), int(self.document_indices[-1])
        if first != 0:
            problems.append(
                f"{path}: the document index starts with {first}, expected 0; the index is corrupt"
            )
        if last != len(self):
            problems.append(
                f"{path}: the document index ends with {last}, expected {len(self)}; the index is "
                "corrupt"
            )
        actual, expected = tokens.stat().st_size, self._expected_nbytes()
        if actual != expected:
            cause = (
                "a truncated copy"
                if actual < expected
                else "the two files belong to different stores"
            )
            problems.append(
                f"{tokens}: {actual} bytes found, {expected} expected from {path}; likely {cause}"
            )
        return problems

    def _sum_problems(self) -> list[str]:
        """Find the first negative length, or the first offset that is not the sum of the lengths
        before it."""
        path, before = index_path(self.path_prefix), 0
        for first in range(0, len(self), _CHECK_CHUNK):
            lengths = self.sequence_lengths[first : first + _CHECK_CHUNK]
            negative = np.flatnonzero(lengths < 0)
            if len(negative):
                position = int(negative[0])
                return [
                    f"{path}: sequence {first + position} has {lengths[position]} tokens, "
                    "expected 0 or "
                    "more"
                ]
            offsets = self.sequence_pointers[first : first + _CHECK_CHUNK]
            expected = byte_offsets(lengths, self.dtype) + before
            wrong = np.flatnonzero(offsets != expected)
            if len(wrong):
                position = int(wrong[0])
                return [
                    f"{path}: sequence {first + position} starts at byte {offsets[position]}, "
                    "expected "
                    f"{expected[position]}, "
                    f"the sum of the lengths before it; the index is corrupt"
                ]
            before = int(expected[-1]) + int(lengths[-1]) * self.dtype.itemsize
        return []


def _reopen(arguments: dict[str, Any]) -> IndexedDataset:
    return IndexedDataset(**arguments)


def _view(contents: mmap.mmap | bytes, part: slice, dtype: type[Any]) -> NDArray[Any]:
    """Return an array over part of the file, without a copy."""
    little = np.dtype(dtype).newbyteorder("<")
    return np.frombuffer(contents, little, (part.stop - part.start) // little.itemsize, part.start)


def _mapped_reader(path: Path) -> Callable[[int, int], memoryview]:
    view = memoryview(_map(path))
    return lambda start, nbytes: view[start : start + nbytes]


def _positioned_reader(path: Path) -> Callable[[int, int], bytes]:
    file = path.open("rb", buffering=0)
    return lambda start, nbytes: _read_exactly(file, start, nbytes)


def _read_exactly(file: BinaryIO, start: int, nbytes: int) -> bytes:
    """Read with pread, which is safe with several threads.

    Raises:
        DataError: the file is too short, because it changed after it was opened.
    """
    parts = []
    while nbytes:
        part = os.pread(file.fileno(), nbytes, start)
        if not part:
            raise DataError(
                f"{file.name}: ends at byte {start}, {nbytes} more expected. Copy the file again."
            )
        parts.append(part)
        start += len(part)
        nbytes -= len(part)
    return b"".join(parts)


def byte_offsets(lengths: NDArray[np.int32], dtype: np.dtype[Any]) -> NDArray[np.int64]:
    """Return the byte offset of each sequence in .bin."""
    offsets = np.zeros(len(lengths), np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
    offsets *= dtype.itemsize
    return offsets


def write_index(
    file: BinaryIO,
    *,
    dtype: np.dtype[Any],
    lengths: NDArray[np.int32],
    document_index: NDArray[np.int64],
    modes: NDArray[np.int8] | None = None,
) -> None:
    """Write an .idx: lengths [n], document_index [documents + 1], modes [n] only in multimodal
    stores."""
    file.write(HEADER.pack(MAGIC, 1, CODES[dtype], len(lengths), len(document_index)))
    for values, kind in (
        (lengths, "<i4"),
        (byte_offsets(lengths, dtype), "<i8"),
        (document_index, "<i8"),
    ):
        file.write(np.ascontiguousarray(values, kind).data)
    if modes is not None:
        file.write(np.ascontiguousarray(modes, np.int8).data)


def publish_store(prefix: str, *, tokens: Path, index: Path) -> None:
    """Rename finished files to their final names, .idx last: a store without .idx does not
    exist."""
    for path in (tokens, index):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    index_path(prefix).unlink(missing_ok=True)
    tokens.replace(tokens_path(prefix))
    index.replace(index_path(prefix))


class IndexedDatasetBuilder:
    """Writes a store under temporary names, which `finalize` replaces.

    Leaving the `with` block without `finalize` removes the files.
    """

    def __init__(self, prefix: str, dtype: DTypeLike, *, multimodal: bool = False) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODES:
            raise DataError(
                f"unsupported token type {self.dtype}: use one of {sorted(str(d) for d in CODES)}."
            )
        self._lengths = array("i")
        self._ends = array("q", [0])
        self._modes = array("b") if multimodal else None
        self._tokens_temporary = Path(f"{prefix}.bin.writing-{os.getpid()}")
        self._index_temporary = Path(f"{prefix}.idx.writing-{os.getpid()}")
        try:
            Path(prefix).parent.mkdir(parents=True, exist_ok=True)
            self._file = self._tokens_temporary.open("wb")
        except OSError as error:
            raise DataError(
                f"output {prefix}: cannot be written ({error}). Use an output in a writable folder."
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        self._tokens_temporary.unlink(missing_ok=True)
        self._index_temporary.unlink(missing_ok=True)

    def add_item(self, tokens: NDArray[Any], mode: int = 0) -> None:
        """Append one sequence to the current document."""
        self._file.write(np.ascontiguousarray(tokens, self.dtype).data)
        self._lengths.append(len(tokens))
        if self._modes is not None:
            self._modes.append(mode)

    def end_document(self) -> None:
        """End the current document, which may be empty."""
        self._ends.append(len(self._lengths))

    def add_document(
        self, ids: NDArray[Any], lengths: list[int], modes: list[int] | None = None
    ) -> None:
        """Append a document: the concatenated ids of its sequences, and their lengths."""
        if sum(lengths) != len(ids):
            raise DataError(
                f"document with {len(ids)} ids but lengths {lengths}: expected lengths that sum to "
                f"{len(ids)}."
            )
        start = 0
        for number, length in enumerate(lengths):
            self.add_item(ids[start : start + length], modes[number] if modes else 0)
            start += length
        self.end_document()

    def add_index(self, prefix: str) -> None:
        """Append every document of another store.

        Raises:
            DataError: its token type or its modality differs.
        """
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype or (
            other.multimodal != (self._modes is not None) and len(other)
        ):
            raise DataError(
                f"{prefix} has {other.dtype} tokens, multimodal={other.multimodal}, but "
                f"{self.prefix} is written as "
                f"{self.dtype}, multimodal={self._modes is not None}. Use stores of the same type."
            )
        self._file.flush()
        with tokens_path(prefix).open("rb") as source:
            while piece := source.read(16 << 20):
                self._file.write(piece)
        before = len(self._lengths)
        self._lengths.frombytes(other.sequence_lengths.astype(np.int32).tobytes())
        self._ends.frombytes((other.document_indices[1:] + before).astype(np.int64).tobytes())
        if self._modes is not None and other.sequence_modes is not None:
            self._modes.frombytes(other.sequence_modes.tobytes())

    def finalize(self) -> None:
        """Write the index, flush both files to disk and rename them."""
        self._file.close()
        with self._index_temporary.open("wb") as file:
            write_index(
                file,
                dtype=self.dtype,
                lengths=np.array(self._lengths, np.int32),
                document_index=np.array(self._ends, np.int64),
                modes=None if self._modes is None else np.array(self._modes, np.int8),
            )
        publish_store(self.prefix, tokens=self._tokens_temporary, index=self._index_temporary)

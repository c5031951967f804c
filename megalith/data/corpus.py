"""Raw text corpora: find the input files (text, JSONL, Parquet) and read their documents in
blocks, in order."""

import difflib
import glob
import gzip
import importlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import zstandard

from megalith.errors import DataError

# Parquet files as a text corpus: selected columns, rows in order. The only module that imports
# pyarrow.


class Rows(NamedTuple):
    """Consecutive rows of one row group, read together."""

    start: int
    stop: int
    nbytes_done: int
    """On-disk bytes of the file up to `stop`."""


BATCH_ROWS = 1024
"""Rows decoded at once (heuristic: 1 to 2 MB of text)."""


def row_ranges(path: str, start: int) -> Iterator[Rows]:
    """Yield the rows from `start` on per row group, because part of one costs as much as all of it.

    Raises:
        DataError: it is not a Parquet file, or pyarrow is not installed.
    """
    with _open(path) as file:
        first, done = 0, 0
        for number in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(number)
            done += sum(
                group.column(column).total_compressed_size for column in range(group.num_columns)
            )
            stop = first + group.num_rows
            if stop > max(first, start):
                yield Rows(max(first, start), stop, done)
            first = stop


def read_rows(path: str, start: int, stop: int, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield rows `start` to `stop` of one row group as {column: value}; missing columns are
    omitted.

    Raises:
        DataError: the file is damaged, or pyarrow is not installed.
    """
    with _open(path) as file:
        present = [name for name in columns if name in file.schema_arrow.names]
        number, first = _group_of(file, start)
        try:
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[number], columns=present):
                values = [batch.column(name).to_pylist() for name in present]
                for row in range(max(0, start - first), min(batch.num_rows, stop - first)):
                    yield {name: column[row] for name, column in zip(present, values, strict=True)}
                first += batch.num_rows
        except Exception as error:  # pyarrow raises several exception types
            raise _unreadable(path, error) from error


def _group_of(file: Any, row: int) -> tuple[int, int]:
    """Return the row group that contains a row, and the group's first row."""
    first = 0
    for number in range(file.metadata.num_row_groups):
        rows = file.metadata.row_group(number).num_rows
        if row < first + rows:
            return number, first
        first += rows
    raise AssertionError(f"row {row} of {first}")


def _open(path: str) -> Any:  # a pyarrow.parquet.ParquetFile, which has no type annotations
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(
            f"input {path}: reading Parquet needs pyarrow. Install it with pip install "
            '"megalith[parquet]", '
            f"or use JSONL."
        ) from error
    try:
        return parquet.ParquetFile(Path(path))
    except Exception as error:  # pyarrow raises several exception types
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: Exception) -> DataError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return DataError(
        f"input {path}: cannot be read as Parquet ({reason}). Copy the file again, or run without "
        "it."
    )


Format = Literal["auto", "jsonl", "text"]
JSONL_ENDINGS = (".jsonl", ".json", ".ndjson")
_UNREADABLE = (".arrow", ".bin", ".idx")
_BLOCK_BYTES = 1 << 20  # task of a worker: about 1 s of tokenization, 1 ms to send
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Reason = Literal["not UTF-8", "not JSON", "lacks a key", "not text", "blank"]


@dataclass(frozen=True, slots=True)
class Source:
    """One input file."""

    path: str
    kind: Literal["jsonl", "text", "parquet"]
    nbytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Position:
    """Position between two documents: complete files, then lines (or rows) and decompressed bytes
    of the next file."""

    sources: int = 0
    lines: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Consecutive documents: lines of one JSONL file, rows of one Parquet file, or complete text
    files."""

    paths: tuple[str, ...]
    lines: bytes | None  # None: the worker reads rows or text files
    first_line: int
    end: Position
    nbytes_done: int  # on-disk bytes of all inputs, for the progress bar
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Document:
    """One document: per key its texts, each of which becomes one sequence."""

    where: str
    texts: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """A line or file that is not a document, and the reason."""

    where: str
    reason: Reason
    detail: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}: {self.detail}"


def find_sources(inputs: Sequence[str], form: Format = "auto") -> list[Source]:
    """Return the files that the inputs match, without duplicates: files as given, folders and globs
    sorted by name.

    Raises:
        DataError: an input matches no file, or has a file type that cannot be read.
    """
    paths = dict.fromkeys(path for pattern in inputs for path in _expand(pattern))
    return [_source(path, form) for path in paths]


def _expand(pattern: str) -> list[str]:
    path = Path(pattern)
    if path.is_file():
        return [pattern]
    if path.is_dir():
        files = [
            str(file)
            for file in sorted(path.rglob("*"))
            if file.is_file()
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]
    else:
        files = [
            file for file in sorted(glob.glob(pattern, recursive=True)) if Path(file).is_file()
        ]
    if files:
        return files
    near = difflib.get_close_matches(
        path.name, [entry.name for entry in path.parent.glob("*")], cutoff=0.5
    )
    raise DataError(
        f"input {pattern}: no such file. Use a file, a folder or a glob"
        + (f", such as {near}." if near else ".")
    )


def _source(path: str, form: Format) -> Source:
    suffix = Path(path.removesuffix(".gz").removesuffix(".zst")).suffix.lower()
    if suffix in _UNREADABLE:
        raise DataError(
            f"input {path}: {suffix} files do not contain plain text. Use JSONL or text files."
        )
    status = Path(path).stat()
    jsonl = suffix in JSONL_ENDINGS if form == "auto" else form == "jsonl"
    kind: Literal["jsonl", "text", "parquet"] = (
        "parquet" if suffix == ".parquet" else "jsonl" if jsonl else "text"
    )
    return Source(path, kind, status.st_size, status.st_mtime_ns)


def read_blocks(
    sources: Sequence[Source], start: Position, *, block_bytes: int = _BLOCK_BYTES
) -> Iterator[LineBlock]:
    """Yield all documents from `start` on, in order, in blocks of about `block_bytes`."""
    done = sum(source.nbytes for source in sources[: start.sources])
    number = start.sources
    while number < len(sources):
        if sources[number].kind == "jsonl":
            yield from _line_blocks(sources[number], number, start, done, block_bytes)
            count = 1
        elif sources[number].kind == "parquet":
            yield from _row_blocks(sources[number], number, start, done)
            count = 1
        else:
            count = _count_text_files(sources[number:], block_bytes)
            files = sources[number : number + count]
            nbytes_done = done + sum(file.nbytes for file in files)
            yield LineBlock(
                tuple(file.path for file in files), None, 1, Position(number + count), nbytes_done
            )
        done += sum(source.nbytes for source in sources[number : number + count])
        number += count
        start = Position(number)


def _count_text_files(sources: Sequence[Source], block_bytes: int) -> int:
    """Return how many text files form one block: at least one."""
    nbytes = 0
    for count, source in enumerate(sources):
        if source.kind != "text" or (nbytes >= block_bytes and count):
            return count
        nbytes += source.nbytes
    return len(sources)


def _line_blocks(
    source: Source, number: int, start: Position, done: int, block_bytes: int
) -> Iterator[LineBlock]:
    line, nbytes = start.lines, start.nbytes
    with Path(source.path).open("rb") as raw, open_unpacked(raw, source.path) as file:
        try:
            _skip(file, nbytes, packed=file is not raw)
            while lines := file.read(block_bytes):
                lines += file.readline()
                first = line + 1
                line += lines.count(b"\n") + (not lines.endswith(b"\n"))
                nbytes += len(lines)
                end = Position(number, line, nbytes)
                yield LineBlock(
                    (source.path,), lines, first, end, done + min(raw.tell(), source.nbytes)
                )
        except (OSError, EOFError, zstandard.ZstdError) as error:
            raise _unpack_error(source.path, error) from error


def _row_blocks(source: Source, number: int, start: Position, done: int) -> Iterator[LineBlock]:
    for rows in row_ranges(source.path, start.lines):
        end, nbytes_done = (
            Position(number, rows.stop, 0),
            done + min(rows.nbytes_done, source.nbytes),
        )
        yield LineBlock(
            (source.path,), None, rows.start + 1, end, nbytes_done, (rows.start, rows.stop)
        )


def open_unpacked(raw: BinaryIO, path: str) -> BinaryIO:
    """Return the file, decompressed if it is a .gz or .zst."""
    if path.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]  # it has the methods used here
    if path.endswith(".zst"):
        return io.BufferedReader(_ZstdReader(raw), 1 << 20)
    return raw


class _ZstdReader(io.RawIOBase):
    """Reads all frames of a .zst. The library's own reader does not detect a truncated file."""

    def __init__(self, raw: BinaryIO) -> None:
        super().__init__()
        self._raw = raw
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._begun = False  # part of the frame was read
        self._packed = b""
        self._unpacked = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # any writable buffer
        while not self._unpacked:
            self._packed = self._packed or self._raw.read(1 << 18)
            if not self._packed:
                if self._begun:
                    raise EOFError("the file ends inside a frame")
                return 0
            self._begun = True
            self._unpacked = self._frame.decompress(self._packed)
            self._packed = b""
            if self._frame.eof:
                self._packed = self._frame.unused_data
                self._frame = zstandard.ZstdDecompressor().decompressobj()
                self._begun = False
        count = min(len(buffer), len(self._unpacked))
        buffer[:count] = self._unpacked[:count]
        self._unpacked = self._unpacked[count:]
        return count


def _skip(file: BinaryIO, nbytes: int, *, packed: bool) -> None:
    if not packed:
        file.seek(nbytes)
        return
    while nbytes > 0:
        nbytes -= len(file.read(min(nbytes, 16 << 20)) or b"x" * nbytes)


def _unpack_error(path: str, error: Exception) -> DataError:
    return DataError(
        f"input {path}: cannot be read completely ({error}). Copy or compress the file again, or "
        "run without it."
    )


def block_documents(block: LineBlock, keys: Sequence[str]) -> Iterator[Document | Rejected]:
    """Yield the documents of a block in order, and a Rejected for each that cannot be used."""
    if block.rows is not None:
        for number, row in enumerate(
            read_rows(block.paths[0], *block.rows, keys), block.first_line
        ):
            yield _entry_document(row, f"{block.paths[0]}:{number}", keys)
        return
    if block.lines is None:
        for path in block.paths:
            yield _text_document(path, len(keys))
        return
    lines = block.lines
    if block.first_line == 1:
        lines = lines.removeprefix(_BYTE_ORDER_MARK)
    for number, line in enumerate(lines.removesuffix(b"\n").split(b"\n"), block.first_line):
        yield _line_document(line, f"{block.paths[0]}:{number}", keys)


def _text_document(path: str, num_keys: int) -> Document | Rejected:
    try:
        with Path(path).open("rb") as raw, open_unpacked(raw, path) as file:
            contents = file.read()
    except (OSError, EOFError, zstandard.ZstdError) as error:
        raise _unpack_error(path, error) from error
    try:
        text = contents.removeprefix(_BYTE_ORDER_MARK).decode()
    except UnicodeDecodeError as error:
        return Rejected(path, "not UTF-8", str(error))
    return Document(path, ((text,),) * num_keys)


def _line_document(line: bytes, where: str, keys: Sequence[str]) -> Document | Rejected:
    shown = line[:80].decode(errors="replace")
    if not line.strip():
        return Rejected(where, "blank", "an empty line")
    try:
        entry = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Rejected(where, "not UTF-8", f"{error.reason} at byte {error.start}: {shown}")
    except (ValueError, RecursionError):
        return Rejected(where, "not JSON", shown)
    if not isinstance(entry, dict):
        return Rejected(
            where, "not JSON", f"expected an object, not {type(entry).__name__}: {shown}"
        )
    document = _entry_document(entry, where, keys)
    if b"\\u" in line and isinstance(document, Document):
        invalid_keys = [
            key
            for key, texts in zip(keys, document.texts, strict=True)
            if not all(map(_encodable, texts))
        ]
        if invalid_keys:
            return Rejected(where, "not UTF-8", f"lone surrogate in {invalid_keys[0]!r}: {shown}")
    return document


def _entry_document(
    entry: Mapping[str, Any], where: str, keys: Sequence[str]
) -> Document | Rejected:
    """Return the texts under the keys; each value is a text or a list of texts."""
    texts = []
    for key in keys:
        if key not in entry:
            return Rejected(where, "lacks a key", f"no {key!r} among the keys {list(entry)[:10]}")
        value = entry[key]
        sentences = (value,) if isinstance(value, str) else value
        if not isinstance(sentences, list | tuple) or not all(
            isinstance(text, str) for text in sentences
        ):
            return Rejected(
                where,
                "not text",
                f"{key!r} is {type(value).__name__}, not a text or a list of texts",
            )
        texts.append(tuple(sentences))
    return Document(where, tuple(texts))


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_texts(sources: Sequence[Source], keys: Sequence[str], *, max_bytes: int) -> Iterator[str]:
    """Yield texts to train a tokenizer on: all, or every n-th block of a corpus larger than
    `max_bytes`."""
    total = sum(source.nbytes for source in sources)
    stride = max(1, -(-total // max_bytes))
    for number, block in enumerate(read_blocks(sources, Position())):
        if number % stride == 0:
            for document in block_documents(block, keys):
                if isinstance(document, Document):
                    yield from (text for texts in dict.fromkeys(document.texts) for text in texts)

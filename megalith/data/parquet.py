"""Parquet files as a corpus: rows in order, some of their columns; the one file that imports pyarrow."""

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megalith.errors import DataError


class Rows(NamedTuple):
    """Some neighbouring rows of a file, about as many bytes as were asked for."""

    start: int
    stop: int
    nbytes_done: int
    """Of the file as it lies on disk, up to `stop`."""


def row_ranges(path: str, start: int, *, nbytes: int) -> Iterator[Rows]:
    """The rows of a file from `start` on, in ranges of about `nbytes` unpacked bytes, none across row groups.

    Raises:
        DataError: it is no Parquet file, or pyarrow is not installed.
    """
    with _open(path) as file:
        first, done = 0, 0
        for number in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(number)
            rows, size = group.num_rows, max(1, group.total_byte_size)
            step = max(1, rows * nbytes // size)
            for low in range(max(0, start - first), rows, step):
                stop = min(low + step, rows)
                yield Rows(first + low, first + stop, done + size * stop // max(1, rows))
            first, done = first + rows, done + size


def read_rows(path: str, start: int, stop: int, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows `start` to `stop`, which lie in one row group, as {column: value}; columns the file lacks are left out.

    Raises:
        DataError: the file is damaged, or pyarrow is not installed.
    """
    with _open(path) as file:
        there = [name for name in columns if name in file.schema_arrow.names]
        first = 0
        for number in range(file.metadata.num_row_groups):
            rows = file.metadata.row_group(number).num_rows
            if first <= start < first + rows:
                try:
                    table = file.read_row_group(number, columns=there).slice(start - first, stop - start)
                except Exception as error:  # pyarrow raises several of its own
                    raise _unreadable(path, error) from error
                values = [table.column(name).to_pylist() for name in there]
                for row in range(stop - start):
                    yield {name: column[row] for name, column in zip(there, values, strict=True)}
                return
            first += rows


def _open(path: str) -> Any:  # a pyarrow.parquet.ParquetFile, which ships no types
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(
            f'input {path}: reading Parquet needs pyarrow. Install it with pip install "megalith[parquet]", '
            f"or use JSONL."
        ) from error
    try:
        return parquet.ParquetFile(Path(path))
    except Exception as error:  # pyarrow raises several of its own
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: Exception) -> DataError:
    told = str(error).splitlines()[0] if str(error) else type(error).__name__
    return DataError(f"input {path}: cannot be read as Parquet ({told}). Copy the file again, or run without it.")

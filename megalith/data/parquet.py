"""Parquet files as a corpus: rows in order, some of their columns; the one file that imports
pyarrow."""

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megalith.errors import DataError


class Rows(NamedTuple):
    """Neighboring rows of one row group, which are read together."""

    start: int
    stop: int
    nbytes_done: int
    """Of the file as it lies on disk, up to `stop`."""


BATCH_ROWS = 1024
"""Rows that are unpacked at once (guess: a megabyte or two of text)."""


def row_ranges(path: str, start: int) -> Iterator[Rows]:
    """The rows of a file from `start` on, a row group at a time, because a part of one costs as
    much as all of it.

    Raises:
        DataError: it is no Parquet file, or pyarrow is not installed.
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
    """Rows `start` to `stop`, which lie in one row group, as {column: value}; columns the file
    lacks are left out.

    Raises:
        DataError: the file is damaged, or pyarrow is not installed.
    """
    with _open(path) as file:
        there = [name for name in columns if name in file.schema_arrow.names]
        number, first = _group_of(file, start)
        try:
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[number], columns=there):
                values = [batch.column(name).to_pylist() for name in there]
                for row in range(max(0, start - first), min(batch.num_rows, stop - first)):
                    yield {name: column[row] for name, column in zip(there, values, strict=True)}
                first += batch.num_rows
        except Exception as error:  # pyarrow raises several of its own
            raise _unreadable(path, error) from error


def _group_of(file: Any, row: int) -> tuple[int, int]:
    """The row group that has a row, and the first of its rows."""
    first = 0
    for number in range(file.metadata.num_row_groups):
        rows = file.metadata.row_group(number).num_rows
        if row < first + rows:
            return number, first
        first += rows
    raise AssertionError(f"row {row} of {first}")


def _open(path: str) -> Any:  # a pyarrow.parquet.ParquetFile, which ships no types
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
    except Exception as error:  # pyarrow raises several of its own
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: Exception) -> DataError:
    told = str(error).splitlines()[0] if str(error) else type(error).__name__
    return DataError(
        f"input {path}: cannot be read as Parquet ({told}). Copy the file again, or run without it."
    )

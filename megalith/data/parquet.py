"""Parquet files as a text corpus: selected columns, rows in order. The only module that imports
pyarrow."""

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megalith.errors import DataError


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

"""Parquet as a corpus: every row once and in order, from any place on, and errors that name the
file."""

import sys
from pathlib import Path

import pytest

from megalith.config.data import PrepareConfig
from megalith.data.corpus import (
    Document,
    Position,
    Rejected,
    block_documents,
    find_sources,
    read_blocks,
    read_rows,
    row_ranges,
)
from megalith.data.indexed import IndexedDataset
from megalith.data.prepare import prepare
from megalith.errors import DataError

arrow = pytest.importorskip("pyarrow", reason="reads Parquet, which needs pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

TEXTS = [f"text {number} " * (number % 7) for number in range(100)]


def written(path: Path, *, group: int = 30) -> str:
    table = arrow.table(
        {"text": TEXTS, "title": [f"t{number}" for number in range(100)], "year": list(range(100))}
    )
    parquet.write_table(table, path, row_group_size=group)
    return str(path)


@pytest.mark.parametrize("start", [0, 1, 29, 30, 95, 100])
def test_ranges_are_row_groups_and_cover_the_rows_once(start: int, tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet")
    ranges = list(row_ranges(path, start))
    assert [row for rows in ranges for row in range(rows.start, rows.stop)] == list(
        range(start, 100)
    )
    assert all(rows.start // 30 == (rows.stop - 1) // 30 for rows in ranges)
    done = [rows.nbytes_done for rows in ranges]
    assert done == sorted(done) and all(nbytes < Path(path).stat().st_size for nbytes in done)


@pytest.mark.parametrize(("start", "stop"), [(0, 30), (31, 33), (59, 60), (90, 100)])
def test_rows_are_limited_to_the_range(
    start: int, stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalith.data.corpus.BATCH_ROWS", 7)
    rows = read_rows(written(tmp_path / "a.parquet"), start, stop, ["text"])
    assert [row["text"] for row in rows] == TEXTS[start:stop]


def test_rows_have_the_requested_columns(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet")
    assert list(read_rows(path, 31, 33, ["title", "absent"])) == [
        {"title": "t31"},
        {"title": "t32"},
    ]


def test_documents_of_a_file_are_its_rows(tmp_path: Path) -> None:
    sources = find_sources([written(tmp_path / "a.parquet")])
    for start in (0, 31):
        blocks = read_blocks(sources, Position(0, start, 0))
        results = [document for block in blocks for document in block_documents(block, ["text"])]
        assert all(isinstance(document, Document) for document in results)
        assert [
            document.texts[0][0] for document in results if isinstance(document, Document)
        ] == TEXTS[start:]
    assert results[0].where.endswith("a.parquet:32")
    (rejected, *_) = block_documents(next(read_blocks(sources, Position())), ["year"])
    assert isinstance(rejected, Rejected) and "'year' is int, not a text" in str(rejected)


def test_tokens_are_those_of_the_same_rows_as_jsonl(tmp_path: Path) -> None:
    lines = "".join(f'{{"text": "{text}"}}\n' for text in TEXTS)
    (tmp_path / "b.jsonl").write_text(lines)
    written(tmp_path / "a.parquet")
    for name in ("a.parquet", "b.jsonl"):
        prepare(
            PrepareConfig(
                input=(str(tmp_path / name),), output=str(tmp_path / name.partition(".")[0])
            )
        )
    a, b = (IndexedDataset(str(tmp_path / name)) for name in "ab")
    assert len(a) == len(b)
    assert all((a[k] == b[k]).all() for k in range(len(a)))


def test_file_that_is_not_parquet_is_rejected_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.parquet").write_bytes(b"no such thing")
    with pytest.raises(
        DataError, match=r"x\.parquet: cannot be read as Parquet \(.*\)\. Copy the file again"
    ):
        list(row_ranges(str(tmp_path / "x.parquet"), 0))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(
        DataError, match=r'needs pyarrow\. Install it with pip install "megalith\[parquet\]"'
    ):
        list(row_ranges(str(tmp_path / "x.parquet"), 0))

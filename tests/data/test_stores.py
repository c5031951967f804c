"""Whole stores: summaries, and merging that equals preparing everything at once."""

from pathlib import Path

import numpy as np
import pytest

from megalith.data.indexed import IndexedDataset, IndexedDatasetBuilder
from megalith.data.stores import find_stores, merge_stores, summarize
from megalith.errors import DataError


def write(folder: Path, name: str, documents: list[list[int]], dtype: str = "uint16") -> str:
    with IndexedDatasetBuilder(str(folder / name), dtype) as builder:
        for document in documents:
            if document:
                builder.add_item(np.array(document))
            builder.end_document()
        builder.finalize()
    return str(folder / name)


def test_a_summary_counts_and_finds_the_end_token(tmp_path: Path) -> None:
    summary = summarize(
        IndexedDataset(write(tmp_path, "a", [[1, 2, 9], [], [3, 9], [4, 5, 6, 7], [9]]))
    )
    assert (summary.documents, summary.empty_documents, summary.sequences, summary.tokens) == (
        5,
        1,
        4,
        10,
    )
    assert (summary.shortest, summary.mean_length, summary.longest) == (1, 2.5, 4)
    assert (summary.common_last_token, summary.common_last_share) == (9, 0.75)
    assert (summary.token_type, summary.bin_nbytes, summary.idx_nbytes) == (
        "uint16",
        20,
        34 + 12 * 4 + 8 * 6,
    )


def test_a_store_without_text_has_a_summary_too(tmp_path: Path) -> None:
    summary = summarize(IndexedDataset(write(tmp_path, "a", [[], []])))
    assert (summary.tokens, summary.longest, summary.common_last_token) == (0, 0, None)


def test_folder_means_its_stores_in_order_of_name(tmp_path: Path) -> None:
    prefixes = [write(tmp_path, name, [[1]]) for name in ("b", "a", "c")]
    assert find_stores(str(tmp_path)) == sorted(prefixes)
    assert find_stores(prefixes[0]) == [prefixes[0]]
    (tmp_path / "a.bin").unlink()
    with pytest.raises(
        DataError, match=r"a has only one of its two files\. Use a folder of complete stores"
    ):
        find_stores(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no \.idx and \.bin files\. Use a folder of"):
        find_stores(str(tmp_path / "empty"))


def test_merging_equals_writing_everything_at_once(tmp_path: Path) -> None:
    parts: list[list[list[int]]] = [[[1, 2], [], [3]], [[]], [[4, 5, 6], [7]]]
    prefixes = [write(tmp_path, f"part{n}", part) for n, part in enumerate(parts)]
    merge_stores(prefixes, str(tmp_path / "merged"))
    whole = write(tmp_path, "whole", [document for part in parts for document in part])
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"merged{ending}").read_bytes() == Path(whole + ending).read_bytes()


def test_stores_that_cannot_be_merged_are_rejected(tmp_path: Path) -> None:
    a, b = write(tmp_path, "a", [[1]]), write(tmp_path, "b", [[1]], "int32")
    with pytest.raises(
        DataError,
        match=r"b \(int32\): not the token type of .*a \(uint16\)\. Use stores of one",
    ):
        merge_stores([a, b], str(tmp_path / "c"))
    with pytest.raises(DataError, match=r"output .*b: the store already exists\. Use another name"):
        merge_stores([a], b)
    with pytest.raises(DataError, match=r"nothing to merge into .*c\. Use one or more prefixes"):
        merge_stores([], str(tmp_path / "c"))
    merge_stores([a], b, overwrite=True)
    assert IndexedDataset(b).dtype.name == "uint16"


def test_a_store_with_a_cache_beside_it_is_still_that_store(tmp_path: Path) -> None:
    prefix = write(tmp_path, "a", [[1]])
    (tmp_path / "a" / "cache").mkdir(parents=True)
    assert find_stores(prefix) == [prefix]


def test_output_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    prefix = write(tmp_path, "a", [[1]])
    (tmp_path / "file").write_text("")
    with pytest.raises(
        DataError, match=r"output .*file/b: cannot be written .*Use an output in a writable folder"
    ):
        merge_stores([prefix], str(tmp_path / "file" / "b"))

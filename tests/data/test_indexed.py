"""The .idx/.bin format: golden bytes, round trips, and a message of its own for every kind of
damage."""

import hashlib
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from megalith.data import indexed
from megalith.data.indexed import (
    DTYPES,
    IndexedDataset,
    IndexedDatasetBuilder,
    file_digest,
    index_path,
    token_dtype,
    tokens_path,
)
from megalith.errors import DataError

# Written by Megatron for the documents [1, 2, 3] and [4, 5] in two-byte tokens.
GOLDEN_BIN = "01000200030004000500"
GOLDEN_IDX = (
    "4d4d494449445800000100000000000000080200000000000000030000000000000003000000020000000000000000000000"
    "0600000000000000000000000000000001000000000000000200000000000000"
)


def write_golden(folder: Path, name: str = "golden") -> str:
    prefix = str(folder / name)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for document in ([1, 2, 3], [4, 5]):
            builder.add_document(np.array(document), [len(document)])
        builder.finalize()
    return prefix


def test_written_bytes_equal_those_of_megatron(tmp_path: Path) -> None:
    prefix = write_golden(tmp_path)
    assert tokens_path(prefix).read_bytes().hex() == GOLDEN_BIN
    assert index_path(prefix).read_bytes().hex() == GOLDEN_IDX
    assert (
        hashlib.sha256(index_path(prefix).read_bytes())
        .hexdigest()
        .startswith("416ba3f8d9601192c5b0c9424ce7e61d")
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["golden.bin", "golden.idx"]


def test_files_of_megatron_are_read(tmp_path: Path) -> None:
    (tmp_path / "g.bin").write_bytes(bytes.fromhex(GOLDEN_BIN))
    (tmp_path / "g.idx").write_bytes(bytes.fromhex(GOLDEN_IDX))
    store = IndexedDataset(str(tmp_path / "g"))
    assert [item.tolist() for item in store[0:2]] == [[1, 2, 3], [4, 5]]
    assert (store.num_documents, store.num_tokens, store.dtype.name, store.verify()) == (
        2,
        5,
        "uint16",
        [],
    )


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("code", sorted(DTYPES))
def test_random_stores_round_trip(tmp_path: Path, code: int, mmap: bool) -> None:
    draw = np.random.default_rng(code)
    documents = [
        [
            draw.integers(0, 100, draw.integers(0, 9)).astype(DTYPES[code])
            for _ in range(draw.integers(0, 4))
        ]
        for _ in range(17)
    ]
    prefix = str(tmp_path / "random")
    with IndexedDatasetBuilder(prefix, DTYPES[code]) as builder:
        for document in documents:
            for sequence in document:
                builder.add_item(sequence)
            builder.end_document()
        builder.finalize()
    store = IndexedDataset(prefix, mmap=mmap)
    sequences = [sequence for document in documents for sequence in document]
    assert store.dtype == DTYPES[code] and store.verify() == []
    assert [item.tolist() for item in store[:]] == [sequence.tolist() for sequence in sequences]
    joined = [
        [token for sequence in document for token in sequence.tolist()] for document in documents
    ]
    assert [store.document(number).tolist() for number in range(17)] == joined


def test_a_store_of_empty_documents_only_can_be_written_and_read(tmp_path: Path) -> None:
    prefix = str(tmp_path / "empty")
    with IndexedDatasetBuilder(prefix, np.int32) as builder:
        builder.end_document()
        builder.end_document()
        builder.finalize()
    store = IndexedDataset(prefix)
    assert (len(store), store.num_documents, store.num_tokens, store.verify()) == (0, 2, 0, [])
    assert store.document(1).tolist() == []


def test_modes_are_inferred_from_the_size(tmp_path: Path) -> None:
    prefix = str(tmp_path / "pictures")
    with IndexedDatasetBuilder(prefix, np.int32, multimodal=True) as builder:
        builder.add_document(np.arange(7), [3, 4], [0, 1])
        builder.finalize()
    store = IndexedDataset(prefix)
    assert (
        store.multimodal
        and store.sequence_modes is not None
        and store.sequence_modes.tolist() == [0, 1]
    )
    with pytest.raises(DataError, match="multimodal does not match the file"):
        IndexedDataset(prefix, multimodal=False)
    with pytest.raises(DataError, match="multimodal does not match the file"):
        IndexedDataset(write_golden(tmp_path), multimodal=True)


def test_parts_of_sequences_can_be_read_and_no_more(tmp_path: Path) -> None:
    store = IndexedDataset(write_golden(tmp_path))
    assert store.get(0, 1).tolist() == [2, 3]
    assert store.get(0, 1, 1).tolist() == [2]
    assert store.get(1, 2, 0).tolist() == []
    with pytest.raises(IndexError, match="tokens 1 to 4 of sequence 0 .*: use 0 to 3"):
        store.get(0, 1, 3)
    with pytest.raises(IndexError, match="sequence 2 of .*golden, which has 2"):
        store.get(2)
    with pytest.raises(ValueError, match="slice step 2"):
        store[0:2:2]
    with pytest.raises(DataError, match="has no document 2: choose one of 0 to 1"):
        store.document(2)


@pytest.mark.parametrize("mmap", [True, False])
def test_pickling_opens_the_files_again(tmp_path: Path, mmap: bool) -> None:
    store = IndexedDataset(write_golden(tmp_path), mmap=mmap)
    pickled = pickle.dumps(store)
    assert len(pickled) < 500
    assert pickle.loads(pickled).get(1).tolist() == [4, 5]


def damaged(prefix: str, offset: int, data: bytes) -> None:
    contents = bytearray(index_path(prefix).read_bytes())
    contents[offset : offset + len(data)] = data
    index_path(prefix).write_bytes(contents)


@pytest.mark.parametrize(
    "offset, data, text",
    [
        (
            0,
            b"X",
            r"starts with b'XMIDIDX.*expected b'MMIDIDX.*not the index of a token store: use a "
            r"prefix",
        ),
        (9, b"\x02", r"version 2, expected 1\. Run"),
        (
            17,
            b"\x09",
            r"token type code 9, expected one of \[1, 2, 3, 4, 5, 6, 7, 8\]\. The header "
            r"is corrupt",
        ),
        (18, b"\x05", r"82 bytes found, 118 expected from its header\. Likely a truncated copy"),
        (
            18,
            b"\x01",
            r"82 bytes found, 70 expected from its header\. Likely the header or the end "
            r"is corrupt",
        ),
        (58, b"\x01", r"the document index starts with 1, expected 0; the index is corrupt"),
        (74, b"\x01", r"the document index ends with 1, expected 2; the index is corrupt"),
        (
            38,
            b"\x03",
            r"golden\.bin: 10 bytes found, 12 expected from .*golden\.idx; likely a truncated copy",
        ),
    ],
)
def test_each_damage_has_its_own_message(
    tmp_path: Path, offset: int, data: bytes, text: str
) -> None:
    prefix = write_golden(tmp_path)
    damaged(prefix, offset, data)
    with pytest.raises(DataError, match=text):
        IndexedDataset(prefix)


def test_truncated_files_are_rejected(tmp_path: Path) -> None:
    prefix = write_golden(tmp_path)
    index_path(prefix).write_bytes(bytes.fromhex(GOLDEN_IDX)[:20])
    with pytest.raises(
        DataError, match="20 bytes, but the header alone has 34. It is a truncated copy"
    ):
        IndexedDataset(prefix)
    index_path(prefix).write_bytes(bytes.fromhex(GOLDEN_IDX))
    tokens_path(prefix).write_bytes(bytes.fromhex(GOLDEN_BIN) + b"\0\0")
    with pytest.raises(
        DataError, match="12 bytes found, 10 expected .* the two files belong to different stores"
    ):
        IndexedDataset(prefix)


def test_file_truncated_after_opening_is_detected(tmp_path: Path) -> None:
    prefix = write_golden(tmp_path)
    store = IndexedDataset(prefix, mmap=False)
    tokens_path(prefix).write_bytes(b"\1\0")
    with pytest.raises(DataError, match=r"ends at byte 6, 4 more expected\. Copy the file again"):
        store.get(1)


def test_verify_reports_problems_that_opening_does_not_check(tmp_path: Path) -> None:
    prefix = str(tmp_path / "long")
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(4):
            builder.add_document(np.arange(5), [2, 3])
        builder.finalize()
    damaged(prefix, 34 + 12 * 8 + 16, struct.pack("<q", 1))
    problems = IndexedDataset(prefix).verify()
    assert problems == [f"{prefix}.idx: the document index decreases after document 1"]


@pytest.mark.parametrize("at_once", [1, 3, 1 << 20])
@pytest.mark.parametrize(
    "offset, data, text",
    [
        (
            34 + 4 * 5,
            struct.pack("<i", -1),
            r"long\.idx: sequence 5 has -1 tokens, expected 0 or more",
        ),
        (
            34 + 4 * 8 + 8 * 4,
            struct.pack("<q", 99),
            r"long\.idx: sequence 4 starts at byte 99, expected 20, the sum of",
        ),
        (
            34 + 4 * 3,
            struct.pack("<i", 4),
            r"long\.idx: sequence 4 starts at byte 20, expected 22, the sum of",
        ),
    ],
)
def test_damage_in_the_middle_is_rejected_at_opening(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    offset: int,
    data: bytes,
    text: str,
    at_once: int,
) -> None:
    monkeypatch.setattr(indexed, "_CHECK_CHUNK", at_once)
    prefix = str(tmp_path / "long")
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(4):
            builder.add_document(np.arange(5), [2, 3])
        builder.finalize()
    assert len(IndexedDataset(prefix)) == 8
    damaged(prefix, offset, data)
    with pytest.raises(DataError, match=text):
        IndexedDataset(prefix)


@pytest.mark.parametrize("start", [-4, 8])
def test_missing_tokens_are_reported(tmp_path: Path, start: int) -> None:
    store = IndexedDataset(write_golden(tmp_path))
    # what a file changed after it was opened looks like
    store.sequence_pointers = np.array([0, start])
    with pytest.raises(
        DataError,
        match=rf"golden\.bin: . bytes of sequence 1 found at byte {start}, 4 expected\. Copy",
    ):
        store.get(1)


def test_a_missing_store_is_named_with_near_matches(tmp_path: Path) -> None:
    write_golden(tmp_path, "corpus_text_document")
    with pytest.raises(
        DataError,
        match=r"corpus\.idx and .*corpus\.bin not found\. Use one of .*corpus_text_document",
    ):
        IndexedDataset(str(tmp_path / "corpus"))
    with pytest.raises(
        DataError, match="Set the path to a prefix that `megalith prepare --output` wrote"
    ):
        IndexedDataset(str(tmp_path / "zzz" / "zzz"))
    with pytest.raises(DataError, match="Use the prefix without the file extension: .*other"):
        IndexedDataset(str(tmp_path / "zzz" / "other.bin"))


def test_exit_without_finalize_leaves_no_files(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="stop"),
        IndexedDatasetBuilder(str(tmp_path / "half"), np.uint16) as builder,
    ):
        builder.add_item(np.arange(5))
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []


def test_joining_stores_equals_writing_them_at_once(tmp_path: Path) -> None:
    first, second = write_golden(tmp_path, "a"), write_golden(tmp_path, "b")
    for prefix, add in (("joined", True), ("once", False)):
        with IndexedDatasetBuilder(str(tmp_path / prefix), np.uint16) as builder:
            if add:
                builder.add_index(first)
                builder.add_index(second)
            else:
                for document in ([1, 2, 3], [4, 5]) * 2:
                    builder.add_document(np.array(document), [len(document)])
            builder.finalize()
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"joined{ending}").read_bytes() == (
            tmp_path / f"once{ending}"
        ).read_bytes()
    with IndexedDatasetBuilder(str(tmp_path / "wide"), np.int32) as builder:
        with pytest.raises(
            DataError, match="has uint16 tokens.*is written as int32.*Use stores of the same type"
        ):
            builder.add_index(first)


def test_lengths_that_do_not_fit_and_unknown_types_are_rejected(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(str(tmp_path / "x"), np.uint16) as builder:
        with pytest.raises(
            DataError,
            match=r"document with 5 ids but lengths \[2, 2\]: expected lengths that sum to 5",
        ):
            builder.add_document(np.arange(5), [2, 2])
    with pytest.raises(DataError, match="unsupported token type float16: use one of"):
        IndexedDatasetBuilder(str(tmp_path / "x"), np.float16)


def test_two_bytes_hold_a_vocabulary_below_65500() -> None:
    assert [token_dtype(size).itemsize for size in (257, 65499, 65500, 200_000)] == [2, 2, 4, 4]


def test_a_digest_follows_contents_of_small_and_large_files(tmp_path: Path) -> None:
    path = tmp_path / "big"
    with path.open("wb") as file:
        file.truncate((64 << 20) + 5)  # sparse: takes no room
    before = file_digest(path)
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    assert file_digest(path) != before


def test_the_fingerprint_follows_the_tokens_too(tmp_path: Path) -> None:
    prefix = write_golden(tmp_path)
    before = IndexedDataset(prefix).fingerprint
    assert IndexedDataset(write_golden(tmp_path, "copy")).fingerprint == before
    # other text of equal lengths
    tokens_path(prefix).write_bytes(bytes.fromhex(GOLDEN_BIN)[:-2] + b"\6\0")
    assert IndexedDataset(prefix).fingerprint != before


def test_an_output_below_a_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        DataError, match=r"output .*file/x: cannot be written .*Use an output in a writable folder"
    ):
        IndexedDatasetBuilder(str(tmp_path / "file" / "x"), np.uint16)

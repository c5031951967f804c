"""Raw text: which files an input names, and documents in order whatever the block size, packing or
starting point."""

import gzip
import json
from pathlib import Path

import pytest
import zstandard

from megalith.data.corpus import (
    Document,
    Position,
    Rejected,
    Source,
    block_documents,
    find_sources,
    read_blocks,
    read_texts,
)
from megalith.errors import DataError

TEXTS = ["one", "", "zwei Wörter", "x" * 500, "日本\n語"]


def jsonl(texts: list[str]) -> bytes:
    return b"".join(
        json.dumps({"text": text}, ensure_ascii=len(text) % 2 == 0).encode() + b"\n"
        for text in texts
    )


def write(path: Path, contents: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        contents = gzip.compress(contents)
    if path.suffix == ".zst":
        half = len(contents) // 2  # two frames, as appending to a file gives
        contents = b"".join(
            zstandard.ZstdCompressor().compress(part) for part in (contents[:half], contents[half:])
        )
    path.write_bytes(contents)
    return str(path)


def documents(
    sources: list[Source], *, block_bytes: int = 1 << 20, start: Position | None = None
) -> list[str]:
    blocks = read_blocks(sources, start or Position(), block_bytes=block_bytes)
    results = [document for block in blocks for document in block_documents(block, ["text"])]
    return [
        document.texts[0][0] if isinstance(document, Document) else document.reason
        for document in results
    ]


@pytest.fixture
def mixed(tmp_path: Path) -> list[Source]:
    """JSONL packed in every way, between text files."""
    names = [
        "a.jsonl",
        "b.txt",
        "c.jsonl.gz",
        "d.md.zst",
        "e.jsonl.zst",
        "f.txt",
        "g.txt.gz",
        "h.json",
    ]
    for name in names:
        write(tmp_path / name, jsonl(TEXTS) if "json" in name else f"the text\nof {name}".encode())
    return find_sources([str(tmp_path)])


EXPECTED = [
    *TEXTS,
    "the text\nof b.txt",
    *TEXTS,
    "the text\nof d.md.zst",
    *TEXTS,
    "the text\nof f.txt",
    "the text\nof g.txt.gz",
    *TEXTS,
]


@pytest.mark.parametrize("block_bytes", [1, 50, 700, 1 << 20])
def test_documents_are_in_order_for_every_block_size(mixed: list[Source], block_bytes: int) -> None:
    assert documents(mixed, block_bytes=block_bytes) == EXPECTED


@pytest.mark.parametrize("block_bytes", [1, 50, 700])
def test_reading_can_start_behind_any_block(mixed: list[Source], block_bytes: int) -> None:
    blocks = list(read_blocks(mixed, Position(), block_bytes=block_bytes))
    done = 0
    for block in blocks:
        done += sum(1 for _ in block_documents(block, ["text"]))
        assert documents(mixed, block_bytes=block_bytes, start=block.end) == EXPECTED[done:]
    assert blocks[-1].nbytes_done == sum(source.nbytes for source in mixed)


def test_each_document_has_its_source(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", jsonl(TEXTS))
    blocks = read_blocks(find_sources([source]), Position(), block_bytes=40)
    results = [document for block in blocks for document in block_documents(block, ["text"])]
    assert [document.where for document in results] == [
        f"{source}:{number}" for number in range(1, 6)
    ]


@pytest.mark.parametrize(
    "line, reason, text",
    [
        (b"{broken", "not JSON", "{broken"),
        (b"[1, 2]", "not JSON", "expected an object, not list"),
        (b'{"body": "x", "id": 3}', "lacks a key", "no 'text' among the keys ['body', 'id']"),
        (b'{"text": 5}', "not text", "'text' is int, not a text or a list of texts"),
        (b'{"text": ["a", 5]}', "not text", "'text' is list"),
        (b'{"text": "\xff"}', "not UTF-8", "invalid start byte at byte 10"),
        (b'{"text": "\\ud83e"}', "not UTF-8", "lone surrogate in 'text'"),
        (b"   ", "blank", "an empty line"),
        (b"[" * 100_000, "not JSON", "[[[["),
    ],
)
def test_each_invalid_line_has_its_reason_and_position(
    tmp_path: Path, line: bytes, reason: str, text: str
) -> None:
    source = write(tmp_path / "a.jsonl", jsonl(["ok"]) + line + b"\n" + jsonl(["fine"]))
    (block,) = read_blocks(find_sources([source]), Position())
    first, bad, last = block_documents(block, ["text"])
    assert isinstance(first, Document) and isinstance(last, Document) and isinstance(bad, Rejected)
    assert (bad.reason, bad.where) == (reason, f"{source}:2")
    assert text in str(bad) and len(bad.detail) < 200


def test_lists_are_sentences_and_several_keys_stay_together(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", b'{"text": ["a", "b"], "title": "t"}\r\n{"text": "c"}')
    (block,) = read_blocks(find_sources([source]), Position())
    first, second = block_documents(block, ["text", "title"])
    assert isinstance(first, Document) and first.texts == (("a", "b"), ("t",))
    assert isinstance(second, Rejected) and second.reason == "lacks a key"


def test_byte_order_marks_are_not_text(tmp_path: Path) -> None:
    marked = [
        write(tmp_path / name, b"\xef\xbb\xbf" + data)
        for name, data in (("a.jsonl", jsonl(["x"])), ("b", b"y"))
    ]
    assert documents(find_sources(marked)) == ["x", "y"]


def test_a_text_file_that_is_not_utf8_is_rejected(tmp_path: Path) -> None:
    assert documents(find_sources([write(tmp_path / "a.txt", b"\xff\xfe\x00")])) == ["not UTF-8"]


def test_files_folders_and_globs_name_each_file_once(tmp_path: Path) -> None:
    for name in ("b.txt", "sub/a.txt", "sub/.hidden/c.txt", ".secret"):
        write(tmp_path / name, b"x")
    inputs = [str(tmp_path / "sub"), str(tmp_path / "**" / "*.txt"), str(tmp_path / "b.txt")]
    results = [str(Path(source.path).relative_to(tmp_path)) for source in find_sources(inputs)]
    assert results == ["sub/a.txt", "b.txt"]
    assert [source.kind for source in find_sources(inputs, "jsonl")] == ["jsonl", "jsonl"]


def test_inputs_that_cannot_be_read_are_rejected(tmp_path: Path) -> None:
    write(tmp_path / "corpus.jsonl", b"")
    with pytest.raises(
        DataError, match=r"corpsu\.jsonl: no such file\. Use a file, .*such as \['corpus\.jsonl'\]"
    ):
        find_sources([str(tmp_path / "corpsu.jsonl")])
    with pytest.raises(
        DataError, match=r"\.arrow files do not contain plain text\. Use JSONL or text files"
    ):
        find_sources([write(tmp_path / "x.arrow", b"")])


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz", "a.jsonl.zst", "a.txt.zst"])
def test_damaged_compressed_files_are_rejected(tmp_path: Path, name: str) -> None:
    path = Path(write(tmp_path / name, jsonl(TEXTS * 50)))
    contents = path.read_bytes()
    for damaged in (contents[: len(contents) // 3], b"not packed at all"):
        path.write_bytes(damaged)
        with pytest.raises(
            DataError, match=rf"{name}: cannot be read completely .*Copy or compress the file again"
        ):
            documents(find_sources([str(path)]))


def test_training_texts_are_spread_over_a_large_corpus(tmp_path: Path) -> None:
    sources = find_sources(
        [write(tmp_path / "a.jsonl", jsonl([str(n) * 1000 for n in range(5000)]))]
    )
    every = list(read_texts(sources, ["text"], max_bytes=1 << 40))
    some = list(read_texts(sources, ["text"], max_bytes=8 << 20))
    assert len(every) == 5000 and 1000 < len(some) < 4000
    assert some[0].startswith("0") and int(some[-1][:4]) > 4000

"""`megalith data info|verify|cat|merge` from the command line."""

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from megalith.cli.main import main
from megalith.data.huggingface import train_bpe
from megalith.data.indexed import IndexedDataset, IndexedDatasetBuilder
from megalith.data.tokenizer import ByteTokenizer


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    with IndexedDatasetBuilder(str(tmp_path / "store"), np.uint16) as builder:
        for text in ("hello", "", "Größe"):
            ids = [*ByteTokenizer().encode(text), 256] if text else []
            builder.add_document(np.array(ids), [len(ids)] if ids else [])
        builder.finalize()
    return str(tmp_path / "store")


def run(*words: object) -> int:
    return main(["data", *map(str, words)])


def test_info_prints_sizes_and_the_end_token(
    prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("info", prefix) == 0
    output = capsys.readouterr().out
    for text in (
        "14 tokens as uint16",
        "documents  3, 1 of them empty",
        "100.0% of documents end with id 256",
    ):
        assert text in output
    assert run("info", prefix, "--json") == 0
    assert json.loads(capsys.readouterr().out)["longest"] == 8


def test_cat_prints_text_or_ids(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("cat", prefix, "--document", 2) == 0
    assert capsys.readouterr().out == "Größe\n"
    assert run("cat", prefix, "--ids") == 0
    assert capsys.readouterr().out == "104 101 108 108 111 256\n"
    assert run("cat", prefix, "--document", 3) == 2
    assert "has no document 3: choose one of 0 to 2" in capsys.readouterr().err


def test_cat_reads_the_tokenizer_that_prepare_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # prepare catches SIGTERM for its process
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    (tmp_path / "text.jsonl").write_text('{"text": "the quick fox, the quick dog"}\n' * 9)
    words = (
        "--input",
        "text.jsonl",
        "--output",
        "store/a",
        "--train-tokenizer",
        "270",
        "--tokenizer",
        "store/words",
    )
    assert main(["prepare", *words]) == 0
    shutil.move("store", "moved")
    capsys.readouterr()
    assert run("cat", "moved/a") == 0
    assert capsys.readouterr().out == "the quick fox, the quick dog\n"
    assert run("merge", "--input", "moved/a", "moved/a", "--output", "twice") == 0
    assert run("cat", "twice", "--document", "10") == 0
    assert capsys.readouterr().out.endswith("documents\nthe quick fox, the quick dog\n")
    train_bpe(["another one, another two"] * 4, vocab_size=262, path="moved/words")
    assert run("cat", "moved/a") == 2
    error = capsys.readouterr().err
    assert "moved/a.tokenizer.yaml: the store was written by the tokenizer huggingface-" in error
    assert "Pass --tokenizer with the original tokenizer, or --ids." in error
    shutil.rmtree("moved/words")
    assert run("cat", "moved/a") == 2 and run("cat", "moved/a", "--ids") == 0
    assert "neither a folder nor a model in the local Hugging Face cache" in capsys.readouterr().err


def test_cat_with_a_smaller_tokenizer_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with IndexedDatasetBuilder(str(tmp_path / "wide"), np.uint16) as builder:
        builder.add_document(np.array([300]), [1])
        builder.finalize()
    assert run("cat", tmp_path / "wide") == 2
    assert (
        "has id 300, but tokenizer byte has 257. Pass the tokenizer of the store with --tokenizer"
        in capsys.readouterr().err
    )


def test_verify_exit_code_is_1_for_a_damaged_store(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("verify", prefix) == 0
    assert capsys.readouterr().out == f"{prefix}: correct\n"
    Path(f"{prefix}.bin").write_bytes(b"short")
    assert run("verify", tmp_path, "--json") == 1
    assert "likely a truncated copy" in json.loads(capsys.readouterr().out)[prefix][0]


def test_merge_joins_stores(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("merge", "--input", prefix, prefix, "--output", tmp_path / "twice") == 0
    assert "twice: 28 tokens, 6 documents" in capsys.readouterr().out
    assert IndexedDataset(str(tmp_path / "twice")).verify() == []


def test_unknown_subcommands_are_rejected(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("mege") == 2
    assert "mege is not a subcommand of `megalith data`." in capsys.readouterr().err
    assert run() == 0
    assert "{info,verify,cat,merge,pack}" in capsys.readouterr().out

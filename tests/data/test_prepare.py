"""prepare: the same bytes for any number of workers and any interruption, and every bad line
counted or refused."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalith.config.data import PrepareConfig, TokenizerConfig
from megalith.data import stores
from megalith.data.corpus import read_blocks
from megalith.data.huggingface import train_bpe
from megalith.data.indexed import IndexedDataset, IndexedDatasetBuilder
from megalith.data.prepare import Progress, prepare
from megalith.data.tokenizer import ByteTokenizer
from megalith.errors import ConfigError, DataError


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 2 KB, so that a small corpus has many."""
    monkeypatch.setattr(read_blocks, "__kwdefaults__", {"block_bytes": 2000})


def write_corpus(folder: Path, documents: int = 400) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    words = ["alpha", "beta", "Größe", "日本", "\n"]
    entries = [
        {"text": " ".join(draw.choice(words, draw.integers(0, 40))), "title": f"Nr. {n}"}
        for n in range(documents)
    ]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return entries


def config(folder: Path, **changes: Any) -> PrepareConfig:
    arguments: dict[str, Any] = {
        "input": (str(folder / "corpus.jsonl"),),
        "output": str(folder / "out"),
    }
    return PrepareConfig(**(arguments | changes))


def hashes(prefix: Path | str) -> list[str]:
    return [
        hashlib.sha256(Path(f"{prefix}{ending}").read_bytes()).hexdigest()
        for ending in (".bin", ".idx")
    ]


def reference(folder: Path, entries: list[dict[str, Any]], key: str = "text") -> list[str]:
    """What a plain loop over the documents writes: the definition."""
    tokenizer = ByteTokenizer()
    with IndexedDatasetBuilder(str(folder / "reference"), np.uint16) as builder:
        for entry in entries:
            ids = tokenizer.encode(entry[key])
            if ids:
                builder.add_item(np.array([*ids, tokenizer.eod]))
            builder.end_document()
        builder.finalize()
    return hashes(folder / "reference")


def test_store_equals_that_of_a_plain_loop(tmp_path: Path, small_blocks: None) -> None:
    entries = write_corpus(tmp_path)
    totals = prepare(config(tmp_path))
    assert hashes(tmp_path / "out") == reference(tmp_path, entries)
    store = IndexedDataset(str(tmp_path / "out"))
    assert store.verify() == [] and store.num_documents == totals.documents == 400
    assert (store.num_tokens, len(store)) == (totals.tokens, totals.sequences)
    assert totals.empty_documents == sum(entry["text"] == "" for entry in entries) > 0
    assert totals.text_bytes == sum(len(entry["text"].encode()) for entry in entries)
    names = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out"))
    assert names == ["out.bin", "out.idx", "out.tokenizer.yaml"]


def test_the_number_of_workers_does_not_matter(tmp_path: Path, small_blocks: None) -> None:
    entries = write_corpus(tmp_path)
    train_bpe([entry["text"] for entry in entries], vocab_size=280, path=str(tmp_path / "bpe"))
    tokenizer = TokenizerConfig(kind="huggingface", path=str(tmp_path / "bpe"))
    one = prepare(config(tmp_path, tokenizer=tokenizer))
    three = prepare(
        config(tmp_path, tokenizer=tokenizer, workers=3, output=str(tmp_path / "three"))
    )
    assert hashes(tmp_path / "out") == hashes(tmp_path / "three")
    assert one == three


def test_sentences_are_sequences_and_the_end_token_belongs_to_the_last(tmp_path: Path) -> None:
    lines = [{"text": ["ab", "", "c"]}, {"text": []}, {"text": [""]}, {"text": "d"}]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    prepare(config(tmp_path))
    store = IndexedDataset(str(tmp_path / "out"))
    assert [item.tolist() for item in store[:]] == [[97, 98], [99, 256], [100, 256]]
    assert store.document_indices.tolist() == [0, 2, 2, 2, 3]


def test_without_the_end_token_there_is_none(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    prepare(config(tmp_path, append_eod=False))
    store = IndexedDataset(str(tmp_path / "out"))
    assert all(item.max() < 256 for item in store[:])


def test_each_key_has_a_store_of_its_own(tmp_path: Path, small_blocks: None) -> None:
    entries = write_corpus(tmp_path)
    prepare(config(tmp_path, keys=("text", "title")))
    assert hashes(tmp_path / "out_text") == reference(tmp_path, entries)
    assert hashes(tmp_path / "out_title") == reference(tmp_path, entries, "title")


class Stop(Exception):
    """Stands for Ctrl-C in a place that the test chooses."""


class StopAfter:
    """Stops at the n-th block."""

    def __init__(self, blocks: int) -> None:
        self.left = blocks

    def __call__(self, progress: Progress) -> None:
        self.left -= 1
        if self.left == 0:
            raise Stop


@pytest.mark.parametrize("workers, stops", [(1, [1, 2, 3, 30]), (2, [7])])
def test_stopped_run_resumes_to_the_same_bytes(
    tmp_path: Path, small_blocks: None, workers: int, stops: list[int]
) -> None:
    entries = write_corpus(tmp_path)
    for number, stop in enumerate(stops):
        with pytest.raises(Stop):
            prepare(config(tmp_path, resume=number > 0, workers=workers), report=StopAfter(stop))
        assert not (tmp_path / "out.bin").exists() and not (tmp_path / "out.idx").exists()
        with (tmp_path / "out.preparing" / "text.tokens").open("ab") as file:
            file.write(b"what was written after the last save")
    with pytest.raises(
        DataError, match=r"out\.preparing contains an unfinished run\. Pass --resume to continue"
    ):
        prepare(config(tmp_path))
    totals = prepare(config(tmp_path, resume=True))
    assert hashes(tmp_path / "out") == reference(tmp_path, entries)
    assert totals.documents == 400
    assert not (tmp_path / "out.preparing").exists()


KILLED = """
import sys
from megalith.config.data import PrepareConfig
from megalith.data import journal
from megalith.data.corpus import read_blocks
from megalith.data.prepare import prepare
import time

if __name__ == "__main__":
    read_blocks.__kwdefaults__["block_bytes"] = 2000
    journal._SAVE_SECONDS = 0.0
    folder = sys.argv[1]
    config = PrepareConfig(input=(folder + "/corpus.jsonl",), output=folder + "/out", workers=int(sys.argv[2]))
    prepare(config, report=lambda progress: (print("block", flush=True), time.sleep(0.02)))
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_run_resumes_to_the_same_bytes_and_leaves_no_process(
    tmp_path: Path, workers: int
) -> None:
    entries = write_corpus(tmp_path)
    (tmp_path / "killed.py").write_text(KILLED)
    command = [sys.executable, str(tmp_path / "killed.py"), str(tmp_path), str(workers)]
    environment = os.environ | {"PYTHONPATH": str(Path(stores.__file__).parents[2])}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, env=environment, start_new_session=True
    )
    assert process.stdout is not None
    for _ in range(8):
        process.stdout.readline()
    process.kill()
    process.communicate(timeout=30)
    totals = prepare(config(tmp_path, resume=True))
    assert hashes(tmp_path / "out") == reference(tmp_path, entries) and totals.documents == 400
    _wait_until_gone(process.pid)


def _wait_until_gone(group: int) -> None:
    """The workers of a killed run end by themselves."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.killpg(group, signal.SIGKILL)
    raise AssertionError("a worker outlived the process that started it")


def test_a_run_stopped_between_its_renames_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = write_corpus(tmp_path)
    rename = Path.replace

    def stop_at_index(self: Path, target: Path) -> Path:
        if str(target).endswith("out.idx"):
            raise Stop
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", stop_at_index)
        with pytest.raises(Stop):
            prepare(config(tmp_path))
    assert (tmp_path / "out.bin").exists() and not (tmp_path / "out.idx").exists()
    prepare(config(tmp_path, resume=True))
    assert hashes(tmp_path / "out") == reference(tmp_path, entries)


def test_resuming_with_other_settings_or_files_is_rejected(
    tmp_path: Path, small_blocks: None
) -> None:
    entries = write_corpus(tmp_path)
    with pytest.raises(Stop):
        prepare(config(tmp_path), report=StopAfter(3))
    with pytest.raises(
        DataError,
        match=r"written with other settings or files \(append_eod differ\)\. Use the same",
    ):
        prepare(config(tmp_path, resume=True, append_eod=False))
    os.utime(tmp_path / "corpus.jsonl", ns=(0, 0))
    with pytest.raises(
        DataError,
        match=r"\(the files read so far differ\)\. Use the same ones to resume, or pass --over",
    ):
        prepare(config(tmp_path, resume=True))
    prepare(config(tmp_path, overwrite=True))
    assert hashes(tmp_path / "out") == reference(tmp_path, entries)


def test_two_runs_cannot_write_one_output(tmp_path: Path) -> None:
    write_corpus(tmp_path)

    def second(progress: Progress) -> None:
        with pytest.raises(
            DataError,
            match=r"out\.preparing: another process is writing to it .*use another output",
        ):
            prepare(config(tmp_path, resume=True))

    prepare(config(tmp_path), report=second)


def test_existing_store_is_kept_without_overwrite(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    prepare(config(tmp_path))
    before = hashes(tmp_path / "out")
    with pytest.raises(
        DataError, match=r"out: the store already exists\. Use another name, or pass --overwrite"
    ):
        prepare(config(tmp_path, append_eod=False))
    assert hashes(tmp_path / "out") == before and not (tmp_path / "out.preparing").exists()
    prepare(config(tmp_path, append_eod=False, overwrite=True))
    assert hashes(tmp_path / "out") != before


BAD = ["{broken", '{"body": 1}', '{"text": 5}', "", '{"text": ""}']


def test_bad_lines_are_counted_and_reported(tmp_path: Path) -> None:
    lines = [*BAD, '{"text": "good"}', "also broken"]
    (tmp_path / "corpus.jsonl").write_bytes("\n".join(lines).encode() + b'\n{"text": "\xff"}\n')
    totals = prepare(config(tmp_path))
    assert totals.rejected == {
        "not JSON": 2,
        "lacks a key": 1,
        "not text": 1,
        "blank": 1,
        "not UTF-8": 1,
    }
    assert (totals.documents, totals.empty_documents, totals.sequences, totals.tokens) == (
        2,
        1,
        1,
        5,
    )
    assert "corpus.jsonl:1: not JSON: {broken" in totals.examples[0] and len(totals.examples) == 5


@pytest.mark.parametrize("line", BAD)
def test_strict_rejects_the_first_bad_line_and_leaves_nothing(tmp_path: Path, line: str) -> None:
    (tmp_path / "corpus.jsonl").write_text(f'{{"text": "good"}}\n{line}\n')
    with pytest.raises(
        DataError,
        match=r"corpus\.jsonl:2: .*\. Correct it, or run without --strict to skip and count",
    ):
        prepare(config(tmp_path, strict=True))
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_strict_rejects_in_a_worker_too(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"text": "good"}\nbroken\n')
    with pytest.raises(DataError, match=r"corpus\.jsonl:2: not JSON: broken"):
        prepare(config(tmp_path, strict=True, workers=2))


def test_input_without_text_is_rejected_and_leaves_nothing(tmp_path: Path) -> None:
    for lines in ('{"text": ""}\n', "broken\n", ""):
        (tmp_path / "corpus.jsonl").write_text(lines)
        with pytest.raises(
            DataError, match=r"no text in 1 files \(.*\)\. Use other files, or set --keys"
        ):
            prepare(config(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        DataError, match=r"No space left on device\. Free some space, and pass --resume to continue"
    ):
        prepare(config(tmp_path))
    assert not (tmp_path / "out.bin").exists()


def test_ids_beyond_the_stated_vocabulary_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path)
    monkeypatch.setattr(ByteTokenizer, "vocab_size", 100)
    with pytest.raises(
        DataError,
        match=r"the tokenizer returned id \d+, but its vocabulary has 100 ids\. Use tokenizer files",
    ):
        prepare(config(tmp_path))


def test_invalid_settings_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="workers=0 must be at least 1"):
        prepare(config(tmp_path, workers=0))

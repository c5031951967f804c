"""A conversion that is killed anywhere goes on to the same bytes, and never on with what is of
another."""

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalith import storage
from megalith.cli.main import main
from megalith.errors import CheckpointError
from megalith.hf import box_files, release
from megalith.hf import folder as hf
from megalith.hf.staging import (
    NAME,
    ConversionJournal,
    begin_journal,
    describe_changes,
    find_staging_folders,
    read_journal,
)

GONE = 2**22 + 1  # above the highest number that Linux gives a process

KILLED = """
import os, signal, sys
from megalith import storage
from megalith.cli.main import main
from megalith.hf import convert, folder, release  # here, once

folder.BATCH_NBYTES = release.BATCH_NBYTES = 1000
every, words = int(sys.argv[1]), sys.argv[2:]

def watch(every):
    calls = iter(range(1, 10**6))
    for name in ("append_line", "begin_sync", "rename", "write_new", "sync_file", "sync_written", "sync_folder"):
        def watched(*given, plain=getattr(storage, name)):
            if next(calls) == every:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*given)
        setattr(storage, name, watched)

kills = 0
while not os.path.exists(words[1]):  # it may be killed when all is done
    child = os.fork()
    if child == 0:
        watch(every + kills)
        os._exit(main(["convert", *words]))
    ended = os.waitpid(child, 0)[1]
    if os.WIFEXITED(ended):
        assert os.WEXITSTATUS(ended) == 0
        break
    kills += 1
print("kills", kills)
"""


def contents(folder: Path) -> dict[str, str]:
    """SHA-256 of every file."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


@pytest.fixture
def theirs(tmp_path: Path, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face folder, of which small pieces are converted at once."""
    tiny.folder(tmp_path / "theirs", tiny.config())
    for module in (hf, release):
        monkeypatch.setattr(module, "BATCH_NBYTES", 1000)
    return tmp_path / "theirs"


def words_of(to: str, source: Path, target: Path) -> list[str]:
    """Of a conversion into several files."""
    return [str(source), str(target), "--to", to, "--shard-gb", "6e-6", "--workers", "1"]


def left_by(path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], pieces: int) -> Path:
    """What a conversion leaves that dies when so many pieces are whole: by a process that is
    gone."""
    with monkeypatch.context() as patch:
        plain, left = storage.append_line, iter(range(pieces + 1))

        def dies(file: Path, line: bytes) -> None:
            if next(left, None) is None:
                raise OSError(errno.ENOSPC, "No space left on device")
            plain(file, line)

        patch.setattr(storage, "append_line", dies)
        assert main(["convert", *words, "--keep"]) == 2
    ((folder, owner),) = find_staging_folders(path)
    assert owner == "gone"
    gone = folder.with_name(folder.name.replace(f"-{os.getpid()}-", f"-{GONE}-"))
    folder.rename(gone)
    return gone


@pytest.mark.slow
@pytest.mark.parametrize("every", [3])
@pytest.mark.parametrize("to", ["megalith", "huggingface"])
def test_a_conversion_killed_repeatedly_writes_the_same_bytes(
    to: str, every: int, theirs: Path, tmp_path: Path
) -> None:
    assert main(["convert", *words_of(to, theirs, tmp_path / "x")]) == 0
    words = words_of(to, theirs, tmp_path / "again")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(every), *words],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert int(done.stdout.split()[-1]) >= 8, done.stderr
    assert "resuming an interrupted conversion" in done.stderr
    before, after = contents(tmp_path / "x"), contents(tmp_path / "again")
    named = {"config.yaml", "manifest.json"}  # with the name of the folder
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} <= (
        named if to == "megalith" else set()
    )
    assert sorted(os.listdir(tmp_path)) == ["again", "theirs", "x"]


@pytest.mark.parametrize("workers", [pytest.param("1", marks=pytest.mark.slow), "2"])
@pytest.mark.parametrize("to", ["megalith", "huggingface"])
def test_finished_pieces_are_reused_and_damaged_ones_rewritten(
    to: str,
    workers: str,
    theirs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    words = [*words_of(to, theirs, tmp_path / "x")[:-1], workers]
    assert main(["convert", *words]) == 0
    before = contents(tmp_path / "x")
    (tmp_path / "x").rename(tmp_path / "whole")
    left = left_by(tmp_path / "x", monkeypatch, words, 4)
    read = read_journal(left)
    assert read is not None and len(read[1]) == 4
    # with two workers it may be of any file
    piece = json.loads((left / NAME).read_bytes().split(b"\n")[2])[0]
    name, _, start = piece.partition("@")
    (file,) = left.rglob(name)
    data = bytearray(file.read_bytes())
    data[int(start) if start else len(data) // 2] ^= 1
    file.write_bytes(data)
    with (left / NAME).open("ab") as torn:
        torn.write(b'["model-00001')
    again = pieces_of(words, monkeypatch)
    assert "x: resuming an interrupted conversion with 4 finished pieces" in caplog.text
    assert contents(tmp_path / "x") == before
    once = pieces_of([words[0], str(tmp_path / "once"), *words[2:]], monkeypatch)
    assert piece in again < once and len(once - again) == 3, "of four, one was damaged"


def pieces_of(words: list[str], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The pieces that a conversion writes."""
    results: list[bytes] = []
    plain = storage.append_line

    def seen(path: Path, line: bytes) -> None:
        results.append(line)
        plain(path, line)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "append_line", seen)
        assert main(["convert", *words]) == 0
    return {json.loads(line)[0] for line in results if line.startswith(b"[")}


@pytest.mark.parametrize(
    "change", ["dtype", "source", pytest.param("shards", marks=pytest.mark.slow)]
)
def test_resuming_with_another_source_or_settings_is_rejected(
    change: str,
    theirs: Path,
    tmp_path: Path,
    tiny: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    words = words_of("huggingface", theirs, tmp_path / "x")
    left = left_by(tmp_path / "x", monkeypatch, words, 3)
    differences = {
        "dtype": "dtype: as they are before, bfloat16 now",
        "source": "its values: ",
        "shards": "largest file: 6,000 bytes",
    }
    other = list(words)
    if change == "dtype":
        other += ["--dtype", "bf16"]
    elif change == "shards":
        other[5] = "1e-5"
    else:
        for file in theirs.iterdir():
            file.unlink()
        theirs.rmdir()
        tiny.folder(theirs, tiny.config(), seed=5)
    capsys.readouterr()
    assert main(["convert", *other]) == 2
    stderr = capsys.readouterr().err
    assert (
        f"{left}: an interrupted conversion to {tmp_path / 'x'} with 3 finished pieces had another "
        "source or" in stderr
    )
    assert (
        differences[change] in stderr
        and "or pass --restart to start again." in stderr
        and left.exists()
    )
    assert main(["convert", *other, "--restart"]) == 0
    assert f"{left}: removed; it was left by a conversion that was killed" in caplog.text
    (tmp_path / "x").rename(tmp_path / "first")
    assert main(["convert", *other]) == 0 and contents(tmp_path / "first") == contents(
        tmp_path / "x"
    )


def test_staging_folders_of_other_machines_are_resumed_only_with_take_over(
    theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    words = words_of("huggingface", theirs, tmp_path / "x")
    left = left_by(tmp_path / "x", monkeypatch, words, 3)
    left = left.rename(left.with_name(f".x.tmp-node_8-{GONE}-0123abcd"))
    assert main(["convert", *words]) == 0
    assert (
        "or was killed. If it was killed, remove the folder, or pass --take-over to resume it"
        in caplog.text
    )
    (tmp_path / "x").rename(tmp_path / "first")
    assert main(["convert", *words, "--take-over"]) == 0
    assert "resuming an interrupted conversion with 3 finished pieces" in caplog.text
    assert contents(tmp_path / "first") == contents(tmp_path / "x") and not left.exists()


def test_staging_folders_of_running_processes_are_never_resumed(
    theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    words = words_of("huggingface", theirs, tmp_path / "x")
    left = left_by(tmp_path / "x", monkeypatch, words, 3)
    left = left.rename(left.with_name(left.name.replace(f"-{GONE}-", f"-{os.getppid()}-")))
    assert main(["convert", *words, "--take-over"]) == 0
    assert (
        f"{left}: another conversion to {tmp_path / 'x'} is running, or a process with the same id"
        in caplog.text
    )
    assert "resuming" not in caplog.text and left.exists() and (tmp_path / "x").exists()


def test_finished_pieces_are_kept_after_a_full_disk_with_keep(
    theirs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    words = words_of("megalith", theirs, tmp_path / "x")
    with monkeypatch.context() as patch:
        count = iter(range(3))

        def full(*given: object) -> None:
            if next(count, None) is None:
                raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(storage, "begin_sync", full)
        assert main(["convert", *words, "--keep"]) == 2
        stderr = capsys.readouterr().err
        assert "finished pieces are kept. Run the same command again to resume" in caplog.text
        assert "No space left on device). Free some space, or choose another target" in stderr
        patch.setattr(storage, "free_nbytes", lambda folder: 12)
        assert main(["convert", *words, "--keep"]) == 2
        assert (
            "has 12 B free" in capsys.readouterr().err
            and len(find_staging_folders(tmp_path / "x")) == 1
        )
    assert main(["convert", *words]) == 0
    assert "resuming an interrupted conversion" in caplog.text
    assert sorted(os.listdir(tmp_path)) == ["theirs", "x"]


def test_an_interrupted_conversion_survives_a_failed_resume(
    theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    words = words_of("megalith", theirs, tmp_path / "x")
    left_by(tmp_path / "x", monkeypatch, words, 4)

    def damaged(*given: object, **settings: object) -> None:
        raise CheckpointError(f"{theirs}: cannot be read. Copy it again.")

    faults: list[tuple[Any, str, Any]] = [
        (storage, "free_nbytes", lambda folder: 12),
        (box_files, "BoxFile", damaged),
    ]
    for module, name, worse in faults:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, worse)
            assert main(["convert", *words]) == 2
        ((folder, _),) = find_staging_folders(tmp_path / "x")
        read = read_journal(folder)
        assert read is not None and len(read[1]) == 4, name
    assert main(["convert", *words]) == 0
    assert caplog.text.count("resuming an interrupted conversion with 4 finished pieces") == 3
    assert sorted(os.listdir(tmp_path)) == ["theirs", "x"]


def test_new_rows_of_an_upcycled_model_are_part_of_the_recipe(
    theirs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    experts = tmp_path / "moe.yaml"
    experts.write_text("num_experts: 4\ntop_k: 2\nffn_hidden_size: 10\n")
    words = [*words_of("megalith", theirs, tmp_path / "x"), "--upcycle", str(experts)]
    left_by(tmp_path / "x", monkeypatch, [*words, "--new-rows", "mean"], 2)
    assert main(["convert", *words]) == 2
    assert "new rows: mean before, zero now" in capsys.readouterr().err


def test_a_target_created_during_conversion_is_rejected(
    theirs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words, plain = words_of("megalith", theirs, tmp_path / "x"), storage.sync_folder

    def another(folder: Path) -> None:
        plain(folder)
        if not (tmp_path / "x").exists():
            (tmp_path / "x").mkdir()
            (tmp_path / "x" / "note").write_text("theirs")

    monkeypatch.setattr(storage, "sync_folder", another)
    assert main(["convert", *words, "--keep"]) == 2
    assert (
        "x already exists and is not overwritten. Choose another target" in capsys.readouterr().err
    )
    assert (tmp_path / "x" / "note").read_text() == "theirs" and sorted(os.listdir(tmp_path)) == [
        "theirs",
        "x",
    ]


def test_journal_lines_of_threads_are_complete_and_invalid_lines_ignored(tmp_path: Path) -> None:
    journal = begin_journal(tmp_path, {"source": "a", "dtype": "b"})
    threads = [
        threading.Thread(target=journal.add, args=(f"piece {n}", {"n": n})) for n in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with (tmp_path / NAME).open("ab") as file:
        file.write(b'["piece 20", {"n"')
    read = read_journal(tmp_path)
    assert read is not None and read[0] == {"source": "a", "dtype": "b"} and len(read[1]) == 20
    later = read[1].reopen(tmp_path)
    later.add("piece 21", 7)
    again = read_journal(tmp_path)
    assert again is not None and len(again[1]) == 21 and again[1].get("piece 21") == 7
    assert again[1].get("piece 3") == {"n": 3} and again[1].get("piece 20") is None
    (tmp_path / NAME).write_bytes(b'{"source": ')
    assert read_journal(tmp_path) is None and read_journal(tmp_path / "none") is None
    (tmp_path / NAME).write_bytes(b"[1]\n")
    assert read_journal(tmp_path) is None


def test_a_journal_without_a_path_writes_no_file(tmp_path: Path) -> None:
    journal = ConversionJournal(None)
    journal.add("a", 1)
    assert len(journal) == 1 and journal.get("a") == 1


def test_recipe_differences_are_reported_by_name() -> None:
    assert describe_changes({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}) == [
        "b: 2 before, 3 now",
        "c: nothing before, 4 now",
    ]
    assert describe_changes({"a": "1"}, {"a": "1"}) == []

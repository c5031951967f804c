"""Built indices on disk: built once, whole or absent, and built again when damaged."""

import fcntl
import logging
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from megalith.data.cache import Arrays, load_or_build
from megalith.data.indexed import file_digest
from megalith.errors import ConfigError, DataError


class Builder:
    """Builds small arrays and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Arrays:
        self.calls += 1
        return {"a": np.arange(5, dtype=np.int32), "b": np.ones((3, 2))}


def test_second_call_reads_the_cache_of_the_first(tmp_path: Path) -> None:
    build = Builder()
    first, second = (load_or_build(tmp_path / "new" / "folder", "x", build) for _ in range(2))
    assert build.calls == 1
    assert first["a"].tolist() == second["a"].tolist() == [0, 1, 2, 3, 4]
    assert isinstance(second["a"], np.memmap) and second["b"].shape == (3, 2)
    load_or_build(tmp_path / "new" / "folder", "y", build)
    assert build.calls == 2


def test_nothing_is_cached_without_a_folder() -> None:
    build = Builder()
    load_or_build(None, "x", build)
    load_or_build(None, "x", build)
    assert build.calls == 2


@pytest.mark.parametrize("ending", ["-a.npy", ".json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_damaged_cache_entry_is_built_again(
    tmp_path: Path, ending: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    build = Builder()
    load_or_build(tmp_path, "x", build)
    file = next(path for path in tmp_path.iterdir() if path.name.endswith(ending))
    contents = bytearray(file.read_bytes())
    contents[len(contents) - 9] ^= 0xFF
    if damage == "cut":
        file.write_bytes(contents[:-7])
    elif damage == "flip":
        file.write_bytes(contents)
    else:
        file.unlink()
    with caplog.at_level(logging.WARNING):
        again = load_or_build(tmp_path, "x", build)
    assert build.calls == 2 and again["a"].tolist() == [0, 1, 2, 3, 4]
    assert ("is damaged" in caplog.text) == (ending != ".json" or damage != "remove")


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    build = Builder()
    load_or_build(tmp_path, "x", build)
    file = next(path for path in tmp_path.iterdir() if path.name.endswith("-a.npy"))
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    entry = next(path for path in tmp_path.iterdir() if path.name.endswith(".json"))
    text = entry.read_text()
    old = next(word for word in text.split('"') if len(word) == 32)
    entry.write_text(text.replace(old, file_digest(file)))
    assert load_or_build(tmp_path, "x", build)["a"].dtype == np.int32
    assert build.calls == 2


def _die_while_writing(folder: str) -> None:
    def build() -> Arrays:
        np.save = lambda *arguments, **options: os.kill(os.getpid(), signal.SIGKILL)
        return {"a": np.arange(3)}

    load_or_build(Path(folder), "x", build)


def _build_slowly(folder: str) -> None:
    with (Path(folder) / "calls").open("a") as file:
        load_or_build(
            Path(folder), "x", lambda: (file.write("built\n"), {"a": np.arange(1_000_000)})[1]
        )


def test_killed_builder_leaves_no_cache_entry(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=_die_while_writing, args=(str(tmp_path),)
    )
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".json", ".npy")]
    build = Builder()
    assert load_or_build(tmp_path, "x", build)["a"].tolist() == [0, 1, 2, 3, 4]


def test_one_of_several_processes_builds_the_cache(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_build_slowly, args=(str(tmp_path),)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    assert (tmp_path / "calls").read_text() == "built\n"


def test_folder_that_cannot_be_created_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError,
        match=r"indices cannot be written to .*file/cache.*Set data\.cache_path to a writable",
    ):
        load_or_build(tmp_path / "file" / "cache", "x", Builder())


def test_full_disk_is_reported_and_leaves_no_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", no_space)
    with pytest.raises(
        DataError,
        match=r"cannot be written \(.*No space left on device\)\. Free some space, or set data",
    ):
        load_or_build(tmp_path, "x", Builder())
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_without_locks_every_process_builds_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*arguments: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with caplog.at_level(logging.WARNING):
        assert load_or_build(tmp_path, "x", Builder())["a"].tolist() == [0, 1, 2, 3, 4]
    assert "every process builds the index" in caplog.text

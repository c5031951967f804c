"""Writes are new, whole or not at all."""

import errno
import mmap
import os
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megalith import storage


def test_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    storage.write_new(tmp_path / "a", b"first")
    with pytest.raises(FileExistsError):
        storage.write_new(tmp_path / "a", b"second")
    assert storage.read_bytes(tmp_path / "a") == b"first"


def test_replacement_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "latest"
    storage.replace_file(path, b"old")

    def refuse(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="No space left"):
            storage.replace_file(path, b"new and longer")
    assert storage.read_bytes(path) == b"old"
    assert storage.list_names(tmp_path) == ["latest"]
    storage.replace_file(path, b"new")
    assert storage.read_bytes(path) == b"new"


def test_leftovers_of_a_killed_replacement_are_ignored(tmp_path: Path) -> None:
    (tmp_path / f"latest.tmp-{os.getpid()}").write_bytes(b"half")
    storage.replace_file(tmp_path / "latest", b"whole")
    assert storage.list_names(tmp_path) == ["latest"]


def test_a_range_of_a_file_ends_with_the_file(tmp_path: Path) -> None:
    storage.write_new(tmp_path / "a", b"0123456789")
    assert storage.read_range(tmp_path / "a", 3, 4) == b"3456"
    assert storage.read_range(tmp_path / "a", 8, 4) == b"89"
    assert storage.file_nbytes(tmp_path / "a") == 10


@pytest.mark.parametrize(
    "start", [0, 5, mmap.ALLOCATIONGRANULARITY, mmap.ALLOCATIONGRANULARITY + 7]
)
def test_range_is_a_view_and_writing_to_it_changes_no_file(tmp_path: Path, start: int) -> None:
    data = bytes(range(256)) * 100
    storage.write_new(tmp_path / "a", data)
    seen = storage.mapped(tmp_path / "a", start, 300)
    assert seen == data[start : start + 300]
    seen[:3] = b"\0\0\0"
    assert storage.read_bytes(tmp_path / "a") == data
    assert storage.mapped(tmp_path / "a", len(data) - 2, 5) == data[-2:]
    assert storage.mapped(tmp_path / "a", len(data) + start, 5).nbytes == 0
    storage.remove_file(tmp_path / "a")
    assert seen[3:] == data[start + 3 : start + 300]
    with pytest.raises(FileNotFoundError):
        storage.mapped(tmp_path / "a", 0, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can be asked to read pages")
def test_unreadable_pages_raise_an_error_instead_of_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.write_new(tmp_path / "a", b"x" * 5 * mmap.PAGESIZE)
    fresh = mmap.mmap

    def cut_off(*options: Any, **named: Any) -> mmap.mmap:  # as it was called
        pages = fresh(*options, **named)
        os.truncate(tmp_path / "a", mmap.PAGESIZE)
        return pages

    monkeypatch.setattr(mmap, "mmap", cut_off)
    with pytest.raises(OSError, match="Input/output error"):
        storage.mapped(tmp_path / "a", 0, 5 * mmap.PAGESIZE)


def test_parts_of_a_file_are_written_in_any_order(tmp_path: Path) -> None:
    storage.allocate_new(tmp_path / "a", 7)
    for start, data in ((4, b"efg"), (0, b"abcd")):
        with storage.open_part(tmp_path / "a", start) as file:
            file.write(data)
            storage.begin_sync(file, start, len(data))
            assert storage.read_range(tmp_path / "a", start, len(data)) == data
    storage.sync_written(tmp_path / "a")
    assert storage.read_bytes(tmp_path / "a") == b"abcdefg"
    with pytest.raises(FileExistsError):
        storage.allocate_new(tmp_path / "a", 7)


def test_new_folders_are_created_with_their_parents(tmp_path: Path) -> None:
    storage.make_folder(tmp_path / "a" / "b")
    with pytest.raises(FileExistsError):
        storage.make_folder(tmp_path / "a" / "b")
    storage.rename(tmp_path / "a" / "b", tmp_path / "a" / "c")
    storage.sync_folder(tmp_path / "a")
    assert storage.list_names(tmp_path / "a") == ["c"]
    assert storage.list_names(tmp_path / "nowhere") == []


def test_a_folder_with_files_is_not_renamed_over(tmp_path: Path) -> None:
    for name in ("a", "b"):
        storage.make_folder(tmp_path / name)
        storage.write_new(tmp_path / name / "x", name.encode())
    with pytest.raises(OSError, match="not empty"):
        storage.rename(tmp_path / "a", tmp_path / "b")
    assert storage.read_bytes(tmp_path / "b" / "x") == b"b"


def test_removing_a_tree_keeps_the_targets_of_links(tmp_path: Path) -> None:
    storage.make_folder(tmp_path / "kept")
    storage.write_new(tmp_path / "kept" / "x", b"x")
    storage.make_folder(tmp_path / "gone")
    (tmp_path / "gone" / "link").symlink_to(tmp_path / "kept")
    storage.remove_tree(tmp_path / "gone")
    storage.remove_tree(tmp_path / "gone")  # nothing there: fine
    assert storage.list_names(tmp_path) == ["kept"]
    assert storage.list_names(tmp_path / "kept") == ["x"]


def test_free_space_is_that_of_the_folder(tmp_path: Path) -> None:
    assert 0 < storage.free_nbytes(tmp_path) < 2**60


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_file_system_without_sync_is_warned_about(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(os.path, "ismount", lambda folder: folder == tmp_path)
    calls: list[Callable[[], None]] = [
        partial(storage.write_new, tmp_path / "a", b"x"),
        partial(storage.sync_written, tmp_path / "a"),
        partial(storage.sync_folder, tmp_path),
        partial(storage.replace_file, tmp_path / "a", b"y"),
    ]
    for call in calls:
        with pytest.warns(RuntimeWarning) as output:
            call()
        assert {str(warning.message) for warning in output} == {
            f"{tmp_path}: this file system does not support fsync ({os.strerror(number)}). After a "
            "power failure its files may be incomplete: check them, or use another file system."
        }
    assert storage.read_bytes(tmp_path / "a") == b"y"


def test_errors_of_the_disk_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.write_new(tmp_path / "a", b"x")

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        storage.sync_written(tmp_path / "a")
    with pytest.raises(OSError, match="Input/output error"):
        storage.sync_folder(tmp_path)


def test_lines_are_added_one_after_the_other(tmp_path: Path) -> None:
    for line in (b"a", b"b c"):
        storage.append_line(tmp_path / "a", line)
    assert storage.read_bytes(tmp_path / "a") == b"a\nb c\n"


def test_device_and_pipe_are_not_read_as_files(tmp_path: Path) -> None:
    (tmp_path / "zeros").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    for name in ("zeros", "pipe"):
        with pytest.raises(
            OSError, match=f"not a regular file, but a device, pipe or socket: '.*{name}'"
        ):
            storage.read_bytes(tmp_path / name)
    with pytest.raises(OSError, match="not a regular file"):
        storage.read_text(tmp_path / "zeros", allow_pipe=True)


def test_file_larger_than_limit_is_rejected_and_pipe_is_read_up_to_limit(tmp_path: Path) -> None:
    storage.write_new(tmp_path / "a", b"12345")
    assert storage.read_bytes(tmp_path / "a", max_nbytes=5) == b"12345"
    with pytest.raises(OSError, match="larger than the limit of 4 bytes"):
        storage.read_bytes(tmp_path / "a", max_nbytes=4)
    read_end, write_end = os.pipe()
    os.write(write_end, b"12345")
    os.close(write_end)
    assert storage.read_text(Path(f"/dev/fd/{read_end}"), allow_pipe=True) == "12345"
    os.close(read_end)


def test_text_has_unix_line_ends_and_must_be_utf8(tmp_path: Path) -> None:
    storage.write_new(tmp_path / "a", "é\r\nb\rc\n".encode())
    assert (
        storage.read_text(tmp_path / "a")
        == (tmp_path / "a").read_text(encoding="utf-8")
        == "é\nb\nc\n"
    )
    storage.write_new(tmp_path / "b", b"\xff")
    with pytest.raises(UnicodeDecodeError):
        storage.read_text(tmp_path / "b")


def test_json_that_is_nested_too_deeply_is_a_value_error() -> None:
    assert storage.parse_json(b'{"a": [1]}') == {"a": [1]}
    for text in ("[" * 100_000, '{"a":' * 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            storage.parse_json(text)


def test_fuzzed_json_is_parsed_or_raises_value_error() -> None:
    pieces = [
        "[",
        "]",
        "{",
        "}",
        '"a"',
        ":",
        ",",
        "1e999",
        "NaN",
        "-",
        "\\",
        '"\\ud800"',
        "9" * 5000,
        "\x00",
        "é",
        "[" * 999,
    ]
    for seed in range(500):
        draw = random.Random(seed)
        text = "".join(draw.choices(pieces, k=draw.randint(0, 12)))
        try:
            storage.parse_json(text)
        except ValueError:
            continue
        except Exception as error:
            pytest.fail(f"seed {seed}, {text[:100]!r}: {error!r}")

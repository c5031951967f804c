"""The corpus that is on every machine: which files, which of them are held out, and two
yardsticks."""

import zlib
from pathlib import Path

import pytest

from megalith.data.prepare import (
    find_local_text,
    known_word_fraction,
    words_in,
    zlib_bits_per_byte,
)
from megalith.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """200 small files, and some of each kind that is left out."""
    for number in range(200):
        file = tmp_path / f"part{number % 7}" / f"file{number}.{('py', 'txt', 'rst')[number % 3]}"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"text {number} äöü\n")
    for name in ("site-packages", "test", "part1/tests", "part2/__pycache__"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "other.py").write_text("other people's")
    (tmp_path / "picture.png").write_text("no text")
    (tmp_path / "latin.txt").write_bytes("äöü".encode("latin-1"))
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "folder.py").mkdir()
    return tmp_path


def test_every_text_is_in_one_of_the_two_parts(folder: Path) -> None:
    local_text = find_local_text(folder)
    assert len(local_text.training) + len(local_text.held_out) == 200
    assert not set(local_text.training) & set(local_text.held_out)
    assert all(
        file.parent.name.startswith("part") and file.name.startswith("file")
        for file in local_text.training
    )
    assert 3 <= len(local_text.held_out) <= 20  # one in 25


def test_the_choice_depends_on_names_inside_the_folder_alone(folder: Path, tmp_path: Path) -> None:
    before = [file.relative_to(folder) for file in find_local_text(folder).held_out]
    moved = folder.rename(folder.with_name("elsewhere"))
    (moved / "part0" / "new.txt").write_text("one more")
    after = [file.relative_to(moved) for file in find_local_text(moved).held_out]
    assert [file for file in after if file.name != "new.txt"] == before
    assert before == sorted(before)


def test_too_little_text_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("x = 1")
    with pytest.raises(
        DataError,
        match=r"has only 1 text files\. Install Python's standard library, or use `megalith",
    ):
        find_local_text(tmp_path)


def test_python_installation_has_enough_text() -> None:
    local_text = find_local_text()
    assert len(local_text.training) > 300 and len(local_text.held_out) > 10
    assert not any("site-packages" in file.parts for file in local_text.training)


def test_zlib_is_measured_over_all_files_together(folder: Path) -> None:
    files = find_local_text(folder).held_out
    text = b"".join(file.read_bytes() for file in files)
    assert zlib_bits_per_byte(files) == 8 * len(zlib.compress(text, 9)) / len(text)


def test_known_words_are_counted_with_repetition(folder: Path) -> None:
    files = find_local_text(folder).training
    assert words_in("def text(self): a_b, 12!") == ["def", "text", "self", "a_b", "12"]
    assert known_word_fraction("text text unknown äöü", files) == 0.75
    assert known_word_fraction("", files) == 0.0

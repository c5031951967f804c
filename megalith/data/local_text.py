"""Text corpus available on every machine: source and documentation of Python's standard library."""

import hashlib
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalith.errors import DataError

EXCLUDED_FOLDERS = (
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
    "lib2to3",
    "encodings",
)
"""Folders without prose or ordinary code: other packages, test data, character tables."""

ENDINGS = (".py", ".txt", ".rst")
HELD_OUT_ONE_IN = 25  # files, by a hash of their name, for the same choice on all machines


@dataclass(frozen=True, slots=True)
class LocalText:
    """Files of the corpus, sorted by name."""

    training: tuple[Path, ...]
    held_out: tuple[Path, ...]


def find_local_text(folder: Path | None = None) -> LocalText:
    """Return the standard library's text files, with one in 25 held out.

    Raises:
        DataError: the folder has too little text.
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(_text_files(folder))
    held_out = tuple(
        file for file in files if _hash_path(file.relative_to(folder)) % HELD_OUT_ONE_IN == 0
    )
    training = tuple(file for file in files if file not in set(held_out))
    if len(held_out) < 3:
        raise DataError(
            f"{folder} has only {len(files)} text files. Install Python's standard library, or use "
            f"`megalith prepare` on your own text."
        )
    return LocalText(training, held_out)


def zlib_bits_per_byte(files: Sequence[Path]) -> float:
    """Return the bits per byte of `zlib -9` on these files, a baseline for a model of the same
    text."""
    text = b"".join(file.read_bytes() for file in files)
    return 8 * len(zlib.compress(text, 9)) / len(text)


def words_in(text: str) -> list[str]:
    """Split a text into runs of letters, digits and underscores."""
    return "".join(c if c.isalnum() or c == "_" else " " for c in text).split()


def share_of_known_words(sample: str, files: Sequence[Path]) -> float:
    """Return the fraction of the words of a sample that occur in the files."""
    known: set[str] = set()
    for file in files:
        known.update(words_in(file.read_text(encoding="utf-8", errors="replace")))
    words = words_in(sample)
    return sum(word in known for word in words) / max(1, len(words))


def _text_files(folder: Path) -> Iterator[Path]:
    for file in folder.rglob("*"):
        inside = file.relative_to(folder).parts[:-1]
        if (
            file.suffix in ENDINGS
            and not set(inside) & set(EXCLUDED_FOLDERS)
            and file.is_file()
            and _is_utf8(file)
        ):
            yield file


def _is_utf8(file: Path) -> bool:
    try:
        return bool(file.read_bytes().decode())
    except UnicodeDecodeError:
        return False


def _hash_path(path: Path) -> int:
    return int.from_bytes(
        hashlib.blake2b(path.as_posix().encode(), digest_size=4).digest(), "little"
    )

"""Mock dataset of counting documents, for runs without data files."""

import hashlib
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalith import storage
from megalith.config.mock import MockLengths
from megalith.errors import DataError


@dataclass(frozen=True)
class MockStore:
    """Mock token store; a document of length L is 1, 2 … L-1 modulo the vocabulary size, then the
    end token.

    The default lengths and contents are those of Megatron's mock data, so that both read the same
    samples.
    """

    vocab_size: int
    eod: int
    num_documents: int = 100_000
    max_tokens: int = 4096
    lengths: MockLengths = field(default_factory=MockLengths)

    @property
    def name(self) -> str:
        """Name in messages."""
        return "the mock corpus"

    @property
    def fingerprint(self) -> str:
        """Text that changes when the tokens do."""
        sizes = f"documents={self.num_documents},max={self.max_tokens}"
        contents = f"{sizes},vocab={self.vocab_size},eod={self.eod}"
        if self.lengths.kind == "uniform":
            return f"mock({contents})"
        digest = hashlib.blake2b(self.sequence_lengths.tobytes(), digest_size=16).hexdigest()
        return f"mock({contents},lengths={digest})"

    @cached_property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """int32 [num_documents]: from 1 to max_tokens - 1, or read from a file.

        Raises:
            DataError: the file of lengths is missing or invalid.
        """
        draw, count = np.random.default_rng(0), self.num_documents
        if self.lengths.kind == "file":
            assert self.lengths.path is not None
            return np.resize(read_lengths(self.lengths.path), count)
        if self.lengths.kind == "lognormal":
            assert self.lengths.mean is not None
            return lognormal_lengths(self.lengths, draw, count, most=self.max_tokens - 1)
        return draw.integers(1, self.max_tokens, size=count, dtype=np.int32)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[np.int64]:
        """Return `length` tokens of document `index` from `offset` on."""
        total = int(self.sequence_lengths[index])
        end = total if length is None else offset + length
        tokens = np.arange(offset + 1, end + 1, dtype=np.int64) % self.vocab_size
        if end == total and end > offset:
            tokens[-1] = self.eod
        return tokens


def lognormal_lengths(
    lengths: MockLengths, draw: np.random.Generator, count: int, *, most: int
) -> NDArray[np.int32]:
    """Return [count] lognormal integers; `lengths.mean` is the mean before clipping."""
    assert lengths.mean is not None
    drawn = draw.lognormal(math.log(lengths.mean) - lengths.sigma**2 / 2, lengths.sigma, count)
    return np.clip(np.rint(drawn), lengths.shortest, most).astype(np.int32)


def read_lengths(path: str) -> NDArray[np.int32]:
    """Read lengths from a file.

    Raises:
        DataError: the file does not exist, or does not contain positive integers.
    """
    try:
        words = storage.read_text(Path(path)).replace(",", " ").split()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.mock_lengths.path={path} cannot be read ({error}). Set it to a text file of "
            "integers."
        ) from error
    wrong = next(
        (word for word in words if not (word.isdecimal() and 1 <= int(word) < 2**31)), None
    )
    if wrong is not None or not words:
        raise DataError(
            f"data.mock_lengths.path={path} contains {wrong if words else 'nothing'!r}: expected "
            "positive integers. Example: 17 240 1003."
        )
    return np.array(words, np.int64).astype(np.int32)

"""A made-up corpus of counting documents, so that a run needs no file."""

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
    """Documents of random lengths; one of length L is 1, 2 … L-1, each modulo the vocabulary, then
    the end token.

    Unless others are asked for, lengths and contents are those of Megatron's mock data, so both
    read the same samples.
    """

    vocab_size: int
    eod: int
    num_documents: int = 100_000
    max_tokens: int = 4096
    lengths: MockLengths = field(default_factory=MockLengths)

    @property
    def name(self) -> str:
        """What messages call it."""
        return "the mock corpus"

    @property
    def fingerprint(self) -> str:
        """All that decides the tokens."""
        sizes = f"documents={self.num_documents},max={self.max_tokens}"
        made_of = f"{sizes},vocab={self.vocab_size},eod={self.eod}"
        if self.lengths.kind == "uniform":
            return f"mock({made_of})"
        digest = hashlib.blake2b(self.sequence_lengths.tobytes(), digest_size=16).hexdigest()
        return f"mock({made_of},lengths={digest})"

    @cached_property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """[num_documents], from 1 to max_tokens - 1; those of a file as they stand there.

        Raises:
            DataError: the file of lengths is missing, or holds something else.
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
        """`length` tokens of document `index` from `offset` on."""
        total = int(self.sequence_lengths[index])
        end = total if length is None else offset + length
        tokens = np.arange(offset + 1, end + 1, dtype=np.int64) % self.vocab_size
        if end == total and end > offset:
            tokens[-1] = self.eod
        return tokens


def lognormal_lengths(
    lengths: MockLengths, draw: np.random.Generator, count: int, *, most: int
) -> NDArray[np.int32]:
    """[count] whole numbers whose logarithms are normal, with the mean asked for before the ends
    cut them off."""
    assert lengths.mean is not None
    drawn = draw.lognormal(math.log(lengths.mean) - lengths.sigma**2 / 2, lengths.sigma, count)
    return np.clip(np.rint(drawn), lengths.shortest, most).astype(np.int32)


def read_lengths(path: str) -> NDArray[np.int32]:
    """The lengths in a file, at least one.

    Raises:
        DataError: there is no such file, or not whole numbers from 1 on in it.
    """
    try:
        words = storage.read_text(Path(path)).replace(",", " ").split()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.mock_lengths.path={path} cannot be read ({error}). Set it to a file of numbers."
        ) from error
    wrong = next(
        (word for word in words if not (word.isdecimal() and 1 <= int(word) < 2**31)), None
    )
    if wrong is not None or not words:
        raise DataError(
            f"data.mock_lengths.path={path} holds {wrong if words else 'nothing'!r}: expected "
            "whole numbers from 1 on. "
            f"Use for example: 17 240 1003."
        )
    return np.array(words, np.int64).astype(np.int32)

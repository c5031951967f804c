"""A made-up corpus of counting documents, so that a run needs no file."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class MockStore:
    """Documents of random lengths; one of length L is 1, 2 … L-1, each modulo the vocabulary, then the end token.

    Lengths and contents are those of Megatron's mock data, so both read the same samples.
    """

    vocab_size: int
    eod: int
    num_documents: int = 100_000
    max_tokens: int = 4096

    @property
    def name(self) -> str:
        """What messages call it."""
        return "the mock corpus"

    @property
    def fingerprint(self) -> str:
        """All that decides the tokens."""
        return f"mock(documents={self.num_documents},max={self.max_tokens},vocab={self.vocab_size},eod={self.eod})"

    @cached_property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """[num_documents], from 1 to max_tokens - 1."""
        draw = np.random.default_rng(0)
        return draw.integers(1, self.max_tokens, size=self.num_documents, dtype=np.int32)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[np.int64]:
        """`length` tokens of document `index` from `offset` on."""
        total = int(self.sequence_lengths[index])
        end = total if length is None else offset + length
        tokens = np.arange(offset + 1, end + 1, dtype=np.int64) % self.vocab_size
        if end == total and end > offset:
            tokens[-1] = self.eod
        return tokens

"""Mock documents with random loss masks, for verification of sequence packing."""

from dataclasses import dataclass

import numpy as np

from megalith.data.sample import PackedSample
from megalith.plan.keys import key


@dataclass(frozen=True, slots=True)
class RaggedDocuments:
    """Documents of 1 to `longest` tokens, of which about half have a label; some have none."""

    longest: int
    vocab_size: int
    num_samples: int
    masked: tuple[int, ...] = ()
    """Samples without any label."""

    @property
    def fingerprint(self) -> str:
        """Text of all arguments."""
        return " ".join(
            [
                "ragged documents",
                *map(str, (self.longest, self.vocab_size, self.num_samples, self.masked)),
            ]
        )

    def __len__(self) -> int:
        return self.num_samples

    def document_lengths(self, k: int) -> tuple[int, ...]:
        """Return the number of tokens of document k."""
        draw = np.random.default_rng(key(0, "verify", "lengths", k))
        return (int(draw.integers(1, self.longest + 1)),)

    def sample(self, k: int) -> PackedSample:
        """Return document k, the same on all ranks."""
        (length,) = self.document_lengths(k)
        draw = np.random.default_rng(key(0, "verify", "documents", k))
        ids = draw.integers(0, self.vocab_size, length + 1)
        kept = draw.random(length) < (0.0 if k in self.masked else 0.5)
        return PackedSample(ids[:-1], np.where(kept, ids[1:], -1), (length,), length)

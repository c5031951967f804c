"""Interfaces of datasets: one sample, its loss mask and attention mask, and the token store."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


class RowMask(NamedTuple):
    """Attention mask of a row, applied within its documents; data/packs.py adds it to the
    tokens."""

    seen: NDArray[np.bool_]
    """[seq_len, seq_len]: query, key; or [seq_len]: False for padding, which is never attended "
    "to."""

    alone: bool = False
    """The mask replaces the causal mask; then all rows of a dataset have a [seq_len, seq_len] "
    "mask."""

    text: NDArray[np.bool_] | None = None
    """[seq_len], in addition to a [seq_len, seq_len] mask: False for padding."""

    def blank(self) -> "RowMask":
        """Return a mask of the same shape in which nothing is attended to."""
        return RowMask(np.zeros_like(self.seen), self.alone)


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of a batch: seq_len input tokens and the label of the last one.

    Inputs are `ids[:-1]`, labels `ids[1:]`.
    """

    ids: NDArray[np.int64]  # [seq_len + 1]; zeros from num_valid on
    num_valid: int  # ids from here on are padding
    places: NDArray[np.int64] | None = None
    """Position ids [3, seq_len] by time, height and width; None: the position in the document."""

    mask: RowMask | None = None
    """None: only the attention mask of the layers applies."""

    @property
    def valid(self) -> NDArray[np.bool_]:
        """Bool [seq_len + 1], False for padding."""
        return np.arange(len(self.ids)) < self.num_valid

    def blank(self) -> "Sample":
        """Return a row of the same length that is all padding."""
        return Sample(np.zeros_like(self.ids), num_valid=0, mask=self.mask and self.mask.blank())


@dataclass(frozen=True, slots=True)
class PackedSample:
    """One row of whole documents (sequence packing) with their own labels."""

    ids: NDArray[np.int64]  # [seq_len], input tokens; zeros in the padding
    labels: NDArray[np.int64]
    """[seq_len], the next token of the same document; -1 where the loss mask excludes it."""

    lengths: tuple[int, ...]
    """Document lengths, which sum to seq_len; the padding counts as one or more documents."""

    num_valid: int  # tokens before the padding
    places: NDArray[np.int64] | None = None
    """Position ids [3, seq_len] by time, height and width; None: the position in the document."""

    mask: RowMask | None = None
    """None: only the attention mask of the layers applies."""

    @property
    def lengths_without_padding(self) -> tuple[int, ...]:
        """Lengths of the documents without the padding."""
        if self.num_valid == len(self.ids):
            return self.lengths
        return tuple(
            length
            for length, end in zip(self.lengths, accumulate(self.lengths))
            if end <= self.num_valid
        )

    def blank(self) -> "PackedSample":
        """Return a row of the same length that is all padding."""
        size = len(self.ids)
        labels, mask = np.full_like(self.labels, -1), self.mask and self.mask.blank()
        return PackedSample(np.zeros_like(self.ids), labels, (size,), 0, mask=mask)


Row = Sample | PackedSample


class Dataset(Protocol):
    """Samples in a fixed order. `sample(k)` depends on k alone, so the number of consumed samples
    is the whole state."""

    @property
    def num_samples(self) -> int:
        """Number of samples of the dataset."""

    @property
    def fingerprint(self) -> str:
        """Text that changes when the tokens or their order do; stored in checkpoints."""

    def sample(self, k: int) -> Row:
        """Return sample k; all have the same class, and the same length unless they are single
        documents.

        Raises:
            DataError: there is no sample k, or a token id is outside the vocabulary.
        """

    def __len__(self) -> int:
        """Return the number of samples."""


@runtime_checkable
class HasDocumentLengths(Protocol):
    """Dataset that returns document lengths without reading the documents."""

    def document_lengths(self, k: int) -> tuple[int, ...]:
        """Return the number of input tokens of each document of sample k."""


class TokenStore(Protocol):
    """Random access to sequences of token ids: an indexed file pair, or mock data."""

    @property
    def name(self) -> str:
        """Name in messages: its prefix."""

    @property
    def fingerprint(self) -> str:
        """Text that changes when the stored tokens do."""

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """int32 [n]: tokens per sequence."""

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return `length` tokens of one sequence from `offset` on; length None: to its end."""

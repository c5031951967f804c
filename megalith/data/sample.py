"""What a loader reads: one sample of a dataset, and the store of tokens beneath it."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


class RowMask(NamedTuple):
    """Which tokens of its document each token of a row may see at most; data/row_masks.py gives it
    to the tokens."""

    seen: NDArray[
        np.bool_
    ]  # [seq_len, seq_len]: by which, of which; or [seq_len]: False for padding, which none sees
    # the mask takes the place of causality; then all rows of a dataset have one of all pairs
    alone: bool = False
    text: NDArray[np.bool_] | None = None  # [seq_len], beside a mask of pairs: False for padding

    def blank(self) -> "RowMask":
        """Of a row as long, in which nothing is seen."""
        return RowMask(np.zeros_like(self.seen), self.alone)


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of a batch: seq_len input tokens and the label of the last of them.

    Inputs are `ids[:-1]`, labels `ids[1:]`.
    """

    ids: NDArray[np.int64]  # [seq_len + 1]; zeros from num_valid on
    num_valid: int  # ids from here on are padding: neither read nor predicted
    places: NDArray[np.int64] | None = (
        None  # [3, seq_len], by time, height and width; None: the place in the document
    )
    mask: RowMask | None = None  # None: no more is hidden than layers hide

    @property
    def valid(self) -> NDArray[np.bool_]:
        """[seq_len + 1], False for padding."""
        return np.arange(len(self.ids)) < self.num_valid

    def blank(self) -> "Sample":
        """A row as long, in which nothing is read or predicted."""
        return Sample(np.zeros_like(self.ids), num_valid=0, mask=self.mask and self.mask.blank())


@dataclass(frozen=True, slots=True)
class PackedSample:
    """One row filled with whole documents, each with labels of its own."""

    ids: NDArray[np.int64]  # [seq_len], what is read; zeros in the filler
    labels: NDArray[
        np.int64
    ]  # [seq_len], the next token of the same document; -1 where there is no loss
    lengths: tuple[
        int, ...
    ]  # of the documents, which fill the row; the filler at its end is one more, or several
    num_valid: int  # tokens before the filler
    places: NDArray[np.int64] | None = (
        None  # [3, seq_len], by time, height and width; None: the place in the document
    )
    mask: RowMask | None = None  # None: no more is hidden than layers hide

    @property
    def read_lengths(self) -> tuple[int, ...]:
        """Of the documents without the filler."""
        if self.num_valid == len(self.ids):
            return self.lengths
        return tuple(
            length
            for length, end in zip(self.lengths, accumulate(self.lengths))
            if end <= self.num_valid
        )

    def blank(self) -> "PackedSample":
        """A row as long, all of it filler."""
        size = len(self.ids)
        labels, mask = np.full_like(self.labels, -1), self.mask and self.mask.blank()
        return PackedSample(np.zeros_like(self.ids), labels, (size,), 0, mask=mask)


Row = Sample | PackedSample


class Dataset(Protocol):
    """Samples in a fixed order. `sample(k)` depends on k alone, so the count of samples read is all
    the state."""

    @property
    def num_samples(self) -> int:
        """How many samples there are."""

    @property
    def fingerprint(self) -> str:
        """A text that changes when the tokens or their order do; kept in checkpoints."""

    def sample(self, k: int) -> Row:
        """Sample k; all of a dataset are of one kind, and equally long unless they are single
        documents.

        Raises:
            DataError: there is no sample k, or it holds a token id outside the vocabulary.
        """

    def __len__(self) -> int:
        """The same as `num_samples`."""


@runtime_checkable
class Indexed(Protocol):
    """A dataset that knows how long the documents of its samples are before it reads them."""

    def lengths_of(self, k: int) -> tuple[int, ...]:
        """Tokens that are read of each document of sample k."""


class TokenStore(Protocol):
    """Sequences of token ids that can be read in any order: an indexed file pair, or made-up
    ones."""

    @property
    def name(self) -> str:
        """What messages call it: its prefix."""

    @property
    def fingerprint(self) -> str:
        """A text that changes when the stored tokens do."""

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """[n], tokens per sequence."""

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """`length` tokens of one sequence from `offset` on; all that are left when length is
        None."""

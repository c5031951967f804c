"""Dataset whose samples are whole documents, in a new random order each epoch."""

import numpy as np
from numpy.typing import NDArray

from megalith.config.sft import Overlong
from megalith.data.pretrain import check_ids, split_range
from megalith.data.sample import PackedSample, TokenStore
from megalith.errors import DataError
from megalith.plan.keys import key


class DocumentDataset:
    """One split of one store; sample k is one document, determined by k alone."""

    def __init__(
        self,
        store: TokenStore,
        *,
        share: tuple[float, float] = (0.0, 1.0),
        split: str = "train",
        seq_len: int,
        overlong: Overlong,
        seed: int,
        num_samples: int | None,
        vocab_size: int,
    ) -> None:
        """`num_samples`: the minimum, rounded up to whole epochs; None: one epoch.

        Raises:
            DataError: the split has no usable document, or a document is too long and
                overlong=error.
        """
        self._store, self._split, self._seed, self._vocab_size = store, split, seed, vocab_size
        self.name = store.name
        self._first, end = split_range(share, len(store.sequence_lengths))
        self._lengths, self._kept, self._excluded = _select_documents(
            store.sequence_lengths[self._first : end],
            seq_len,
            overlong,
            f"the {split} split of {store.name}",
        )
        epochs = 1 if num_samples is None else max(-(-num_samples // len(self._kept)), 1)
        self._orders: dict[int, NDArray[np.int64]] = {}
        self.num_samples = epochs * len(self._kept)
        self.fingerprint = (
            f"documents {store.fingerprint} sequences={self._first}:{end} seq_len={seq_len} "
            f"overlong={overlong} "
            f"seed={seed}"
        )

    @property
    def report(self) -> str:
        """How many documents are read, truncated and dropped."""
        mean = self._lengths[self._kept].mean()
        return f"{len(self._kept):,} documents of {mean:,.1f} tokens on average{self._excluded}"

    def __len__(self) -> int:
        return self.num_samples

    def document_lengths(self, k: int) -> tuple[int, ...]:
        """Return the number of input tokens of document k."""
        return (int(self._lengths[self._document_index(k)]),)

    def sample(self, k: int) -> PackedSample:
        """Return document k as a row of its own length; its last token is only a label.

        Raises:
            DataError: there is no sample k, or a token id is outside the vocabulary.
        """
        number = self._document_index(k)
        length = int(self._lengths[number])
        ids = self._store.get(self._first + number, 0, length + 1).astype(np.int64)
        check_ids(ids, self._vocab_size, self._store.name)
        return PackedSample(ids[:-1], ids[1:], (length,), length)

    def _document_index(self, k: int) -> int:
        """Return the index of the document in the split."""
        if not 0 <= k < self.num_samples:
            raise DataError(
                f"the {self._split} split of {self._store.name} has {self.num_samples} documents, "
                f"and document {k} was requested. Use more data, or set train.steps to a lower "
                "value."
            )
        epoch, place = divmod(k, len(self._kept))
        if epoch not in self._orders:
            draw = np.random.default_rng(key(self._seed, "documents", "epoch", epoch))
            self._orders = {epoch: draw.permutation(self._kept)} | {
                near: order for near, order in self._orders.items() if abs(near - epoch) == 1
            }
        return int(self._orders[epoch][place])


def _select_documents(
    sequences: NDArray[np.int32], seq_len: int, overlong: Overlong, name: str
) -> tuple[NDArray[np.int64], NDArray[np.int64], str]:
    """Return the input tokens of each document, the usable documents, and a text about the others.

    Raises:
        DataError: no document is usable, or one is too long and `overlong` is error.
    """
    lengths = np.maximum(sequences.astype(np.int64) - 1, 0)
    long, short = lengths > seq_len, lengths == 0
    if overlong == "error" and long.any():
        first = int(np.flatnonzero(long)[0])
        raise DataError(
            f"{name}: document {first} has {int(lengths[first]) + 1} tokens, and "
            f"train.seq_len={seq_len} "
            f"allows {seq_len + 1} with the last label; {int(long.sum())} of {len(long)} are too "
            "long. Set train.seq_len "
            f"to {int(lengths.max())}, or data.overlong to truncate or drop."
        )
    kept = np.flatnonzero(~short & ~long if overlong == "drop" else ~short).astype(np.int64)
    if len(kept) == 0:
        raise DataError(
            f"{name} has {len(kept)} usable documents of {len(lengths)}: {int(long.sum())} are "
            "too long for "
            f"train.seq_len={seq_len}, and {int(short.sum())} have no token to predict. Use more "
            f"data, or set data.overlong=truncate."
        )
    counts = {
        "truncated": int(long.sum()) if overlong == "truncate" else 0,
        "dropped as too long": int(long.sum()) if overlong == "drop" else 0,
        "dropped with nothing to predict": int(short.sum()),
    }
    excluded = "".join(f", {count:,} {reason}" for reason, count in counts.items() if count)
    return np.minimum(lengths, seq_len), kept, excluded

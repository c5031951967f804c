"""The order of pretraining samples: documents shuffled, joined into one stream, cut into windows,
windows shuffled.

All of it follows from the lengths of the documents, the sequence length, the number of samples and
a seed, in exactly Megatron's order of random draws, so that the same corpus gives the same samples.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.data.cache import Arrays, load_or_build
from megalith.data.loops import fill_sample_index, loop_for
from megalith.data.sample import Sample, TokenStore
from megalith.errors import DataError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """How a split is cut into samples: everything that decides the order, besides the document
    lengths."""

    seq_len: int
    extra: int = 1  # tokens that a sample shares with the next: 1 for the label of the last
    num_samples: int | None  # None: one epoch
    seed: int
    keep_partial: bool = False


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """How often the documents are repeated, and whether the last repetition is shuffled apart."""

    tokens_per_epoch: int
    epochs: int
    # the last epoch is used for less than 80 %: shuffled on its own, so no document comes early
    # twice
    separate: bool
    samples_before_last: (
        int  # samples that need nothing of the last epoch; only meaningful when separate
    )


@dataclass(frozen=True, slots=True)
class SampleIndex:
    """The three arrays that say which tokens sample k has."""

    documents: NDArray[
        np.int32
    ]  # [epochs * documents], sequences of the store in the order they are read
    samples: NDArray[Any]  # [n + 1, 2], where each window starts: (position in `documents`, offset)
    shuffle: NDArray[Any]  # [n], which window sample k is


def split_range(share: tuple[float, float], num_sequences: int) -> tuple[int, int]:
    """The sequences of a split, rounded half to even as Megatron rounds them.

    >>> split_range((0.8, 0.9), 10)
    (8, 9)
    """
    low, high = share
    return round(low * num_sequences), round(high * num_sequences)


def plan_epochs(tokens_per_epoch: int, plan: WindowPlan) -> EpochPlan:
    """The least number of epochs that gives the samples asked for."""
    if plan.num_samples is None:
        return EpochPlan(tokens_per_epoch, 1, False, 0)
    need = plan.num_samples * plan.seq_len + plan.extra
    epochs = max(1, -(-need // tokens_per_epoch))
    if epochs == 1:
        return EpochPlan(tokens_per_epoch, 1, False, 0)
    before_last = ((epochs - 1) * tokens_per_epoch - plan.extra) // plan.seq_len
    in_last = plan.num_samples - before_last
    per_epoch = (tokens_per_epoch - plan.extra) // plan.seq_len
    assert 0 <= in_last <= per_epoch + 1
    return EpochPlan(tokens_per_epoch, epochs, in_last < int(0.80 * per_epoch), before_last)


def build_sample_index(
    lengths: NDArray[np.int32], indices: NDArray[np.int32], plan: WindowPlan
) -> SampleIndex:
    """Build the three arrays. lengths [store], indices [split]: the sequences that belong to the
    split.

    The random draws, in this order: the documents of all epochs (or of all but the last, then of
    the last), then the windows in the same one or two parts.
    """
    epoch = plan_epochs(int(lengths[indices].sum(dtype=np.int64)), plan)
    draw = np.random.RandomState(plan.seed)
    documents = _shuffled_documents(indices, epoch, draw)
    samples = _window_starts(lengths, documents, epoch, plan)
    shuffle = _shuffled_windows(len(samples) - 1, epoch, draw)
    return SampleIndex(documents, samples, shuffle)


def _shuffled_documents(
    indices: NDArray[np.int32], epoch: EpochPlan, draw: np.random.RandomState
) -> NDArray[np.int32]:
    documents = np.tile(indices.astype(np.int32, copy=False), epoch.epochs)
    last = len(indices) * (epoch.epochs - 1) if epoch.separate else 0
    for part in (documents[:last], documents[last:]):
        draw.shuffle(part)
    return documents


def _window_starts(
    lengths: NDArray[np.int32], documents: NDArray[np.int32], epoch: EpochPlan, plan: WindowPlan
) -> NDArray[Any]:
    tokens = epoch.epochs * epoch.tokens_per_epoch - plan.extra
    count = -(-tokens // plan.seq_len) if plan.keep_partial else tokens // plan.seq_len
    largest = max(len(documents), int(lengths.max()))
    index = np.empty(
        (count + 1, 2), dtype=np.int32 if largest <= np.iinfo(np.int32).max else np.int64
    )
    fill = loop_for(fill_sample_index, rounds=count + len(documents))
    fill(lengths, documents, plan.seq_len, plan.extra, index)
    return index


def _shuffled_windows(count: int, epoch: EpochPlan, draw: np.random.RandomState) -> NDArray[Any]:
    windows = np.arange(count, dtype=np.uint32 if count < 2**32 - 2 else np.int64)
    last = epoch.samples_before_last if epoch.separate else 0
    for part in (windows[:last], windows[last:]):
        draw.shuffle(part)
    return windows


class PretrainDataset:
    """One split of one store: `num_samples` windows of seq_len tokens and a label, in their
    shuffled order."""

    def __init__(
        self,
        store: TokenStore,
        plan: WindowPlan,
        *,
        share: tuple[float, float] = (0.0, 1.0),
        split: str = "train",
        vocab_size: int,
        cache: Path | None = None,
        repeat_short: bool = False,
    ) -> None:
        """`share` (low, high) is the part of the store's sequences that is read; `cache` keeps the
        index if given.

        `repeat_short` lets a part that is shorter than one sample repeat inside it, as small
        members of a blend must.

        Raises:
            DataError: the part is empty, or too short for one sample.
        """
        self._store = store
        self._plan = plan
        self._split = split
        self._vocab_size = vocab_size
        lengths = store.sequence_lengths
        begin, end = split_range(share, len(lengths))
        tokens = int(lengths[begin:end].sum(dtype=np.int64))
        self._check_enough(
            end - begin, tokens, repeat_short=repeat_short and plan.num_samples is not None
        )
        epoch = plan_epochs(tokens, plan)
        self.fingerprint = (
            f"pretrain {store.fingerprint} sequences={begin}:{end} seq_len={plan.seq_len} "
            f"extra={plan.extra} "
            f"seed={plan.seed} epochs={epoch.epochs} last_apart={epoch.separate} "
            f"partial={plan.keep_partial}"
        )
        indices = np.arange(begin, end, dtype=np.int32)
        arrays = load_or_build(
            cache, self.fingerprint, lambda: _index_arrays(lengths, indices, plan)
        )
        self._index = SampleIndex(arrays["documents"], arrays["samples"], arrays["shuffle"])
        self.num_samples = len(self._index.shuffle)

    def _check_enough(self, sequences: int, tokens: int, *, repeat_short: bool) -> None:
        name, split, size = self._store.name, self._split, self._plan.seq_len + self._plan.extra
        if sequences == 0:
            raise DataError(
                f"the {split} split of {name} has 0 of its {len(self._store.sequence_lengths)} "
                "sequences. "
                f"Set data.split so that {split} has a larger share, or set data.{split}_path."
            )
        if 0 < tokens < size and repeat_short:
            _log.warning(
                "the %s split of %s has %d tokens: they repeat inside each sample",
                split,
                name,
                tokens,
            )
        elif tokens < size:
            raise DataError(
                f"the {split} split of {name} has {tokens} tokens in {sequences} sequences, and "
                "one sample needs "
                f"{size}. Use more data, set data.split so that {split} has a larger share, or set "
                f"train.seq_len to {max(tokens - self._plan.extra, 1)} or less."
            )

    def __len__(self) -> int:
        return self.num_samples

    def sample(self, k: int) -> Sample:
        """Sample k, a function of k alone.

        Raises:
            DataError: there is no sample k, or a token id does not fit the vocabulary.
        """
        if not 0 <= k < self.num_samples:
            raise DataError(
                f"the {self._split} split of {self._store.name} has {self.num_samples} samples, "
                f"and sample {k} was "
                f"asked for. Use more data, or set train.steps to a value that needs fewer."
            )
        size = self._plan.seq_len + self._plan.extra
        ids = np.zeros(size, dtype=np.int64)
        filled = 0
        for document, offset, length in self._pieces(int(self._index.shuffle[k])):
            ids[filled : filled + length] = self._store.get(document, offset, length)
            filled += length
        check_ids(ids, self._vocab_size, self._store.name)
        return Sample(ids, filled)

    def _pieces(self, window: int) -> list[tuple[int, int, int]]:
        """(sequence, offset, tokens) of the documents that a window touches, in order."""
        (first, start), (last, end) = self._index.samples[window : window + 2].tolist()
        documents = self._index.documents[first : last + 1].tolist()
        ends = [int(self._store.sequence_lengths[document]) for document in documents[:-1]]
        ends.append(end + self._plan.extra)
        starts = [start] + [0] * (len(documents) - 1)
        return [
            (document, begin, stop - begin)
            for document, begin, stop in zip(documents, starts, ends)
            if stop > begin
        ]


class ContinuedDataset:
    """A split that was made longer: its first order to the end, and then further epochs, each part
    in its own order.

    Megatron shuffles the documents of all epochs together, so the order for more epochs does not
    begin with the order for fewer. Here what has been read stays what it was.
    """

    def __init__(self, parts: Sequence[PretrainDataset]) -> None:
        self._parts = parts
        self._ends = list(accumulate(part.num_samples for part in parts))
        self.num_samples = self._ends[-1]
        self.fingerprint = "\n  and then ".join(part.fingerprint for part in parts)

    def __len__(self) -> int:
        return self.num_samples

    def sample(self, k: int) -> Sample:
        """Sample k, a function of k alone.

        Raises:
            DataError: there is no sample k, or a token id does not fit the vocabulary.
        """
        number = bisect_right(self._ends, k) if k >= 0 else 0
        if number == len(self._parts):
            raise DataError(
                f"the split and its further epochs have {self.num_samples} samples, and sample {k} "
                f"was asked for. Use more data, or set train.steps to a value that needs fewer."
            )
        return self._parts[number].sample(k - (self._ends[number - 1] if number else 0))


def continued(
    build: Callable[[WindowPlan], PretrainDataset], plan: WindowPlan, longer: Sequence[int]
) -> PretrainDataset | ContinuedDataset:
    """The split for `plan`, continued for each count in `longer` that it has too few samples for,
    one after the other.

    What follows has a seed of its own, so that no two parts are alike. The first samples never
    depend on `longer`.
    """
    parts = [build(plan)]
    for count in longer:
        lacking = count - sum(part.num_samples for part in parts)
        if lacking > 0:
            parts.append(
                build(replace(plan, num_samples=lacking, seed=(plan.seed + len(parts)) % 2**32))
            )
    return parts[0] if len(parts) == 1 else ContinuedDataset(parts)


def _index_arrays(
    lengths: NDArray[np.int32], indices: NDArray[np.int32], plan: WindowPlan
) -> Arrays:
    index = build_sample_index(lengths, indices, plan)
    return {"documents": index.documents, "samples": index.samples, "shuffle": index.shuffle}


def check_ids(ids: NDArray[Any], vocab_size: int, name: str) -> None:
    """Refuse tokens that the model has no row for.

    Raises:
        DataError: an id is negative or not below vocab_size.
    """
    if len(ids) == 0:
        return
    for worst in (int(ids.max()), int(ids.min())):
        if not 0 <= worst < vocab_size:
            raise DataError(
                f"{name}: token id {worst} is outside the vocabulary of {vocab_size} ids. Use the "
                "tokenizer that wrote "
                f"the data, or set the model's vocabulary to its size."
            )

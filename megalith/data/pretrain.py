"""Pretraining samples: shuffled documents are concatenated and split into windows, which are
shuffled.

The order depends on the document lengths, the sequence length, the number of samples and a seed.
The random draws are Megatron's, so that the same corpus yields the same samples.
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
from megalith.data.loops import compile_if_long, compute_sample_index
from megalith.data.sample import Sample, TokenStore
from megalith.errors import DataError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """Settings that determine the samples of a split, besides the document lengths."""

    seq_len: int
    extra: int = 1  # tokens that consecutive samples share: 1, the label of the last token
    num_samples: int | None  # None: one epoch
    seed: int
    keep_partial: bool = False


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """Number of epochs, and whether the last epoch is shuffled separately."""

    tokens_per_epoch: int
    epochs: int
    separate: bool
    """Less than 80 % of the last epoch is used; it is shuffled separately, so that its documents
    are not repeated early."""

    samples_before_last: int
    """Samples without tokens of the last epoch; used only if `separate`."""


@dataclass(frozen=True, slots=True)
class SampleIndex:
    """Arrays that map sample k to its tokens."""

    documents: NDArray[np.int32]  # [epochs * documents], shuffled sequence indices
    samples: NDArray[Any]  # [n + 1, 2], start of each window: (position in `documents`, offset)
    shuffle: NDArray[Any]  # [n], window of sample k


def split_range(share: tuple[float, float], num_sequences: int) -> tuple[int, int]:
    """Return the sequences of a split, rounded half to even as in Megatron.

    >>> split_range((0.8, 0.9), 10)
    (8, 9)
    """
    low, high = share
    return round(low * num_sequences), round(high * num_sequences)


def plan_epochs(tokens_per_epoch: int, plan: WindowPlan) -> EpochPlan:
    """Return the smallest number of epochs with enough samples."""
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
    """Build the three arrays. lengths [store]; indices [split]: the sequences of the split.

    Random draws, in this order: the documents of all epochs (or of all but the last, then of the
    last), then the windows in the same one or two parts.
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
    compute_index = compile_if_long(compute_sample_index, rounds=count + len(documents))
    compute_index(lengths, documents, plan.seq_len, plan.extra, index)
    return index


def _shuffled_windows(count: int, epoch: EpochPlan, draw: np.random.RandomState) -> NDArray[Any]:
    windows = np.arange(count, dtype=np.uint32 if count < 2**32 - 2 else np.int64)
    last = epoch.samples_before_last if epoch.separate else 0
    for part in (windows[:last], windows[last:]):
        draw.shuffle(part)
    return windows


class PretrainDataset:
    """One split of one store: shuffled windows of seq_len tokens and a label."""

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
        """`share` (low, high): fraction of the store's sequences; `cache`: folder of the index.

        `repeat_short`: repeat a split that is shorter than one sample, for small members of a
        blend.

        Raises:
            DataError: the split is empty, or too short for one sample.
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
                "the %s split of %s has only %d tokens, which repeat inside each sample",
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
        """Return sample k, which depends on k alone.

        Raises:
            DataError: there is no sample k, or a token id is outside the vocabulary.
        """
        if not 0 <= k < self.num_samples:
            raise DataError(
                f"the {self._split} split of {self._store.name} has {self.num_samples} samples, "
                f"and sample {k} was requested. Use more data, or set train.steps to a lower value."
            )
        size = self._plan.seq_len + self._plan.extra
        ids = np.zeros(size, dtype=np.int64)
        end = 0
        for document, offset, length in self._window_parts(int(self._index.shuffle[k])):
            ids[end : end + length] = self._store.get(document, offset, length)
            end += length
        check_ids(ids, self._vocab_size, self._store.name)
        return Sample(ids, end)

    def _window_parts(self, window: int) -> list[tuple[int, int, int]]:
        """Return (sequence, offset, tokens) of the documents that a window overlaps, in order."""
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


class ExtendedDataset:
    """A split that was extended by more epochs, each part with its own order.

    Megatron shuffles the documents of all epochs together, so the order for more epochs does not
    begin with the order for fewer. Here the order of earlier samples does not change.
    """

    def __init__(self, parts: Sequence[PretrainDataset]) -> None:
        self._parts = parts
        self._ends = list(accumulate(part.num_samples for part in parts))
        self.num_samples = self._ends[-1]
        self.fingerprint = "\n  and then ".join(part.fingerprint for part in parts)

    def __len__(self) -> int:
        return self.num_samples

    def sample(self, k: int) -> Sample:
        """Return sample k, which depends on k alone.

        Raises:
            DataError: there is no sample k, or a token id is outside the vocabulary.
        """
        number = bisect_right(self._ends, k) if k >= 0 else 0
        if number == len(self._parts):
            raise DataError(
                f"the extended split has {self.num_samples} samples, and sample {k} was requested. "
                f"Use more data, or set train.steps to a lower value."
            )
        return self._parts[number].sample(k - (self._ends[number - 1] if number else 0))


def build_extended_dataset(
    build: Callable[[WindowPlan], PretrainDataset], plan: WindowPlan, longer: Sequence[int]
) -> PretrainDataset | ExtendedDataset:
    """Build the split for `plan`, and extend it for each count in `longer` that exceeds its size.

    Each extension has its own seed. The first samples do not depend on `longer`.
    """
    parts = [build(plan)]
    for count in longer:
        num_missing = count - sum(part.num_samples for part in parts)
        if num_missing > 0:
            parts.append(
                build(replace(plan, num_samples=num_missing, seed=(plan.seed + len(parts)) % 2**32))
            )
    return parts[0] if len(parts) == 1 else ExtendedDataset(parts)


def _index_arrays(
    lengths: NDArray[np.int32], indices: NDArray[np.int32], plan: WindowPlan
) -> Arrays:
    index = build_sample_index(lengths, indices, plan)
    return {"documents": index.documents, "samples": index.samples, "shuffle": index.shuffle}


def check_ids(ids: NDArray[Any], vocab_size: int, name: str) -> None:
    """Check that the token ids are in the vocabulary.

    Raises:
        DataError: an id is negative or at least vocab_size.
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

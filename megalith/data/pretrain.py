"""Pretraining samples: shuffled documents are concatenated and split into windows, which are
shuffled; datasets of whole documents and of mock documents.

The order depends on the document lengths, the sequence length, the number of samples and a seed.
The random draws are Megatron's, so that the same corpus yields the same samples.
"""

import hashlib
import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from megalith import storage
from megalith.config.data import MockLengths, Overlong
from megalith.data.cache import Arrays, load_or_build
from megalith.data.sample import PackedSample, Sample, TokenStore
from megalith.errors import DataError
from megalith.plan.keys import key

# --- index-building loops over millions of documents and samples, compiled by numba for long inputs
#
# The plain Python function is the definition; tests compare its arrays with those of the compiled
# one. Short inputs are not compiled, because importing numba takes longer than running them.

P = ParamSpec("P")
R = TypeVar("R")

_MIN_COMPILED_ITERATIONS = (
    50_000  # measured: plain Python runs these while numba is imported (0.5 s)
)


def compile_if_long(function: Callable[P, R], *, rounds: int) -> Callable[P, R]:
    """Return the function itself for a short loop, and its compiled form for a long one."""
    return compiled(function) if rounds >= _MIN_COMPILED_ITERATIONS else function


@cache
def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile one of the loops below, cached on disk; it releases the GIL."""
    from numba import njit  # half a second: only when a long loop needs it

    result: Callable[P, R] = njit(cache=True, nogil=True)(function)
    return result


def compute_sample_index(
    lengths: NDArray[np.int32],
    documents: NDArray[np.int32],
    seq_len: int,
    extra: int,
    index: NDArray[Any],
) -> None:
    """Write the start of each sample to `index` as (position in `documents`, offset), and the end
    of the last one.

    A sample has seq_len + extra tokens, and the next one starts `extra` tokens before its end. The
    last window may be short and end at the end of the last document.
    """
    position = 0
    offset = 0
    index[0, 0] = 0
    index[0, 1] = 0
    last = len(documents) - 1
    for row in range(1, len(index)):
        need = seq_len + extra
        while need > 0:
            length = lengths[documents[position]]
            need -= length - offset
            if need <= 0:
                offset = length + need - extra
            elif position == last:
                offset = length - extra
                need = 0
            else:
                position += 1
                offset = 0
        index[row, 0] = position
        index[row, 1] = offset


def compute_weighted_order(
    weights: NDArray[np.float64],
    counts: NDArray[np.int64],
    member: NDArray[np.int16],
    sample: NDArray[np.int64],
) -> None:
    """Write the member and sample index of each sample of a blend: the member furthest behind its
    share, ties to the first.

    `weights` [m] sum to 1; `counts` [m], initially zero, are the number of samples taken per
    member.
    """
    for i in range(len(member)):
        total = float(max(i, 1))
        best = 0
        best_gap = weights[0] * total - counts[0]
        for m in range(1, len(weights)):
            gap = weights[m] * total - counts[m]
            if gap > best_gap:
                best = m
                best_gap = gap
        member[i] = best
        sample[i] = counts[best]
        counts[best] += 1


def compute_exhaustive_order(
    sizes: NDArray[np.int64],
    counts: NDArray[np.int64],
    member: NDArray[np.int16],
    sample: NDArray[np.int64],
) -> None:
    """Write an order of every sample of every member once, in proportion to the member sizes."""
    total_size = len(member)
    for i in range(total_size):
        total = float(max(i, 1))
        best = -1
        best_gap = 0.0
        for m in range(len(sizes)):
            if counts[m] < sizes[m]:
                gap = sizes[m] / total_size * total - counts[m]
                if best < 0 or gap > best_gap:
                    best = m
                    best_gap = gap
        member[i] = best
        sample[i] = counts[best]
        counts[best] += 1


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


# --- dataset whose samples are whole documents, in a new random order each epoch


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


# --- mock dataset of counting documents, for runs without data files


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

"""Interfaces of datasets: one sample, its loss mask, attention mask and extra tensors, and the
token store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Protocol, Self, get_args, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from megalith.config.train import TrainRun
from megalith.errors import DataError


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


Extra = Mapping[str, NDArray[Any]]
"""Extra tensors of a sample by name, with the shapes that its dataset declares."""


Per = Literal["token", "document", "sample"]
"""What an extra tensor has one value for."""

EXTRA_DTYPES = "float16", "float32", "float64", "bool", "uint8", "int8", "int16", "int32", "int64"
"""Dtypes that both NumPy and torch have."""


@dataclass(frozen=True, slots=True)
class ExtraTensor:
    """Declaration of a named tensor that each sample of a dataset has beside ids and labels, such
    as token weights, reference log-probabilities or rewards; a dataset plug-in maps names to
    declarations in its class attribute `extra`."""

    per: Per
    """`token`: an array of one value per label; `document`: of one value per document without
    padding; `sample`: a single value."""

    dtype: str = "float32"
    """Name of the NumPy dtype."""

    shape: tuple[int, ...] = ()
    """Shape of one value; only numbers, with the shape (), have a count."""

    def zeros(self, count: int) -> NDArray[Any]:
        """Return the values of padding: [count, *shape]."""
        return np.zeros((count, *self.shape), self.dtype)


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

    extra: Extra = field(default_factory=dict)

    @property
    def valid(self) -> NDArray[np.bool_]:
        """Bool [seq_len + 1], False for padding."""
        return np.arange(len(self.ids)) < self.num_valid

    @property
    def is_blank(self) -> bool:
        """Whether the row is all padding; it has no extra tensors then."""
        return self.num_valid == 0 and not self.extra

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

    extra: Extra = field(default_factory=dict)

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

    @property
    def is_blank(self) -> bool:
        """Whether the row is all padding; it has no extra tensors then."""
        return self.num_valid == 0 and not self.extra

    def blank(self) -> "PackedSample":
        """Return a row of the same length that is all padding."""
        size = len(self.ids)
        labels, mask = np.full_like(self.labels, -1), self.mask and self.mask.blank()
        return PackedSample(np.zeros_like(self.ids), labels, (size,), 0, mask=mask)


Row = Sample | PackedSample


def concatenate_extra(
    samples: Sequence[Row],
    declared: Mapping[str, ExtraTensor],
    num_documents: Sequence[tuple[int, int]],
) -> Extra:
    """Return the extra tensors of several samples: [t, ...] per token, [documents, ...] per
    document, [samples, ...] per sample; padding is 0.

    `num_documents`: documents of each sample without and with padding. The values of rows that are
    all padding are 0.

    Raises:
        DataError: a sample does not have the tensors as they are declared.
    """
    for sample in samples:
        if sample.extra.keys() != declared.keys() and not sample.is_blank:
            raise DataError(
                f"a sample has the extra tensors {sorted(sample.extra)}, but the attribute `extra` "
                f"of its dataset declares {sorted(declared)}. Return an array for each declared "
                "name."
            )
    tensors = {}
    for name, tensor in declared.items():
        parts = [tensor.zeros(0)]
        for sample, (documents, padded) in zip(samples, num_documents, strict=True):
            parts.append(
                tensor.zeros(_count_extra(sample, tensor, documents))
                if sample.is_blank
                else _extra_values(sample, name, tensor, documents)
            )
            if tensor.per == "document" and padded > documents:
                parts.append(tensor.zeros(padded - documents))
        tensors[name] = np.concatenate(parts)
    return tensors


def _count_extra(sample: Row, declared: ExtraTensor, num_documents: int) -> int:
    """Return the number of values of an extra tensor of a sample."""
    num_tokens = len(sample.ids) - isinstance(sample, Sample)
    return {"token": num_tokens, "document": num_documents, "sample": 1}[declared.per]


def _extra_values(
    sample: Row, name: str, declared: ExtraTensor, num_documents: int
) -> NDArray[Any]:
    """Return an extra tensor of a sample: [tokens, ...], [documents, ...] or [1, ...]."""
    num_tokens = len(sample.ids) - isinstance(sample, Sample)
    sizes = {"token": (num_tokens,), "document": (num_documents,), "sample": ()}
    values, shape = np.asarray(sample.extra[name]), (*sizes[declared.per], *declared.shape)
    if values.shape != shape or not np.can_cast(values.dtype, declared.dtype, "same_kind"):
        raise DataError(
            f"the extra tensor {name} of a sample has shape {list(values.shape)} and dtype "
            f"{values.dtype}: it is declared per {declared.per}, and the sample has {num_tokens} "
            f"tokens and {num_documents} documents. Return an array of shape {list(shape)} and "
            f"dtype {declared.dtype}."
        )
    return values.astype(declared.dtype, copy=False).reshape(-1, *declared.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSettings:
    """Settings of a run that determine its samples, besides those of its data."""

    seq_len: int
    vocab_size: int
    seed: int
    """Seed of the order."""

    eod: int | None = None
    """The token that ends the documents of mock data."""

    whole_documents: bool = False
    """A sample is one document or conversation of at most `seq_len` tokens instead of a row of
    `seq_len` tokens."""

    keep_partial: bool = False
    """Keep the last, padded row of every split, for full passes in evaluation."""

    @classmethod
    def of_run(cls, run: TrainRun, *, eod: int | None) -> Self:
        """Return those of a run."""
        return cls(
            seq_len=run.train.seq_len,
            vocab_size=run.model.vocab_size,
            seed=run.seed,
            eod=eod,
            whole_documents=run.train.tokens_per_microbatch is not None,
        )


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


def declared_extra(dataset: object) -> Mapping[str, ExtraTensor]:
    """Return the extra tensors that a dataset, or its class, declares.

    Raises:
        DataError: the declaration is not valid.
    """
    declared = getattr(dataset, "extra", {})
    if not isinstance(declared, Mapping) or not all(
        isinstance(tensor, ExtraTensor) for tensor in declared.values()
    ):
        raise DataError(
            f"the dataset {type(dataset).__name__} has extra={declared!r:.200}: it must map each "
            "name to an ExtraTensor. Use extra = {'weight': ExtraTensor('token')}."
        )
    for name, tensor in declared.items():
        if tensor.per not in get_args(Per) or tensor.dtype not in EXTRA_DTYPES:
            raise DataError(
                f"the dataset {type(dataset).__name__} declares the extra tensor {name} per "
                f"{tensor.per} with dtype {tensor.dtype}. Use one of {', '.join(get_args(Per))}, "
                f"and a dtype of {', '.join(EXTRA_DTYPES)}."
            )
    return declared


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

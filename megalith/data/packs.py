"""Sequence packing: several documents in one row, packed per step or ahead of time and stored in a
file, with their attention masks."""

import hashlib
import os
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megalith.data.sample import (
    ExtraTensor,
    PackedSample,
    Row,
    RowMask,
    Sample,
    concatenate_extra,
)
from megalith.errors import DataError
from megalith.kernels.packed import PackedSeqParams, with_masks, with_padding
from megalith.plan.batch_assignment import TokenBudget
from megalith.plan.keys import key
from megalith.plan.packing import PackedDocuments, pack_first_fit_decreasing

# Attention masks of rows: converts the masks of dataset rows to the per-document masks of the
# tokens.

RowMaskKind = NDArray[np.bool_]


def row_masks(rows: Sequence[Row], *, padding: bool) -> list[RowMask | None]:
    """Return the attention mask of each row; with `padding`, padding of unpacked rows is masked.

    Rows without input tokens get no further mask, so that they run on backends without mask
    support.
    """
    masks = []
    for row in rows:
        mask = row.mask
        if padding and isinstance(row, Sample) and 0 < row.num_valid < len(row.ids) - 1:
            text = row.valid[:-1]
            if mask is None or mask.seen.ndim == 1:
                mask = RowMask(text if mask is None else mask.seen & text)
            else:
                mask = mask._replace(text=text if mask.text is None else mask.text & text)
        masks.append(mask)
    return masks


def _non_padding(row: RowMask | None) -> RowMaskKind | None:
    """Return bool [s], False for padding; None: no padding."""
    if row is None:
        return None
    return row.seen if row.seen.ndim == 1 else row.text


def _concat_non_padding(
    rows: Sequence[RowMask | None], lengths: Sequence[int]
) -> RowMaskKind | None:
    """Return the same for several rows of these lengths, concatenated."""
    texts = [_non_padding(row) for row in rows]
    if all(text is None for text in texts):
        return None
    return np.concatenate(
        [
            np.ones(length, np.bool_) if text is None else text
            for text, length in zip(texts, lengths, strict=True)
        ]
    )


def with_row_masks(
    tokens: PackedSeqParams, rows: Sequence[RowMask | None], lengths: Sequence[int]
) -> PackedSeqParams:
    """Add the masks of rows to the tokens, whose documents have these lengths.

    Raises:
        DataError: a mask does not have the shape of its row, or one microbatch has several kinds
            of masks.
    """
    if all(row is None for row in rows):
        return tokens
    size, device = sum(lengths) // len(rows), tokens.position_ids.device
    _check(rows, size)
    if (text := _concat_non_padding(rows, [size] * len(rows))) is not None:
        tokens = with_padding(tokens, torch.from_numpy(text).to(device))
    masks, end = list[torch.Tensor | None](), 0
    for length in lengths:
        row, start, end = rows[min(end // size, len(rows) - 1)], end % size, end + length
        if row is None or row.seen.ndim == 1:
            masks.append(None)
        else:
            own = np.ascontiguousarray(row.seen[start : start + length, start : start + length])
            masks.append(torch.from_numpy(own).to(device))
    return with_masks(tokens, masks, alone=any(row is not None and row.alone for row in rows))


def join_masks(rows: Sequence[RowMask | None], lengths: Sequence[int], size: int) -> RowMask | None:
    """Return the block-diagonal mask of short rows that are concatenated to one row of `size`
    tokens.

    Padding at the end attends to nothing and is attended to by nothing.

    Raises:
        DataError: the rows have several kinds of masks.
    """
    if all(row is None for row in rows):
        return None
    for row, length in zip(rows, lengths, strict=True):
        _check([row], length)
    alone, text = _alone(rows), _concat_non_padding(rows, lengths)
    text = None if text is None else np.pad(text, (0, size - len(text)))
    if text is not None and all(row is None or row.seen.ndim == 1 for row in rows):
        return RowMask(text)
    whole, end = np.zeros((size, size), np.bool_), 0
    for row, length in zip(rows, lengths, strict=True):
        own = slice(end, end + length)
        # a padding mask is the same for all queries
        whole[own, own] = True if row is None else row.seen
        end += length
    return RowMask(whole, alone, text)


def _check(rows: Sequence[RowMask | None], size: int) -> None:
    for number, row in enumerate(rows):
        if row is not None and row.seen.shape not in ((size,), (size, size)):
            raise DataError(
                f"the mask of row {number} has shape {list(row.seen.shape)}: a row of {size} "
                "tokens "
                f"needs [{size}, {size}], or [{size}] for padding. Pass a mask of that shape."
            )
        if row is not None and row.text is not None and row.text.shape != (size,):
            raise DataError(
                f"the padding mask of row {number} has shape {list(row.text.shape)}: a row of "
                f"{size} "
                f"tokens needs [{size}]. Pass a mask of that shape."
            )
        if row is not None and row.seen.dtype != np.bool_:
            raise DataError(
                f"the mask of row {number} has dtype {row.seen.dtype}: expected bool, True where a "
                "token may be attended to. Use seen.astype(bool)."
            )
    _alone(rows)


def _alone(rows: Sequence[RowMask | None]) -> bool:
    """Return whether the masks replace the causal mask."""
    kinds = {row is not None and row.alone for row in rows}
    padding = [
        number
        for number, row in enumerate(rows)
        if row is not None and row.alone and row.seen.ndim == 1
    ]
    if len(kinds) > 1 or padding:
        raise DataError(
            f"rows of one microbatch have alone={[row is not None and row.alone for row in rows]}: "
            "masks that replace the causal mask need shape [s, s] in every row of the microbatch. "
            "Use "
            "np.tril(np.ones((s, s), bool)) for causal rows of s tokens."
        )
    return kinds == {True}


MAX_BARS = 12
"""Maximum number of lines of a histogram."""


def pack_documents(
    documents: Sequence[PackedSample],
    budget: TokenBudget,
    extra: Mapping[str, ExtraTensor] | None = None,
) -> PackedSample:
    """Concatenate documents and pad them to the capacity; without documents, the row is all
    padding.

    Where each document is padded for context parallelism, there is less padding at the end.
    `extra`: the extra tensors of the documents, each of which is one sample.
    """
    lengths = [len(document.ids) for document in documents]
    filler = budget.filler(budget.capacity - sum(map(budget.padded, lengths)))
    num_tokens, size = sum(lengths), sum(lengths) + sum(filler)
    ids, labels = np.zeros(size, np.int64), np.full(size, -1, np.int64)
    if documents:
        ids[:num_tokens] = np.concatenate([document.ids for document in documents])
        labels[:num_tokens] = np.concatenate([document.labels for document in documents])
    mask = join_masks([document.mask for document in documents], lengths, size)
    row = PackedSample(ids, labels, (*lengths, *filler), num_tokens, mask=mask)
    if extra is None or not (extra or any(document.extra for document in documents)):
        return row
    tensors = dict(concatenate_extra(documents, extra, [(1, 1)] * len(documents)))
    for name, tensor in extra.items():
        if tensor.per == "token":
            tensors[name] = np.concatenate([tensors[name], tensor.zeros(sum(filler))])
    return replace(row, extra=tensors)


def token_numbers(documents: Sequence[int], row: PackedSample, longest: int) -> NDArray[np.int64]:
    """Return [t]: number of each token in the whole run, -1 for padding.

    It is (document, counted from the first of the run) * longest + position in it, and does not
    depend on which documents share a pack.
    """
    own = [
        np.arange(length) + number * longest
        for number, length in zip(documents, row.lengths_without_padding, strict=True)
    ]
    return np.concatenate([*own, np.full(len(row.ids) - row.num_valid, -1)]).astype(np.int64)


# --- packed ahead of time


class PackingInput(NamedTuple):
    """Conversations and row length that a packing is computed from."""

    digest: str
    """Hash of the tokenized conversations."""

    seq_len: int
    overlong: str
    lengths: NDArray[np.int64]
    """Input tokens of each conversation."""

    kept: NDArray[np.int64]
    """Indices of the conversations that are used."""


@dataclass(frozen=True, slots=True)
class Packs:
    """Packed rows of whole conversations for one epoch."""

    packed: PackedDocuments
    digest: str
    """Hash of the rows."""


def pack_first_fit(inputs: PackingInput, seed: int) -> PackedDocuments:
    """Pack by first-fit decreasing; the seed orders conversations of equal length.

    Source: Johnson 1973, "Near-optimal bin packing algorithms".
    """
    order = np.random.default_rng(key(seed, "sft", "packs")).permutation(inputs.kept)
    packed = pack_first_fit_decreasing(inputs.lengths[order].tolist(), inputs.seq_len)
    return PackedDocuments(order[packed.documents].astype(np.int64), packed.starts)


def write_packs(path: Path, inputs: PackingInput, packed: PackedDocuments) -> None:
    """Write a packing to a file atomically.

    Raises:
        DataError: it cannot be written.
    """
    temporary = path.with_name(f"{path.name}.writing-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            np.savez(
                file,
                documents=packed.documents,
                starts=packed.starts,
                conversations=np.array(inputs.digest),
                seq_len=np.array(inputs.seq_len),
                overlong=np.array(inputs.overlong),
            )
        temporary.replace(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error}). Choose another path, or free some space."
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def read_packs(path: str, inputs: PackingInput) -> Packs:
    """Read a packing, and check that it was computed for these conversations and rows.

    Raises:
        DataError: the file is missing, damaged, or was computed for other input.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            stored_values = str(file["conversations"]), int(file["seq_len"]), str(file["overlong"])
            packed = PackedDocuments(
                file["documents"].astype(np.int64), file["starts"].astype(np.int64)
            )
    except (
        OSError,
        ValueError,
        KeyError,
        EOFError,
        AttributeError,
        TypeError,
        zipfile.BadZipFile,
    ) as error:
        raise DataError(
            f"data.sft.packs={path} is not a file of packs ({error}). Create it with `megalith "
            "data "
            "pack`."
        ) from error
    names = (
        "conversations, template or tokenizer",
        "train.seq_len",
        "data.sft.overlong",
    )
    expected_values = inputs.digest, inputs.seq_len, inputs.overlong
    for name, stored, expected in zip(names, stored_values, expected_values, strict=True):
        if stored != expected:
            raise DataError(
                f"data.sft.packs={path} was packed with other {name}: {stored} in the file, "
                f"{expected} in this "
                "run. Create it again with `megalith data pack` and the settings of this run."
            )
    sizes = (
        np.add.reduceat(inputs.lengths[packed.documents], packed.starts[:-1])
        if packed.num_rows
        else np.zeros(1)
    )
    if sorted(packed.documents.tolist()) != inputs.kept.tolist() or sizes.max() > inputs.seq_len:
        raise DataError(
            f"data.sft.packs={path} does not contain each of the {len(inputs.kept)} conversations "
            "once, "
            "in rows of at most "
            f"{inputs.seq_len} tokens. Create it again with `megalith data pack`."
        )
    digest = hashlib.blake2b(
        packed.documents.tobytes() + packed.starts.tobytes(), digest_size=16
    ).hexdigest()
    return Packs(packed, digest)


@dataclass(frozen=True, slots=True)
class PackReport:
    """Statistics of a packing."""

    rows: int
    fewest: int
    """Lower bound of the number of rows."""

    conversations: int
    fill: float  # lint: allow old-word: a key of the JSON report
    """Fraction of the rows that is not padding."""

    mean: float
    """Conversations per row."""

    histogram: tuple[tuple[int, int, int], ...]
    """(from, to, rows): number of rows with that many conversations."""


def summarize_packing(
    packed: PackedDocuments, lengths: NDArray[np.int64], seq_len: int
) -> PackReport:
    """Compute the statistics of a packing."""
    tokens, rows = int(lengths[packed.documents].sum()), packed.num_rows
    sizes = Counter(np.diff(packed.starts).tolist())
    width = max(-(-max(sizes, default=1) // MAX_BARS), 1)
    bars: Counter[int] = Counter()
    for size, count in sizes.items():
        bars[(size - 1) // width] += count
    histogram = tuple(
        (1 + width * bar, width * (bar + 1), bars[bar]) for bar in range(max(bars, default=-1) + 1)
    )
    count = len(packed.documents)
    packing_efficiency, mean = tokens / max(1, rows * seq_len), count / max(1, rows)
    return PackReport(rows, -(-tokens // seq_len), count, packing_efficiency, mean, histogram)

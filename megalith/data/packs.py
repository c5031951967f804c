"""Sequence packing: several documents in one row, packed per step or ahead of time and stored in a
file."""

import hashlib
import os
import zipfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalith.data.row_masks import join_masks
from megalith.data.sample import PackedSample
from megalith.errors import DataError
from megalith.plan.batch_assignment import TokenBudget
from megalith.plan.fill import PackedDocuments, pack_first_fit_decreasing
from megalith.plan.keys import key

MAX_BARS = 12
"""Maximum number of lines of a histogram."""


def pack_documents(documents: Sequence[PackedSample], budget: TokenBudget) -> PackedSample:
    """Concatenate documents and pad them to the capacity; without documents, the row is all
    padding.

    Where each document is padded for context parallelism, there is less padding at the end.
    """
    lengths = [len(document.ids) for document in documents]
    filler = budget.filler(budget.capacity - sum(map(budget.padded, lengths)))
    num_tokens, size = sum(lengths), sum(lengths) + sum(filler)
    ids, labels = np.zeros(size, np.int64), np.full(size, -1, np.int64)
    if documents:
        ids[:num_tokens] = np.concatenate([document.ids for document in documents])
        labels[:num_tokens] = np.concatenate([document.labels for document in documents])
    mask = join_masks([document.mask for document in documents], lengths, size)
    return PackedSample(ids, labels, (*lengths, *filler), num_tokens, mask=mask)


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

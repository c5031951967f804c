"""Packs: several documents in one row, joined for a step, or decided beforehand and kept in a
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

from megalith.data.row_masks import joined_masks
from megalith.data.sample import PackedSample
from megalith.errors import DataError
from megalith.plan.deal import Budget
from megalith.plan.fill import PackedDocuments, fill_first
from megalith.plan.keys import key

BARS = 12
"""Lines of a histogram at most."""


def joined(documents: Sequence[PackedSample], budget: Budget) -> PackedSample:
    """Single documents one after the other, and filler after the last up to the capacity; of
    nothing, all filler.

    Where each is padded before ranks share it, there is less filler by that.
    """
    lengths = [len(document.ids) for document in documents]
    filler = budget.filler(budget.capacity - sum(map(budget.padded, lengths)))
    end, size = sum(lengths), sum(lengths) + sum(filler)
    ids, labels = np.zeros(size, np.int64), np.full(size, -1, np.int64)
    if documents:
        ids[:end] = np.concatenate([document.ids for document in documents])
        labels[:end] = np.concatenate([document.labels for document in documents])
    mask = joined_masks([document.mask for document in documents], lengths, size)
    return PackedSample(ids, labels, (*lengths, *filler), end, mask=mask)


def numbers_of(documents: Sequence[int], row: PackedSample, longest: int) -> NDArray[np.int64]:
    """[t]: which token of the whole run each is: (document, counted from the run's first) ·
    longest + place in it; -1 for filler. It does not depend on what a document shares a pack
    with."""
    own = [
        np.arange(length) + number * longest
        for number, length in zip(documents, row.read_lengths, strict=True)
    ]
    return np.concatenate([*own, np.full(len(row.ids) - row.num_valid, -1)]).astype(np.int64)


# --- decided beforehand


class PackingInput(NamedTuple):
    """What a packing is made for: conversations, and rows for them."""

    digest: str
    """Of the conversations as tokens."""

    seq_len: int
    overlong: str
    lengths: NDArray[np.int64]
    """Tokens that are read of each."""

    kept: NDArray[np.int64]
    """Which are read."""


@dataclass(frozen=True, slots=True)
class Packs:
    """Rows of whole conversations for one epoch."""

    filled: PackedDocuments
    digest: str
    """Of the rows."""


def pack_first_fit(room: PackingInput, seed: int) -> PackedDocuments:
    """First-fit decreasing; among equally long conversations the seed decides who comes first.

    Source: Johnson 1973, "Near-optimal bin packing algorithms".
    """
    order = np.random.default_rng(key(seed, "sft", "packs")).permutation(room.kept)
    filled = fill_first(room.lengths[order].tolist(), room.seq_len)
    return PackedDocuments(order[filled.documents].astype(np.int64), filled.starts)


def write_packs(path: Path, room: PackingInput, filled: PackedDocuments) -> None:
    """Keep a packing; the file is whole whenever it is there.

    Raises:
        DataError: it cannot be written.
    """
    temporary = path.with_name(f"{path.name}.writing-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            np.savez(
                file,
                documents=filled.documents,
                starts=filled.starts,
                conversations=np.array(room.digest),
                seq_len=np.array(room.seq_len),
                overlong=np.array(room.overlong),
            )
        temporary.replace(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error}). Choose another path, or free some space."
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def read_packs(path: str, room: PackingInput) -> Packs:
    """A packing that was made for these conversations and rows.

    Raises:
        DataError: there is none, it is damaged, or it was made for others.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            made_for = str(file["conversations"]), int(file["seq_len"]), str(file["overlong"])
            filled = PackedDocuments(
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
            f"data.sft.packs={path} is not a file of packs ({error}). Make it with `megalith data "
            "pack`."
        ) from error
    names = (
        "other conversations or another template or tokenizer",
        "train.seq_len",
        "data.sft.overlong",
    )
    wanted = room.digest, room.seq_len, room.overlong
    for name, there, here in zip(names, made_for, wanted, strict=True):
        if there != here:
            raise DataError(
                f"data.sft.packs={path} was made for {name}: {there} there, {here} here. Make it "
                f"again with `megalith data pack` and the settings of this run."
            )
    sizes = (
        np.add.reduceat(room.lengths[filled.documents], filled.starts[:-1])
        if filled.num_rows
        else np.zeros(1)
    )
    if sorted(filled.documents.tolist()) != room.kept.tolist() or sizes.max() > room.seq_len:
        raise DataError(
            f"data.sft.packs={path} does not hold each of the {len(room.kept)} conversations once, "
            "in rows of at most "
            f"{room.seq_len} tokens. Make it again with `megalith data pack`."
        )
    digest = hashlib.blake2b(
        filled.documents.tobytes() + filled.starts.tobytes(), digest_size=16
    ).hexdigest()
    return Packs(filled, digest)


@dataclass(frozen=True, slots=True)
class PackReport:
    """How well a packing fills its rows."""

    rows: int
    fewest: int
    """Rows that there would be at least."""

    conversations: int
    fill: float
    """Share of the rows that conversations are."""

    mean: float
    """Conversations in a row."""

    histogram: tuple[tuple[int, int, int], ...]
    """(from, to, rows): how many rows have so many conversations."""


def report_of(filled: PackedDocuments, lengths: NDArray[np.int64], room: int) -> PackReport:
    """Count what a packing has come to."""
    tokens, rows = int(lengths[filled.documents].sum()), filled.num_rows
    sizes = Counter(np.diff(filled.starts).tolist())
    width = max(-(-max(sizes, default=1) // BARS), 1)
    bars: Counter[int] = Counter()
    for size, count in sizes.items():
        bars[(size - 1) // width] += count
    histogram = tuple(
        (1 + width * bar, width * (bar + 1), bars[bar]) for bar in range(max(bars, default=-1) + 1)
    )
    count = len(filled.documents)
    fill, mean = tokens / max(1, rows * room), count / max(1, rows)
    return PackReport(rows, -(-tokens // room), count, fill, mean, histogram)

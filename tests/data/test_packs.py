"""Tests of megalith/data/packs.py."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megalith.data.packs import (
    PackingInput,
    pack_documents,
    pack_first_fit,
    read_packs,
    summarize_packing,
    token_numbers,
    write_packs,
)
from megalith.data.sample import PackedSample
from megalith.errors import DataError
from megalith.plan.batch_assignment import TokenBudget
from megalith.plan.packing import PackedDocuments


def document(first: int, length: int) -> PackedSample:
    ids = np.arange(first, first + length)
    return PackedSample(ids, ids + 1, (length,), length)


def test_documents_are_contiguous_and_padding_follows() -> None:
    row = pack_documents([document(10, 3), document(50, 2)], TokenBudget(capacity=12, longest=4))
    assert (
        row.ids.tolist() == [10, 11, 12, 50, 51] + [0] * 7
        and row.labels.tolist() == [11, 12, 13, 51, 52] + [-1] * 7
    )
    assert (
        row.lengths == (3, 2, 4, 3) and row.lengths_without_padding == (3, 2) and row.num_valid == 5
    )
    assert token_numbers([7, 2], row, 100).tolist() == [700, 701, 702, 200, 201] + [-1] * 7
    empty = pack_documents([], TokenBudget(capacity=12, longest=8))
    assert (
        empty.lengths == (8, 4)
        and empty.lengths_without_padding == ()
        and (empty.labels == -1).all()
    )
    assert token_numbers([], empty, 100).tolist() == [-1] * 12


def test_documents_reserve_space_for_their_padding() -> None:
    row = pack_documents(
        [document(10, 3), document(50, 5)], TokenBudget(capacity=24, longest=8, multiple=4)
    )
    padded = sum(length + -length % 4 for length in row.lengths)
    assert row.lengths_without_padding == (3, 5) and padded == 24 and sum(row.lengths) == 20


LENGTHS = np.array([7, 3, 9, 3, 1, 8, 3, 2])
ROOM = PackingInput("abc", 10, "drop", LENGTHS, np.array([0, 1, 3, 4, 5, 6, 7]))


def test_a_packing_has_every_conversation_once_and_depends_on_the_seed_alone() -> None:
    filled = pack_first_fit(ROOM, 1)
    assert sorted(filled.documents.tolist()) == ROOM.kept.tolist()
    assert all(LENGTHS[filled.row(number)].sum() <= 10 for number in range(filled.num_rows))
    again = pack_first_fit(ROOM, 1)
    assert (filled.documents == again.documents).all() and (filled.starts == again.starts).all()
    assert filled.num_rows == 3, "27 tokens need no more"


def test_file_of_packs_round_trips(tmp_path: Path) -> None:
    path, filled = tmp_path / "packs.npz", pack_first_fit(ROOM, 1)
    write_packs(path, ROOM, filled)
    packs = read_packs(str(path), ROOM)
    assert (packs.packed.documents == filled.documents).all() and (
        packs.packed.starts == filled.starts
    ).all()
    assert len(packs.digest) == 32 and list(tmp_path.iterdir()) == [path]


def test_file_of_packs_for_other_settings_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "packs.npz"
    write_packs(path, ROOM, pack_first_fit(ROOM, 1))
    others = {
        "conversations, template or tokenizer: abc in the file, xyz in this run": ROOM._replace(
            digest="xyz"
        ),
        "train.seq_len: 10 in the file, 12 in this run": ROOM._replace(seq_len=12),
        "data.sft.overlong: drop in the file, error in this run": ROOM._replace(overlong="error"),
    }
    for text, room in others.items():
        with pytest.raises(
            DataError,
            match=f"was packed with other {text}. Create it again with `megalith data pack`",
        ):
            read_packs(str(path), room)
    for wrong in (
        PackedDocuments(np.array([0, 1]), np.array([0, 2])),
        PackedDocuments(ROOM.kept, np.array([0, 7])),
    ):
        write_packs(path, ROOM, wrong)
        with pytest.raises(
            DataError,
            match="does not contain each of the 7 conversations once, in rows of at",
        ):
            read_packs(str(path), ROOM)
    write_packs(path, ROOM, pack_first_fit(ROOM, 1))
    whole, flipped = path.read_bytes(), bytearray(path.read_bytes())
    flipped[flipped.index(b"\x93NUMPY") + 130] ^= 1  # a number of the first array
    for name, content in {
        "packs.npz": b"nothing",
        "cut.npz": whole[: len(whole) // 2],
        "bit.npz": flipped,
    }.items():
        (tmp_path / name).write_bytes(content)
    for name in ("packs.npz", "cut.npz", "bit.npz", "none"):
        with pytest.raises(
            DataError, match=r"is not a file of packs \(.*\). Create it with `megalith data pack`"
        ):
            read_packs(str(tmp_path / name), ROOM)


def test_a_report_counts_rows_by_what_is_in_them() -> None:
    starts = np.array([0, 1, 3, 6])
    report = summarize_packing(PackedDocuments(np.array([2, 0, 4, 1, 3, 6]), starts), LENGTHS, 10)
    assert (report.rows, report.fewest, report.conversations, report.mean) == (3, 3, 6, 2.0)
    assert report.fill == pytest.approx(26 / 30) and report.histogram == (
        (1, 1, 1),
        (2, 2, 1),
        (3, 3, 1),
    )
    many = summarize_packing(
        PackedDocuments(np.arange(30) % 8, np.array([0, 1, 30])), LENGTHS, 1000
    )
    assert (
        many.histogram[0] == (1, 3, 1)
        and many.histogram[-1] == (28, 30, 1)
        and len(many.histogram) == 10
    )


def test_samples_of_rows_keep_their_fields() -> None:
    whole = document(3, 4)
    assert (
        whole.lengths_without_padding == (4,)
        and replace(whole, num_valid=0).lengths_without_padding == ()
    )

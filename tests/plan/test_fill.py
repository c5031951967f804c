import random

import numpy as np
import pytest

from megalith.errors import PlanError
from megalith.plan.packing import (
    PackedDocuments,
    pack_best_fit_decreasing,
    pack_by_group,
    pack_first_fit_decreasing,
    pack_in_order,
    pack_one_per_row,
)
from tests.cases import loop_over


def rows(filled: PackedDocuments) -> list[list[int]]:
    return [filled.row(number).tolist() for number in range(filled.num_rows)]


@loop_over("seed", range(5))
def test_every_document_is_in_one_row_and_no_row_overflows(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 37) for _ in range(101)]
    groups = [number // 3 for number in range(101)]
    for filled in (
        pack_in_order(lengths, 37),
        pack_best_fit_decreasing(lengths, 37),
        pack_by_group(lengths, groups, 37),
    ):
        assert sorted(filled.documents.tolist()) == list(range(101))
        assert max(sum(lengths[number] for number in row) for row in rows(filled)) <= 37
        assert all(row for row in rows(filled))


@loop_over("seed", range(5))
def test_best_fit_leaves_less_padding_than_file_order(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 30) for _ in range(300)]
    fewest = -(-sum(lengths) // 64)
    assert fewest <= pack_best_fit_decreasing(lengths, 64).num_rows <= 11 * fewest / 9 + 4
    assert pack_best_fit_decreasing(lengths, 64).num_rows < pack_in_order(lengths, 64).num_rows


def test_in_order_keeps_the_order_and_groups_share_no_row() -> None:
    assert rows(pack_in_order([3, 3, 3, 6, 1], 6)) == [[0, 1], [2], [3], [4]]
    assert rows(pack_by_group([2, 2, 3, 1, 6], "aaabb", 6)) == [[0, 1], [2], [3], [4]]
    assert rows(pack_by_group([2, 2, 1, 1], ["a", "a", "b", "a"], 6)) == [[0, 1], [2], [3]]
    assert rows(pack_best_fit_decreasing([], 6)) == rows(pack_in_order([], 6)) == []


def test_the_number_of_rows_depends_on_lengths_alone() -> None:
    lengths = [random.Random(7).randint(1, 30) for _ in range(60)]
    assert (
        pack_best_fit_decreasing(lengths, 40).num_rows
        == pack_best_fit_decreasing(lengths[::-1], 40).num_rows
    )


@pytest.mark.parametrize("lengths", [[3, 7], [0, 2]])
def test_document_longer_than_a_row_is_rejected(lengths: list[int]) -> None:
    for fill in (pack_best_fit_decreasing, pack_in_order):
        with pytest.raises(PlanError, match=r"do not fit rows of 6 tokens. Use lengths of 1 to 6"):
            fill(lengths, 6)


@loop_over("seed", range(20))
def test_first_fit_takes_the_first_row_with_room(seed: int) -> None:
    draw = np.random.default_rng(seed)
    room, count = int(draw.integers(5, 60)), int(draw.integers(0, 70))
    lengths = [int(length) for length in draw.integers(1, room + 1, count)]
    filled = pack_first_fit_decreasing(lengths, room)
    rows: list[list[int]] = []
    for number in sorted(range(count), key=lambda i: -lengths[i]):
        fits = (row for row in rows if sum(lengths[n] for n in row) + lengths[number] <= room)
        if (row := next(fits, None)) is None:
            rows.append([number])
        else:
            row.append(number)
    assert [filled.row(number).tolist() for number in range(filled.num_rows)] == [
        sorted(row) for row in rows
    ]


def test_separate_documents_have_one_row_each() -> None:
    assert (
        pack_one_per_row([3, 5, 1]).documents.tolist() == [0, 1, 2]
        and pack_one_per_row([]).num_rows == 0
    )

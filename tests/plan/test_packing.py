"""Tests of megalith/plan/packing.py."""

import numpy as np
import pytest

from megalith.errors import PlanError
from megalith.plan.packing import (
    PackedLayout,
    documents_from_eod,
    labels_inside_documents,
    pad_documents,
    plan_row_documents,
    shift_tokens_within_documents,
)
from tests.cases import loop_over


def token_by_token(ids: list[list[int]], eod: int) -> list[tuple[int, int]]:
    """(document, position) of each token, by the plain definition."""
    results: list[tuple[int, int]] = []
    document = -1
    for row in ids:
        starts = True
        for token in row:
            document, position = (document + 1, 0) if starts else (document, results[-1][1] + 1)
            results.append((document, position))
            starts = token == eod
    return results


def agrees(layout: PackedLayout, expected: list[tuple[int, int]]) -> bool:
    return list(zip(layout.document.tolist(), layout.positions.tolist(), strict=True)) == expected


def test_each_row_is_a_document() -> None:
    layout = plan_row_documents(3, 5)
    assert layout.cu.tolist() == [0, 5, 10, 15]
    assert layout.positions.tolist() == [0, 1, 2, 3, 4] * 3
    assert layout.document.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert (layout.max_length, layout.uniform, layout.num_documents) == (5, 5, 3)


def test_a_document_starts_after_each_end_of_document_token_and_at_each_row() -> None:
    layout = documents_from_eod(np.array([[1, 9, 2, 9], [3, 4, 5, 6]]), eod=9)
    assert layout.cu.tolist() == [0, 2, 4, 8]
    assert layout.positions.tolist() == [0, 1, 0, 1, 0, 1, 2, 3]
    assert layout.lengths.tolist() == [2, 2, 4]
    assert (layout.max_length, layout.uniform) == (4, None)


def test_end_of_document_tokens_side_by_side_and_at_the_borders_of_rows() -> None:
    layout = documents_from_eod(np.array([[9, 9, 1], [1, 2, 9], [9, 1, 1]]), eod=9)
    assert layout.cu.tolist() == [0, 1, 2, 3, 6, 7, 9]


def test_without_end_of_document_tokens_rows_are_documents() -> None:
    ours, rows = (
        documents_from_eod(np.zeros((4, 7), dtype=np.int64), eod=1),
        plan_row_documents(4, 7),
    )
    assert ours.uniform == rows.uniform == 7
    for name in ("cu", "positions", "document"):
        assert np.array_equal(getattr(ours, name), getattr(rows, name))


@loop_over("seed", range(40))
def test_documents_match_the_rule_token_by_token(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, length = int(rng.integers(1, 5)), int(rng.integers(1, 12))
    ids = rng.integers(0, 4, size=(rows, length)).astype(["int64", "int32", "uint16"][seed % 3])
    layout = documents_from_eod(ids, eod=0)
    assert agrees(layout, token_by_token(ids.tolist(), 0))
    assert (layout.cu[0], layout.cu[-1]) == (0, ids.size)
    assert (layout.lengths > 0).all()
    assert layout.max_length == layout.lengths.max()
    assert (layout.uniform is not None) == (len(set(layout.lengths.tolist())) == 1)
    assert [str(array.dtype) for array in (layout.cu, layout.positions, layout.document)] == [
        "int32",
        "int64",
        "int32",
    ]


def test_an_empty_batch_has_no_documents() -> None:
    layout = plan_row_documents(0, 5)
    assert (layout.cu.tolist(), layout.max_length, layout.uniform, layout.num_documents) == (
        [0],
        0,
        None,
        0,
    )


def test_a_label_crosses_into_another_document_only_after_its_end() -> None:
    ids = np.array([[1, 9, 2, 9], [3, 4, 5, 6]])
    assert labels_inside_documents(ids, eod=9).tolist() == [[True, False, True, False], [True] * 4]
    layout = documents_from_eod(ids, eod=9)
    inside = labels_inside_documents(ids, eod=9).reshape(-1)
    for token in range(3):  # within a row, the next token is the label
        assert inside[token] == (layout.document[token] == layout.document[token + 1])


@pytest.mark.parametrize("distance", [1, 2, 5])
def test_shifted_tokens_stay_inside_their_document(distance: int) -> None:
    lengths = [3, 1, 6, 2]
    document = np.repeat(np.arange(4), lengths)
    for token, result in enumerate(shift_tokens_within_documents(lengths, distance).tolist()):
        inside = token + distance < 12 and document[token + distance] == document[token]
        assert result == (token + distance if inside else -1)


def test_padding_adds_empty_documents() -> None:
    cu = plan_row_documents(2, 3).cu
    padded = pad_documents(cu, 5)
    assert padded.tolist() == [0, 3, 6, 6, 6, 6]
    assert str(padded.dtype) == "int32"
    assert pad_documents(cu, 2).tolist() == [0, 3, 6]


def test_invalid_packing_input_is_rejected() -> None:
    with pytest.raises(PlanError, match="count=2 is too small for 3 documents. Use at least 3"):
        pad_documents(plan_row_documents(3, 1).cu, 2)
    with pytest.raises(PlanError, match=r"ids has shape \[3\]. Pass token ids as \[rows, tokens\]"):
        documents_from_eod(np.zeros(3, dtype=np.int64), eod=0)
    with pytest.raises(PlanError, match=r"ids has shape \[2, 0\]"):
        labels_inside_documents(np.zeros((2, 0), dtype=np.int64), eod=0)
    with pytest.raises(
        PlanError, match="rows=1, length=0: rows must be at least 0 and length at least 1"
    ):
        plan_row_documents(1, 0)


def test_more_tokens_than_int32_counts_are_rejected_before_they_are_laid_out() -> None:
    with pytest.raises(PlanError, match="4294967296 tokens in one microbatch are too many"):
        plan_row_documents(2, 2**31)

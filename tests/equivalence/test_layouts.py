"""Any layout equals one process: initial weights, loss, every gradient, weights after three steps,
save and reload.

The rows are those of `megalith verify --all`; the sample of them is in `make test`, all are in
`make test-all`.
"""

import pytest

from megalith.verify.matrix import Layout, load_matrix
from megalith.verify.ranks import RaggedRows, compare_with_one_process


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=[] if row.sample else [pytest.mark.slow])
        for row in load_matrix()
    ],
)
def test_layout_equals_one_process(row: Layout) -> None:
    differences = compare_with_one_process(row.case())
    assert {result.what for result in differences if not result.holds} == set(), differences


def test_mock_rows_under_cp_have_a_microbatch_and_a_rank_without_labels() -> None:
    """Of the first step of cp 2: rank 1 has the two chunks in the middle of each row."""
    rows = RaggedRows(12, 61, 48, masked=(0, 1, 2, 17))
    kept = [int(rows.sample(k).valid[1:].sum()) for k in range(12)]
    assert 0 in kept and any(0 < labels <= 3 for labels in kept)

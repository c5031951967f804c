"""Tests of megalith/config/data.py."""

import pytest

from megalith.config.data import MockLengths, mock_problems
from megalith.config.fields import range_problems

WRONG = {
    "data.mock_lengths.mean=None must be from 1 to 99, below data.mock_max_tokens=100": MockLengths(
        kind="lognormal"
    ),
    "data.mock_lengths.mean=120 must be from 1 to 99": MockLengths(kind="lognormal", mean=120),
    "data.mock_lengths.sigma=-1.0 must be a finite number of at least 0. Use 1.0": MockLengths(
        kind="lognormal", mean=9, sigma=-1.0
    ),
    "data.mock_lengths.shortest=100 must be from 1 to 99": MockLengths(
        kind="lognormal", mean=9, shortest=100
    ),
    "data.mock_lengths.kind=file needs data.mock_lengths.path. Set it": MockLengths(kind="file"),
    "data.mock_lengths.mean=9 is not used by data.mock_lengths.kind=uniform. Remove "
    "it, or set data.mock_lengths.kind=lognormal": MockLengths(mean=9),
    "data.mock_lengths.path=a is not used by data.mock_lengths.kind=uniform. Remove "
    "it, or set data.mock_lengths.kind=file": MockLengths(path="a"),
}


@pytest.mark.parametrize("text", WRONG)
def test_invalid_lengths_are_reported(text: str) -> None:
    lengths = WRONG[text]
    problems = range_problems(lengths, "data.mock_lengths")
    (problem,) = problems + mock_problems(lengths, most=99, used=True)
    assert text in problem


def test_valid_lengths_need_mock_data() -> None:
    for lengths in (
        MockLengths(),
        MockLengths(kind="lognormal", mean=9.5),
        MockLengths(kind="file", path="a"),
    ):
        assert not mock_problems(lengths, most=99, used=True)
    assert not mock_problems(MockLengths(), most=99, used=False)
    (problem,) = mock_problems(MockLengths(kind="file", path="a"), most=99, used=False)
    assert (
        "data.mock_lengths.kind=file needs data.mock=true. Set it, or remove data.mock_lengths"
        in problem
    )

"""Tests of megalith/megatron/patterns.py."""

import pytest

from megalith.megatron.arguments import read_arguments
from megalith.megatron.draft import Draft
from megalith.megatron.patterns import pattern_of


def draft(typed: str) -> Draft:
    return Draft(read_arguments(["--num-layers", "8", "--no-rope-freq", typed]))


@pytest.mark.parametrize(
    ("typed", "pattern"),
    [
        ("4", [False, False, False, True]),
        ("1", [True]),
        ("9", [False]),
        ("([0]*3+[1]*1)*2", [False, False, False, True]),
        ("[1] + [0] * 7", [True, *[False] * 7]),
        ("[0,1,0,1,0,1,0,1]", [False, True]),
    ],
)
def test_numbers_and_lists_become_the_shortest_pattern(typed: str, pattern: list[bool]) -> None:
    assert pattern_of(draft(typed), "--no-rope-freq") == pattern


@pytest.mark.parametrize(
    "typed",
    [
        "0",
        "-1",
        "[0,1]",
        "[2]*8",
        "[[1]]*8",
        "open('x')",
        "[1]*99999999",
        "[1]*[2]",
        "1 +",
        "[x]*8",
        "3.5",
    ],
)
def test_anything_else_is_a_problem_and_runs_nothing(typed: str) -> None:
    found = draft(typed)
    assert pattern_of(found, "--no-rope-freq") is None
    assert found.problems == [
        f"--no-rope-freq {typed} must be a number above 0, or a list of 8 ones and zeros, one for "
        f"each layer. Use --no-rope-freq 4 for every fourth layer."
    ]


def test_an_argument_that_is_left_out_marks_nothing() -> None:
    assert pattern_of(draft("4"), "--window-attn-skip-freq") is None

"""Contenders take fair turns, and ratios are taken round by round."""

from collections import Counter

import pytest

from benchmarks.paired import spread, take_turns, times_as_fast


def test_every_contender_runs_once_per_round_and_warmup_is_not_counted() -> None:
    calls: list[str] = []
    turns = take_turns(
        {name: lambda name=name: calls.append(name) for name in "abc"}, rounds=5, warmup=2
    )
    rounds = [tuple(calls[first : first + 3]) for first in range(0, 21, 3)]
    assert all(Counter(order) == Counter("abc") for order in rounds)
    assert len(set(rounds)) > 1, "no contender always follows the same one"
    assert {name: len(taken) for name, taken in turns.seconds.items()} == {"a": 5, "b": 5, "c": 5}
    assert turns.cpu_seconds.keys() == turns.seconds.keys()


def test_a_ratio_compares_times_of_the_same_round() -> None:
    # The machine was ten times slower in the second half; the ratio of medians would be 1.
    ours, reference = [1.0, 1.0, 10.0, 10.0, 10.0], [2.0, 2.0, 20.0, 20.0, 5.0]
    result = times_as_fast(ours, reference)
    assert (result.lower, result.median, result.upper) == (2.0, 2.0, 2.0)


def test_quartiles_are_those_of_the_sample() -> None:
    result = spread([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (result.lower, result.median, result.upper) == (2.0, 3.0, 4.0)
    assert str(result) == "3.000 (quartiles 2.000 to 4.000)"


def test_one_round_has_no_spread() -> None:
    assert spread([0.5]).lower == spread([0.5]).upper == 0.5


def test_rounds_that_do_not_match_are_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        times_as_fast([1.0], [1.0, 2.0])

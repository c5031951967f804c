"""Loops over cases report every case that fails; measurements repeat until one is short enough."""

from pathlib import Path

import pytest

from tests.cases import least_of, loop_over


@loop_over("seed", range(5))
def check_even(seed: int) -> None:
    """Fails for 1 and 3, in two ways."""
    if seed == 1:
        with pytest.raises(ValueError, match="invalid literal"):
            int("1")
    assert seed % 2 == 0


def test_every_failing_case_is_named_with_the_first_error() -> None:
    with pytest.raises(AssertionError, match=r"2 of 5 cases fail, with seed = 1, 3\. ") as error:
        check_even()
    assert "DID NOT RAISE" in str(error.value.__cause__)


def test_a_skip_inside_a_loop_is_a_failure() -> None:
    skip = loop_over("case", ["a", "b"])(lambda case: pytest.skip("no GPU"))
    with pytest.raises(AssertionError, match="2 of 2 cases fail, with case = 'a', 'b'"):
        skip()


SEEN: list[tuple[int, str]] = []


@pytest.mark.parametrize("word", ["x", "y"])
@loop_over("seed", range(2))
def test_a_loop_composes_with_parameters_and_fixtures(seed: int, word: str, tmp_path: Path) -> None:
    assert tmp_path.is_dir()
    SEEN.append((seed, word))
    assert SEEN[-2:] == [(0, word), (1, word)] or seed == 0


def test_measurements_stop_at_the_first_that_is_short_enough() -> None:
    times = iter([0.5, 0.1, 0.3])
    assert least_of(lambda: next(times), below=0.2) == 0.1
    assert next(times) == 0.3


def test_no_short_measurement_gives_the_least_of_three() -> None:
    times = iter([0.5, 0.3, 0.4, 0.1])
    assert least_of(lambda: next(times), below=0.2) == 0.3

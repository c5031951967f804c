"""Run many cases inside one test: a test id per seed costs more than most seeds do."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

FAILED = (Exception, pytest.fail.Exception, pytest.skip.Exception)
"""What fails a case; a skip does too, since it would otherwise hide the cases after it."""


def loop_over(
    name: str, values: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test to run once per value of its argument `name`, in one test id.

    All values run. The test fails if one of them fails, with the list of all values that fail and
    the traceback of the first. The values share the fixtures of the test.
    """
    cases = list(values)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run_cases(*args: Any, **fixtures: Any) -> None:
            failures: list[tuple[Any, BaseException]] = []
            for case in cases:
                try:
                    test(*args, **{name: case}, **fixtures)
                except FAILED as error:
                    failures.append((case, error))
            if failures:
                failed = ", ".join(str(getattr(case, "name", repr(case))) for case, _ in failures)
                text = (
                    f"{len(failures)} of {len(cases)} cases fail, with {name} = {failed}. The "
                    "first error is above."
                )
                raise AssertionError(text) from failures[0][1]

        signature = inspect.signature(test)
        parameters = [parameter for key, parameter in signature.parameters.items() if key != name]
        run_cases.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # for pytest
        return run_cases

    return decorate


def least_of(measure: Callable[[], float], *, below: float, runs: int = 3) -> float:
    """Return the least of up to `runs` measured times; stop at the first that is less than `below`.

    Other processes on the machine can lengthen a measured time but not shorten it, so one short
    measurement suffices.
    """
    least = float("inf")
    for _ in range(runs):
        least = min(least, measure())
        if least < below:
            break
    return least

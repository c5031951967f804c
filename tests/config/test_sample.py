from typing import Any

import pytest

from megalith.config.fields import range_problems
from megalith.config.generation import SampleConfig


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0.0}, {"top_k": 1, "top_p": 1.0}, {"top_p": 0.01}, {"seed": -5}]
)
def test_valid_settings_are_accepted(fields: dict[str, Any]) -> None:
    assert range_problems(SampleConfig(**fields)) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"max_new_tokens": 0},
            "max_new_tokens=0 must be at least 1. Set max_new_tokens to 1 or more.",
        ),
        (
            {"temperature": -0.5},
            "temperature=-0.5 must be a finite number of at least 0. Use 1.0.",
        ),
        ({"temperature": float("nan")}, "temperature=nan must be a finite number of at least 0"),
        ({"temperature": float("inf")}, "temperature=inf must be a finite number of at least 0"),
        ({"top_k": 0}, "top_k=0 must be at least 1. Use 50."),
        ({"top_p": 0.0}, "top_p=0.0 must be a finite number above 0. Use 0.9."),
        ({"top_p": 1.5}, "top_p=1.5 must be at most 1"),
    ],
)
def test_invalid_settings_are_reported(fields: dict[str, Any], message: str) -> None:
    (problem,) = range_problems(SampleConfig(**fields))
    assert problem.startswith(message)


def test_all_problems_are_reported_together() -> None:
    assert (
        len(range_problems(SampleConfig(max_new_tokens=0, temperature=-1, top_k=0, top_p=2))) == 4
    )

from typing import Any

import pytest

from megalith.config.generation import SampleConfig, sample_problems


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0.0}, {"top_k": 1, "top_p": 1.0}, {"top_p": 0.01}, {"seed": -5}]
)
def test_valid_settings_are_accepted(fields: dict[str, Any]) -> None:
    assert sample_problems(SampleConfig(**fields)) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"max_new_tokens": 0},
            "max_new_tokens=0 must be at least 1. Set it to the number of tokens to generate.",
        ),
        (
            {"temperature": -0.5},
            "temperature=-0.5 must be at least 0 (0 is greedy decoding). Use 1.",
        ),
        ({"temperature": float("nan")}, "temperature=nan must be at least 0"),
        ({"temperature": float("inf")}, "temperature=inf must be at least 0"),
        ({"top_k": 0}, "top_k=0 must be at least 1. Use 50, or remove it."),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1. Use 0.9, or remove it."),
        ({"top_p": 1.5}, "top_p=1.5 must be above 0"),
    ],
)
def test_invalid_settings_are_reported(fields: dict[str, Any], message: str) -> None:
    (problem,) = sample_problems(SampleConfig(**fields))
    assert problem.startswith(message)


def test_all_problems_are_reported_together() -> None:
    assert (
        len(sample_problems(SampleConfig(max_new_tokens=0, temperature=-1, top_k=0, top_p=2))) == 4
    )

import math

import pytest

from megalith.config.model import DropoutConfig, dropout_problems


def test_dropout_is_off_by_default() -> None:
    assert not DropoutConfig().is_enabled()
    assert all(
        DropoutConfig(**{name: 0.1}).is_enabled() for name in ("embedding", "residual", "attention")
    )


@pytest.mark.parametrize("p", [-0.1, 1.0, 3.0, math.nan])
def test_invalid_probability_is_rejected_by_name(p: float) -> None:
    (problem,) = dropout_problems(DropoutConfig(embedding=p))
    assert (
        problem
        == f"model.dropout.embedding={p} must be a probability, at least 0 and below 1. Use 0.1."
    )

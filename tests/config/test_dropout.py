import math

import pytest

from megalith.config.fields import range_problems
from megalith.config.model import DropoutConfig


def test_dropout_is_off_by_default() -> None:
    assert not DropoutConfig().is_enabled()
    assert all(
        DropoutConfig(**{name: 0.1}).is_enabled() for name in ("embedding", "residual", "attention")
    )


@pytest.mark.parametrize("p", [-0.1, 1.0, 3.0, math.nan])
def test_invalid_probability_is_rejected_by_name(p: float) -> None:
    (problem,) = range_problems(DropoutConfig(embedding=p), "model.dropout")
    reason = "below 1" if p >= 1 else "a finite number of at least 0"
    assert problem == f"model.dropout.embedding={p} must be {reason}. Use 0.1."

"""Counters survive JSON."""

import json

import pytest

from megalith.train.state import TrainState


def test_state_comes_back_from_json() -> None:
    state = TrainState(step=3, consumed_samples=24, scheduled_samples=16, tokens=768, skipped=1)
    assert TrainState.from_json(json.loads(json.dumps(state.as_json()))) == state


def test_a_missing_counter_is_not_made_up() -> None:
    with pytest.raises(KeyError):
        TrainState.from_json({"step": 3})

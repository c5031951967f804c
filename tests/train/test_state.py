"""Counters survive JSON."""

import json

import pytest

from megalith.train.state import TrainState


def test_state_round_trips_through_json() -> None:
    state = TrainState(
        step=3, consumed_samples=24, scheduled_samples=16, tokens=768, skipped=3, skipped_in_a_row=2
    )
    assert TrainState.from_json(json.loads(json.dumps(state.as_json()))) == state


def test_missing_counter_is_an_error() -> None:
    with pytest.raises(KeyError):
        TrainState.from_json({"step": 3})


def test_checkpoints_from_before_skipped_steps_in_a_row_were_kept_still_load() -> None:
    saved = TrainState(step=3, skipped=3, skipped_in_a_row=2).as_json()
    del saved["skipped_in_a_row"]
    assert TrainState.from_json(saved) == TrainState(step=3, skipped=3)

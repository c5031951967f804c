"""States of an engine."""

import pytest

from megalith.plan.serving.engine_state import EngineState, InvalidStateError, Suspension

OFFLOAD = Suspension("offload")
STATES = {
    "running": EngineState(),
    "paused": EngineState(is_paused=True),
    "suspended": EngineState(is_paused=True, suspension=OFFLOAD),
}


@pytest.mark.parametrize(
    ("state", "after"),
    [
        ("running", {"pause": "paused", "resume": "running", "wake_up": "running"}),
        ("paused", {"pause": "paused", "resume": "running", "wake_up": "paused"}),
        ("suspended", {"pause": "suspended", "resume": None, "wake_up": "paused"}),
    ],
)
def test_commands_change_the_state(state: str, after: dict[str, str | None]) -> None:
    assert STATES[state].name == state
    assert STATES[state].suspend(OFFLOAD) == STATES["suspended"]
    for command, expected in after.items():
        if expected is None:
            with pytest.raises(InvalidStateError, match="the engine is suspended"):
                getattr(STATES[state], command)()
        else:
            assert getattr(STATES[state], command)() == STATES[expected]


def test_suspended_engine_may_also_release_its_weights() -> None:
    both = Suspension("offload", offload_weights=True)
    state = STATES["suspended"].suspend(both)
    assert state == EngineState(is_paused=True, suspension=both)
    for other in (OFFLOAD, Suspension("recompute", offload_weights=True)):
        with pytest.raises(InvalidStateError, match="suspended with kv_cache=offload, offload_w"):
            state.suspend(other)

"""The first signal is noted, handlers come back, and time runs out."""

import os
import signal

from megalith.train.stop import Stopper


def test_first_signal_is_noted_and_the_old_handler_comes_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    said: list[str] = []
    with Stopper(max_minutes=None, say=said.append) as stopper:
        assert stopper.reason is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopper.reason == "SIGTERM"
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL  # a second signal ends the process
    assert signal.getsignal(signal.SIGTERM) == before
    assert "finishing the step and saving" in said[0]


def test_time_limit_is_a_reason() -> None:
    with Stopper(max_minutes=0.0, say=print) as stopper:
        assert stopper.reason == "time limit"

"""Early stop of a run: preemption by a signal, or the time limit. The current step is finished and
saved first."""

import os
import select
import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from megalith.data.loader import StepBatches
from megalith.launch.launcher import SIGNALS, is_ignored_hangup
from megalith.train.callbacks.base import Callback, Outcome, RunView
from megalith.train.step import StepRequest


class StopRequests(Callback):
    """Requests to stop the run after a signal or at the time limit."""

    essential = True

    def on_start(self, run: RunView) -> None:
        """Handle signals from now on."""
        self._run = run
        self._stopper = Stopper(max_minutes=run.config.train.max_minutes, say=run.log)
        self._stopper.__enter__()

    @property
    def reason(self) -> str | None:
        """Why this rank should stop, or None."""
        return self._stopper.reason

    def before_step(self, step: int, batches: StepBatches) -> None:
        """Request to stop after this step."""
        if self.reason is not None:
            self._run.request(StepRequest.STOP)

    def on_error(self, error: BaseException) -> None:
        """Restore the signal handlers."""
        self._stopper.__exit__(None, None, None)

    def on_end(self, outcome: Outcome) -> None:
        """Restore the signal handlers."""
        self._stopper.__exit__(None, None, None)


class Stopper:
    """Records the first SIGTERM, SIGINT or SIGHUP; a second one ends the process immediately.

    Restores the handlers on exit. A SIGHUP that `nohup` ignores stays ignored.
    """

    def __init__(self, *, max_minutes: float | None, say: Callable[[str], None]) -> None:
        self._deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._say = say
        self._reason: str | None = None
        self._before: dict[signal.Signals, Any] = {}  # Any: what the signal module calls a handler

    def __enter__(self) -> "Stopper":
        handled = [number for number in SIGNALS if not is_ignored_hangup(number)]
        self._before = {number: signal.signal(number, self._note) for number in handled}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def reason(self) -> str | None:
        """Why the run should stop, or None."""
        if (
            self._reason is None
            and self._deadline is not None
            and time.monotonic() > self._deadline
        ):
            self._reason = "time limit"
        return self._reason

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._reason = signal.Signals(number).name
        if number == signal.SIGHUP:
            _redirect_closed_output()
        self._say(f"{self._reason}: finishing the step and saving; repeat it to end without saving")
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)


def _redirect_closed_output() -> None:
    """Redirect standard output and error to the null device if their terminal is closed.

    Writing to a closed terminal would fail, and the checkpoint would not be saved.
    """
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor)
    closed = [descriptor for descriptor, events in poll.poll(0) if events & select.POLLHUP]
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in closed:
        os.dup2(null, descriptor)
    os.close(null)

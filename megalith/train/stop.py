"""When a run ends early: a signal, or its time limit. The step in hand is finished and saved first."""

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopper:
    """Notes the first SIGTERM or SIGINT; a second one ends the process at once. Restores the handlers on exit."""

    def __init__(self, *, max_minutes: float | None, say: Callable[[str], None]) -> None:
        self._deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._say = say
        self._reason: str | None = None
        self._before: dict[signal.Signals, Any] = {}  # Any: what the signal module calls a handler

    def __enter__(self) -> "Stopper":
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def reason(self) -> str | None:
        """Why to stop, or None."""
        if self._reason is None and self._deadline is not None and time.monotonic() > self._deadline:
            self._reason = "time limit"
        return self._reason

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._reason = signal.Signals(number).name
        self._say(f"{self._reason}: finishing the step and saving; once more to end now without saving")
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)

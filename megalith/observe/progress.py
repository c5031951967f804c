"""Progress output: a progress bar with the remaining time on a terminal, plain lines elsewhere."""

import logging
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_log = logging.getLogger(__name__)

LINE_SECONDS = 10.0  # between plain lines, so that a log of a long run stays readable


class StepProgress:
    """Prints the progress of steps: one bar on a terminal, elsewhere a line at most every few
    seconds."""

    def __init__(
        self, *, total: int, show: bool, noun: str = "step", stream: TextIO | None = None
    ) -> None:
        """`noun`: the unit of progress; `stream`: the output, by default standard output."""
        self._total, self._show, self._noun = total, show, noun
        self._stream = sys.stdout if stream is None else stream
        self._last_line = 0.0
        self._bar: Progress | None = None
        if show and self._stream.isatty():
            columns = (
                TextColumn(noun),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[metrics]}"),
            )
            console = Console(file=self._stream)
            self._bar = Progress(
                *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console
            )
            self._task = self._bar.add_task("train", total=total, metrics="")

    def __enter__(self) -> "StepProgress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def resume(self, step: int) -> None:
        """Start at a step that was already done; the remaining time is estimated from later
        steps."""
        if self._bar is not None:
            self._bar.reset(self._task, completed=step)

    def step(self, step: int, metrics: Mapping[str, str]) -> None:
        """Report a finished step with its metrics."""
        text = " · ".join(f"{name} {value}" for name, value in metrics.items())
        if self._bar is not None:
            self._bar.update(self._task, completed=step, metrics=text)
        elif self._show and (
            step == self._total or time.monotonic() - self._last_line > LINE_SECONDS
        ):
            self._last_line = time.monotonic()
            self._line(f"{self._noun} {step}/{self._total}{f' · {text}' if text else ''}")

    def say(self, text: str) -> None:
        """Print a line above the bar and log it."""
        _log.info(text)
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, soft_wrap=True)
        elif self._show:
            self._line(text)

    def _line(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

"""Output of a run: metrics.jsonl (one JSON object per logged step, from one writer, without
duplicate steps after a resume), log.txt (messages), and the progress bar.
"""

import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from megalith import storage
from megalith.errors import DataError

Value = float | int | str | list[int] | None
"""A metric; a list holds counts by index, such as tokens by expert."""

Row = Mapping[str, Value]


class MetricsFile:
    """Writes rows to a run's metrics.jsonl, and optionally to TensorBoard."""

    def __init__(self, path: Path, *, resume_at: int, tensorboard: Path | None = None) -> None:
        """Continue after step `resume_at`; later rows of a killed run are removed."""
        cut_after(path, resume_at)
        self._file = path.open("a", encoding="utf-8")
        self._events = None if tensorboard is None else _event_writer(tensorboard, resume_at)

    def write(self, row: Row) -> None:
        """Write and flush one row. JSON has no NaN or infinity: they become null."""
        row = {
            name: None if isinstance(x, float) and not math.isfinite(x) else x
            for name, x in row.items()
        }
        row = {**row, "time_utc": datetime.now(UTC).isoformat(timespec="milliseconds")}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in row.items():
                if isinstance(value, list):
                    _add_counts(self._events, name, value, row["step"])
                elif isinstance(value, int | float) and name != "step":
                    self._events.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Sync and close both files."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if self._events is not None:
            self._events.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:  # Any: JSON
    """Return all rows, except an incomplete last line."""
    return [row for row, _ in _rows(path)]


def cut_after(path: Path, step: int) -> None:
    """Remove rows after `step` and an incomplete last line; a missing file is ignored.

    Raises:
        DataError: a line is not a row of metrics; the file is not changed.
    """
    if not path.exists():
        return
    kept = 0
    for row, end in _rows(path):
        if int(row["step"] or 0) > step:
            break
        kept = end
    with path.open("r+b") as file:
        file.truncate(kept)


def _rows(path: Path) -> Iterator[tuple[dict[str, Any], int]]:  # Any: JSON
    """Yield each complete row and the byte offset of its end."""
    end = 0
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        end += len(line)
        if not line.endswith(b"\n"):
            return
        try:
            row = storage.parse_json(line)
            problem = (
                ""
                if isinstance(row, dict) and isinstance(row.get("step"), int)
                else "it has no step"
            )
        except ValueError as error:
            problem = str(error)
        if problem:
            raise DataError(
                f"{path}: line {number} is not a row of metrics ({problem}). Remove the line, or "
                "move the file away: a new one is begun."
            )
        yield row, end


def _add_counts(
    events: Any, name: str, counts: list[int], step: Value
) -> None:  # Any: the optional package's own
    """Add a histogram with one bar per count."""
    pairs = list(enumerate(counts))
    events.add_histogram_raw(
        name,
        min=-0.5,
        max=len(counts) - 0.5,
        num=sum(counts),
        sum=sum(number * count for number, count in pairs),
        sum_squares=sum(number * number * count for number, count in pairs),
        bucket_limits=[number + 0.5 for number, _ in pairs],
        bucket_counts=counts,
        global_step=step,
    )


def has_tensorboard() -> bool:
    """Return whether TensorBoard's writer is installed."""
    from importlib.util import find_spec

    return find_spec("tensorboard") is not None


def _event_writer(folder: Path, resume_at: int):  # type: ignore[no-untyped-def]  # the optional package's own class
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=resume_at + 1)


# --- progress output: a progress bar with the remaining time on a terminal, plain lines elsewhere

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

    def print_line(self, text: str) -> None:
        """Print a line above the bar and log it."""
        _log.info(text)
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, soft_wrap=True)
        elif self._show:
            self._line(text)

    def _line(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

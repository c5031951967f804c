"""Events of a run: the lines of `events.jsonl`, from which `megalith report` computes goodput and
lost time."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megalith.checkpoint.save import SaveReport
from megalith.errors import CheckpointError
from megalith.train.callbacks.base import (
    Callback,
    FinishedStep,
    Outcome,
    RunView,
    StepMetrics,
)
from megalith.train.start_records import append_record
from megalith.train.step import StepResult
from megalith.train.suites import SuiteResults

_log = logging.getLogger(__name__)

STEPS_SECONDS = 10.0
"""Time after which finished steps are written (heuristic: a kill loses the times of so many
seconds, and a run of months stays below 100 MB)."""


@dataclass(slots=True)
class _Steps:
    """Consecutive finished steps that are not written yet."""

    first: int
    last: int
    seconds: float = 0.0
    rerun_seconds: float = 0.0
    skipped_seconds: float = 0.0
    ended: float = 0.0
    """Seconds since the process began at the end of the last step."""


class EventsWriter(Callback):
    """Writes events with their times to events.jsonl, on rank 0.

    A line has `event`, `start` (its number in starts.jsonl), `time` (seconds since 1970), `elapsed`
    (seconds since the process began, by the monotonic clock), and for what takes time
    `seconds`, which end at `elapsed`. Other callbacks write events with `RunView.record_event`:
    one named `waiting` with `seconds` contains the part of the last steps spent on waiting for
    stragglers.
    """

    def __init__(self) -> None:
        self._is_writer = self._has_failed = False
        self._steps: _Steps | None = None
        self._flushed = self._evaluation_began = 0.0

    def on_start(self, run: RunView) -> None:
        """Write the start: the time before it was spent on loading and starting up."""
        self._run, self._starts, self._is_writer = run, run.prepared.starts, run.is_writer
        self._flushed = self._last_end = self._starts.elapsed
        self._write(
            "start",
            {
                "began": round(self._starts.began, 3),
                "step": run.step,
                "seconds": round(run.prepared.load_seconds, 4),
                "steps": run.config.train.steps,
                "checkpoint_every": run.config.checkpoint.every,
                "world_size": run.mesh.world.size,
            },
        )

    def record(self, event: str, fields: Mapping[str, Any]) -> None:  # Any: JSON
        """Write an event after the steps before it; on other ranks than 0 do nothing."""
        if self._is_writer:
            self._write_steps()
            self._write(event, fields)

    @contextmanager
    def section(self, event: str, **fields: Any) -> Iterator[None]:  # Any: JSON
        """Write an event with the time that the context took, unless there was nothing to do."""
        began = time.monotonic()
        yield
        seconds = time.monotonic() - began
        if seconds >= _MIN_SECTION_SECONDS:
            self.record(event, fields | {"seconds": round(seconds, 4)})

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        """Count a finished step; write a skipped or repeated one."""
        if not self._is_writer:
            return
        result = finished.result
        if self._steps is None:
            self._steps = _Steps(finished.step, finished.step)
        steps, share = self._steps, result.num_reruns / (result.num_reruns + 1)
        steps.last = finished.step
        steps.seconds += finished.seconds
        steps.rerun_seconds += share * finished.seconds
        steps.skipped_seconds += 0.0 if result.updated else (1 - share) * finished.seconds
        steps.ended = self._last_end = self._starts.elapsed
        if result.num_reruns:
            ranks = list(result.differing_ranks)
            fields = {"step": finished.step, "reruns": result.num_reruns, "differing_ranks": ranks}
            self.record("rerun", fields)
        if not result.updated:
            self.record("skip", {"step": finished.step, "reason": _describe_skip(result)})
        if self._starts.elapsed - self._flushed >= STEPS_SECONDS:
            self._write_steps()

    def before_evaluate(self, step: int) -> None:
        """Begin to measure an evaluation."""
        self._evaluation_began = time.monotonic()

    def after_evaluate(self, results: SuiteResults, metrics: StepMetrics) -> None:
        """Write an evaluation."""
        seconds = time.monotonic() - self._evaluation_began
        fields = {"step": self._run.step, "suites": list(results), "seconds": round(seconds, 4)}
        self.record("evaluate", fields)

    def after_save(self, report: SaveReport) -> None:
        """Write that a checkpoint is complete."""
        self.record(
            "saved",
            {
                "checkpoint": report.path.name,
                "nbytes": report.nbytes,
                "save_seconds": round(report.seconds, 4),
                "blocked_seconds": round(report.blocked_seconds, 4),
            },
        )

    def after_save_failed(self, error: CheckpointError) -> None:
        """Write that a save has failed."""
        self.record("save_failed", {"step": self._run.step, "reason": str(error)[:300]})

    def after_rollback(self, step: int) -> None:
        """Write a rollback, with the time since the last finished step."""
        if self._is_writer:
            self._write_steps()
            seconds = self._starts.elapsed - self._last_end
            self._write("rollback", {"step": step, "seconds": round(seconds, 4)})

    def on_error(self, error: BaseException) -> None:
        """Write the error that ends the run."""
        text = " ".join(f"{type(error).__name__}: {error}".split())
        self.record("error", {"step": self._run.step, "reason": text[:300]})

    def on_end(self, outcome: Outcome) -> None:
        """Write how the run ended."""
        self.record(
            "end",
            {
                "kind": outcome.kind,
                "step": outcome.step,
                "reason": outcome.reason,
                "saved": outcome.saved,
            },
        )

    def _write_steps(self) -> None:
        """Write the finished steps since the last event."""
        steps, self._steps = self._steps, None
        self._flushed = self._starts.elapsed
        if steps is not None:
            self._write_at(
                steps.ended,
                "steps",
                {
                    "first": steps.first,
                    "last": steps.last,
                    "seconds": round(steps.seconds, 4),
                    "rerun_seconds": round(steps.rerun_seconds, 4),
                    "skipped_seconds": round(steps.skipped_seconds, 4),
                },
            )

    def _write(self, event: str, fields: Mapping[str, Any]) -> None:  # Any: JSON
        """Append a line of an event that ends now."""
        if self._is_writer:
            self._last_end = self._starts.elapsed
            self._write_at(self._last_end, event, fields)

    def _write_at(self, elapsed: float, event: str, fields: Mapping[str, Any]) -> None:  # Any: JSON
        """Append a line. If the file cannot be written, the run continues."""
        line = {
            "event": event,
            "start": self._starts.number,
            "time": round(time.time() - self._starts.elapsed + elapsed, 3),
            "elapsed": round(elapsed, 4),
            **fields,
        }
        path = self._run.folder.events
        try:
            append_record(path, line)
        except OSError as error:
            if not self._has_failed:
                _log.warning("%s cannot be written (%s); the run continues", path, error)
            self._has_failed = True


def _describe_skip(result: StepResult) -> str:
    """Return why a step has not updated the weights."""
    if result.skipped_reason == "grad_norm":
        return "the gradient norm is above optim.grad_norm_skip_threshold"
    if result.empty:
        return "no labels"
    return "requested by a callback" if result.is_finite else "a gradient is not finite"


_MIN_SECTION_SECONDS = 1e-4
"""Sections that took less had nothing to do (heuristic: any save writes a file)."""

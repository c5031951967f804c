"""Early stop of a run: preemption by a signal, the time limit, and the end time of a batch job. The
current step is finished and saved first.
"""

import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Literal

from megalith.checkpoint.save import SaveReport
from megalith.data.loader import StepBatches
from megalith.errors import ConfigError
from megalith.launch.launcher import SIGNALS, SignalRecorder, is_ignored_hangup
from megalith.train.callbacks.base import Callback, FinishedStep, Outcome, RunView, StepMetrics
from megalith.train.step import StepRequest

END_TIME = "SLURM_JOB_END_TIME"
"""Variable with the end of a Slurm job's time limit, in seconds since 1970."""

TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Variable that torchrun sets."""

TORCHRUN_GRACE_SECONDS = 30.0
"""Time between SIGTERM and SIGKILL under torchrun. Source: `PContext.close` in torch 2.13,
torch/distributed/elastic/multiprocessing/api.py."""

MIN_EXIT_MARGIN_SECONDS = 60.0
"""Smallest derived margin before the end of a batch job. Heuristic: the process must also leave its
groups and exit."""

MARGIN_FACTOR = 2.0
"""The derived margin in longest saves and steps (heuristic: a save on a busy file system)."""


@dataclass(frozen=True, slots=True)
class JobLimits:
    """When a batch system or launcher ends the processes of this job."""

    end_time: float | None = None
    """Seconds since 1970; None: unknown."""

    grace_seconds: float | None = None
    """Time between SIGTERM and SIGKILL; None: unknown."""


class StopRequests(Callback):
    """Requests to stop the run after a signal, at the time limit or before the end of a batch job,
    and to save it after SIGUSR1 if train.sigusr1_action=save."""

    essential = True

    def __init__(self, limits: JobLimits | None = None, job_started: float | None = None) -> None:
        """`job_started`: `time.monotonic()` from which train.max_minutes counts, None: from
        `on_start` on."""
        self._job_started = job_started
        self._stack = ExitStack()
        limits = limits or JobLimits()
        self._job_end_time, self._grace_seconds = limits.end_time, limits.grace_seconds
        self._longest_save = self._longest_step = 0.0

    def on_start(self, run: RunView) -> None:
        """Handle signals from now on."""
        self._run, train = run, run.config.train
        self._stopper = Stopper(
            max_minutes=train.max_minutes,
            print_line=run.log,
            sigusr1_action=train.sigusr1_action,
            started=self._job_started,
        )
        self._stack.enter_context(self._stopper)
        if self._job_end_time is not None and self._job_end_time <= time.time():
            run.log(
                f"{END_TIME}={self._job_end_time:.0f} is in the past, so it is ignored; this shell "
                "may have been started by a job that has ended"
            )
            self._job_end_time = None
        if train.termination_grace_seconds is not None:
            self._grace_seconds = train.termination_grace_seconds

    def describe_lack_of_time(self) -> str:
        """Describe that this process will be killed before a save like the longest one so far is
        complete; empty if there is enough time, no save was measured, or the end is not known."""
        received, ends = self._stopper.signaled_at, []
        if received is not None and self._grace_seconds is not None:
            ends.append(received + self._grace_seconds - time.monotonic())
        if self._job_end_time is not None:
            ends.append(self._job_end_time - time.time())
        if not ends or not self._longest_save or min(ends) >= self._longest_save:
            return ""
        return (
            f"{max(0.0, min(ends)):.1f} s are left, and a persistent save has taken "
            f"{self._longest_save:.1f} s"
        )

    @property
    def reason(self) -> str | None:
        """Why this rank should stop, or None."""
        if self._stopper.reason is None and self._must_exit_before_job_end():
            return "end of the Slurm job"
        return self._stopper.reason

    def _must_exit_before_job_end(self) -> bool:
        if self._job_end_time is None:
            return False
        minutes = self._run.config.train.exit_margin_minutes
        derived = MARGIN_FACTOR * (self._longest_save + self._longest_step)
        margin = max(MIN_EXIT_MARGIN_SECONDS, derived) if minutes is None else 60 * minutes
        return time.time() >= self._job_end_time - margin

    def before_step(self, step: int, batches: StepBatches) -> None:
        """Request to stop or save after this step."""
        self.before_skipped_step(step)

    def before_skipped_step(self, step: int) -> None:
        """Request to stop or save after this step."""
        if self.reason is not None:
            self._run.request(StepRequest.STOP)
        elif self._stopper.is_save_requested:
            self._run.request(StepRequest.SAVE)

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        """Measure the longest step; one save fulfills the requests of all ranks so far."""
        self._longest_step = max(self._longest_step, finished.seconds)
        self.after_skipped_step(finished.step, finished.result.requests)

    def after_skipped_step(self, step: int, requests: StepRequest) -> None:
        """Note that one save fulfills the requests of all ranks so far."""
        if StepRequest.SAVE in requests:
            self._stopper.is_save_requested = False

    def after_save(self, report: SaveReport) -> None:
        """Measure the longest save, of which the margin is derived."""
        self._longest_save = max(self._longest_save, report.seconds)

    def on_error(self, error: BaseException) -> None:
        """Restore the signal handlers."""
        self._stack.close()

    def on_end(self, outcome: Outcome) -> None:
        """Restore the signal handlers."""
        self._stack.close()


class Stopper:
    """Records the first SIGTERM, SIGINT or SIGHUP; a second one ends the process immediately.
    SIGUSR1 stops or saves, and may come several times.

    Restores the handlers on exit. A SIGHUP that `nohup` ignores stays ignored.
    """

    def __init__(
        self,
        *,
        max_minutes: float | None,
        print_line: Callable[[str], None],
        sigusr1_action: Literal["stop", "save", "ignore"] = "stop",
        started: float | None = None,
    ) -> None:
        """`started`: `time.monotonic()` from which the minutes count; None: now."""
        start = time.monotonic() if started is None else started
        self._deadline = None if max_minutes is None else start + 60 * max_minutes
        self._print_line = print_line
        self._sigusr1_action = sigusr1_action
        self._reason: str | None = None
        self.signaled_at: float | None = None
        """`time.monotonic()` of the first SIGTERM, SIGINT or SIGHUP; None: there was none."""
        self._before: dict[signal.Signals, Any] = {}  # Any: what the signal module calls a handler
        self.is_save_requested = False
        """Whether SIGUSR1 has requested a save that no step has executed."""

    def __enter__(self) -> "Stopper":
        handled = [number for number in SIGNALS if not is_ignored_hangup(number)]
        self._before = {number: signal.signal(number, self._note) for number in handled}
        earlier = signal.signal(signal.SIGUSR1, self._note_sigusr1)
        self._before[signal.SIGUSR1] = earlier
        if isinstance(earlier, SignalRecorder) and earlier.received:
            self._note_sigusr1(signal.SIGUSR1, None)
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
        self._reason, self.signaled_at = signal.Signals(number).name, time.monotonic()
        if number == signal.SIGHUP:
            _redirect_closed_output()
        self._print_line(
            f"{self._reason}: finishing the step and saving; repeat it to end without saving"
        )
        for each in self._before:
            if each in SIGNALS:
                signal.signal(each, signal.SIG_DFL)

    def _note_sigusr1(self, number: int, frame: FrameType | None) -> None:
        """Record SIGUSR1. Slurm and a launcher may both send it, so another one changes nothing."""
        if self._sigusr1_action == "save" and not self.is_save_requested:
            self.is_save_requested = True
            self._print_line("SIGUSR1: saving after the step")
        if self._sigusr1_action == "stop" and self._reason is None:
            self._reason = "SIGUSR1"
            self._print_line("SIGUSR1: finishing the step and saving")


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


@contextmanager
def record_sigusr1() -> Iterator[None]:
    """Only record SIGUSR1 until training starts: its default action would end the process."""
    if isinstance(signal.getsignal(signal.SIGUSR1), SignalRecorder):  # of `worker_main`
        yield
        return
    before = signal.signal(signal.SIGUSR1, SignalRecorder())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def read_job_limits(environment: Mapping[str, str]) -> JobLimits:
    """Return what the environment tells about the end of this job.

    Raises:
        ConfigError: a variable is not valid.
    """
    grace = TORCHRUN_GRACE_SECONDS if TORCHRUN in environment else None
    return JobLimits(read_job_end_time(environment), grace)


def read_job_end_time(environment: Mapping[str, str]) -> float | None:
    """Return the end of the Slurm job's time limit, in seconds since 1970; None outside of Slurm or
    without a limit.

    Raises:
        ConfigError: the variable is not a time.
    """
    text = environment.get(END_TIME, "")
    if text in ("", "0"):
        return None
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(
            f"{END_TIME}={text} in the environment is not a time in seconds since 1970, such as "
            "1767225600. Unset it, or start the run with srun."
        )
    return float(text)

"""Requests of `megalith request`: rank 0 reads their files, and all ranks execute them in the same
step."""

import logging
import time
from dataclasses import dataclass

from megalith.checkpoint.format import folder_name
from megalith.checkpoint.save import SaveReport
from megalith.data.loader import StepBatches
from megalith.errors import CheckpointError, ConfigError
from megalith.train.callbacks.base import Callback, FinishedStep, Outcome, RunView, StepMetrics
from megalith.train.callbacks.health import Evaluator
from megalith.train.callbacks.profile import Profiler
from megalith.train.request_files import (
    ACTIONS,
    RequestResult,
    RunRequest,
    Status,
    list_requests,
    read_request,
    remove_request,
    write_result,
)
from megalith.train.step import StepRequest
from megalith.train.suites import SuiteResults

_log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Time between two looks into the folder of the requests."""

TRACE_WAIT_SECONDS = 120.0
"""How long the traces of a profile may take to be written after its last step (heuristic: a trace
of a large model takes tens of seconds)."""

KINDS = {
    "save": StepRequest.SAVE,
    "evaluate": StepRequest.EVALUATE,
    "profile": StepRequest.PROFILE,
    "stop": StepRequest.STOP,
}
"""What the loop does for each action."""


@dataclass(slots=True)
class _Pending:
    """A request that is not finished."""

    request: RunRequest
    step: int | None = None
    """Step in whose message it was sent to all ranks; None: it is sent again in the next step."""


class RunRequests(Callback):
    """Requests the actions of `megalith request`, and writes their results (rank 0)."""

    def __init__(self, lock_id: str | None, evaluator: Evaluator, profiler: Profiler) -> None:
        """`lock_id`: id of the run folder's lock, on rank 0."""
        self._lock_id, self._evaluator, self._profiler = lock_id, evaluator, profiler
        self._pending: dict[str, _Pending] = {}
        self._next_poll = 0.0
        self._traces_until: float | None = None
        """Time until which traces of a finished profile may be missing."""
        self.stop_reason: str | None = None
        """Who requested to stop the run."""

    def on_start(self, run: RunView) -> None:
        """Receive the run."""
        self._run = run

    def before_step(self, step: int, batches: StepBatches) -> None:
        """Read new requests, and request the pending ones that have not been sent."""
        self.before_skipped_step(step)

    def before_skipped_step(self, step: int) -> None:
        """Read new requests, and request the pending ones that have not been sent."""
        if self._lock_id is None:
            return
        now = time.monotonic()
        if now >= self._next_poll:
            self._next_poll = now + POLL_SECONDS
            self._poll(step)
        for action, pending in self._pending.items():
            if pending.step is None:
                self._run.request(KINDS[action])

    def _poll(self, step: int) -> None:
        if "profile" in self._pending:
            self._finish_profile()
        for action in list_requests(self._run.folder.path):
            try:
                self._read(action, step)
            except ConfigError as error:
                remove_request(self._run.folder.path, action)
                self._run.log(f"removed: {error}")

    def _read(self, action: str, step: int) -> None:
        """Accept the request for an action if it is new and can be executed.

        Raises:
            ConfigError: it is not a request, or not for this job.
        """
        folder = self._run.folder.path
        if action not in ACTIONS:
            raise ConfigError(
                f"{folder}/requests/{action}.json requests an unknown action. Use `megalith "
                f"request {folder}` with one of {', '.join(ACTIONS)}."
            )
        request = read_request(folder, action)
        if request is None or action in self._pending:
            return
        if request.lock != self._lock_id:
            self._finish(
                request, "failed", "the job that it was for has ended; request it again if needed"
            )
            return
        if (problem := self._find_problem(action)) is not None:
            self._finish(request, "failed", problem)
            return
        self._run.log(f"step {step}: {action}, requested by {request}")
        self._pending[action] = _Pending(request)
        if action == "stop":
            self.stop_reason = "megalith request"

    def _find_problem(self, action: str) -> str | None:
        """Return why an action cannot be executed, or None."""
        if action == "profile":
            return self._profiler.find_problem()
        if action == "evaluate" and not self._evaluator.list_suites(0, is_requested=True):
            return (
                "this run has no samples for an evaluation. Set train.eval_steps to at least 1 and "
                "provide validation data."
            )
        return None

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        """Note which requests all ranks have received."""
        self.after_skipped_step(finished.step, finished.result.requests)

    def after_skipped_step(self, step: int, requests: StepRequest) -> None:
        """Note which requests all ranks have received."""
        for action, pending in self._pending.items():
            if pending.step is None and KINDS[action] in requests:
                pending.step = step

    def after_save(self, report: SaveReport) -> None:
        """Report a requested save. An asynchronous one of an earlier step may end first."""
        pending = self._pending.get("save")
        if pending is None or pending.step is None:
            return
        if report.path.name >= folder_name(pending.step):
            self._finish_pending("save", "done", f"saved {report.path}")

    def after_save_failed(self, error: CheckpointError) -> None:
        """Report that a requested save has failed."""
        self._finish_pending("save", "failed", str(error))

    def after_evaluate(self, results: SuiteResults, metrics: StepMetrics) -> None:
        """Report the results of a requested evaluation."""
        values = {name: value for name, value in metrics.items() if name != "step"}
        shown = ", ".join(
            f"{name} {value:.4g}" for name, value in values.items() if isinstance(value, float)
        )
        self._finish_pending("evaluate", "done", shown, values)

    def _has_traces_to_come(self) -> bool:
        """Return whether a requested profile has recorded its last step."""
        pending, window = self._pending["profile"], self._profiler.window
        return pending.step is not None and window is not None and self._run.step >= window.last

    def _finish_profile(self) -> None:
        """Report a requested profile when all of its traces are written, or have taken too long."""
        window = self._profiler.window
        if window is None or not self._has_traces_to_come():
            return
        now = time.monotonic()
        if self._traces_until is None:
            self._traces_until = now + TRACE_WAIT_SECONDS
        missing = self._profiler.list_missing_traces()
        if missing and now < self._traces_until:
            return
        self._traces_until = None
        steps = f"steps {window.start} to {window.last}: {window.folder}"
        if missing:
            names = ", ".join(path.name for path in missing)
            self._finish_pending(
                "profile", "failed", f"{names} of {steps} are missing; see log.txt"
            )
        else:
            self._finish_pending("profile", "done", f"profiled {steps}")

    def _finish_pending(
        self, action: str, status: Status, message: str, metrics: StepMetrics | None = None
    ) -> None:
        """Finish a request for an action, if one was sent to all ranks."""
        pending = self._pending.get(action)
        if pending is not None and pending.step is not None:
            del self._pending[action]
            self._finish(pending.request, status, message, metrics)

    def _finish(
        self, request: RunRequest, status: Status, message: str, metrics: StepMetrics | None = None
    ) -> None:
        result = RequestResult(
            request.id,
            request.action,
            status,
            self._run.step,
            message,
            metrics or {},
        )
        write_result(self._run.folder.path, result)
        if status != "done":
            _log.warning("%s, requested by %s, failed: %s", request.action, request, message)

    def on_error(self, error: BaseException) -> None:
        """Report pending requests as failed."""
        text = " ".join(str(error).split()) or type(error).__name__
        self._fail_pending(f"the run ended with an error: {text:.300}")

    def on_end(self, outcome: Outcome) -> None:
        """Report a requested stop, and other pending requests as failed."""
        while "profile" in self._pending and self._has_traces_to_come():
            self._finish_profile()
            time.sleep(0.05)
        if outcome.kind == "stopped":
            saved = "saved" if outcome.saved else f"did not save ({outcome.reason})"
            self._finish_pending("stop", "done", f"stopped after step {outcome.step} and {saved}")
        else:
            self._finish_pending("stop", "done", f"the run is done at step {outcome.step}")
        reason = f" ({outcome.reason})" if outcome.reason else ""
        self._fail_pending(f"the run ended at step {outcome.step}{reason} before it was executed")

    def _fail_pending(self, message: str) -> None:
        """Report all requests as failed that are pending or have not been read."""
        if self._lock_id is None:
            return
        self._poll(self._run.step)
        for pending in self._pending.values():
            self._finish(pending.request, "failed", message)
        self._pending.clear()

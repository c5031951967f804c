"""Experiment trackers: Weights & Biases and MLflow, written to from a thread, so that no step waits
for a network."""

import json
import logging
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, Protocol

from megalith import storage
from megalith.config.observe import MlflowConfig, ObserveConfig, WandbConfig
from megalith.config.tree import flatten, to_dict
from megalith.errors import ConfigError
from megalith.object_store import StorePath
from megalith.observe.metrics import Row
from megalith.storage import StoragePath

_log = logging.getLogger(__name__)

MAX_WAITING_ROWS = 10_000
"""Rows that are kept while a tracker cannot be reached; older ones are dropped (heuristic: a day of
steps of ten seconds)."""

RETRY_SECONDS = 60.0
"""Time between attempts to reach a tracker (heuristic)."""


class Tracker(Protocol):
    """Connection to an experiment tracker; used by one thread."""

    setting: str
    """Setting of the tracker."""

    max_metrics: int
    """Numbers in one request."""

    advice: str
    """What to do if it cannot be reached."""

    def start(self, step: int) -> None:
        """Start a run, or continue that of the run folder after step `step`."""

    def write(self, rows: Sequence[Row]) -> None:
        """Send rows of metrics."""

    def link_checkpoint(self, path: StoragePath) -> None:
        """Record the path of the newest checkpoint; nothing is uploaded."""

    def finish(self, *, failed: bool) -> None:
        """End the run."""


class RunIds:
    """Ids of the run, stored in the run folder so that a resumed run continues them. A key names
    the tracker, the address or mode, and the project, because another one does not have the run."""

    def __init__(self, path: Path, *, is_resumed: bool) -> None:
        """A run that starts from the beginning gets new ids."""
        self._path, self._lock = path, threading.Lock()  # of the threads of the trackers
        if not is_resumed:
            storage.remove_file(path)

    def read(self, key: str) -> str | None:
        """Return the id in a tracker; None if it has none."""
        with self._lock:
            ids = self._read_all()
        return str(ids[key]) if key in ids else None

    def write(self, key: str, run_id: str) -> None:
        """Store the id in a tracker."""
        with self._lock:
            ids = self._read_all() | {key: run_id}
            storage.replace_file(self._path, json.dumps(ids).encode())

    def _read_all(self) -> dict[str, str]:
        ids: dict[str, str] = json.loads(self._path.read_bytes()) if self._path.exists() else {}
        return ids


class WandbTracker:
    """Run of Weights & Biases."""

    setting = "observe.wandb"
    max_metrics = 10_000  # it sends rows by itself
    advice = "Log in with `wandb login`, or set observe.wandb.mode=offline"

    def __init__(
        self,
        config: WandbConfig,
        settings: object,
        ids: RunIds,
        folder: Path,
        *,
        flush_seconds: float = 30.0,
    ) -> None:
        """`settings`: config of the training run, which is uploaded; `folder`: the run folder;
        `flush_seconds`: longest wait of W&B at the end, also that of its exit handler.

        Raises:
            ConfigError: the package is not installed, or too old.
        """
        require_package(self.setting, "wandb", "wandb")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # to the vendor, not to the project
        import wandb

        if "prompt" not in signature(wandb.login).parameters:
            raise ConfigError(
                f"{self.setting} needs wandb 0.31 or newer, and {wandb.__version__} is installed. "
                "Run pip install -U wandb."
            )
        self._wandb: Any = wandb  # Any: the optional package
        self._config, self._settings = config, settings
        self._ids, self._folder = ids, folder
        self._flush_seconds = flush_seconds
        self._key = f"{self.setting} {config.mode} {config.entity or ''}/{config.project}"
        self._run: Any = None  # Any: a run of the optional package

    def start(self, step: int) -> None:
        """Start a W&B run, or continue that of the run folder.

        If W&B has later steps than `step`, it is rewound; a server that cannot do that gets a new
        run, whose config names the old one as `resumed_from`.
        """
        if self._run is None:  # else another attempt, because the id could not be stored
            self._run = self._open(step)
        self._ids.write(self._key, self._run.id)

    def _open(self, step: int) -> Any:  # Any: as above
        if self._config.mode == "online" and not self._wandb.login(prompt=False):
            raise ConfigError("not logged in")
        before = self._ids.read(self._key)
        if before is None or self._config.mode == "offline":
            return self._init(resumed_from=before)  # offline runs cannot be continued
        run = self._init(id=before, resume="allow")
        if run.step <= step + 1:
            return run
        run.finish()
        try:
            return self._init(resume_from=f"{before}?_step={step}")
        except self._wandb.Error:
            return self._init(resumed_from=before)

    def _init(self, *, resumed_from: str | None = None, **options: str) -> Any:  # Any: as above
        config, settings = self._config, to_dict(self._settings)
        return self._wandb.init(
            project=config.project,
            entity=config.entity,
            name=config.name or settings["name"],
            group=config.group,
            tags=config.tags,
            mode=config.mode,
            dir=str(self._folder),
            config=settings | ({} if resumed_from is None else {"resumed_from": resumed_from}),
            settings=self._wandb.Settings(
                console="off",
                silent=True,
                finish_timeout=max(self._flush_seconds, 0.001),  # 0: no limit
                x_disable_meta=True,  # command line, host, user
                x_save_requirements=False,
                disable_git=True,
                disable_code=True,
            ),
            **options,
        )

    def write(self, rows: Sequence[Row]) -> None:
        """Send rows; rows of one step are merged."""
        for row in rows:
            self._run.log(_select_scalars(row), step=row["step"])

    def link_checkpoint(self, path: StoragePath) -> None:
        """Write the path into the summary of the run."""
        self._run.summary["checkpoint"] = str(path)

    def finish(self, *, failed: bool) -> None:
        """Send the remaining rows and end the run."""
        self._run.finish(exit_code=int(failed))
        self._run = None


class MlflowTracker:
    """Run of MLflow."""

    setting = "observe.mlflow"
    advice = "Check observe.mlflow.tracking_uri, and the credentials of the server"

    max_metrics = 1000

    MAX_PARAMS, MAX_CHARACTERS = 100, 500
    """Limits of one request; the last one is that of older servers for a parameter."""

    def __init__(self, config: MlflowConfig, settings: object, ids: RunIds) -> None:
        """`settings`: config of the training run, whose leaves become parameters.

        Raises:
            ConfigError: the package is not installed.
        """
        require_package(self.setting, "mlflow", "mlflow-skinny")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # sent when it is imported
        import mlflow

        self._mlflow: Any = mlflow  # Any: the optional package
        self._client: Any = None  # Any: as above
        self._config, self._settings = config, settings
        self._ids, self._id = ids, ""
        self._key = f"{self.setting} {config.tracking_uri} {config.experiment}"

    def start(self, step: int) -> None:
        """Create a run in the experiment, or continue that of the run folder; MLflow keeps the
        metrics of steps that are repeated. A failure to send the parameters is only logged, since
        another attempt continues the run."""
        if self._client is None:
            self._client = self._mlflow.MlflowClient(tracking_uri=self._config.tracking_uri)
        before = self._id or self._ids.read(self._key)
        if before is not None:
            self._client.update_run(before, status="RUNNING")
            self._id = before
            return
        name, client = self._config.experiment, self._client
        experiment = client.get_experiment_by_name(name)
        number = client.create_experiment(name) if experiment is None else experiment.experiment_id
        settings = flatten(self._settings)
        self._id = client.create_run(number, run_name=str(settings["name"])).info.run_id
        self._ids.write(self._key, self._id)
        try:
            self._send_params(settings)
        except Exception as error:  # of another package
            _log.warning("%s: the parameters of the run were not sent (%s).", self.setting, error)

    def _send_params(self, settings: Mapping[str, object]) -> None:
        params = [
            self._mlflow.entities.Param(_clean_name(key), str(value)[: self.MAX_CHARACTERS])
            for key, value in settings.items()
        ]
        for first in range(0, len(params), self.MAX_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + self.MAX_PARAMS])

    def write(self, rows: Sequence[Row]) -> None:
        """Send the numbers of rows in as few requests as the server permits."""
        now = int(time.time() * 1000)
        metrics = [
            self._mlflow.entities.Metric(_clean_name(name), float(value), now, row["step"])
            for row in rows
            for name, value in _select_scalars(row).items()
        ]
        for first in range(0, len(metrics), self.max_metrics):
            self._client.log_batch(self._id, metrics=metrics[first : first + self.max_metrics])

    def link_checkpoint(self, path: StoragePath) -> None:
        """Write the path into a tag of the run."""
        self._client.set_tag(self._id, "checkpoint", str(path))

    def finish(self, *, failed: bool) -> None:
        """End the run."""
        self._client.set_terminated(self._id, status="FAILED" if failed else "FINISHED")


def require_package(setting: str, module: str, package: str) -> None:
    """Check that an optional package is installed.

    Raises:
        ConfigError: it is not.
    """
    if find_spec(module) is None:
        raise ConfigError(
            f"{setting} is set and needs the package {package}. Run pip install {package}, or set "
            f"{setting}=none."
        )


def _select_scalars(row: Row) -> dict[str, int | float]:
    """Return the finite numbers of a row without the step."""
    return {
        name: value
        for name, value in row.items()
        if isinstance(value, int | float) and math.isfinite(value) and name != "step"
    }


def _clean_name(name: str) -> str:
    """Replace characters that MLflow does not accept in names.

    >>> _clean_name("lr_*.norm")
    'lr__.norm'
    """
    return re.sub(r"[^\w\-. /]", "_", name)


Message = Row | StoragePath | int
"""A row, the path of a checkpoint, or the step after which the tracker starts or continues."""


class TrackerThread:
    """Sends metrics to one tracker from a thread; a step never waits for it.

    If the tracker cannot be reached, one warning is logged, the newest rows are kept, and the
    attempt is repeated every minute and at the end of the run.
    """

    def __init__(
        self, tracker: Tracker, *, step: int, retry_seconds: float = RETRY_SECONDS
    ) -> None:
        """`step`: number of finished steps."""
        self._tracker, self._retry_seconds = tracker, retry_seconds
        self._waiting: deque[Message] = deque([step])
        self._change = threading.Condition()
        self._failed: bool | None = None
        """Whether the run failed; None while it goes on."""
        self._unsent: deque[Message] = deque()  # of the thread only
        self._num_dropped = 0
        self._is_started, self._has_warned = False, False
        self._thread = threading.Thread(target=self._run, name=tracker.setting, daemon=True)
        self._thread.start()

    def put(self, message: Message) -> None:
        """Queue a message; beyond the limit the oldest row is dropped."""
        with self._change:
            self._waiting.append(message)
            self._num_dropped += _drop_rows(self._waiting)
            self._change.notify()

    def end(self, *, failed: bool) -> None:
        """Request to end the run in the tracker after the queued rows."""
        with self._change:
            self._failed = failed
            self._change.notify()

    def close(self, *, failed: bool, seconds: float) -> None:
        """End the run in the tracker after the queued rows; waits at most `seconds`."""
        self.end(failed=failed)
        self._thread.join(max(0.0, seconds))
        num_unsent = sum(isinstance(m, Mapping) for m in (*self._unsent, *self._waiting))
        if num_lost := self._num_dropped + num_unsent:
            _log.warning(
                "%s: %d rows of metrics were not sent%s; metrics.jsonl has them.",
                self._tracker.setting,
                num_lost,
                f" within observe.flush_seconds={seconds:g}" if self._thread.is_alive() else "",
            )

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(self._has_work)
                failed = self._failed
                self._unsent.extend(self._waiting)
                self._waiting.clear()
                self._num_dropped += _drop_rows(self._unsent)
            try:
                self._send()
                if failed is not None:
                    if self._is_started:
                        self._tracker.finish(failed=failed)
                    return
            except Exception as error:  # of another package: the run must continue
                self._warn_once(error)
                if failed is not None:
                    return
                with self._change:
                    self._change.wait_for(lambda: self._failed is not None, self._retry_seconds)

    def _has_work(self) -> bool:
        return bool(self._waiting or self._unsent) or self._failed is not None

    def _send(self) -> None:
        """Send the messages in order, rows that follow each other together, as many as one request
        takes: another attempt must not send them again."""
        while self._unsent:
            message, num_sent = self._unsent[0], 1
            if isinstance(message, int):
                if self._is_started:
                    self._is_started = False
                    self._tracker.finish(failed=False)
                self._tracker.start(message)
                self._is_started = True
            elif isinstance(message, (Path, StorePath)):
                self._tracker.link_checkpoint(message)
            else:
                rows = _take_rows(self._unsent, max_metrics=self._tracker.max_metrics)
                self._tracker.write(rows)
                num_sent = len(rows)
            for _ in range(num_sent):
                self._unsent.popleft()

    def _warn_once(self, error: Exception) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        _log.warning(
            "%s: cannot be reached (%s). The run continues; its last %d rows of metrics are kept "
            "for later attempts. %s.",
            self._tracker.setting,
            error,
            MAX_WAITING_ROWS,
            self._tracker.advice,
        )


def _take_rows(messages: Iterable[Message], *, max_metrics: int) -> list[Row]:
    """Return the first rows, up to the first other message or to so many metrics; at least one."""
    rows: list[Row] = []
    num_metrics = 0
    for message in messages:
        if not isinstance(message, Mapping):
            break
        num_metrics += len(message)
        if rows and num_metrics > max_metrics:
            break
        rows.append(message)
    return rows


def _drop_rows(messages: deque[Message]) -> int:
    """Remove the oldest rows beyond `MAX_WAITING_ROWS` messages; return how many."""
    num_dropped = 0
    while len(messages) > MAX_WAITING_ROWS:
        # the first message may be the step to start at
        rows = (i for i, message in enumerate(messages) if isinstance(message, Mapping))
        oldest = next(rows, None)
        if oldest is None:
            break
        del messages[oldest]
        num_dropped += 1
    return num_dropped


def build_trackers(
    config: ObserveConfig, settings: object, folder: Path, *, is_resumed: bool
) -> list[Tracker]:
    """Return the trackers of a run; `settings`: its config, `folder`: its folder.

    Raises:
        ConfigError: a package is not installed.
    """
    ids = RunIds(folder / "trackers.json", is_resumed=is_resumed)
    trackers: list[Tracker] = []
    if config.wandb is not None:
        seconds = config.flush_seconds
        trackers.append(WandbTracker(config.wandb, settings, ids, folder, flush_seconds=seconds))
    if config.mlflow is not None:
        trackers.append(MlflowTracker(config.mlflow, settings, ids))
    return trackers

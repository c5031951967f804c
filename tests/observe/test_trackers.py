"""Experiment trackers: metrics reach them in order from a thread, and a tracker that cannot be
reached stops no run."""

import json
import logging
import os
import sys
import threading
import time
import types
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from megalith.config.observe import MlflowConfig, ObserveConfig, WandbConfig
from megalith.errors import ConfigError
from megalith.observe import trackers
from megalith.observe.metrics import Row
from megalith.observe.trackers import (
    MlflowTracker,
    RunIds,
    TrackerThread,
    WandbTracker,
    build_trackers,
)
from megalith.testing.tiny import tiny_run


class FakeTracker:
    """Records the calls; `failures`: how often starting fails."""

    setting = "observe.fake"
    max_metrics = 1000
    advice = "Start the server"

    def __init__(self, *, failures: int = 0) -> None:
        self.events: list[Any] = []
        self.failures = failures
        self.release = threading.Event()
        self.release.set()

    def start(self, step: int) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no route to host")
        self.events.append(("start", step))

    def write(self, rows: Sequence[Row]) -> None:
        self.release.wait(60)
        self.events += [row["step"] for row in rows]

    def link_checkpoint(self, path: Path) -> None:
        self.events.append(path.name)

    def finish(self, *, failed: bool) -> None:
        self.events.append(("finish", failed))


def test_messages_are_sent_in_order() -> None:
    tracker = FakeTracker()
    thread = TrackerThread(tracker, step=3)
    for message in ({"step": 4}, {"step": 5}, Path("step_0000005"), {"step": 6}, 5, {"step": 6}):
        thread.put(message)
    thread.close(failed=False, seconds=60)
    assert tracker.events == [
        ("start", 3),
        4,
        5,
        "step_0000005",
        6,
        ("finish", False),
        ("start", 5),
        6,
        ("finish", False),
    ]


def test_unreachable_tracker_is_reported_once_and_gets_all_rows_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracker = FakeTracker(failures=3)
    with caplog.at_level(logging.WARNING):
        thread = TrackerThread(tracker, step=0, retry_seconds=0)
        for step in range(1, 4):
            thread.put({"step": step})
        while tracker.failures:
            threading.Event().wait(0.001)
        thread.close(failed=True, seconds=60)
    assert tracker.events == [("start", 0), 1, 2, 3, ("finish", True)]
    (message,) = caplog.messages
    assert message.startswith("observe.fake: cannot be reached (no route to host). The run conti")
    assert message.endswith("are kept for later attempts. Start the server.")


def test_only_the_newest_rows_are_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers, "MAX_WAITING_ROWS", 4)
    tracker = FakeTracker(failures=1)
    thread = TrackerThread(tracker, step=0, retry_seconds=60)
    for step in range(1, 9):
        thread.put({"step": step})
    with caplog.at_level(logging.WARNING):
        thread.close(failed=False, seconds=60)
    assert tracker.events == [("start", 0), 6, 7, 8, ("finish", False)]
    assert "observe.fake: 5 rows of metrics were not sent; metrics.jsonl has them." in caplog.text


def test_slow_tracker_delays_neither_a_step_nor_the_end(caplog: pytest.LogCaptureFixture) -> None:
    tracker = FakeTracker()
    tracker.release.clear()
    thread = TrackerThread(tracker, step=0)
    for step in range(1, 4):
        thread.put({"step": step})
    with caplog.at_level(logging.WARNING):
        thread.close(failed=False, seconds=0.05)
    tracker.release.set()
    assert "3 rows of metrics were not sent within observe.flush_seconds=0.05" in caplog.text


class FakeWandb(types.ModuleType):
    """The parts of the wandb package that are used; `steps`: last step + 1 of each run."""

    class Error(Exception):
        """Error of the package."""

    def __init__(self, *, api_key: str | None = "key", can_rewind: bool = True) -> None:
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None)
        self.api_key = api_key
        self.can_rewind = can_rewind
        self.steps: dict[str, int] = {}
        self.rows: list[tuple[str, int, dict[str, float]]] = []
        self.inits: list[dict[str, Any]] = []

    def login(self, *, prompt: bool) -> bool:
        """Return whether there is a login."""
        assert not prompt
        return self.api_key is not None

    def Settings(self, **options: object) -> dict[str, object]:
        """Return the settings of a run."""
        return options

    def init(self, **options: Any) -> types.SimpleNamespace:
        """Start or continue a run."""
        self.inits.append(options)
        if "resume_from" in options and not self.can_rewind:
            raise self.Error("rewinding is not supported")
        rewound, _, step = options.get("resume_from", "").partition("?_step=")
        run_id = options.get("id") or rewound or f"run{len(self.inits)}"
        start = int(step) + 1 if step else self.steps.get(run_id, 0)

        def log(values: dict[str, float], step: int) -> None:
            self.rows.append((run_id, step, values))
            self.steps[run_id] = step + 1

        return types.SimpleNamespace(
            id=run_id, step=start, log=log, summary={}, finish=lambda exit_code=0: None
        )


def test_threads_store_their_ids_in_one_file(tmp_path: Path) -> None:
    for trial in range(30):
        ids = RunIds(tmp_path / f"{trial}.json", is_resumed=False)
        with ThreadPoolExecutor(4) as executor:
            list(executor.map(lambda key, ids=ids: ids.write(key, key.upper()), "abcdefgh"))
        assert [ids.read(key) for key in "abcdefgh"] == [*"ABCDEFGH"]


def test_rows_that_were_sent_are_not_sent_again(caplog: pytest.LogCaptureFixture) -> None:
    """The second request fails once."""

    class Failing(FakeTracker):
        max_metrics = 4
        num_requests = 0

        def write(self, rows: Sequence[Row]) -> None:
            self.num_requests += 1
            assert len(rows) <= 2
            if self.num_requests == 2:
                raise ConnectionError("planted")
            super().write(rows)

    tracker = Failing()
    tracker.release.clear()
    thread = TrackerThread(tracker, step=0, retry_seconds=0.01)
    for step in range(1, 7):
        thread.put({"step": step, "loss": 1.0})
    tracker.release.set()
    deadline = time.monotonic() + 60
    while len(tracker.events) < 7:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    thread.close(failed=False, seconds=60)
    assert tracker.events == [("start", 0), 1, 2, 3, 4, 5, 6, ("finish", False)]
    assert "planted" in caplog.text


def test_wandb_run_is_kept_if_its_id_cannot_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    ids = RunIds(tmp_path / "absent" / "trackers.json", is_resumed=False)
    tracker = WandbTracker(WandbConfig(project="p"), tiny_run(), ids, tmp_path)
    with pytest.raises(FileNotFoundError):
        tracker.start(0)
    (tmp_path / "absent").mkdir()
    tracker.start(0)
    assert len(fake.inits) == 1 and ids.read("observe.wandb online /p") == "run1"


def test_old_wandb_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setattr(fake, "login", lambda: True)
    monkeypatch.setattr(fake, "__version__", "0.20.1", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    ids = RunIds(tmp_path / "trackers.json", is_resumed=False)
    with pytest.raises(ConfigError, match=r"needs wandb 0\.31 or newer, and 0\.20\.1 is installed"):
        WandbTracker(WandbConfig(project="p"), tiny_run(), ids, tmp_path)


def write_steps(folder: Path, steps: range, *, is_resumed: bool, **config: Any) -> None:
    """Send rows of some steps with a W&B tracker."""
    ids = RunIds(folder / "trackers.json", is_resumed=is_resumed)
    wandb = WandbConfig(project="p", **config)
    thread = TrackerThread(WandbTracker(wandb, tiny_run(), ids, folder), step=steps.start - 1)
    for step in steps:
        thread.put({"step": step, "loss": float(step), "name": "text", "nan": float("nan")})
    thread.close(failed=False, seconds=60)


def test_wandb_gets_the_settings_and_finite_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    write_steps(tmp_path, range(1, 3), is_resumed=False, tags=("a", "b"), group="g")
    assert fake.rows == [("run1", 1, {"loss": 1.0}), ("run1", 2, {"loss": 2.0})]
    (options,) = fake.inits
    assert (options["project"], options["name"], options["group"]) == ("p", "tiny", "g")
    assert (options["tags"], options["mode"], options["dir"]) == (
        ("a", "b"),
        "online",
        str(tmp_path),
    )
    assert options["config"]["train"]["steps"] == 8
    assert json.loads((tmp_path / "trackers.json").read_text()) == {
        "observe.wandb online /p": "run1"
    }


@pytest.mark.parametrize(
    ("can_rewind", "runs"), [(True, ["run1", "run1"]), (False, ["run1", "run4"])]
)
def test_resumed_run_continues_the_wandb_run_without_duplicate_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_rewind: bool, runs: list[str]
) -> None:
    """Steps 3 and 4 were sent and then lost in a crash, so that W&B must go back to step 2."""
    fake = FakeWandb(can_rewind=can_rewind)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    write_steps(tmp_path, range(1, 5), is_resumed=False)
    write_steps(tmp_path, range(3, 5), is_resumed=True)
    assert [run for run, step, _ in fake.rows if step == 3] == runs
    assert fake.inits[1]["id"] == "run1"
    assert fake.inits[2]["resume_from"] == "run1?_step=2"
    if not can_rewind:
        assert fake.inits[3]["config"]["resumed_from"] == "run1"


def test_run_without_later_steps_continues_the_wandb_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    write_steps(tmp_path, range(1, 3), is_resumed=False)
    write_steps(tmp_path, range(3, 5), is_resumed=True)
    assert [(run, step) for run, step, _ in fake.rows] == [("run1", step) for step in range(1, 5)]
    write_steps(tmp_path, range(1, 2), is_resumed=False)  # the checkpoints were deleted
    assert fake.rows[-1][0] == "run3"


def test_missing_wandb_login_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(api_key=None))
    with caplog.at_level(logging.WARNING):
        write_steps(tmp_path, range(1, 3), is_resumed=False)
    assert caplog.messages[0].startswith("observe.wandb: cannot be reached (not logged in).")
    assert "Log in with `wandb login`, or set observe.wandb.mode=offline." in caplog.messages[0]
    assert "2 rows of metrics were not sent" in caplog.messages[1]
    caplog.clear()
    write_steps(tmp_path, range(1, 3), is_resumed=False, mode="offline")  # needs none
    assert not caplog.messages


def install_mlflow(monkeypatch: pytest.MonkeyPatch, client: object) -> None:
    """Install a fake of the mlflow package; `client`: in place of its client class."""
    fake: Any = types.ModuleType("mlflow")
    fake.__spec__ = ModuleSpec("mlflow", None)
    fake.MlflowClient = client
    fake.entities = types.SimpleNamespace(
        Metric=lambda key, value, timestamp, step: (key, value, step),
        Param=lambda key, value: (key, value),
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)


def test_failed_request_does_not_create_another_mlflow_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server accepts no parameters; the run is created once and gets the metrics."""
    client, rows = MagicMock(), []

    def log_batch(run_id: str, metrics: Any = (), params: Any = ()) -> None:
        if params:
            raise ConnectionError("too large")
        rows.extend(metrics)

    client.create_run.return_value.info.run_id = "r1"
    client.log_batch = log_batch
    install_mlflow(monkeypatch, lambda tracking_uri: client)
    config = MlflowConfig(tracking_uri="http://localhost:5000")
    ids = RunIds(tmp_path / "trackers.json", is_resumed=False)
    thread = TrackerThread(MlflowTracker(config, tiny_run(), ids), step=0, retry_seconds=0)
    for message in ({"step": 1, "loss": 0.5}, 0, {"step": 1, "loss": 0.5}):
        thread.put(message)
    with caplog.at_level(logging.WARNING):
        thread.close(failed=False, seconds=60)
    assert client.create_run.call_count == 1
    assert rows == [("loss", 0.5, 1)] * 2
    assert caplog.messages == [
        "observe.mlflow: the parameters of the run were not sent (too large)."
    ]
    assert json.loads((tmp_path / "trackers.json").read_text()) == {
        "observe.mlflow http://localhost:5000 megalith": "r1"
    }


def test_mlflow_gets_parameters_and_metrics_in_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[tuple[str, list[Any], list[Any]]] = []
    events: list[tuple[str, ...]] = []

    class Client:
        def __init__(self, tracking_uri: str) -> None:
            events.append(("connect", tracking_uri))

        def get_experiment_by_name(self, name: str) -> None:
            return None

        def create_experiment(self, name: str) -> str:
            return f"id of {name}"

        def create_run(self, experiment: str, run_name: str) -> Any:
            events.append(("create", experiment, run_name))
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))

        def update_run(self, run_id: str, status: str) -> None:
            events.append((status, run_id))

        def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
            batches.append((run_id, [*metrics], [*params]))

        def set_tag(self, run_id: str, key: str, value: str) -> None:
            events.append((key, value))

        def set_terminated(self, run_id: str, status: str) -> None:
            events.append((status, run_id))

    install_mlflow(monkeypatch, Client)
    monkeypatch.setattr(MlflowTracker, "max_metrics", 3)
    config = MlflowConfig(tracking_uri="http://localhost:5000")
    for is_resumed, steps in ((False, (1, 2)), (True, (3, 4))):
        ids = RunIds(tmp_path / "trackers.json", is_resumed=is_resumed)
        run = replace(tiny_run(), callbacks={"a*b": {"field": 1}})
        thread = TrackerThread(MlflowTracker(config, run, ids), step=steps[0] - 1)
        for step in steps:
            thread.put({"step": step, "loss": 0.5, "lr_a*b": 1})
        thread.put(Path("step_0000002"))
        thread.close(failed=is_resumed, seconds=60)
    params = dict(pair for _, _, batch in batches for pair in batch)
    assert params["callbacks.a_b.field"] == "1"
    assert params["train.global_batch_size"] == "12"
    assert max(len(batch) for _, _, batch in batches) == 100
    metrics = [batch for _, batch, _ in batches if batch]
    assert max(map(len, metrics)) <= 3
    expected = [
        (name, value, s) for s in (1, 2, 3, 4) for name, value in (("loss", 0.5), ("lr_a_b", 1.0))
    ]
    assert [metric for batch in metrics for metric in batch] == expected
    assert events == [
        ("connect", "http://localhost:5000"),
        ("create", "id of megalith", "tiny"),
        ("checkpoint", "step_0000002"),
        ("FINISHED", "r1"),
        ("connect", "http://localhost:5000"),
        ("RUNNING", "r1"),
        ("checkpoint", "step_0000002"),
        ("FAILED", "r1"),
    ]


@pytest.mark.parametrize(
    ("setting", "module", "package"),
    [("observe.wandb", "wandb", "wandb"), ("observe.mlflow", "mlflow", "mlflow-skinny")],
)
def test_missing_package_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, module: str, package: str
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    wandb = WandbConfig(project="p") if module == "wandb" else None
    mlflow = MlflowConfig(tracking_uri="http://x") if module == "mlflow" else None
    config = ObserveConfig(wandb=wandb, mlflow=mlflow)
    with pytest.raises(ConfigError, match=f"{setting} is set and needs the package {package}. Run"):
        build_trackers(config, tiny_run(), tmp_path, is_resumed=False)


def test_address_that_mlflow_does_not_support_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install_mlflow(monkeypatch, MagicMock(side_effect=RuntimeError("no store of this scheme")))
    config = ObserveConfig(mlflow=MlflowConfig(tracking_uri="databricks"))
    (tracker,) = build_trackers(config, tiny_run(), tmp_path, is_resumed=False)
    thread = TrackerThread(tracker, step=0)
    thread.put({"step": 1, "loss": 0.5})
    with caplog.at_level(logging.WARNING):
        thread.close(failed=False, seconds=60)
    text = "observe.mlflow: cannot be reached (no store of this scheme)."
    assert caplog.messages[0].startswith(text)
    assert caplog.messages[0].endswith(
        "Check observe.mlflow.tracking_uri, and the credentials of the server."
    )
    assert caplog.messages[1].startswith("observe.mlflow: 1 rows of metrics were not sent")


@pytest.mark.parametrize("flush_seconds", [30.0, 0.0])
def test_wandb_ends_in_time_and_uploads_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush_seconds: float
) -> None:
    """W&B's exit handler has the same limit, for which 0 would mean none."""
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = ObserveConfig(wandb=WandbConfig(project="p"), flush_seconds=flush_seconds)
    (tracker,) = build_trackers(config, tiny_run(), tmp_path, is_resumed=False)
    tracker.start(0)
    settings = fake.inits[0]["settings"]
    assert 0 < settings["finish_timeout"] <= max(flush_seconds, 0.1)
    assert settings["disable_git"] and settings["disable_code"] and settings["x_disable_meta"]
    assert settings["x_save_requirements"] is False


@pytest.mark.parametrize("given", [None, "by the user"])
def test_vendors_get_no_reports_unless_the_user_enables_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    expected = {"WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    for name in expected:
        monkeypatch.setenv(name, given or "")
        if given is None:
            monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    install_mlflow(monkeypatch, MagicMock())
    config = ObserveConfig(
        wandb=WandbConfig(project="p"), mlflow=MlflowConfig(tracking_uri="http://x")
    )
    build_trackers(config, tiny_run(), tmp_path, is_resumed=False)
    assert {name: os.environ[name] for name in expected} == {
        name: given or value for name, value in expected.items()
    }


def test_run_that_is_resumed_with_another_entity_or_mode_gets_a_new_wandb_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    write_steps(tmp_path, range(1, 3), is_resumed=False, mode="offline")
    write_steps(tmp_path, range(3, 5), is_resumed=True)
    write_steps(tmp_path, range(5, 7), is_resumed=True, entity="team")
    assert [run for run, _, _ in fake.rows] == ["run1", "run1", "run2", "run2", "run3", "run3"]
    assert all("id" not in options for options in fake.inits)

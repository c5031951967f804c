"""W&B and MLflow get the rows of metrics.jsonl, and log messages have levels and a file per
rank."""

import json
import logging
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.config.train import TrainRun
from megalith.errors import CheckpointError
from megalith.observe import trackers
from megalith.observe.metrics import read_metrics
from megalith.observe.trackers import TrackerThread
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.rules.run import run_problems
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.callbacks.base import Outcome
from megalith.train.callbacks.metrics import ExperimentTrackers
from megalith.train.loop import _open_log, run_training
from megalith.train.run_folder import RunFolder
from tests.observe.test_trackers import FakeTracker, FakeWandb

CPU = torch.device("cpu")
SHORT = {"train.steps": "2", "train.eval_steps": "0"}


def train(path: Path, settings: dict[str, str]) -> None:
    """Run the tiny run on one process."""
    run_training(tiny_run(settings), RunFolder(path), build_single_rank_mesh(), CPU, show=False)


def test_wandb_gets_the_rows_of_the_metrics_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train(tmp_path, SHORT | {"observe.wandb.project": "p"})
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(step, values["loss"]) for _, step, values in fake.rows] == [
        (row["step"], row["loss"]) for row in rows
    ]


def test_trackers_end_at_the_same_time() -> None:
    """The wait for the first one is not added to that for the second one."""
    second_has_ended = threading.Event()

    class First(FakeTracker):
        def finish(self, *, failed: bool) -> None:
            self.events.append(second_has_ended.wait(60))

    class Second(FakeTracker):
        def finish(self, *, failed: bool) -> None:
            second_has_ended.set()

    first, callback = First(), ExperimentTrackers()
    callback._run = types.SimpleNamespace(config=tiny_run({"observe.flush_seconds": "60"}))  # type: ignore[assignment]
    callback._threads = [TrackerThread(tracker, step=0) for tracker in (first, Second())]
    callback.on_end(Outcome("done", 1))
    assert first.events == [("start", 0), True]


def test_tracker_without_package_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"observe.mlflow is set and needs the package"):
        train(tmp_path, SHORT | {"observe.mlflow.tracking_uri": "http://localhost:5000"})


@pytest.mark.slow
def test_real_trackers_record_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B offline, and MLflow in a folder; both packages are optional."""
    pytest.importorskip("wandb")
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    settings = {"observe.wandb.project": "p", "observe.wandb.mode": "offline"}
    settings |= {"observe.mlflow.tracking_uri": uri}
    train(tmp_path / "run", SHORT | settings)
    train(tmp_path / "run", SHORT | settings | {"train.steps": "4"})
    assert len(list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))) == 2
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("megalith")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("tiny", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "loss")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(m.step, m.value) for m in history] == [(row["step"], row["loss"]) for row in rows]
    assert run.data.params["train.global_batch_size"] == "12"
    assert run.data.tags["checkpoint"].endswith("step_0000004")


def _train_rank(rank: int, world: int, run: TrainRun, path: Path) -> None:
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    run_training(run, RunFolder(path), mesh, CPU, show=False)


def test_levels_and_files_of_log_messages(tmp_path: Path) -> None:
    settings = SHORT | {
        "parallel.tp": "2",
        "observe.log_ranks": "true",
        "observe.log_format": "json",
    }
    settings |= {
        "observe.log_level": "WARNING",
        "observe.log_levels": "megalith.train.callbacks=INFO",
    }
    run_ranks(_train_rank, 2, tiny_run(settings), tmp_path)
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (tmp_path / "log.txt").read_text().splitlines()
    ]
    names = {line["logger"].removeprefix("megalith.train.callbacks.") for line in lines}
    assert names == {"health", "memory"}
    assert {line["level"] for line in lines} == {"INFO"}
    assert (tmp_path / "logs" / "rank_00001.txt").read_text()


def test_warnings_of_a_rank_with_a_file_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As they do without a file, through Python's own handler."""
    run, folder = tiny_run({"observe.log_ranks": "true"}), RunFolder(tmp_path)
    with _open_log(folder, run, 1):
        logging.getLogger("megalith.train").warning("short split")
    assert capsys.readouterr().err == "short split\n"
    assert "short split" in folder.rank_log(1).read_text()


@pytest.mark.parametrize("text", ["megalith.train", "torch=INFO", "megalith=info", "=INFO"])
def test_invalid_log_levels_are_rejected(text: str) -> None:
    (problem,) = run_problems(tiny_run({"observe.log_levels": text}), 1)
    assert problem.startswith(f"observe.log_levels={text}: expected NAME=LEVEL")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"observe.wandb.project": " "}, "observe.wandb.project=' ': W&B stores each run in a pro"),
        (
            {"observe.mlflow.tracking_uri": "http://x", "observe.mlflow.experiment": ""},
            "observe.mlflow.experiment='': MLflow stores each run in an experiment. Use a name",
        ),
        *(
            (
                {"observe.mlflow.tracking_uri": uri},
                f"observe.mlflow.tracking_uri={uri}: expected an address with a scheme of http, ",
            )
            for uri in ("", "localhost:5000", "http://", "ftp://x", "http://x:port", "http://[::1")
        ),
    ],
)
def test_invalid_settings_of_trackers_are_rejected(settings: dict[str, str], message: str) -> None:
    (problem,) = run_problems(tiny_run(settings), 1)
    assert problem.startswith(message)


@pytest.mark.parametrize(
    "uri",
    ["https://host/mlflow", "http://host/a@b", "file:///data/a@b", "sqlite:///m.db", "databricks"],
)
def test_addresses_of_mlflow_are_accepted(uri: str) -> None:
    assert not run_problems(tiny_run({"observe.mlflow.tracking_uri": uri}), 1)


@pytest.mark.parametrize(
    "uri",
    ["http://user:secret@host:5000", "user:secret@host:5000", "http://user:sec@ret@host:5000"],
)
def test_credentials_in_a_tracking_uri_are_rejected_and_not_printed(uri: str) -> None:
    (problem,) = run_problems(tiny_run({"observe.mlflow.tracking_uri": uri}), 1)
    assert problem.startswith("observe.mlflow.tracking_uri=***@host:5000: credentials in the add")
    assert "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" in problem
    assert "sec" not in problem


def test_query_of_a_tracking_uri_is_rejected_and_not_printed() -> None:
    uri = "http://host:5000/?token=secret"
    (problem,) = run_problems(tiny_run({"observe.mlflow.tracking_uri": uri}), 1)
    assert problem.startswith("observe.mlflow.tracking_uri=http://host:5000/?***: credentials in")
    assert "MLFLOW_TRACKING_TOKEN" in problem and "secret" not in problem


def test_error_of_the_trackers_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: TrackerThread, message: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(TrackerThread, "put", fail)
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    train(tmp_path, SHORT | {"observe.wandb.project": "p"})
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == 2
    log = (tmp_path / "log.txt").read_text()
    assert "callback ExperimentTrackers failed in on_log at step 1: RuntimeError('planted')" in log

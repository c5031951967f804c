"""Callbacks: requests and errors of one rank reach all ranks, state survives a restart, and names
that cannot be loaded are rejected."""

import logging
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch

from megalith.checkpoint.load import open_checkpoint
from megalith.checkpoint.save import SaveReport
from megalith.cli.arguments import split_overrides
from megalith.config.fields import Ge
from megalith.config.train import TrainRun, load_run
from megalith.config.tree import apply_overrides
from megalith.data.loader import StepBatches
from megalith.errors import CallbackError, CheckpointError, ConfigError
from megalith.observe.metrics import read_metrics
from megalith.observe.timers import SECTION_LEVELS, Timers
from megalith.parallel.grad_sync import ShardedParam
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.rules.run import run_problems
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.callbacks import replicas
from megalith.train.callbacks.base import (
    Callback,
    CallbackList,
    FinishedStep,
    Outcome,
    RunView,
    StepMetrics,
    _describe_requesters,
    configure_callbacks,
    load_callbacks,
)
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder
from megalith.train.step import StepRequest
from megalith.train.suites import SuiteResults
from megalith.train.trainer import build_trainer

CPU = torch.device("cpu")
EXAMPLE = Path(__file__).parents[2] / "examples" / "callback.py"


def train(path: Path, settings: Mapping[str, str], *callbacks: Callback) -> Outcome:
    """Run the tiny run on one process, with settings changed."""
    run, mesh = tiny_run(settings), build_single_rank_mesh()
    return run_training(run, RunFolder(path), mesh, CPU, show=False, callbacks=callbacks)


class Misbehaving(Callback):
    """Raises an error, or requests to stop, after one step on one rank."""

    def __init__(self, rank: int, *, step: int = 3, action: str = "raise") -> None:
        self.rank, self.step, self.action = rank, step, action
        self.num_calls = 0
        self.essential = action == "raise"

    def on_start(self, run: RunView) -> None:
        self.run = run

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> StepRequest | None:
        self.num_calls += 1
        if finished.step != self.step or self.run.mesh.world.rank != self.rank:
            return None
        if self.action == "stop":
            return StepRequest.STOP
        raise ZeroDivisionError("planted")


def _train_rank(rank: int, world: int, run: TrainRun, path: Path, action: str) -> str:
    """Train with a callback that misbehaves on rank 1; return how the run ended on this rank."""
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    callback = Misbehaving(1, action=action)
    try:
        outcome = run_training(run, RunFolder(path), mesh, CPU, show=False, callbacks=[callback])
    except CallbackError as error:
        return f"{callback.num_calls} {error}"
    return f"{callback.num_calls} {outcome.kind} at {outcome.step}: {outcome.reason}"


TWO_RANKS = {"parallel.tp": "2", "train.eval_steps": "0", "checkpoint.every": "100"}


def test_error_of_an_essential_callback_on_one_rank_ends_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(_train_rank, 2, tiny_run(TWO_RANKS), tmp_path, "raise")
    text = (
        "rank 1: callback Misbehaving failed in after_step at step 3: ZeroDivisionError('planted')"
    )
    assert first.startswith(f"4 {text}")
    assert second.startswith(f"3 {text}")  # it was not called again
    assert (tmp_path / "checkpoints" / "step_0000004" / "manifest.json").exists()


def test_failure_of_a_callback_on_another_rank_is_logged_by_rank_0(tmp_path: Path) -> None:
    run = tiny_run(TWO_RANKS | {"train.steps": "4"})
    reports = run_ranks(_train_rank, 2, run, tmp_path, "ignore")
    assert reports == ["4 done at 4: ", "3 done at 4: "]
    text = (
        "WARNING megalith.train.callbacks.base: rank 1: callback Misbehaving failed in after_step "
        "at step 3: ZeroDivisionError('planted'). The run continued without it."
    )
    assert text in (tmp_path / "log.txt").read_text()


def test_request_to_stop_on_one_rank_stops_all_ranks_at_the_same_step(tmp_path: Path) -> None:
    first, second = run_ranks(_train_rank, 2, tiny_run(TWO_RANKS), tmp_path, "stop")
    assert first == "4 stopped at 4: another rank stopped"
    assert second == "4 stopped at 4: requested by callback Misbehaving"


def test_run_continues_without_a_callback_that_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = Misbehaving(0)
    callback.essential = False
    with caplog.at_level(logging.WARNING):
        assert train(tmp_path, {}, callback) == Outcome("done", 8)
    assert callback.num_calls == 3
    text = "callback Misbehaving failed in after_step at step 3"
    assert sum(text in record.getMessage() for record in caplog.records) == 1


class WrongTypes(Callback):
    """Returns or requests a value of a wrong type in one event."""

    def __init__(self, event: str) -> None:
        self.event, self.num_steps = event, 0

    def on_start(self, run: RunView) -> None:
        self.run = run

    def before_step(self, step: int, batches: StepBatches) -> Any:
        if self.event == "request":
            self.run.request("stop")  # type: ignore[arg-type]  # that is tested
        return True if self.event == "before_step" else None

    def after_backward(self, local_params: Sequence[ShardedParam]) -> Any:
        return 3 if self.event == "after_backward" else None

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> Any:
        self.num_steps += 1
        if self.event == "metrics":
            metrics["loss"] = torch.tensor(1.0)  # type: ignore[assignment]  # that is tested
        return True if self.event == "after_step" else None

    def on_log(self, metrics: Mapping[str, Any]) -> Any:
        return "logged" if self.event == "on_log" else None

    def state_dict(self) -> Any:
        states = {"state_dict": [1], "JSON": {"sum": torch.tensor(1.0)}}
        return states.get(self.event, {})


@pytest.mark.parametrize(
    ("event", "method", "message", "num_steps"),
    [
        (
            "request",
            "before_step",
            "'stop' was requested. Use a StepRequest, such as StepRequest.SAVE",
            0,
        ),
        ("before_step", "before_step", "before_step returned True. Return a StepBatches or", 0),
        ("after_backward", "after_backward", "returned 3. Return a StepRequest or None", 0),
        ("after_step", "after_step", "returned True. Return a StepRequest or None", 1),
        ("metrics", "after_step", "metrics['loss'] is not a number, a text, a list of counts", 1),
        ("on_log", "on_log", "returned 'logged'. Return a StepRequest or None", 1),
        ("state_dict", "state_dict", "state_dict returned [1]. Return a dict or None", 2),
        ("JSON", "state_dict", "Object of type Tensor is not JSON serializable", 2),
    ],
)
def test_run_continues_without_a_callback_that_returns_a_wrong_type(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    event: str,
    method: str,
    message: str,
    num_steps: int,
) -> None:
    callback = WrongTypes(event)
    settings = {"train.steps": "3", "train.eval_steps": "0", "checkpoint.every": "2"}
    with caplog.at_level(logging.WARNING):
        assert train(tmp_path, settings, callback) == Outcome("done", 3)
    (text,) = [record.getMessage() for record in caplog.records if event in record.getMessage()]
    assert f"callback WrongTypes failed in {method} at step" in text
    assert message in text
    assert callback.num_steps == num_steps
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(isinstance(row["loss"], float) for row in rows)


class Recorder(Callback):
    """Counts steps over restarts, records every event, and requests an evaluation and a save."""

    def __init__(self) -> None:
        self.count = 0
        self.events: list[str] = []

    def on_start(self, run: RunView) -> None:
        self.run = run
        self.events.append(f"start {run.step}")

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> StepRequest | None:
        self.count += 1
        metrics["count"] = self.count
        return StepRequest.EVALUATE | StepRequest.SAVE if finished.step == 1 else None

    def after_evaluate(self, results: SuiteResults, metrics: StepMetrics) -> None:
        self.events.append(f"evaluate {metrics['step']}")
        metrics["eval_count"] = self.count

    def after_save(self, report: SaveReport) -> None:
        self.events.append(f"save {report.path.name}")

    def on_end(self, outcome: Outcome) -> None:
        self.events.append(f"end {outcome.step}")

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


def test_requests_before_a_discarded_step_are_sent_again() -> None:
    callbacks, batches = CallbackList([]), StepBatches([], 0)
    callbacks.request(StepRequest.SAVE)
    callbacks.before_step(1, batches)
    callbacks.request(StepRequest.SKIP)
    assert callbacks.after_backward([]) == StepRequest.SAVE | StepRequest.SKIP
    callbacks.restore_requests()
    callbacks.before_step(1, batches)
    assert callbacks.after_backward([]) == StepRequest.SAVE
    callbacks.request(StepRequest.STOP)
    assert callbacks.before_skipped_step(2) == StepRequest.STOP
    callbacks.restore_requests()
    assert callbacks.before_skipped_step(2) == StepRequest.STOP
    callbacks.before_step(3, batches)
    assert callbacks.after_backward([]) == StepRequest.NONE


def test_times_of_discarded_steps_do_not_count() -> None:
    timers, callbacks = Timers(level=1), CallbackList([])
    view: Any = types.SimpleNamespace(
        prepared=types.SimpleNamespace(
            callback_states={}, trainer=types.SimpleNamespace(timers=timers)
        ),
        config=tiny_run({"observe.timer_level": "1"}),
        mesh=build_single_rank_mesh(),
        step=0,
        is_writer=True,
        is_logged=lambda step: step == 2,
    )
    callbacks.on_start(view)
    steps: list[Any] = [types.SimpleNamespace(step=step) for step in (1, 2)]
    timers.add("data", 7.0)
    callbacks.after_step(steps[0])
    callbacks.after_rollback(0)
    timers.add("data", 1.0)
    callbacks.after_step(steps[0])
    assert callbacks.after_step(steps[1]) == {"time_data_ms": 500.0}


def test_requests_take_effect_after_the_next_step_and_state_survives_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"train.eval_every": "none", "checkpoint.every": "100", "checkpoint.keep": "none"}
    stop = Misbehaving(0, step=3, action="stop")
    recorder = Recorder()
    assert train(tmp_path, settings, recorder, stop).step == 4
    assert recorder.events == [
        "start 0",
        "evaluate 2",
        "save step_0000002",
        "save step_0000004",
        "end 4",
    ]
    resumed = Recorder()
    assert train(tmp_path, settings, resumed) == Outcome("done", 8)
    assert resumed.events == ["start 4", "evaluate 8", "save step_0000008", "end 8"]
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["count"] for row in rows if "count" in row] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row["eval_count"] for row in rows if "eval_count" in row] == [2, 8]
    saved = open_checkpoint(tmp_path / "checkpoints" / "step_0000008").state
    assert saved["callbacks"].keys() == {"FaultDetector", "Recorder"}
    assert saved["callbacks"]["Recorder"] == {"count": 8}
    with caplog.at_level(logging.WARNING):
        train(tmp_path, settings | {"train.steps": "9"})
    assert "state of callbacks that this run does not use: Recorder" in caplog.text
    saved = open_checkpoint(tmp_path / "checkpoints" / "step_0000009").state
    assert saved["callbacks"].keys() == {"FaultDetector"}  # as in a run without other callbacks


def test_example_logs_gradient_norms_and_stops_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLE.parents[1])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert len(EXAMPLE.read_text().splitlines()) <= 60
    norms, early_stop = load_callbacks(
        ["examples.callback:LayerGradientNorms", "examples.callback:EarlyStop"]
    )
    early_stop.load_state_dict({"best": 0.0, "num_worse": 1})  # no loss is below 0
    settings = {"train.eval_every": "1", "train.eval_steps": "1", "optim.clip_grad": "0"}
    assert train(tmp_path, settings, norms, early_stop) == Outcome(
        "stopped", 3, "requested by callback EarlyStop"
    )
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "loss" in row]
    for row in rows:
        layers = [value for name, value in row.items() if name.startswith("grad_norm_layers_")]
        assert len(layers) == tiny_run({}).model.num_layers
        assert 0 < sum(norm**2 for norm in layers) < row["grad_norm"] ** 2


PLUGIN = """
from megalith.train.callbacks.base import Callback
class Good(Callback): ...
class Needs(Callback):
    def __init__(self, size): ...
class Other: ...
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plugin_of_test", "does not name a class. Use --callback package.module:Class"),
        ("plugin_of_tset:Good", "there is no module plugin_of_tset. Did you mean plugin_of_test"),
        ("megalith.trian:Good", "there is no module megalith.trian. Did you mean megalith.train"),
        ("plugin_of_test:God", "plugin_of_test has no God. Did you mean Good"),
        ("plugin_of_test:God", "Use one of its callbacks: Good, Needs."),
        (".plugin_of_test:Good", "Use --callback plugin_of_test:Good"),
        ("plugin_of_test:Other", "plugin_of_test:Other is not a subclass of megalith.train.callb"),
        ("plugin_of_test:Needs", "without arguments: Needs requires size. Set defaults"),
    ],
)
def test_callback_that_cannot_be_loaded_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    (tmp_path / "plugin_of_test.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert type(load_callbacks(["plugin_of_test:Good"])[0]).__name__ == "Good"
    with pytest.raises(ConfigError) as raised:
        load_callbacks([name])
    assert message in str(raised.value)
    del sys.modules["plugin_of_test"]


class MisspelledMethod(Callback):
    def after_stepp(self) -> None: ...


class WrongArguments(Callback):
    def after_step(self) -> None: ...  # type: ignore[override]


class NoMethod(Callback):
    after_step = None  # type: ignore[assignment]


class NamedSave(Callback):
    """Its time would be that of the section."""

    name = "save"


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (
            [MisspelledMethod()],
            "after_stepp is not called by the training loop. Did you mean",
        ),
        ([NoMethod()], "after_step=None is not a method. Define it as after_step(self, finished"),
        ([WrongArguments()], "does not accept the arguments of a callback"),
        ([Recorder(), Recorder()], "callback Recorder: two callbacks have this name"),
        ([NamedSave()], "callback save: time_save_ms is the time of a section of the step. Set"),
    ],
)
def test_callback_with_wrong_methods_or_name_is_rejected(
    callbacks: list[Callback], message: str
) -> None:
    for check in (CallbackList, partial(configure_callbacks, tiny_run())):
        with pytest.raises(ConfigError) as raised:
            check(callbacks)
        assert message in str(raised.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("package.module:Class", "Name the class on the command line: --callback package.module:C"),
        ("unknown", "train.callbacks=unknown is not an installed callback"),
    ],
)
def test_settings_name_only_installed_callbacks(name: str, message: str) -> None:
    (problem,) = run_problems(tiny_run({"train.callbacks": name}), 1)
    assert message in problem


class WithSettings(Callback):
    """Stops the run after a number of steps, and records its settings."""

    @dataclass(frozen=True)
    class Config:
        """Settings of the callback."""

        steps: Annotated[int, Ge(1)] = 3
        """Steps until the run stops."""

        factor: float = 0.5
        """A number."""

        words: tuple[str, ...] = ()
        """A list."""

        loud: bool = False
        """A flag."""

    config: Config

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> StepRequest | None:
        metrics["factor"] = self.config.factor
        return StepRequest.STOP if finished.step == self.config.steps else None


def test_settings_of_a_callback_are_typed_and_part_of_the_resolved_config(tmp_path: Path) -> None:
    """Values are text on the command line, and plain data in files."""
    settings = {
        "callbacks.WithSettings.steps": "2",
        "callbacks.WithSettings.words": "[a, b]",
        "callbacks.WithSettings.loud": "true",
    }
    callback = WithSettings()
    assert train(tmp_path, settings, callback).step == 3
    assert callback.config == WithSettings.Config(steps=2, words=("a", "b"), loud=True)
    resolved = {"steps": 2, "factor": 0.5, "words": ["a", "b"], "loud": True}
    for folder in (tmp_path, tmp_path / "checkpoints" / "step_0000003"):
        assert load_run(folder / "config.yaml").callbacks == {"WithSettings": resolved}
    again = WithSettings()
    run = configure_callbacks(load_run(tmp_path / "config.yaml"), [again])
    assert (again.config, run.callbacks) == (callback.config, {"WithSettings": resolved})
    assert {row["factor"] for row in read_metrics(tmp_path / "metrics.jsonl") if "loss" in row} == {
        0.5
    }


def test_callback_without_settings_has_its_defaults_or_those_given_in_python() -> None:
    default, own = WithSettings(), WithSettings()
    own.name, own.config = "own", WithSettings.Config(factor=0.25)
    run = configure_callbacks(tiny_run({"callbacks.own.steps": "5"}), [default, own, Recorder()])
    assert default.config == WithSettings.Config()
    assert own.config == WithSettings.Config(steps=5, factor=0.25)
    assert set(run.callbacks) == {"own"}


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("WithSetings.steps", "2", "no callback of this name. Did you mean WithSettings?"),
        ("WithSettings.stps", "2", "has no such setting. Did you mean steps? Use one of callbacks"),
        ("WithSettings.steps", "0", "callbacks.WithSettings.steps=0 must be at least 1"),
        ("WithSettings.steps", "many", "callbacks.WithSettings.steps=many: expected a whole numb"),
        ("Recorder.steps", "2", "callbacks.Recorder.steps=2: the callback has no such setting"),
    ],
)
def test_wrong_settings_of_a_callback_are_rejected(setting: str, value: str, message: str) -> None:
    run = tiny_run({f"callbacks.{setting}": value})
    with pytest.raises(ConfigError) as raised:
        configure_callbacks(run, [WithSettings(), Recorder()])
    assert message in str(raised.value)


def test_settings_of_an_absent_callback_can_be_removed(tmp_path: Path) -> None:
    run = tiny_run({"callbacks.WithSettings.steps": "2"})
    with pytest.raises(ConfigError, match="callbacks.WithSettings none"):
        configure_callbacks(run, [])
    removed = apply_overrides(run, {"callbacks.WithSettings": "none"})
    assert configure_callbacks(removed, []).callbacks == {}


def test_settings_of_callbacks_are_options_of_the_command_line() -> None:
    words = ["tiny_cpu", "--callbacks.WithSettings.steps", "3", "--callbacks.WithSettings.loud=yes"]
    rest, overrides = split_overrides([*words, "--nproc", "2"], TrainRun)
    assert rest == ["tiny_cpu", "--nproc", "2"]
    run = configure_callbacks(tiny_run(overrides), [WithSettings()])
    settings = run.callbacks["WithSettings"]
    assert settings is not None
    assert (settings["steps"], settings["loud"]) == (3, True)


def test_host_time_of_callbacks_is_logged_on_request(tmp_path: Path) -> None:
    train(tmp_path, {"observe.callback_times": "true", "train.log_every": "2"}, Recorder())
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "loss" in row]
    assert len(rows) == 4
    for row in rows:
        assert row["time_Recorder_ms"] >= 0
        assert row["time_Throughput_ms"] > 0


def _section_metrics(rank: int, world: int, run: TrainRun, path: Path) -> list[dict[str, Any]]:
    """Train on one of several ranks; return the rows of steps."""
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    run_training(run, RunFolder(path), mesh, CPU, show=False)
    return [row for row in read_metrics(path / "metrics.jsonl") if "loss" in row]


def test_sections_of_a_pipeline_are_logged_with_the_extremes_over_ranks(tmp_path: Path) -> None:
    settings = {"parallel.pp": "2", "train.steps": "2", "train.log_every": "2"}
    settings |= {"observe.timer_level": "2", "checkpoint.every": "1"}
    (row,), _ = run_ranks(_section_metrics, 2, tiny_run(settings), tmp_path)
    names = {name.removeprefix("time_").removesuffix("_ms") for name in row}
    in_steps = SECTION_LEVELS.keys() - {"weight_grads", "evaluate"}
    assert in_steps | {"Throughput", "Checkpointer"} <= names
    for name in in_steps:
        times = [row[f"time_{name}_{part}"] for part in ("min_ms", "ms", "max_ms")]
        assert times == sorted(times)
        assert row[f"time_{name}_max_rank"] in (0, 1)
    assert row["time_forward_backward_ms"] > row["time_forward_ms"] > 0


def _starts_apart(rank: int, world: int) -> str:
    """Two replicas of which one has another first weight."""
    run = tiny_run({"parallel.dp": "2"})
    trainer = build_trainer(
        run, build_mesh(model_grid(run.parallel, run.model, world), rank=rank), CPU
    )
    replicas.compare_replicas(trainer)
    with torch.no_grad():
        trainer.data.weights[0][3] += rank
    try:
        replicas.compare_replicas(trainer)
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_replicas_with_different_weights_are_rejected_on_every_rank() -> None:
    for output in run_ranks(_starts_apart, 2):
        assert output.startswith("ranks [1] start from other weights than rank 0")


def test_requests_of_many_ranks_are_counted_instead_of_listed() -> None:
    gathered: list[object] = [[(StepRequest.RERUN.value, "A")] for _ in range(20)]
    gathered[3] = [(StepRequest.RERUN.value, "A"), (StepRequest.RERUN.value, "B")]
    gathered[4] = []
    text = _describe_requesters(StepRequest.RERUN, gathered, range(20))
    assert text == "callback A (19 of 20 ranks), callback B (rank 3)"
    assert _describe_requesters(StepRequest.SKIP, gathered, range(20)) == ""

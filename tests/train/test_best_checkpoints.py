"""checkpoint.best_metric: the checkpoints with the best values of an evaluation are kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalith.checkpoint.commit import BestCheckpoints
from megalith.checkpoint.manifest import list_complete_checkpoints
from megalith.checkpoint.save import SaveReport
from megalith.config.tree import Override
from megalith.errors import CheckpointError, ConfigError
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.rules.run import check_run
from megalith.testing.tiny import tiny_run
from megalith.train.callbacks import health
from megalith.train.callbacks.base import Outcome
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder

SETTINGS = {
    "train.steps": "6",
    "train.eval_every": "1",
    "train.eval_steps": "1",
    "checkpoint.every": "1",
    "checkpoint.keep": "1",
    "checkpoint.best_metric": "eval_loss",
}


@dataclass(frozen=True)
class Result:
    """Result of an evaluation with one given value."""

    value: float
    metric: str = "loss"

    def metrics(self, name: str) -> Mapping[str, float | None]:
        return {f"{name}_{self.metric}": self.value}

    def describe(self) -> str:
        return f"{self.metric} {self.value}"


def train(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    values: Sequence[float],
    more: Mapping[str, Override] | None = None,
    *,
    metric: str = "loss",
) -> Outcome:
    """Train the tiny run; step n (from 1) has the n-th value of the metric."""

    def evaluate(self: health.Evaluator, names: Sequence[str]) -> dict[str, Result]:
        return {"eval": Result(values[self._run.step - 1], metric)}

    monkeypatch.setattr(health.Evaluator, "evaluate", evaluate)
    run = tiny_run(SETTINGS | dict(more or {}))
    return run_training(
        run, RunFolder(path), build_single_rank_mesh(), torch.device("cpu"), show=False
    )


def saved_steps(path: Path) -> list[int]:
    return [*list_complete_checkpoints(path / "checkpoints")]


def test_checkpoint_with_lowest_loss_is_kept_beside_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "one", monkeypatch, (5, 2, 3, 2, float("nan"), 4))
    assert saved_steps(tmp_path / "one") == [2, 6], "of equal values the earlier step"
    two = {"checkpoint.keep_best": "2", "checkpoint.async_save": "true"}
    train(tmp_path / "two", monkeypatch, (5, 2, 3, 4, 1, 6), two)
    assert saved_steps(tmp_path / "two") == [2, 5, 6]


@pytest.mark.slow
def test_highest_accuracy_is_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracy = {"checkpoint.best_metric": "eval_acc"}
    train(tmp_path, monkeypatch, (0.1, 0.5, 0.4, 0.2, 0.2, 0.3), accuracy, metric="acc")
    assert saved_steps(tmp_path) == [2, 6]


def test_best_checkpoint_is_known_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = (5, 2, 3, 3, 3, 3)
    train(tmp_path, monkeypatch, values, {"train.max_minutes": "0"})
    while saved_steps(tmp_path)[-1] < 6:
        train(tmp_path, monkeypatch, values, {"train.max_minutes": "0"})
    assert saved_steps(tmp_path) == [2, 6]


def test_metric_that_the_evaluation_lacks_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {"checkpoint.best_metric": "eval_lost"}
    with pytest.raises(
        ConfigError, match=r"checkpoint\.best_metric=eval_lost: .* Use one of eval_loss"
    ):
        train(tmp_path, monkeypatch, (1,) * 6, wrong)


@pytest.mark.parametrize(
    "changes,text",
    [
        (
            {"checkpoint.best_metric": "test_loss"},
            r"best_metric=test_loss is not a metric of an evaluation of this run\. Use one of "
            r"\['eval_loss'\]",
        ),
        (
            {"train.eval_steps": "0", "train.eval_every": "0"},
            r"Set train\.eval_steps=10 and eval_loss",
        ),
        (
            {"train.eval_every": "4", "checkpoint.every": "3"},
            r"with train\.eval_every=4 and checkpoint\.every=3, no step before the last is both",
        ),
        (
            {"train.eval_every": "0"},
            r"with train\.eval_every=0 and checkpoint\.every=1, no step before the last is both",
        ),
    ],
)
def test_rule_rejects_metrics_of_which_no_value_is_saved(
    changes: Mapping[str, Override], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        check_run(tiny_run(SETTINGS | dict(changes)), 1)


def test_checkpoint_stays_the_best_if_a_better_step_cannot_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = health.save_checkpoint

    def fail_in_step_3(folder: Path, step: int, *arguments: Any, **options: Any) -> SaveReport:
        if step == 3:
            raise CheckpointError("the disk is full")
        return save(folder, step, *arguments, **options)

    monkeypatch.setattr(health, "save_checkpoint", fail_in_step_3)
    train(tmp_path, monkeypatch, (5, 2, 1, 4, 4, 4))
    assert saved_steps(tmp_path) == [2, 6]


def test_metric_of_an_evaluation_that_is_due_in_other_steps_is_no_error(tmp_path: Path) -> None:
    """`eval_code_loss` is not the validation's, although its name begins with `eval_`."""
    checkpointer = health.Checkpointer(None, None, None)  # type: ignore[arg-type]  # not called
    config = SimpleNamespace(
        checkpoint=SimpleNamespace(best_metric="eval_code_loss"), evaluate={"eval_code": None}
    )
    checkpointer._run = SimpleNamespace(config=config, step=3)  # type: ignore[assignment]
    checkpointer._best = BestCheckpoints("eval_code_loss", 1)
    checkpointer.after_evaluate({"eval": Result(2.0)}, {"eval_loss": 2.0})
    assert checkpointer._evaluated is None
    with pytest.raises(ConfigError, match=r"eval_code_loss: .* Use one of eval_code_acc"):
        checkpointer.after_evaluate({"eval_code": Result(2.0, "acc")}, {"eval_code_acc": 2.0})

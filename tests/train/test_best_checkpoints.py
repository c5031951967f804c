"""checkpoint.best_metric: the checkpoints with the best values of an evaluation are kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megalith.checkpoint.manifest import list_complete_checkpoints
from megalith.config.tree import Override
from megalith.errors import ConfigError
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

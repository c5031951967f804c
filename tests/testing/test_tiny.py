"""The tiny run that other tests train."""

from pathlib import Path

import pytest

from megalith.config.train import TrainRun
from megalith.config.tree import load_yaml
from megalith.errors import ConfigError
from megalith.rules.run import run_problems
from megalith.testing.tiny import tiny_run, tiny_yaml


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_the_tiny_run_fits_any_small_world(world: int) -> None:
    assert run_problems(tiny_run(), world) == []


def test_settings_change_by_their_dotted_names() -> None:
    assert tiny_run({"train.steps": "3", "parallel.tp": "2"}).train.steps == 3
    with pytest.raises(ConfigError, match="Did you mean"):
        tiny_run({"train.step": "3"})


def test_the_file_describes_the_same_run(tmp_path: Path) -> None:
    assert load_yaml(tiny_yaml(tmp_path / "run.yaml", {"seed": "7"}), TrainRun) == tiny_run(
        {"seed": "7"}
    )

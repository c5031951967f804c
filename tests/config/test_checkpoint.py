"""Checkpoint settings: defaults and rules."""

import pytest

from megalith.config.checkpoint import CheckpointConfig, LoadMode, checkpoint_problems
from megalith.config.tree import from_dict, to_dict


def test_missing_and_unexpected_keys_are_errors_by_default() -> None:
    defaults = CheckpointConfig()
    assert (
        defaults.missing_keys,
        defaults.unexpected_keys,
        defaults.skip,
        defaults.allow_model_changes,
    ) == (
        "error",
        "error",
        (),
        (),
    )
    assert not defaults.prefer_weights and checkpoint_problems(defaults) == []
    assert from_dict(CheckpointConfig, to_dict(defaults)) == defaults


@pytest.mark.parametrize(
    "name", ["model.rope", "model.rope.theta", "model.mla.kv_rank", "model.norm_eps"]
)
def test_model_settings_and_sections_can_be_allowed_to_change(name: str) -> None:
    assert checkpoint_problems(CheckpointConfig(allow_model_changes=(name,))) == []


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("rope.theta", "Use model.rope.theta."),
        ("model.rope.teta", "Did you mean rope.theta"),
        ("model", "there is no such setting"),
        ("train.steps", "there is no such setting"),
    ],
)
def test_unknown_name_in_allow_model_changes_is_rejected(name: str, advice: str) -> None:
    (text,) = checkpoint_problems(CheckpointConfig(allow_model_changes=(name,)))
    assert (
        text.startswith(f"checkpoint.allow_model_changes={name}: expected names of model settings")
        and advice in text
    )


def test_skip_needs_load() -> None:
    (text,) = checkpoint_problems(CheckpointConfig(skip=("head.*",)))
    assert "checkpoint.skip=['head.*'] needs checkpoint.load, which is unset" in text
    assert checkpoint_problems(CheckpointConfig(skip=("head.*",), load="first")) == []


@pytest.mark.parametrize("take", ["progress", "all"])
def test_load_mode_needs_load_and_all_weights(take: LoadMode) -> None:
    (text,) = checkpoint_problems(CheckpointConfig(load_mode=take))
    assert (
        f"checkpoint.load_mode={take} needs checkpoint.load, which is unset. Set "
        "checkpoint.lo" in text
    )
    (text,) = checkpoint_problems(CheckpointConfig(load_mode=take, load="first", skip=("head.*",)))
    assert (
        f"checkpoint.load_mode={take} with checkpoint.skip=['head.*']: a run that continues at "
        "a step must load all weights" in text
    )
    assert checkpoint_problems(CheckpointConfig(load_mode=take, load="first")) == []

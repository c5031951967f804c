"""Renamed settings: errors that name the successor, and translation of stored settings."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megalith.config.fields import (
    find_setting_successor,
    hint_at,
    literal_values,
    read_renamed_settings,
    translate_stored_settings,
)
from megalith.config.train import CONFIG_FILE, TrainRun, load_run
from megalith.config.tree import apply_overrides, flatten, to_dict
from megalith.errors import ConfigError
from megalith.testing.tiny import tiny_run

TABLE = read_renamed_settings()
RENAMED_VALUES = [
    (path, old, new) for path, values in TABLE.values.items() for old, new in values.items()
]
ALL_SECTIONS = {
    "model.moe.num_experts": "4",
    "model.moe.ffn_hidden_size": "6",
    "model.mtp.num_layers": "1",
    "kernels.norm": "numba",
    "kernels.attention": "cpu_tiled",
}


def nest(settings: dict[str, Any]) -> dict[str, Any]:
    """Convert dotted names to nested mappings."""
    tree: dict[str, Any] = {}
    for path, value in settings.items():
        *parents, leaf = path.split(".")
        section = tree
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    return tree


def write_with_changes(file: Path, changes: dict[str, Any]) -> Path:
    """Write a complete run with `changes`, which replace their successors, to a YAML file."""
    settings = flatten(tiny_run(ALL_SECTIONS))
    for path in changes:
        settings.pop(find_setting_successor(path) or path, None)
    file.write_text(yaml.safe_dump(nest(settings | changes)))
    return file


def test_every_successor_is_a_setting_or_a_value_of_one() -> None:
    for old, new in TABLE.settings.items():
        assert hint_at(TrainRun, old) is None, f"{old} is still a setting"
        assert hint_at(TrainRun, new) is not None, f"{new} is not a setting"
    for path, old, new in RENAMED_VALUES:
        allowed = literal_values(hint_at(TrainRun, path))
        assert old not in allowed, (path, old)
        assert not allowed or new in allowed, (path, new)


def test_a_renamed_setting_in_a_yaml_file_is_an_error_that_names_its_successor(
    tmp_path: Path,
) -> None:
    for old, new in TABLE.settings.items():
        file = write_with_changes(tmp_path / "run.yaml", {old: 1})
        with pytest.raises(ConfigError) as error:
            load_run(file)
        assert f"{old}=1: this setting was renamed. Use {new}." in str(error.value), old


def test_every_setting_of_a_renamed_section_is_reported(tmp_path: Path) -> None:
    file = write_with_changes(
        tmp_path / "run.yaml", {"model.moe.balance.batch": 0.1, "model.moe.balance.z": 0.2}
    )
    with pytest.raises(ConfigError) as error:
        load_run(file)
    assert (
        "balance.batch=0.1: this setting was renamed. Use model.moe.aux_loss.batch_coeff."
        in str(error.value)
    )
    assert "balance.z=0.2: this setting was renamed. Use model.moe.aux_loss.z_loss_coeff." in str(
        error.value
    )


def test_a_renamed_value_in_a_yaml_file_is_an_error_that_names_its_successor(
    tmp_path: Path,
) -> None:
    for path, old, new in RENAMED_VALUES:
        with pytest.raises(ConfigError) as error:
            load_run(write_with_changes(tmp_path / "run.yaml", {path: old}))
        assert f"{path}={old}: this value was renamed. Use {path}={new}." in str(error.value), path


def test_stored_settings_and_values_are_translated() -> None:
    for old, new in TABLE.settings.items():
        assert translate_stored_settings(nest({old: 1})) == nest({new: 1}), old
    for path, old, new in RENAMED_VALUES:
        assert translate_stored_settings(nest({path: old})) == nest({path: new}), path
    assert translate_stored_settings({"unknown": 1}) == {"unknown": 1}


def test_a_stored_config_with_the_old_names_is_the_same_run(tmp_path: Path) -> None:
    run = tiny_run(ALL_SECTIONS)
    old_names = {new: old for old, new in TABLE.settings.items()}
    old_values = {(path, new): old for path, old, new in RENAMED_VALUES}
    stored = {
        old_names.get(path, path): old_values.get((path, value), value)
        if isinstance(value, str)
        else value
        for path, value in flatten(run).items()
    }
    assert stored["kernels.norm"] == "loops" and stored["parallel.dispatcher"] == "exchange"
    assert set(TABLE.settings) - set(stored) == {"model.moe.balance"}, "a section has no value"
    file = tmp_path / CONFIG_FILE
    file.write_text(yaml.safe_dump(nest(stored)))
    assert to_dict(load_run(file)) == to_dict(run)
    user_file = tmp_path / "run.yaml"
    user_file.write_text(yaml.safe_dump(nest(stored)))
    with pytest.raises(ConfigError, match="this setting was renamed"):
        load_run(user_file)


def test_a_renamed_value_of_an_override_is_an_error_that_names_its_successor() -> None:
    for path, old, new in RENAMED_VALUES:
        with pytest.raises(ConfigError) as error:
            apply_overrides(tiny_run(), {path: old})
        assert str(error.value) == f"{path}={old}: this value was renamed. Use {path}={new}.", path

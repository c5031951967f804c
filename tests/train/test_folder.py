"""A run keeps what decides its weights and its data; the rest may change, and is listed."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from megalith.config.train import TrainRun
from megalith.config.tree import apply_overrides
from megalith.errors import ConfigError
from megalith.recipes import resolve
from megalith.train.run_folder import (
    RunFolder,
    TokenizerFiles,
    list_changed_settings,
    read_tokenizer_files,
    remove_new_folder_on_error,
    run_folder,
    set_aside_metrics,
    write_config,
    write_parameters,
)

NO_FILES = TokenizerFiles(None, {})


def started(tmp_path: Path) -> tuple[RunFolder, TrainRun]:
    """The folder of a run that has begun."""
    run, folder = resolve("tiny_cpu"), RunFolder(tmp_path / "run")
    write_config(folder, run, read_tokenizer_files(run))
    return folder, run


def test_unchanged_settings_are_not_listed(tmp_path: Path) -> None:
    folder, run = started(tmp_path)
    assert list_changed_settings(folder, run) == []
    assert list_changed_settings(RunFolder(tmp_path / "new"), run) == []


def test_permitted_changes_are_listed(tmp_path: Path) -> None:
    folder, run = started(tmp_path)
    later = apply_overrides(run, {"train.steps": "80", "parallel.tp": "2", "schedule.lr": "5e-4"})
    lines = list_changed_settings(folder, later)
    assert "train.steps: 40 before, 80 now" in lines
    assert {line.split(":")[0] for line in lines} == {"train.steps", "parallel.tp", "schedule.lr"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model.hidden_size", "128"),
        ("seed", "7"),
        ("train.seq_len", "64"),
        ("data.mock_num_documents", "9"),
    ],
)
def test_changed_fixed_settings_are_rejected_with_both_values(
    tmp_path: Path, field: str, value: str
) -> None:
    folder, run = started(tmp_path)
    with pytest.raises(ConfigError, match=f"{field}: .* before, {value} now") as caught:
        list_changed_settings(folder, apply_overrides(run, {field: value}))
    assert "choose another folder with --run NAME" in str(caught.value)


def test_a_name_is_under_runs_and_a_path_is_a_path() -> None:
    run = resolve("tiny_cpu")
    assert run_folder(run, None).path == Path("runs/tiny_cpu")
    assert run_folder(run, "again").path == Path("runs/again")
    assert run_folder(run, "./here").path == Path("here")
    assert run_folder(run, "/tmp/there").path == Path("/tmp/there")


@pytest.mark.parametrize(
    "name", ["again", "./again", "../again", "deep/again", "/tmp/again", ".", ".."]
)
def test_trailing_slash_does_not_change_which_folder_a_run_has(name: str) -> None:
    run = resolve("tiny_cpu")
    assert run_folder(run, f"{name}/").path == run_folder(run, name).path


def test_metrics_without_a_checkpoint_are_set_aside_not_wiped(tmp_path: Path) -> None:
    folder, _ = started(tmp_path)
    assert set_aside_metrics(folder) is None
    folder.metrics.write_text('{"step": 1}\n')
    kept = set_aside_metrics(folder)
    assert kept is not None
    assert kept.name == "metrics.before-1.jsonl"
    assert not folder.metrics.exists()
    folder.metrics.write_text('{"step": 2}\n')
    again = set_aside_metrics(folder)
    assert again is not None
    assert again.name == "metrics.before-2.jsonl"
    assert kept.read_text() == '{"step": 1}\n'


def test_data_files_may_move(tmp_path: Path) -> None:
    folder, run = started(tmp_path)
    moved = apply_overrides(run, {"data.cache_path": "/elsewhere"})
    assert list_changed_settings(folder, moved) == ["data.cache_path: None before, /elsewhere now"]


def test_conversations_may_move_and_are_listed(tmp_path: Path) -> None:
    sft = resolve("sft_tiny")
    run = apply_overrides(
        sft, {"data.sft.mock_conversations": "none", "data.sft.path": "[a.jsonl]"}
    )
    folder = RunFolder(tmp_path / "run")
    write_config(folder, run, NO_FILES)
    moved = apply_overrides(run, {"data.sft.path": "[b/a.jsonl]"})
    assert list_changed_settings(folder, moved) == [
        "data.sft.path: ['a.jsonl'] before, ['b/a.jsonl'] now"
    ]


def test_equal_tokenizer_elsewhere_is_no_change_and_another_one_is_listed(tmp_path: Path) -> None:
    run = apply_overrides(
        resolve("tiny_cpu"),
        {"tokenizer.kind": "huggingface", "tokenizer.path": str(tmp_path / "a")},
    )
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text("{}")
    folder = RunFolder(tmp_path / "run")
    write_config(folder, run, read_tokenizer_files(run))
    assert "path: tokenizer/tokenizer.json" in folder.config.read_text()
    elsewhere = apply_overrides(run, {"tokenizer.path": str(tmp_path / "b")})
    assert list_changed_settings(folder, run) == list_changed_settings(folder, elsewhere) == []
    (tmp_path / "b" / "tokenizer.json").write_text("[]")
    copy = folder.tokenizer / "tokenizer.json"
    assert list_changed_settings(folder, elsewhere) == [
        f"tokenizer.path: {copy} before, {tmp_path / 'b'} now"
    ]


def fail_after(folder: RunFolder, *steps: Callable[[], object]) -> None:
    """A start that does some things and is refused."""
    with pytest.raises(ConfigError, match="refused"), remove_new_folder_on_error(folder):
        for step in steps:
            step()
        raise ConfigError("refused")


def test_failed_start_removes_new_folder_only_before_config_is_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "one")
    log = partial(folder.log.write_text, "message")
    make = partial(folder.path.mkdir, parents=True)
    fail_after(folder, make, log)
    assert list(tmp_path.iterdir()) == []
    fail_after(folder, make, log, (folder.path / "of_others").touch)
    assert [file.name for file in folder.path.iterdir()] == ["of_others"]
    fail_after(folder, log)
    assert folder.log.read_text() == "message", "the folder was there before"
    again = RunFolder(tmp_path / "runs" / "two")
    fail_after(again, lambda: write_config(again, resolve("tiny_cpu"), NO_FILES))
    assert again.config.exists()


def test_other_trained_parameters_are_rejected_and_other_rates_listed(
    tmp_path: Path,
) -> None:
    folder, run = started(tmp_path)
    with pytest.raises(
        ConfigError, match=r"optim.frozen: \[\] before, \['embed.weight'\] now"
    ) as reported:
        list_changed_settings(folder, apply_overrides(run, {"optim.frozen": "[embed.weight]"}))
    assert "choose another folder with --run NAME" in str(reported.value)
    group = "[{name: table, match: [embed.weight], lr_scale: 0.1}]"
    (line,) = list_changed_settings(folder, apply_overrides(run, {"optim.groups": group}))
    assert line.startswith("optim.groups: []")


def test_the_map_of_parameters_is_a_line_for_each(tmp_path: Path) -> None:
    folder, run = started(tmp_path)
    write_parameters(folder, apply_overrides(run, {"optim.frozen": "[embed.weight]"}))
    rows = [json.loads(line) for line in folder.parameters.read_text().splitlines()]
    assert {"name": "embed.weight", "numel": rows[0]["numel"], "trained": False} == rows[0]
    assert all(row["lr"] == "schedule" for row in rows[1:]) and len(rows) > 10

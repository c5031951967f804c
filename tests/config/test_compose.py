"""Composition of YAML files: included files, variables, and the source of each value."""

from pathlib import Path
from textwrap import dedent

import pytest

from megalith.config.compose import MAX_INCLUDE_DEPTH, compose, load_composed
from megalith.config.train import TrainRun, load_run
from megalith.config.tree import save_yaml
from megalith.errors import ConfigError
from megalith.recipes import build_recipe, trace_settings


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Write base.yaml, a complete run, and return its folder."""
    save_yaml(build_recipe("tiny_cpu"), tmp_path / "base.yaml")
    return tmp_path


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(dedent(text))
    return file


def load(file: Path, **variables: str) -> TrainRun:
    return load_composed(file, TrainRun, variables)


def test_included_settings_are_overridden_by_the_file_that_includes_them(base: Path) -> None:
    write(base, "parts/optim.yaml", "beta1: 0.8\nbeta2: 0.7\n")
    file = write(
        base,
        "run.yaml",
        """
        include: [base.yaml]
        name: mine
        train: {steps: 7}
        optim: {include: parts/optim.yaml, beta2: 0.9}
        """,
    )
    run, original = load(file), load(base / "base.yaml")
    assert (run.name, run.train.steps) == ("mine", 7)
    assert run.train.global_batch_size == original.train.global_batch_size
    assert (run.optim.beta1, run.optim.beta2) == (0.8, 0.9)
    assert run.model == original.model


def test_later_included_files_override_earlier_ones(base: Path) -> None:
    write(base, "long.yaml", "train: {steps: 90}\n")
    file = write(base, "run.yaml", "include: [base.yaml, long.yaml]\n")
    assert load(file).train.steps == 90


def test_variables_have_the_type_of_their_text_and_defaults(base: Path) -> None:
    file = write(
        base,
        "run.yaml",
        """
        include: ${BASE:base.yaml}
        name: run-${USER_NAME}-${SUFFIX:a}-$${HOME}
        train: {steps: "${STEPS}", log_every: "${LOG:3}"}
        parallel: {tp: "${TP:1}"}
        """,
    )
    run = load(file, USER_NAME="ada", STEPS="12")
    assert run.name == "run-ada-a-${HOME}"
    assert (run.train.steps, run.train.log_every, run.parallel.tp) == (12, 3, 1)


def test_values_of_variables_are_not_expanded_again(base: Path) -> None:
    file = write(base, "run.yaml", "include: base.yaml\nname: ${A}\n")
    assert load(file, A="${B}", B="x").name == "${B}"


def test_all_invalid_variables_are_reported_with_the_setting(base: Path) -> None:
    file = write(
        base, "run.yaml", 'include: base.yaml\nname: ${NOT_SET}\ntrain: {steps: "${1x}"}\n'
    )
    with pytest.raises(ConfigError) as error:
        load(file)
    assert "the environment variable NOT_SET is not set" in str(error.value)
    assert "${NOT_SET:default}" in str(error.value)
    assert "train.steps='${1x}'" in str(error.value) and "'1x' is not the name" in str(error.value)


def test_files_that_include_themselves_or_do_not_exist_are_rejected(base: Path) -> None:
    write(base, "a.yaml", "include: b.yaml\n")
    write(base, "b.yaml", "model: {include: a.yaml}\n")
    with pytest.raises(ConfigError, match=r"a\.yaml includes itself: .*a\.yaml -> .*b\.yaml"):
        load(base / "a.yaml")
    file = write(base, "run.yaml", "include: bas.yaml\n")
    with pytest.raises(ConfigError, match=r"bas\.yaml: no such file.*base\.yaml"):
        load(file)
    for include in ("{a: 1}", '"a\\0b"', "[1]"):
        file = write(base, "run.yaml", f"include: {include}\n")
        with pytest.raises(ConfigError, match="must be the name of a YAML file, or a list"):
            load(file)


def test_includes_are_bounded(base: Path) -> None:
    for number in range(MAX_INCLUDE_DEPTH + 2):
        write(base, f"deep{number}.yaml", f"include: deep{number + 1}.yaml\n")
    write(base, f"deep{MAX_INCLUDE_DEPTH + 2}.yaml", "name: x\n")
    with pytest.raises(ConfigError, match="includes too many files"):
        load(base / "deep0.yaml")
    write(base, "wide9.yaml", "name: x\n")
    for number in range(9):
        names = ", ".join([f"wide{number + 1}.yaml"] * 3)
        write(base, f"wide{number}.yaml", f"include: [{names}]\n")
    with pytest.raises(ConfigError, match="at most 100 files"):
        load(base / "wide0.yaml")


def test_stored_settings_are_not_expanded(base: Path) -> None:
    text = (base / "base.yaml").read_text().replace("name: tiny_cpu", "name: ${HOME}", 1)
    stored = write(base, "config.yaml", text)
    assert load_run(stored).name == "${HOME}"


def test_each_value_has_its_source(base: Path) -> None:
    file = write(
        base,
        "run.yaml",
        'include: base.yaml\ntrain: {steps: "${STEPS:5}"}\nschedule: {lr: "${LR}"}\n',
    )
    sources = compose(file, TrainRun, {"LR": "0.1"}).sources
    assert sources["train.global_batch_size"] == str(base / "base.yaml")
    assert sources["train.steps"] == str(file)
    assert sources["schedule.lr"] == f"{file}, environment variable LR"
    write(base, "unset.yaml", "train: {ema: none, steps: 5}\n")
    file = write(base, "run.yaml", "include: unset.yaml\ntrain: {ema: {decay: 0.9}}\n")
    assert compose(file, TrainRun, {}).sources == {
        "train.steps": str(base / "unset.yaml"),
        "train.ema.decay": str(file),
    }


def test_traced_settings_of_a_recipe_name_recipe_command_line_and_default() -> None:
    rows = {row.path: row for row in trace_settings("tiny_cpu", {"train.steps": "3"})}
    assert list(rows) == sorted(rows)
    assert (rows["train.steps"].value, rows["train.steps"].source) == (3, "command line")
    assert rows["model.hidden_size"].source == "recipe tiny_cpu"
    assert rows["checkpoint.max_save_failures"].source == "default"

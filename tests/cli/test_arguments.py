"""Command-line parsing."""

from dataclasses import dataclass, field

import pytest
from tyro.conf import Positional

from megalith.cli.arguments import COMMON_SETTINGS, parse_options, split_overrides
from megalith.config.fields import describe, read_renamed_settings, setting_names
from megalith.config.train import TrainRun
from megalith.config.tree import Override, apply_overrides
from megalith.errors import ConfigError
from megalith.recipes import resolve


@dataclass(frozen=True, kw_only=True)
class Options:
    """Do something with a run."""

    recipe: Positional[str]
    """Recipe or YAML file."""

    nproc: int = 1
    """Ranks on this machine."""

    dry_run: bool = False
    """Start nothing."""

    plots: bool = True
    """Draw."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section with every kind of value."""

    count: int = 0
    flag: bool = False
    maybe: bool | None = None
    words: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Root:
    """A root with a leaf of its own."""

    seed: int = 0
    section: Section = field(default_factory=Section)


def parsed(line: str) -> Options:
    return parse_options(Options, line.split(), prog="megalith try", root=TrainRun)


def split(line: str, root: type = Root) -> tuple[list[str], dict[str, Override]]:
    return split_overrides(line.split(), root)


# --- overrides


def test_overrides_are_extracted_and_the_rest_keeps_its_order() -> None:
    line = "tiny_cpu --section.count 2 --nproc 4 --section.count=3 --seed 7 --dry-run out"
    rest, overrides = split(line)
    assert rest == ["tiny_cpu", "--nproc", "4", "--dry-run", "out"]
    assert overrides == {"section.count": "3", "seed": "7"}, "the last of two counts"


def test_a_list_takes_all_words_up_to_the_next_option() -> None:
    rest, overrides = split("--section.words 0.3 a 0.7 b --nproc 2")
    assert rest == ["--nproc", "2"]
    assert overrides == {"section.words": ["0.3", "a", "0.7", "b"]}


@pytest.mark.parametrize(
    "line, value, rest",
    [
        ("--section.flag", "true", []),
        ("--section.flag recipe", "true", ["recipe"]),
        ("--section.flag false recipe", "false", ["recipe"]),
        ("--section.flag=off", "off", []),
        ("--section.flag --nproc 1", "true", ["--nproc", "1"]),
        ("--nproc 2 --section.flag recipe", "true", ["--nproc", "2", "recipe"]),
        ("recipe --section.flag perhaps", "perhaps", ["recipe"]),
        ("--section.flag 1", "1", []),
    ],
)
def test_true_or_false_alone_means_true(line: str, value: str, rest: list[str]) -> None:
    assert split(line) == (rest, {"section.flag": value})


def test_invalid_boolean_is_rejected_with_its_setting() -> None:
    rest, overrides = split("tiny_cpu --parallel.sp perhaps", TrainRun)
    assert rest == ["tiny_cpu"]
    with pytest.raises(ConfigError, match="parallel.sp=perhaps: expected true or false"):
        apply_overrides(resolve("tiny_cpu"), overrides)


def test_a_bool_that_may_be_unset_takes_none() -> None:
    assert split("--section.maybe none")[1] == {"section.maybe": "none"}


def test_negative_numbers_are_values_and_hyphens_are_underscores() -> None:
    assert split("--section.count -1") == ([], {"section.count": "-1"})
    assert split("--parallel.bucket-numel 1e6", TrainRun) == ([], {"parallel.bucket_numel": "1e6"})


def test_words_with_dots_that_are_values_of_other_options_stay() -> None:
    line = "run.yaml --run=../a.b --out ./x.y"
    assert split(line) == (line.split(), {})


def test_unknown_and_empty_overrides_are_reported_together() -> None:
    with pytest.raises(ConfigError) as error:
        split("--paralel.tp 2 --parallel.dp --data.path --x.y=1 --train.lr 3", TrainRun)
    text = str(error.value)
    assert text.startswith("5 settings")
    assert "--paralel.tp=2: there is no such setting. Did you mean parallel.tp?" in text
    assert "--parallel.dp has no value. Use --parallel.dp VALUE." in text
    assert "--data.path has no value" in text
    assert "--train.lr=3: there is no such setting. Did you mean schedule.lr?" in text


def test_a_renamed_setting_is_an_error_that_names_its_successor() -> None:
    for old, new in read_renamed_settings().settings.items():
        with pytest.raises(ConfigError) as error:
            split(f"--{old} 1", TrainRun)
        assert str(error.value) == f"--{old}=1: this setting was renamed. Use {new}.", old


def test_a_command_line_ends_in_a_run() -> None:
    rest, overrides = split(
        "tiny_cpu --parallel.tp 2 --data.document_masking --schedule.lr 3e-4", TrainRun
    )
    options = parse_options(Options, rest, prog="megalith try", root=TrainRun)
    run = apply_overrides(resolve(options.recipe), overrides)
    assert (run.parallel.tp, run.data.document_masking, run.schedule.lr) == (2, True, 3e-4)


# --- fixed options


def test_fixed_options_are_read() -> None:
    assert parsed("tiny_cpu --nproc 2 --dry-run --no-plots") == Options(
        recipe="tiny_cpu", nproc=2, dry_run=True, plots=False
    )
    assert parsed("tiny_cpu --dry_run") == Options(recipe="tiny_cpu", dry_run=True)


def test_unknown_options_get_did_you_mean_from_options_and_settings() -> None:
    with pytest.raises(ConfigError) as error:
        parsed("tiny_cpu --nporc 2 --tp 2 --zzzz --recipe x")
    text = str(error.value)
    assert "--nporc is not an option of this command. Did you mean --nproc?" in text
    assert "--tp is not an option of this command. Did you mean --parallel.tp?" in text
    assert (
        "--zzzz is not an option of this command. Use one of --nproc, --dry-run, --plots." in text
    )
    assert "--recipe is not an option" in text


@pytest.mark.parametrize(
    "line", ["tiny_cpu --nproc two", "--nproc=two tiny_cpu", "tiny_cpu --nproc two --dry-run"]
)
def test_non_numeric_value_is_rejected_with_an_example(line: str) -> None:
    with pytest.raises(ConfigError) as error:
        parsed(line)
    assert str(error.value) == "--nproc=two is not a whole number. Use for example --nproc 8."
    assert parsed("tiny_cpu --nproc 2").nproc == 2


def test_a_missing_recipe_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parsed("--nproc 2")
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert "RECIPE" in captured.err and captured.out == ""


def help_of(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        parsed(line)
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_is_short_and_names_every_top_level_group(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = help_of("llama3_8b --help", capsys)
    assert len(text.splitlines()) <= 100
    groups = {setting.path.split(".")[0] for setting in describe(TrainRun) if "." in setting.path}
    assert all(f"\n  {group} " in text for group in groups)
    assert "--help GROUP" in text and "--help-all" in text


def test_common_settings_exist_and_are_in_the_short_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = help_of("--help", capsys)
    for path in COMMON_SETTINGS:
        assert path in setting_names(TrainRun) and f"  --{path} " in text


def test_help_all_lists_every_setting_and_group_help_those_of_the_group(
    capsys: pytest.CaptureFixture[str],
) -> None:
    everything = help_of("--help-all", capsys)
    group = help_of("--help model.moe", capsys)
    for setting in describe(TrainRun):
        assert f"  --{setting.path} " in everything
        assert (f"  --{setting.path} " in group) == setting.path.startswith("model.moe.")
    assert "--nproc" in everything and "--nproc" not in group


@pytest.mark.parametrize("line", ["--help", "--help-all", "llama3_8b --help-all"])
def test_help_shows_no_names_of_classes_and_no_text_of_typing(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(line, capsys)
    for name in ("mo_e", "[MODEL", "typing", "subcommand", "{None}"):
        assert name not in text


def test_help_of_a_flag_that_disables_a_default_states_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = help_of("--help", capsys)
    assert "  --no-plots   Turn this off: Draw.\n" in text
    assert "default: True" not in text and "default: False" not in text


def test_help_shows_options_and_settings_with_the_values_of_the_recipe(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        parsed("llama3_8b --help")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "--dry-run" in text
    assert "--parallel.tp INT" in text
    assert "(default: 14336)" in text
    assert "Tensor-parallel size" in text


def test_help_without_a_recipe_names_what_recipes_must_give(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parsed("-h")
    assert "(required)" in capsys.readouterr().out

"""`megalith recipes`."""

import json
from pathlib import Path

import pytest

from megalith.cli.main import main
from megalith.cli.recipes import _short_count, recipe_summary
from megalith.config.train import TrainRun
from megalith.config.tree import from_dict, load_yaml
from megalith.recipes import recipes, resolve


def test_every_recipe_is_listed_with_parameters_and_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["recipes"]) == 0
    text = capsys.readouterr().out
    for name in recipes():
        assert f" {name} " in text
    assert "8.03B" in text and "e+" not in text
    assert main(["recipes", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(recipes())
    assert all(row["memory_gib_per_rank"] > 0 and row["summary"] for row in rows)


def test_counts_are_three_digits() -> None:
    counts = (12, 828_544, 123_551_232, 999_499_999, 999_885_952, 8_030_261_248)
    assert [_short_count(n) for n in counts] == ["12", "829k", "124M", "999M", "1B", "8.03B"]


def test_a_summary_counts_memory_per_rank_of_one_replica() -> None:
    row = recipe_summary("llama3_70b")
    assert row["parameters"] == 70_553_706_496
    assert row["ranks"] == 8
    # bf16 with fp32 sums, master and moments: 18 bytes a parameter, an eighth of them on each rank.
    assert 1 < row["memory_gib_per_rank"] / (18 * 70_553_706_496 / 8 / 2**30) < 2


def test_a_replica_that_takes_a_pipeline_counts_all_its_ranks() -> None:
    row = recipe_summary("llama3_405b")
    assert row["ranks"] == 128
    assert 1 < row["memory_gib_per_rank"] / (18 * row["parameters"] / 128 / 2**30) < 3


def test_show_prints_a_run_in_three_formats(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["recipes", "show", "tiny_cpu", "--parallel.tp", "2"]) == 0
    assert "parallel.tp" in capsys.readouterr().out
    assert main(["recipes", "show", "tiny_cpu", "--json"]) == 0
    assert from_dict(TrainRun, json.loads(capsys.readouterr().out)) == resolve("tiny_cpu")
    assert main(["recipes", "show", "tiny_cpu", "--yaml"]) == 0
    (tmp_path / "mine.yaml").write_text(capsys.readouterr().out)
    assert load_yaml(tmp_path / "mine.yaml", TrainRun) == resolve("tiny_cpu")


def test_diff_prints_differences_and_exits_with_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["recipes", "diff", "llama3_8b", "llama3_70b"]) == 1
    assert "model.num_layers" in capsys.readouterr().out
    assert main(["recipes", "diff", "llama3_8b", "llama3_70b", "--json"]) == 1
    rows = {row["setting"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["model.num_layers"] == {"setting": "model.num_layers", "left": 32, "right": 80}
    assert main(["recipes", "diff", "tiny_cpu", "tiny_cpu"]) == 0
    assert "are the same run" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line, text",
    [
        (
            "recipes shwo tiny_cpu",
            "shwo is not a subcommand of `megalith recipes`. Did you mean show?",
        ),
        (
            "recipes show tiny_cpuu",
            "tiny_cpuu is neither a recipe nor a file. Did you mean tiny_cpu?",
        ),
        ("recipes --jsno", "--jsno is not an option of this command. Did you mean --json?"),
        ("recipes show tiny_cpu --parallel.tp two", "parallel.tp=two: expected a whole number"),
    ],
)
def test_user_errors_are_reported_with_advice(
    line: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert captured.out == ""

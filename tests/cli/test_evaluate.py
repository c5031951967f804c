"""`megalith evaluate`: one line or one JSON document about a run's newest checkpoint."""

import json
from pathlib import Path

import pytest

from megalith.cli.main import main
from megalith.observe.metrics import read_metrics
from megalith.testing.tiny import tiny_yaml


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("evaluate")
    assert main(["train", str(tiny_yaml(folder / "tiny.yaml")), "--run", str(folder / "runs" / "one")]) == 0
    return folder / "runs" / "one"


def test_it_finds_what_the_run_found(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run), "--samples", "12", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    logged = read_metrics(run / "metrics.jsonl")[-1]
    assert found["loss"] == pytest.approx(logged["eval_loss"], rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(logged["eval_bits_per_byte"], rel=1e-6)
    assert (found["run"], found["split"], found["num_labels"]) == (str(run), "valid", 144)
    assert found["perplexity"] > 1


def test_the_line_names_run_split_and_figures(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run), "--split", "train", "--samples", "3"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"{run} on train: loss ") and told.endswith(" bits per byte (36 tokens)\n")
    assert "perplexity" in told


def test_a_name_under_runs_is_enough(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run.parent.parent)
    assert main(["evaluate", "one", "--samples", "2"]) == 0
    assert capsys.readouterr().out.startswith("runs/one on valid: ")
    assert main(["evaluate", "two"]) == 2
    error = capsys.readouterr().err
    assert "two is not the folder of a run. Use a path, or one of runs/: one." in error


def test_without_a_count_the_whole_split_is_read_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_labels"] > 1000 and found["num_labels"] % 12 == 0


def test_two_ranks_find_the_same(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run), "--samples", "7", "--json"]) == 0
    one = json.loads(capfd.readouterr().out)
    assert main(["evaluate", str(run), "--samples", "7", "--json", "--nproc", "2", "--parallel.tp", "2"]) == 0
    two = json.loads(capfd.readouterr().out)
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert two["num_labels"] == one["num_labels"] == 84


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--samples", "0"], "--samples=0 must be at least 1. Leave it out to read the whole split."),
        (["--nproc", "0"], "--nproc=0 must be at least 1"),
        (["--parallel.tp", "2"], "world"),
        (["--model.num_layers", "3"], "another model"),
    ],
)
def test_what_the_user_can_fix_is_text(
    run: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(run), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megalith evaluate: ") and said in error


def test_a_split_that_does_not_exist_is_refused_by_the_parser(run: Path) -> None:
    assert main(["evaluate", str(run), "--split", "valeed"]) == 2

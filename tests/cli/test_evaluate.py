"""`megalith evaluate`: results and layout."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalith.cli.evaluate import fit_layout_to_world
from megalith.cli.main import main
from megalith.config.moe import MoEConfig
from megalith.config.train import TrainRun
from megalith.config.tree import dump_yaml
from megalith.kernels.norm import RMSNormFunction
from megalith.observe.metrics import read_metrics
from megalith.recipes import resolve
from megalith.rules.run import run_problems
from megalith.testing.tiny import tiny_run, tiny_yaml


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("evaluate")
    assert (
        main(["train", str(tiny_yaml(folder / "tiny.yaml")), "--run", str(folder / "runs" / "one")])
        == 0
    )
    return folder / "runs" / "one"


def test_evaluation_matches_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run), "--samples", "12", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    logged = read_metrics(run / "metrics.jsonl")[-1]
    assert document["loss"] == pytest.approx(logged["eval_loss"], rel=1e-6)
    assert document["bits_per_byte"] == pytest.approx(logged["eval_bits_per_byte"], rel=1e-6)
    assert (document["run"], document["split"], document["num_labels"]) == (str(run), "valid", 144)
    assert document["perplexity"] > 1


def test_kernels_setting_is_used(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbid(*arguments: object) -> object:
        raise AssertionError("a fast form runs where plain definitions are asked for")

    words = ["evaluate", str(run), "--samples", "4", "--json"]
    assert main(words) == 0
    fast = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(RMSNormFunction, "apply", forbid)
    assert main([*words, "--kernels", "reference"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(fast["loss"], rel=1e-5)
    with pytest.raises(AssertionError, match="a fast form runs"):
        main(words)


def test_evaluation_line_names_run_split_and_metrics(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(run), "--split", "train", "--samples", "3"]) == 0
    output = capsys.readouterr()
    assert output.out.startswith(f"{run} on train: loss ") and output.out.endswith(
        " bits per byte (36 tokens)\n"
    )
    assert "perplexity" in output.out
    assert output.err.splitlines() == ["reading 3 rows of train", "row 2/3", "row 3/3"]


def test_a_name_under_runs_is_enough(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run.parent.parent)
    assert main(["evaluate", "one", "--samples", "2"]) == 0
    assert capsys.readouterr().out.startswith("runs/one on valid: ")
    assert main(["evaluate", "two"]) == 2
    error = capsys.readouterr().err
    assert "two is not the folder of a run. Use a path, or a name under runs/: one." in error


def test_without_a_count_the_whole_split_is_read_once(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(run), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["num_labels"] > 1000 and document["num_labels"] % 12 == 0


def test_two_ranks_match_one_rank(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run), "--samples", "7", "--json"]) == 0
    one = json.loads(capfd.readouterr().out)
    assert (
        main(
            ["evaluate", str(run), "--samples", "7", "--json", "--nproc", "2", "--parallel.tp", "2"]
        )
        == 0
    )
    two = json.loads(capfd.readouterr().out)
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert two["num_labels"] == one["num_labels"] == 84


def test_a_run_of_two_ranks_is_evaluated_on_one(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(run, cut)
    saved = resolve(str(run))
    assert isinstance(saved, TrainRun)
    parallel = replace(saved.parallel, tp=2, sp=True, dp=1)
    (cut / "config.yaml").write_text(dump_yaml(replace(saved, parallel=parallel)))
    assert main(["evaluate", str(cut), "--samples", "7", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert main(["evaluate", str(run), "--samples", "7", "--json"]) == 0
    assert document["loss"] == json.loads(capsys.readouterr().out)["loss"]


@pytest.mark.parametrize(
    ("trained", "world", "given", "layout"),
    [
        ({"tp": 2, "sp": True, "dp": 1}, 1, (), (1, False, None)),
        ({"tp": 2, "sp": True, "dp": 1}, 3, (), (1, False, None)),
        ({"tp": 2, "sp": True, "dp": 1}, 4, (), (2, True, None)),
        ({"dp": 8}, 3, (), (1, False, None)),
        ({"dp": 4, "pp": 3, "cp": 2, "zero": 2, "dp_replicate": 2}, 3, (), (1, False, None)),
        ({"tp": 2, "dp": 8}, 3, ("parallel.tp", "parallel.dp"), (2, False, 8)),
        ({"sp": True}, 2, ("parallel.sp",), (1, True, None)),
    ],
)
def test_layout_follows_the_number_of_processes_unless_given(
    trained: dict[str, Any],
    world: int,
    given: tuple[str, ...],
    layout: tuple[int, bool, int | None],
) -> None:
    run = tiny_run()
    result = fit_layout_to_world(
        replace(run, parallel=replace(run.parallel, **trained)), world, given
    )
    assert (result.parallel.tp, result.parallel.sp, result.parallel.dp) == layout
    if not given:
        assert run_problems(result, world) == []


@pytest.mark.parametrize(
    ("trained", "given", "zero"),
    [(3, (), 3), (2, (), 0), (1, (), 0), (3, ("parallel.zero",), 3), (2, ("parallel.zero",), 2)],
)
def test_zero_3_weights_stay_sharded(trained: int, given: tuple[str, ...], zero: int) -> None:
    run = tiny_run({"parallel.zero": str(trained), "parallel.dp_replicate": "2"})
    for world in (1, 2, 3):
        result = fit_layout_to_world(run, world, given)
        assert (result.parallel.zero, result.parallel.dp_replicate) == (zero, 1)
        assert run_problems(result, world) == []


@pytest.mark.parametrize(
    ("trained", "found"),
    [
        ({"ep": 2}, {1: (1, 1), 2: (2, None), 3: (1, 1), 4: (2, None)}),
        ({"ep": 2, "etp": 2}, {1: (1, 1), 2: (2, 1), 4: (2, 2)}),
        ({"ep": 2, "etp": 1, "tp": 2, "sp": True}, {1: (1, 1), 2: (2, 1)}),
        ({"ep": 4, "dp": 4, "overlap_experts": True}, {1: (1, 1), 2: (2, 1), 4: (4, None)}),
    ],
)
def test_expert_parallel_size_follows_the_number_of_processes(
    trained: dict[str, Any], found: dict[int, tuple[int, int | None]]
) -> None:
    run = tiny_run()
    model = replace(run.model, moe=MoEConfig(num_experts=4, ffn_hidden_size=6))
    run = replace(run, model=model, parallel=replace(run.parallel, **trained))
    for world, (ep, etp) in found.items():
        layout = fit_layout_to_world(run, world, ())
        assert (layout.parallel.ep, layout.parallel.etp, layout.parallel.overlap_experts) == (
            ep,
            etp,
            False,
        )
        assert run_problems(layout, world) == []
    assert fit_layout_to_world(run, 1, ("parallel.ep",)).parallel.ep == trained["ep"]


@pytest.mark.slow
def test_fully_sharded_evaluation_on_two_processes_matches_one(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cut, saved = tmp_path / "cut", resolve(str(run))
    shutil.copytree(run, cut)
    assert isinstance(saved, TrainRun)
    (cut / "config.yaml").write_text(
        dump_yaml(replace(saved, parallel=replace(saved.parallel, zero=3)))
    )
    losses = []
    for words in ([], ["--nproc", "2"]):
        assert main(["evaluate", str(cut), "--samples", "7", "--json", *words]) == 0
        losses.append(json.loads(capfd.readouterr().out)["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_settings_of_training_memory_are_reset() -> None:
    run = tiny_run(
        {
            "parallel.tp": "2",
            "parallel.zero": "1",
            "parallel.reduce_dtype": "bf16",
            "recompute.granularity": "full",
            "recompute.shard_inputs": "true",
            "offload.layers": "1",
        }
    )
    assert run_problems(run, 4) == []
    assert run_problems(fit_layout_to_world(run, 1, ()), 1) == []
    assert (
        len(
            run_problems(
                fit_layout_to_world(run, 1, ("recompute.granularity", "parallel.reduce_dtype")), 1
            )
        )
        == 2
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--samples", "0"],
            "--samples=0 must be at least 1. Remove it to read the whole split.",
        ),
        (["--nproc", "0"], "--nproc=0 must be at least 1"),
        (["--parallel.tp", "2"], "world"),
        (["--model.num_layers", "3"], "has a different model"),
    ],
)
def test_user_errors_are_messages(
    run: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(run), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megalith evaluate: ") and message in error


def test_a_split_that_does_not_exist_is_rejected_by_the_parser(run: Path) -> None:
    assert main(["evaluate", str(run), "--split", "valeed"]) == 2


def test_suite_of_the_command_line_is_evaluated(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question = {"context": "2 + 2 =", "choices": ["3", "4"], "answer": 1}
    (tmp_path / "quiz.jsonl").write_text(json.dumps(question))
    words = ["evaluate", str(run), "--suite", "quiz", "--evaluate.quiz.kind", "choice"]
    words += ["--evaluate.quiz.path", str(tmp_path / "quiz.jsonl")]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["suite"], document["quiz_acc"] in (0, 1)) == ("quiz", True)
    assert main(words) == 0
    assert "on quiz: acc " in capsys.readouterr().out
    for option in (["--samples", "3"], ["--split", "test"]):
        assert main([*words, *option]) == 2
        assert (
            "--suite=quiz has its own samples: --split and --samples do not apply. Remove them"
            in (capsys.readouterr().err)
        )

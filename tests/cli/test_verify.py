"""`megalith verify`: tables, JSON and exit codes."""

import json
from pathlib import Path

import pytest

from megalith.cli import verify
from megalith.cli.main import main
from megalith.config.train import TrainRun
from megalith.testing.tiny import tiny_yaml
from megalith.verify import prove
from megalith.verify.faults.plant import find_fault
from megalith.verify.matrix import load_matrix
from megalith.verify.ranks import LayoutCase
from megalith.verify.shrink import shrink


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return str(tiny_yaml(tmp_path / "tiny.yaml", {"parallel.tp": "2", "parallel.sp": "true"}))


def test_valid_layout_exits_with_0_and_has_rows_for_every_part(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", recipe, "--world", "6", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["holds"] is True
    rows = document["rows"]
    assert {row["part"] for row in rows} == {"a", "b", "c", "d"}
    questions = " ".join(row["question"] for row in rows)
    for requested in (
        "all rules",
        "at world size 6",
        "4 processes",
        "first loss",
        "gradients",
        "checkpoint",
        "replicas are equal",
    ):
        assert requested in questions


def test_table_lists_what_each_part_checks(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", recipe]) == 0
    output = capsys.readouterr().out
    assert "verification of the layout" in output and "all rules" in output and "NO" not in output
    assert "at its real size: (b) the reduction of every gradient, but no values" in " ".join(
        output.split()
    )


def test_violated_rules_are_all_reported_and_end_the_verification(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--parallel.tp",
        "3",
        "--model.num_kv_heads",
        "4",
        "--train.seq_len",
        "64",
        "--optim.beta2",
        "2",
    ]
    # as --help and docs/concepts/verify.md say
    assert main(["verify", recipe, "--world", "8", *words, "--json"]) == 2
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(row["part"], row["holds"]) for row in rows} == {("a", False)}
    output = " ".join(row["answer"] for row in rows)
    for message in (
        "parallel.tp=3",
        "train.seq_len=64 is more than",
        "optim.beta2=2.0 must be below 1",
    ):
        assert message in output


def test_injected_fault_is_reported_with_exit_code_1(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fault in the numbers, which the type check does not see."""

    def faulty(run: TrainRun, world: int, *, fault: str | None) -> list[LayoutCase]:
        assert fault is None
        return shrink(run, world, fault="sp_norm_not_summed")

    monkeypatch.setattr(prove, "shrink", faulty)
    assert main(["verify", recipe, "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert all(row["holds"] for row in rows if row["part"] in "abc")
    (wrong,) = [row for row in rows if row["question"].strip() == "gradients"]
    assert not wrong["holds"] and "_norm.weight" in wrong["answer"]


def test_invalid_world_size_is_rejected(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", recipe, "--world", "0"]) == 2
    assert (
        "--world=0 must be at least 1. Use the world size of the real job."
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "output"),
    [
        ((), "recipe=None: a recipe is required. Pass the name of a recipe, a YAML file or"),
        (("tiny_cpu", "--sample"), "--sample=True needs --all. Add --all, or remove it."),
        (
            ("tiny_cpu", "--all", "--world", "3"),
            "--all with tiny_cpu, --world 3: layouts of --all have fixed settings.",
        ),
        (
            ("--all", "--parallel.tp", "2"),
            "--all with --parallel.tp: layouts of --all have fixed settings. Remove one",
        ),
    ],
)
def test_invalid_options_exit_with_2(
    words: tuple[str, ...], output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *words]) == 2
    assert output in capsys.readouterr().err


def test_all_verifies_the_matrix_and_every_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two small rows and one fault of theirs; the whole takes minutes."""
    rows = [row for row in load_matrix() if row.name in ("dp2", "pp2 gpipe")]
    monkeypatch.setattr(prove, "matrix_rows", lambda *, sample: rows)
    monkeypatch.setattr(prove, "load_faults", lambda: [find_fault("dp_sum_averaged")])
    assert main(["verify", "--all", "--json"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["holds"] and [row["name"] for row in document["layouts"]] == [
        "dp2",
        "pp2 gpipe",
    ]
    assert [(fault["numbers"], fault["rejected"]) for fault in document["faults"]] == [
        ("wrong gradients", True)
    ]
    assert (
        "layout 2/2 pp2 gpipe: holds, " in printed.err
        and "fault 1/1 dp_sum_averaged: rejected" in printed.err
    )
    assert main(["verify", "--all", "--sample"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "2 of 2 layouts match one process, 1 of 1 injected faults were detected" in output


def test_kernels_setting_applies_to_all_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[object] = []

    def note(**settings: object) -> tuple[list[object], list[object]]:
        requested.append(settings["kernels"])
        return [], []

    monkeypatch.setattr(prove, "verify_matrix", note)
    assert (
        main(["verify", "--all", "--kernels", "reference"]) == 0 and main(["verify", "--all"]) == 0
    )
    assert requested == ["reference", "auto"]


def test_unknown_kernels_are_rejected_with_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--all", "--kernels", "plain"]) == 2
    assert (
        "kernels=plain: there is no such choice. Use one of auto, torch, reference."
        in capsys.readouterr().err
    )


def test_failed_check_has_exit_code_1() -> None:
    assert verify.CHECK_FAILED == 1


# 80 layers at three places of the world: about ten seconds, of which the rest is starting ranks
@pytest.mark.slow
def test_70b_on_4096_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "llama3_70b", "--world", "4096", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    types = next(row for row in rows if row["part"] == "b")
    print(types["answer"])
    seconds, gib = (
        float(word.split()[0]) for word in types["answer"].rsplit("; ", 1)[1].split(", ")
    )
    assert seconds < 60 and gib < 4

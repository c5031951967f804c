"""`megalith plan`: explain and estimate."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megalith.cli.main import main
from megalith.testing.tiny import tiny_yaml

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return str(tiny_yaml(tmp_path / "tiny.yaml", {"parallel.tp": "2", "parallel.sp": "true"}))


def flat(text: str) -> str:
    return " ".join(text.split())


def test_explain_shows_grids_groups_stages_and_slices(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "explain", recipe, "--world", "8", "--parallel.pp", "2"]) == 0
    output = flat(capsys.readouterr().out)
    assert "8 = tp 2 · cp 1 · dp 2 · pp 2" in output and "8 = etp 2 · ep 1 · edp 2 · pp 2" in output
    assert "0, 1 | 2, 3 | 4, 5 | 6, 7" in output and "0, 4 | 1, 5 | 2, 6 | 3, 7" in output
    assert (
        "embedding" in output
        and "loss" in output
        and "Schedule 1f1b: the bubble adds 33.3 %" in output
    )
    assert "in a step: tp" in output


def test_explain_as_json_has_the_same_and_the_memory(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "explain", recipe, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["world"] == 2, "without --world one replica"
    assert [row["axis"] for row in document["dense"]] == ["tp", "cp", "dp", "pp"]
    assert document["groups"][0]["axes"] == "tp" and document["stages"][0]["layers"] == "0-1"
    assert {row["axis"] for row in document["traffic"]} == {"tp"}
    assert document["memory"][0]["memory"]["weights"] > 0 and document["memory"][0]["total"] > 0


@pytest.mark.parametrize("command", [("plan", "explain"), ("plan", "estimate")])
def test_invalid_parallel_size_is_reported_by_name(
    command: tuple[str, str], recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, recipe, "--parallel.pp", "0"]) == 2
    output = capsys.readouterr().err
    assert (
        "parallel.pp=0 must be at least 1. Set parallel.pp to 1 or more." in output
        and "--world" not in output
    )


def test_the_405b_layout_on_16384_ranks_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "explain", "llama3_405b", "--parallel.cp", "4", "--world", "16384"]) == 0
    output = flat(capsys.readouterr().out)
    assert "405.9B parameters on 16384 ranks" in output
    assert "16384 = tp 8 · cp 4 · dp 32 · pp 16" in output
    assert "adds 5.9 % to the compute time" in output


def test_estimate_reports_that_a_run_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "estimate", "llama3_405b", "--parallel.cp", "4", "--world", "16384"]) == 0
    output = flat(capsys.readouterr().out)
    assert "Fits:" in output and "on rank 1024 (pp 1, tp 0)" in output
    assert "Nearest fix" not in output
    for name in (
        "weights",
        "gradients",
        "activations",
        "messages",
        "library",
        "keys, values",
        "updated weights",
    ):
        assert name in output


def test_estimate_resolves_recompute_auto_and_prints_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    automatic = ["--parallel.zero", "1", "--recompute.granularity", "auto", "--recompute.device"]
    assert main(["plan", "estimate", "llama3_8b", "--world", "16", *automatic, "50", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "recompute.granularity=auto chose selective, modules [norm, mlp_act]\n"
    assert json.loads(captured.out)["device"]["name"] == "h100"
    assert main(["plan", "explain", "llama3_8b", "--world", "16", *automatic, "12"]) == 2
    assert "more than the 12.0 GiB of recompute.device=12" in capsys.readouterr().err
    assert main(["plan", "explain", "llama3_8b", "--world", "16", *automatic, "h10"]) == 2
    assert (
        "recompute.device=h10 is not a known device. Did you mean h100?" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_sizes_in_the_documentation_are_current(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (DOCS / "howto" / "plan.md").read_text()
    plain = ["--recompute.granularity", "none", "--recompute.modules", "core_attention"]
    for more in ([], ["--parallel.cp", "4"], plain, [*plain, "--parallel.cp", "4"]):
        main(["plan", "estimate", "llama3_405b", "--world", "16384", *more])
        held = re.search(r"it: ([\d.]+) of|s: ([\d.]+) of", capsys.readouterr().out)
        assert held is not None
        assert (held[1] or held[2]) in page


def test_estimate_that_does_not_fit_is_1_with_the_nearest_fix(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "estimate", "llama3_8b", "--world", "16"]) == 1
    output = flat(capsys.readouterr().out)
    assert "Does not fit:" in output and "of 79.0 GiB" in output
    assert "Nearest fix: --parallel.zero 1:" in output
    assert "--recompute.modules '[norm]'" in output, "as a shell takes it"
    assert main(["plan", "estimate", "llama3_8b", "--world", "16", "--parallel.zero", "1"]) == 0


def test_estimate_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "estimate", "llama3_8b", "--world", "16", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == "does not fit" and document["worst"]["rank"] == 0
    assert document["nearest_fix"]["overrides"] == {"parallel.zero": "1"}
    assert document["worst"]["total"] == sum(document["worst"]["memory"].values())
    assert {row["axis"] for row in document["traffic"]} == {"tp", "dp"}
    assert all(row["passage"]["seconds"] > 0 for row in document["traffic"])


def test_ranks_on_this_cpu_share_its_memory(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "estimate", recipe, "--world", "4", "--device", "cpu"]) == 0
    output = flat(capsys.readouterr().out)
    assert "on 4 × cpu" in output and "library" not in output and "peak" not in output


def test_a_device_may_be_given_in_gib(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "estimate", "llama3_8b", "--world", "2", "--device", "200"]) == 0
    assert main(["plan", "estimate", "llama3_8b", "--world", "2", "--device", "0.1"]) == 1
    assert (
        "None of the tried changes makes it fit on 2 ranks. Use more ranks."
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "line, texts",
    [
        (
            "plan explian tiny_cpu",
            ["explian is not a subcommand of `megalith plan`. Did you mean explain?"],
        ),
        (
            "plan estimate tiny_cpu --device h10",
            ["--device=h10 is not a known device. Did you mean h100?"],
        ),
        ("plan explain tiny_cpu --world 0", ["--world=0 must be at least 1"]),
        (
            "plan explain tiny_cpu --world abc",
            ["--world=abc is not a whole number. Use for example --world 8."],
        ),
        ("plan explain .", ["so it is not the folder of a run"]),
        (
            "plan estimate tiny_cpu --device 1e99",
            ["--device=1e99 is not a known device", "or a number of GiB, at most 1048576."],
        ),
        (
            "plan estimate tiny_cpu --world 7 --parallel.tp 2 --optim.beta2 2",
            ["world_size=7 is not", "optim.beta2=2.0 must be below 1"],
        ),
        (
            "plan estimate tiny_cpu --wrld 7",
            ["--wrld is not an option of this command. Did you mean --world"],
        ),
    ],
)
def test_all_user_errors_are_reported_together(
    line: str, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    for text in texts:
        assert text in captured.err


def documented(page: str) -> list[tuple[str, list[str]]]:
    """(command line, lines it prints) of every example on a page of the documentation."""
    text = (DOCS / page).read_text()
    return [
        (line, [row for row in block.splitlines() if row])
        for line, block in re.findall(r"<!-- megalith (.*?) -->\n```\n(.*?)\n```", text, re.DOTALL)
    ]


@pytest.mark.parametrize("line, lines", documented("howto/plan.md"))
def test_examples_in_the_documentation_are_current(
    line: str, lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    main(line.split())
    printed = [row.rstrip() for row in capsys.readouterr().out.splitlines()]
    assert [row for row in printed if row] == lines


def test_usage_names_both_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 0
    output = capsys.readouterr().out
    assert "explain" in output and "estimate" in output


def test_planning_the_largest_job_loads_no_torch() -> None:
    code = (
        "import contextlib, io, sys\n"
        "from megalith.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    for action in ('explain', 'estimate'):\n"
        "        main(['plan', action, 'llama3_405b', '--world', '16384'])\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize(
    ("suffix", "content"),
    [(".txt", b"F0"), (".png", b"\x89PNG"), (".html", b"1f1b"), (".json", b"traceEvents")],
)
def test_explain_writes_the_timeline_of_the_schedule(
    tmp_path: Path, suffix: str, content: bytes
) -> None:
    target = tmp_path / f"step{suffix}"
    pipeline = ["--parallel.pp", "2", "--timeline", str(target)]
    assert main(["plan", "explain", "tiny_cpu", "--device", "cpu", *pipeline]) == 0
    assert content in target.read_bytes()


def test_unknown_timeline_format_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "explain", "tiny_cpu", "--timeline", str(tmp_path / "step.svg")]
    assert main(command) == 2
    assert "Use a name that ends in one of .txt .png .html .json." in capsys.readouterr().err

"""Impossible parallel layouts are reported by every command that runs a model: all rules at once,
and before another process starts."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalith.cli.main import main
from megalith.config.data import TokenizerConfig
from megalith.config.model import MLAConfig
from megalith.config.serve import EngineConfig, InferenceParallelConfig, adapter_name_problems
from megalith.config.serve import process_count_problems as count_problems
from tests.cli.test_generate import CONFIG, make_run

MLA = MLAConfig(kv_rank=6, nope_dim=4, rope_dim=2, value_dim=3)
EXECUTOR = "megalith.cli.serve.ProcessPoolExecutor"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Runs of a model with key/value heads, and of one with MLA."""
    folder = tmp_path_factory.mktemp("layouts")
    latent = replace(CONFIG, mla=MLA, num_kv_heads=CONFIG.num_heads)
    return {
        "dense": make_run(folder / "dense", TokenizerConfig()),
        "mla": make_run(folder / "mla", TokenizerConfig(), latent),
    }


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a worker or an engine process starts."""

    def fail(*arguments: object, **settings: object) -> object:
        raise AssertionError("a process starts")

    monkeypatch.setattr("asyncio.create_subprocess_exec", fail)
    monkeypatch.setattr("megalith.launch.launcher.run_workers", fail)


def check(
    command: str, run: str, words: list[str], texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"serve": ["--port", "0"], "run-batch": ["--input", "in", "--output", "out"]}
    assert main([command, run, *words, *more.get(command, [])]) == 2
    error = capsys.readouterr().err
    assert [text for text in texts if text not in error] == [], error
    assert "Traceback" not in error


CASES: list[tuple[str, list[str], list[str]]] = [
    (
        "dense",
        ["--nproc", "2", "--parallel.pp", "9"],
        [
            "2 settings must be changed",
            "parallel.pp=9 is more than model.num_layers=2: every stage has a layer. Set "
            "parallel.pp to at most 2.",
            "parallel.pp=9 and parallel.dp=1 with --nproc=2: every stage and every data-parallel "
            "replica has equally many processes. Set --nproc to a multiple of 9, such as 9.",
        ],
    ),
    (
        "dense",
        ["--nproc", "5"],
        ["--nproc=5: this number of processes cannot share", "Set --nproc to one of 1, 2, 4, 6."],
    ),
    (
        "dense",
        ["--nproc", "4", "--parallel.tp", "3", "--engine.batching", "static"],
        ["tp x pp x dp is the number of processes. Set --nproc to 3."],
    ),
    (
        "dense",
        ["--nproc", "3", "--parallel.dp", "2", "--engine.max_num_seqs", "0"],
        ["parallel.dp=2 with --nproc=3: every stage and every", "max_num_seqs=0 must be at least"],
    ),
    (
        "mla",
        ["--nproc", "2", "--parallel.sp", "true", "--engine.max_adapters", "1"],
        [
            "max_adapters=1 with parallel.sp=true: adapters need all tokens on every rank.",
        ],
    ),
    (
        "mla",
        ["--parallel.sp", "true"],
        ["sp=true with --nproc=1: there is one tensor-parallel rank"],
    ),
    (
        "dense",
        ["--nproc", "4", "--parallel.dp", "2", "--parallel.dp_replicate", "1"],
        [
            "parallel.dp_replicate=1 with parallel.dp=2: 4 ranks cannot share the 0 experts of the "
            "model equally. Leave parallel.dp_replicate unset."
        ],
    ),
    (
        "dense",
        ["--nproc", "2", "--parallel.dp_replicate", "0"],
        ["parallel.dp_replicate=0 must be at least 1"],
    ),
    ("dense", ["--nproc", "-1"], ["--nproc=-1 must be at least 1. Use the number of processes"]),
]


@pytest.mark.parametrize("command", ["serve", "run-batch", "generate", "chat"])
@pytest.mark.parametrize(("name", "words", "texts"), CASES)
def test_impossible_layout_is_reported_before_a_process_starts(
    command: str,
    name: str,
    words: list[str],
    texts: list[str],
    runs: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def make_thread(*, max_workers: int, mp_context: Any) -> ThreadPoolExecutor:
        assert mp_context.get_start_method() == "spawn"
        return ThreadPoolExecutor(max_workers)

    monkeypatch.setattr(EXECUTOR, make_thread)
    check(command, runs[name], words, texts, capsys)


@pytest.mark.parametrize(
    ("command", "words", "text"),
    [
        (
            "serve",
            ["--parallel.dp", "4", "--parallel.dp_replicate", "3"],
            "parallel.dp_replicate=3 with parallel.dp=4: the groups of replicas that share experts "
            "have equal sizes. Set parallel.dp_replicate to 4, or parallel.dp to 3.",
        ),
        (
            "run-batch",
            ["--parallel.dp", "4", "--parallel.dp_replicate", "2", "--engine.max_adapters", "1"],
            "parallel.dp_replicate=2 with parallel.dp=4 and max_adapters=1: ranks that share "
            "experts would load adapters in different steps. Set parallel.dp_replicate to 4, or "
            "max_adapters to 0.",
        ),
        (
            "generate",
            ["--parallel.dp", "4", "--parallel.dp_replicate", "2"],
            "parallel.dp_replicate=2: only megalith serve has groups of replicas. Leave it ",
        ),
    ],
)
def test_impossible_groups_of_replicas_are_reported(
    command: str,
    words: list[str],
    text: str,
    runs: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(EXECUTOR, lambda *, max_workers, mp_context: ThreadPoolExecutor(1))
    check(command, runs["dense"], ["--nproc", "4", *words], [text], capsys)


def test_missing_model_and_other_problems_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check("generate", str(tmp_path / "gone"), ["--nproc", "2"], ["gone: no such folder"], capsys)
    words = ["--nproc", "2", "--top-p", "3"]
    check("generate", str(tmp_path / "gone"), words, ["--top-p=3.0 must be at most 1"], capsys)


@pytest.mark.parametrize(
    ("degrees", "nproc", "text"),
    [
        ({"pp": 2}, 4, ""),
        ({"dp": 2, "tp": 2}, 4, ""),
        ({"sp": True, "pp": 2}, 4, ""),
        ({"dp": 2, "tp": 2, "pp": 3}, 8, "Set --nproc to a multiple of 6, such as 12."),
        ({"sp": True, "pp": 2}, 2, "there is one tensor-parallel rank, and no tokens to share."),
    ],
)
def test_number_of_processes_fits_the_degrees(
    degrees: dict[str, Any], nproc: int, text: str
) -> None:
    problems = count_problems(InferenceParallelConfig(**degrees), nproc)
    assert len(problems) == bool(text) and text in "".join(problems)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_unknown_adapter_is_reported(
    command: str, runs: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = ["--engine.max_adapters", "2", "--engine.adapters", "sql=a", "de=b"]
    text = "--adapter=sqll: engine.adapters has sql, de, but no adapter of this name. Did you mean"
    check(command, runs["dense"], ["--adapter", "sqll", *loaded], [f"{text} sql?"], capsys)
    (text,) = adapter_name_problems("de", EngineConfig())
    assert text.endswith("has none, but no adapter of this name. Add --engine.adapters de=FOLDER.")


def test_server_reports_settings_that_do_not_fit_before_it_listens(
    runs: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    graphs = ["--engine.graphs.mode", "none", "--engine.graphs.prefills", "mixed"]
    drafts = ["--engine.quantization", "int8", "--engine.speculation.method", "mtp"]
    assert main(["serve", runs["dense"], *graphs, *drafts]) == 2
    printed = capsys.readouterr()
    assert "listening" not in printed.out + printed.err
    assert "graphs.prefills=mixed with graphs.mode=none, which has no buckets." in printed.err
    assert "quantization=int8 with speculation.method=mtp" in printed.err

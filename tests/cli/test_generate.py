import io
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.save import save_checkpoint
from megalith.cli.arguments import parse_options, split_overrides
from megalith.cli.generate import (
    GenerateOptions,
    build_worker_arguments,
    print_now,
    read_prompt_file,
    read_prompts,
)
from megalith.cli.main import main
from megalith.config.data import TokenizerConfig
from megalith.config.model import ModelConfig
from megalith.config.server import ServeRun
from megalith.config.tree import apply_overrides, dump_yaml
from megalith.errors import DataError
from megalith.hf.release import release_run
from megalith.models.decoder import Decoder, allocate, initialize, iter_parameter_specs
from megalith.nn.build import build_context
from megalith.parallel.group import single_rank_group
from megalith.parallel.mesh import build_single_rank_mesh
from tests.infer.lora_folders import save_adapter

CONFIG = ModelConfig(
    vocab_size=257,
    hidden_size=12,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    ffn_hidden_size=10,
    max_seq_len=64,
    init_std=0.5,
)


def make_run(folder: Path, tokenizer: TokenizerConfig, config: ModelConfig = CONFIG) -> str:
    """A run with one checkpoint."""
    model = Decoder(build_context(config, build_single_rank_mesh()))
    allocate(model, torch.device("cpu"))
    initialize(model, seed=1)
    entries = [
        CheckpointEntry(d.shard, "param", getattr(module, name))
        for d, module, name in iter_parameter_specs(model)
    ]
    text = dump_yaml(release_run("run", config, tokenizer, folder))
    save_checkpoint(
        folder / "checkpoints", 7, entries, {}, single_rank_group("world"), config_text=text
    )
    return str(folder)


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A run whose tokens are bytes."""
    return make_run(tmp_path / "run", TokenizerConfig())


def document(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What `generate --json` prints."""
    assert main(["generate", *words, "--json"]) == 0
    error_text = capsys.readouterr()
    assert error_text.err == ""
    result: dict[str, Any] = json.loads(error_text.out)
    return result


def test_the_prompt_and_what_follows_it_are_printed(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", run, "ab", "--max-new-tokens", "9", "--greedy"]) == 0
    error_text = capsys.readouterr().out
    (result,) = document(capsys, run, "ab", "--max-new-tokens", "9", "--greedy")["results"]
    assert error_text == "ab" + result["text"] + "\n"
    assert (result["prompt"], result["prompt_ids"], len(result["ids"])) == ("ab", [97, 98], 9)


def test_json_is_one_document_with_every_prompt(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    actual = document(capsys, run, "ab", "", "abc", "--max-new-tokens", "5")
    assert [result["prompt"] for result in actual["results"]] == ["ab", "", "abc"]
    assert actual["results"][1]["prompt_ids"] == [256], "nothing begins a document"
    assert actual["num_tokens"] == sum(len(result["ids"]) for result in actual["results"]) > 0
    assert actual["source"].endswith("step_0000007") and actual["tokens_per_second"] > 0
    assert {result["finish"] for result in actual["results"]} <= {"stop", "length"}


def test_prompts_come_from_words_files_and_standard_input(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    (tmp_path / "p.txt").write_text("one\n\nthree words\r\n")
    words = [run, "a", "-", "--file", str(tmp_path / "p.txt"), "--max-new-tokens", "1"]
    actual = document(capsys, *words)
    assert [result["prompt"] for result in actual["results"]] == [
        "a",
        "two\nlines",
        "one",
        "three words",
    ]


def test_a_jsonl_file_may_hold_prompts_of_several_lines(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a\\nb"}\n\n"c"\n{"prompt": "", "x": 1}\n')
    assert read_prompt_file(file) == ["a\nb", "c", ""]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("p.jsonl", b"{}\n", r'p.jsonl:1: expected text under "prompt", found'),
        ("p.jsonl", b'"a"\n{x\n', r"p.jsonl:2: not JSON .*Use an object like"),
        (
            "p.jsonl",
            b'{"a":' * 100_000,
            r"p.jsonl:1: not JSON \(arrays or objects are nested too deeply\)",
        ),
        ("p.jsonl", b'"\\ud800"\n', r"p.jsonl:1: not JSON .*surrogates not allowed"),
        ("p.txt", b"a\xff", "byte 1 is not UTF-8. Pass a text file"),
        (None, b"", "No such file or directory. Pass a text file with one prompt per line"),
    ],
)
def test_files_without_prompts_are_rejected(
    name: str | None, data: bytes, message: str, tmp_path: Path
) -> None:
    file = tmp_path / (name or "gone.txt")
    if name is not None:
        file.write_bytes(data)
    with pytest.raises(DataError, match=message):
        read_prompt_file(file)


def test_prompt_file_that_links_to_a_device_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "p.txt").symlink_to("/dev/zero")
    with pytest.raises(
        DataError, match=r"p.txt: not a regular file, but a device.*Pass a text file"
    ):
        read_prompt_file(tmp_path / "p.txt")


@pytest.mark.parametrize(
    "errors", ["strict", "surrogateescape"]
)  # the second one is what the C locale uses
def test_standard_input_that_is_not_utf8_is_rejected(
    errors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8", errors=errors)
    monkeypatch.setattr("sys.stdin", stdin)
    with pytest.raises(DataError, match=r"-: standard input is not UTF-8 \(.*\). Pass UTF-8 text."):
        read_prompts(GenerateOptions(source="x", prompts=("-",)))


def test_seed_temperature_and_filters_change_the_text(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def ids(*words: str) -> list[int]:
        (result,) = document(capsys, run, "ab", "--max-new-tokens", "12", "--ignore-eod", *words)[
            "results"
        ]
        actual: list[int] = result["ids"]
        return actual

    assert ids() == ids("--seed", "1234") != ids("--seed", "5")
    greedy = ids("--greedy")
    assert (
        greedy
        == ids("--temperature", "0")
        == ids("--top-k", "1")
        == ids("--top-p", "1e-6")
        != ids()
    )


def test_model_without_a_tokenizer_reads_and_writes_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_run(tmp_path / "run", TokenizerConfig(kind="null", vocab_size=257))
    assert main(["generate", source, "5 17", "--max-new-tokens", "3", "--ignore-eod"]) == 0
    words = capsys.readouterr().out.split()
    assert words[:2] == ["5", "17"] and len(words) == 5 and all(word.isdigit() for word in words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gone"], "gone: no such folder"),
        (
            ["RUN", "--temperature", "-1"],
            "--temperature=-1.0 must be a finite number of at least 0",
        ),
        (
            ["RUN", "--temperature", "-1", "--top-p", "2"],
            "2. --top-p=2.0 must be at most 1. Set top-p to 1 or less.",
        ),
        (["RUN", "--max-new-tokens", "0"], "--max-new-tokens=0 must be at least 1. Use 256."),
        (
            ["RUN", "--greedy", "--temperature", "0.5"],
            "--greedy with --temperature=0.5: set only one of them",
        ),
        (["RUN", "--nproc", "0"], "--nproc=0 must be at least 1"),
        (
            ["RUN", "--mlp-chunks", "0"],
            "--mlp-chunks=0 must be at least 1. Use 1 for no chunks",
        ),
        (
            ["RUN", "--nproc", "5"],
            "equal number of processes per KV head. Set --nproc to one of 1, 2, 4, 6.",
        ),
        (
            ["RUN", "--parallel.pp", "2"],
            "parallel.pp=2 and parallel.dp=1 with --nproc=1: every stage and every data-parallel "
            "replica has equally many processes. Set --nproc to a multiple of 2, such as 2.",
        ),
        (
            ["RUN", "--nproc", "9", "--parallel.pp", "9"],
            "every stage has a layer. Set parallel.pp to at most",
        ),
        (
            ["RUN", "--nproc", "4", "--parallel.pp", "2", "--parallel.tp", "1"],
            "parallel.tp=1, parallel.pp=2 and parallel.dp=1 with --nproc=4: tp x pp x dp is the "
            "number of processes. Set --nproc to 2.",
        ),
        (
            ["RUN", "--parallel.sp", "true"],
            "parallel.sp=true with --nproc=1: there is one tensor-parallel rank",
        ),
        (["RUN", "x" * 64], "prompt 1: the prompt has 64 tokens, but the context is 64"),
        (
            ["RUN", "--tempreature", "1"],
            "--tempreature is not an option of this command. Did you mean --temperature",
        ),
    ],
)
def test_invalid_input_is_reported(
    words: list[str], message: str, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *(run if word == "RUN" else word for word in words)]) == 2
    error_text = capsys.readouterr()
    assert message in error_text.err and "Traceback" not in error_text.err and error_text.out == ""


def test_folder_without_a_checkpoint_is_reported_with_its_contents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log.txt").write_text("")
    assert main(["generate", str(tmp_path)]) == 2
    assert "has no checkpoint (found: log.txt). Use the folder of a run" in capsys.readouterr().err


def test_control_characters_are_replaced_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for place, expected in ((Terminal(), "a\ufffd[2Jb\n\tc"), (io.StringIO(), "a\x1b[2Jb\n\tc")):
        monkeypatch.setattr("sys.stdout", place)
        print_now("a\x1b[2Jb\n\tc")
        assert place.getvalue() == expected


def test_workers_get_the_same_options_and_every_prompt(
    run: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[tuple[list[str], int, str]] = []

    def start(argv: list[str], nproc: int) -> int:
        started.append((argv, nproc, Path(argv[argv.index("--file") + 1]).read_text()))
        return 0

    monkeypatch.setattr("megalith.launch.launcher.run_workers", start)
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    assert main(["generate", run, "a\nb", "-", "--nproc", "2", "--top-k", "7", "--greedy"]) == 0
    ((argv, nproc, text),) = started
    assert nproc == 2 and [json.loads(line)["prompt"] for line in text.splitlines()] == [
        "a\nb",
        "from a pipe",
    ]
    assert argv[:2] == ["generate", f"{run}/checkpoints/step_0000007"]
    options = parse_options(GenerateOptions, argv[1:], prog="x")
    assert (options.top_k, options.greedy, options.nproc, options.prompts) == (7, True, 1, ())


def test_settings_of_the_engine_reach_the_workers_and_change_no_token(
    run: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", run, "abab", "--max-new-tokens", "30", "--greedy", "--json"]
    assert main(words) == 0
    expected = json.loads(capfd.readouterr().out)["results"]
    drafts = ["--engine.speculation.method", "ngram", "--engine.speculation.num_draft_tokens=2"]
    assert main([*words, *drafts]) == 0
    assert json.loads(capfd.readouterr().out)["results"] == expected
    started = list[list[str]]()

    def start(argv: list[str], nproc: int) -> int:
        started.append(argv)
        return 0

    monkeypatch.setattr("megalith.launch.launcher.run_workers", start)
    assert main([*words, *drafts, "--nproc", "2"]) == 0
    rest, overrides = split_overrides(started[0][1:], ServeRun)
    speculation = apply_overrides(ServeRun(), overrides).engine.speculation
    assert (speculation.method, speculation.num_draft_tokens) == ("ngram", 2)
    assert parse_options(GenerateOptions, rest, prog="x").greedy
    assert main([*words, "--engine.speculation.num_draft_tokens", "0"]) == 2
    assert "speculation.num_draft_tokens=0 must be at least 1" in capfd.readouterr().err


def test_every_option_reaches_the_workers() -> None:
    values: dict[str, Any] = {
        "max_new_tokens": 3,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.5,
        "seed": 6,
        "adapter": "sql",
        "greedy": True,
        "ignore_eod": True,
        "dtype": "fp64",
        "json": True,
        "base": "b",
        "kernels": "reference",
        "mlp_chunks": 2,
        "role": "ema",
    }
    options = GenerateOptions(source="x", prompts=("a",), file="f", nproc=4, **values)
    assert {field.name for field in fields(options)} == {
        *values,
        "source",
        "prompts",
        "file",
        "nproc",
    }
    read = parse_options(
        GenerateOptions, build_worker_arguments(options, Path("y"), Path("z")), prog="x"
    )
    assert {name: getattr(read, name) for name in values} == values and (
        read.source,
        read.file,
    ) == ("y", "z")


def test_two_processes_generate_the_same_text_as_one(
    run: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", run, "ab", "xyz", "--max-new-tokens", "9", "--json", "--seed", "3"]
    assert main(words) == 0
    one = json.loads(capfd.readouterr().out)
    assert main([*words, "--nproc", "2"]) == 0
    assert json.loads(capfd.readouterr().out)["results"] == one["results"]


@pytest.mark.parametrize("command", ["generate", "convert"])
def test_help_does_not_load_torch(command: str) -> None:
    code = (
        f"import sys; from megalith.cli.main import main; main(['{command}', '--help']); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "--dtype" in done.stdout and done.stdout.endswith("False\n")


def test_adapter_option_selects_an_adapter(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_adapter(tmp_path / "sql", Path(run), seed=1)
    words = ["--greedy", "--max-new-tokens", "12"]
    loaded = ["--engine.max_adapters", "1", "--engine.adapters", f"sql={folder}"]
    base, adapted, merged = (
        document(capsys, *each, *words)["results"][0]["ids"]
        for each in (
            [run, "abc", *loaded],
            [run, "abc", *loaded, "--adapter", "sql"],
            [str(folder), "abc"],
        )
    )
    assert adapted == merged != base

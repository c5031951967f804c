"""`megalith chat` through pipes: turns, commands, ranks that share the model, and what is
missing."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.save import save_checkpoint
from megalith.cli import chat as command
from megalith.cli.arguments import parse_options
from megalith.cli.chat import (
    ONE_SEQUENCE,
    ChatOptions,
    build_worker_arguments,
    handle_turn,
    open_chat,
    option_problems,
    settings,
)
from megalith.cli.main import main
from megalith.config.data import BUILT_IN_TEMPLATES, DataConfig, SFTConfig, TokenizerConfig
from megalith.config.model import ModelConfig
from megalith.config.serve import GenerateRun
from megalith.config.tree import dump_yaml
from megalith.hf.release import release_run
from megalith.infer.layout import open_source
from megalith.kernels.norm import RMSNormFunction
from megalith.launch.worker import Worker
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
    max_seq_len=96,
    init_std=0.5,
)


def make_run(folder: Path, template: str | None, tokenizer: TokenizerConfig | None = None) -> str:
    """A run with one checkpoint, as tuned with a template."""
    model = Decoder(build_context(CONFIG, build_single_rank_mesh()))
    allocate(model, torch.device("cpu"))
    initialize(model, seed=1)
    entries = [
        CheckpointEntry(d.shard, "param", getattr(module, name))
        for d, module, name in iter_parameter_specs(model)
    ]
    run = release_run("run", CONFIG, tokenizer or TokenizerConfig(), folder)
    text = dump_yaml(replace(run, data=DataConfig(sft=SFTConfig(template=template))))
    save_checkpoint(
        folder / "checkpoints", 7, entries, {}, single_rank_group("world"), config_text=text
    )
    return str(folder)


@pytest.fixture
def tuned(tmp_path: Path) -> str:
    return make_run(tmp_path / "run", "identity")


def chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], turns: str, *words: str
) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    monkeypatch.setattr("sys.stdin", io.StringIO(turns))
    code = main(["chat", *words])
    error_text = capsys.readouterr()
    return code, error_text.out, error_text.err


def test_default_temperature_makes_unlikely_tokens_rarer(tuned: str) -> None:
    assert settings(ChatOptions(source=tuned)).temperature == 0.6
    assert settings(ChatOptions(source=tuned, greedy=True)).temperature == 0.0
    assert option_problems(ChatOptions(source=tuned, greedy=True)) == []


def test_every_line_is_a_turn_and_reset_starts_a_new_conversation(
    tuned: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (tuned, "--max-new-tokens", "6", "--seed", "3")
    _, once, _ = chat(monkeypatch, capsys, "abc\n", *words)
    code, out, err = chat(monkeypatch, capsys, "abc\n\nabc\n/reset\nabc\n/exit\nnever\n", *words)
    assert (code, err) == (0, "")
    assert out.startswith(once) and out.endswith(once)
    middle = out[len(once) : len(out) - len(once)]
    assert middle not in ("", once), "the second turn saw the first"
    assert chat(monkeypatch, capsys, "abc\n", *words, "--system", "be brief")[1] != once
    assert "/reset starts a new conversation" in chat(monkeypatch, capsys, "/help\n", *words)[1]


@pytest.mark.slow  # two processes of their own
def test_turns_from_a_file_on_two_tensor_parallel_ranks(
    tuned: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "turns.txt").write_text("abc\nxyz\n")
    words = [
        "chat",
        tuned,
        "--max-new-tokens",
        "6",
        "--greedy",
        "--input",
        str(tmp_path / "turns.txt"),
    ]
    assert main(words) == 0
    alone_ = capfd.readouterr().out
    assert main([*words, "--nproc", "2"]) == 0
    assert capfd.readouterr().out == alone_


def test_workers_get_the_same_options(tuned: str) -> None:
    options = parse_options(
        ChatOptions, [tuned, "--system=-x", "--top-p", "0.5", "--greedy", "--nproc", "3"], prog="x"
    )
    again = parse_options(ChatOptions, build_worker_arguments(options), prog="x")
    assert again == replace(options, nproc=1)


def test_answers_may_be_computed_by_plain_definitions(
    tuned: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (tuned, "--max-new-tokens", "6", "--greedy", "--dtype", "fp64")
    fast = chat(monkeypatch, capsys, "abc\n", *words)
    assert chat(monkeypatch, capsys, "abc\n", *words, "--mlp-chunks", "3") == fast

    def forbid(*arguments: object) -> object:
        raise AssertionError("a fast form runs where plain definitions are asked for")

    monkeypatch.setattr(RMSNormFunction, "forward", forbid)
    assert chat(monkeypatch, capsys, "abc\n", *words, "--kernels", "reference") == fast
    with pytest.raises(AssertionError, match="a fast form runs"):
        chat(monkeypatch, capsys, "abc\n", *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--greedy", "--temperature", "0.5"),
            "--greedy with --temperature=0.5: set only one of them.",
        ),
        (("--nproc", "0"), "--nproc=0 must be at least 1. Use the number"),
        (("--parallel.dp", "2"), "parallel.dp=2: this command runs one replica"),
        (("--mlp-chunks", "-1"), "--mlp-chunks=-1 must be at least 1. Use 1 for no chunks"),
        (
            ("--input", "gone.txt"),
            "--input=gone.txt: no such file. Pass a file with one turn per line.",
        ),
        (("--template", "chatlm"), "--template=chatlm: No such file or directory."),
        (("--max-new-tokens", "0"), "--max-new-tokens=0"),
    ],
)
def test_invalid_options_are_reported(
    tuned: str,
    words: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = chat(monkeypatch, capsys, "abc\n", tuned, *words)
    assert code == 2 and message in err


def test_conversation_longer_than_the_context_is_reported(
    tuned: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = chat(monkeypatch, capsys, "x" * 100 + "\n", tuned)
    assert (
        code == 2
        and "the conversation has 100 tokens, but the context of the model is 96" in err
        and "/reset" in err
    )


def test_missing_template_is_reported_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_run(tmp_path / "plain", None)
    code, _, err = chat(monkeypatch, capsys, "abc\n", source)
    assert (
        code == 2
        and "has no chat template. Put one into" in err
        and "set --template to one of chatml" in err
    )
    assert (
        chat(
            monkeypatch, capsys, "abc\n", source, "--template", "identity", "--max-new-tokens", "2"
        )[0]
        == 0
    )


def test_model_with_null_tokenizer_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_run(tmp_path / "null", "identity", TokenizerConfig(kind="null", vocab_size=257))
    code, _, err = chat(monkeypatch, capsys, "abc\n", source)
    assert code == 2 and "tokenizer.kind=null, so it has no text. Use a model with" in err


def test_interrupted_answer_ends_and_the_conversation_continues(
    tuned: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = parse_options(ChatOptions, [tuned, "--max-new-tokens", "30", "--greedy"], prog="x")
    worker = Worker.from_environment({})
    run_chat = open_chat(options, GenerateRun(engine=ONE_SEQUENCE), open_source(tuned, 1), worker)
    shown: list[str] = []

    def impatient(text: str) -> None:
        shown.append(text)
        if len(shown) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(command, "print_now", impatient)
    with pytest.raises(KeyboardInterrupt):
        handle_turn(run_chat, "abc", first=True)
    assert [message["role"] for message in run_chat.messages] == ["user", "assistant"]
    assert run_chat.messages[1]["content"] == "".join(shown)
    shown.clear()
    handle_turn(run_chat, "and then?", first=True, forgiving=True, stoppable=True)
    assert shown[3:] == [" [stopped]\n"] and len(run_chat.messages) == 4
    before = list(run_chat.messages)
    monkeypatch.setattr(command, "print_now", shown.append)
    handle_turn(run_chat, "xyz", first=True)
    again = open_chat(options, GenerateRun(engine=ONE_SEQUENCE), open_source(tuned, 1), worker)
    again.messages = before
    assert again.reply("xyz", lambda text: None) == run_chat.messages[-1]["content"], (
        "what was read is still right"
    )


def test_help_lists_every_built_in_template(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--help"]) == 0
    output = " ".join(capsys.readouterr().out.replace("│", " ").split()).replace("- ", "-")
    assert all(name in output for name in BUILT_IN_TEMPLATES), output


def test_adapter_option_selects_an_adapter(
    tuned: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = save_adapter(tmp_path / "sql", Path(tuned), seed=1)
    words = ["--greedy", "--max-new-tokens", "9", "--template", "identity"]
    loaded = ["--engine.max_adapters", "1", "--engine.adapters", f"sql={folder}"]
    base, adapted, merged = (
        chat(monkeypatch, capsys, "abc\n", *each, *words)[1]
        for each in ([tuned, *loaded], [tuned, *loaded, "--adapter", "sql"], [str(folder)])
    )
    assert adapted == merged != base

"""`megalith prepare` from the command line: results, reports, exit codes."""

import base64
import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megalith.cli.main import main
from megalith.cli.prepare import Display
from megalith.data.indexed import IndexedDataset
from megalith.data.prepare import Progress
from megalith.data.stores import Totals

LINES = '{"text": "one two three"}\n{"text": "four"}\nbroken\n'


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # The command catches SIGTERM for its process, which here is the whole test run's.
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    (tmp_path / "corpus.jsonl").write_text(LINES * 30)
    return tmp_path / "corpus.jsonl"


def run(*words: object) -> int:
    return main(["prepare", *map(str, words)])


def test_text_becomes_a_store_and_bad_lines_are_reported(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--input", corpus, "--output", corpus.parent / "out") == 0
    output = capsys.readouterr().out
    assert "out: 570 tokens, 60 documents (0 empty)" in output
    assert "skipped 30 lines or files: 30 not JSON. The first:" in output
    assert "corpus.jsonl:3: not JSON: broken" in output
    assert IndexedDataset(str(corpus.parent / "out")).num_tokens == 570


def test_json_is_one_document(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run("--input", corpus, "--output", corpus.parent / "out", "--json", "--no-append-eod") == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert (document["tokens"], document["documents"], document["rejected"]) == (
        510,
        60,
        {"not JSON": 30},
    )
    assert document["outputs"] == [str(corpus.parent / "out")]


def test_tokenizer_is_trained_before_tokenization(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--input", corpus, "--train-tokenizer", 270)
    assert run(*words, "--output", corpus.parent / "out") == 0
    assert (corpus.parent / "out.tokenizer" / "tokenizer.json").exists()
    assert IndexedDataset(str(corpus.parent / "out")).num_tokens < 570
    assert run(*words, "--output", corpus.parent / "out") == 2
    output = capsys.readouterr().err
    assert "out.tokenizer already has a tokenizer. Pass --overwrite to replace it" in output
    assert (
        run(
            "--input",
            corpus,
            "--tokenizer",
            corpus.parent / "out.tokenizer",
            "--output",
            corpus.parent / "two",
        )
        == 0
    )
    assert (corpus.parent / "two.bin").read_bytes() == (corpus.parent / "out.bin").read_bytes()


@pytest.mark.parametrize("named", ["tokenizer.model", "."])
def test_sentencepiece_model_is_used_for_the_ids(named: str, corpus: Path) -> None:
    library = pytest.importorskip(
        "sentencepiece", reason="reads SentencePiece models, which needs the library"
    )
    (corpus.parent / "words").write_text("one two three four\n" * 20)
    (corpus.parent / "m").mkdir()
    library.SentencePieceTrainer.train(
        input=str(corpus.parent / "words"),
        model_prefix=str(corpus.parent / "m" / "tokenizer"),
        vocab_size=280,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    model = corpus.parent / "m" / named
    assert (
        run(
            "--input",
            corpus,
            "--output",
            corpus.parent / "out",
            "--tokenizer",
            model,
            "--workers",
            2,
        )
        == 0
    )
    reference = library.SentencePieceProcessor(
        model_file=str(corpus.parent / "m" / "tokenizer.model")
    )
    store = IndexedDataset(str(corpus.parent / "out"))
    for number, text in enumerate(("one two three", "four")):
        assert np.asarray(store[number]).tolist() == [
            reference.bos_id(),
            *reference.encode(text),
            reference.eos_id(),
        ]


@pytest.mark.parametrize("shape", ["words.tiktoken", "tokenizer.model", "words.json"])
def test_tiktoken_vocabulary_is_used_for_the_ids(
    shape: str, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = pytest.importorskip(
        "tiktoken", reason="reads tiktoken vocabularies, which needs the library"
    )
    pieces = [bytes([byte]) for byte in range(256)] + [b"on", b"one", b"th"]
    file, written = corpus.parent / shape, [base64.b64encode(piece).decode() for piece in pieces]
    words = [
        "--input",
        corpus,
        "--output",
        corpus.parent / "out",
        "--tokenizer",
        file,
        "--no-add-special-tokens",
    ]
    if shape == "words.json":
        entries = [
            {"rank": n, "token_bytes": text, "token_str": ""} for n, text in enumerate(written)
        ]
        file.write_text(json.dumps(entries))
        words += ["--tokenizer-kind", "tiktoken", "--tiktoken-num-special-tokens", 5]
    else:
        file.write_text("".join(f"{text} {n}\n" for n, text in enumerate(written)))
        words += ["--tiktoken-special-tokens", "<|end_of_text|>", "--tiktoken-pattern", "cl100k"]
    assert run(*words) == 0, capsys.readouterr().err
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    reference = library.Encoding(
        "x", pat_str=r".+", mergeable_ranks=ranks, special_tokens={}
    ).encode_ordinary("four")
    first, shift = (
        np.asarray(IndexedDataset(str(corpus.parent / "out"))[1]).tolist(),
        5 if shape == "words.json" else 0,
    )
    assert first == [token + shift for token in reference] + [
        2 if shape == "words.json" else len(pieces)
    ]


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (
            ("--tokenizer-kind", "tiktoken"),
            "--tokenizer-kind=tiktoken with --tokenizer=byte, which has no file",
        ),
        (("--tiktoken-pattern", "v1"), "tokenizer.pattern=v1 applies to tiktoken vocabularies"),
        (
            ("--tiktoken-num-special-tokens", "0"),
            "--tiktoken-num-special-tokens=0 must be at least 1. Use 1000.",
        ),
        (
            ("--tokenizer", "m.model", "--tokenizer-kind", "tiktoken", "--train-tokenizer", "270"),
            "Remove one of them",
        ),
        (
            ("--tokenizer", "nowhere.model"),
            "no tokenizer.model found. Set it to a SentencePiece model",
        ),
    ],
)
def test_invalid_tokenizers_are_rejected(
    words: tuple[str, ...], output: str, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--input", corpus, "--output", corpus.parent / "out", *words) == 2
    assert output in capsys.readouterr().err


def test_several_keys_give_several_stores(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "two.jsonl").write_text('{"text": "a", "title": "b"}\n')
    assert (
        run(
            "--input", tmp_path / "two.jsonl", "--output", tmp_path / "x", "--keys", "text", "title"
        )
        == 0
    )
    assert IndexedDataset(str(tmp_path / "x_title")).get(0).tolist() == [98, 256]


@pytest.mark.parametrize(
    "words, text",
    [
        (["--strict"], "corpus.jsonl:3: not JSON: broken. Correct it, or run without --strict"),
        (["--workers", "0"], "workers=0 must be at least 1"),
        (
            ["--train-tokenizer", "300", "--train-tokenizer-mib", "0"],
            "--train-tokenizer-mib=0 must be at least 1. Use",
        ),
        (
            ["--tokenizer", "no/such"],
            "tokenizer.path=no/such: neither a folder nor a model in the local",
        ),
        (["--eod", "</s>"], "tokenizer.eod=</s> applies to tokenizers that are read from files"),
        (["--keys", "body"], "no text in 1 files"),
        (
            ["--tokenzer", "byte"],
            "--tokenzer is not an option of this command. Did you mean --tokenizer",
        ),
    ],
)
def test_user_errors_exit_with_2(
    corpus: Path, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--input", corpus, "--output", corpus.parent / "out", *words) == 2
    assert text in capsys.readouterr().err
    assert [path.name for path in corpus.parent.iterdir()] == ["corpus.jsonl"]


def test_second_end_token_is_warned_about(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--input", corpus, "--train-tokenizer", 270, "--output", corpus.parent / "out") == 0
    file = corpus.parent / "out.tokenizer" / "tokenizer.json"
    description = json.loads(file.read_text())
    token = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    description["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, token],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
        },
    }
    file.write_text(json.dumps(description))
    words = ("--input", corpus, "--tokenizer", file.parent)
    assert run(*words, "--output", corpus.parent / "two") == 0
    assert (
        "documents get two end tokens. Pass --no-append-eod to add only one"
        in capsys.readouterr().err
    )
    assert run(*words, "--output", corpus.parent / "one", "--no-append-eod") == 0
    assert "two end tokens" not in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_exits_with_75_and_resume_continues(
    tmp_path: Path, corpus: Path, number: signal.Signals
) -> None:
    (tmp_path / "corpus.jsonl").write_text(LINES)
    words = ["--input", str(tmp_path / "corpus.jsonl"), "--output", str(tmp_path / "out")]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "first block\n"
    process.send_signal(number)
    _, output = process.communicate(timeout=30)
    assert process.returncode == 75
    assert "out.preparing. Pass --resume to continue" in output
    assert (
        not (tmp_path / "out.bin").exists() and (tmp_path / "out.preparing" / "state.json").exists()
    )
    assert run(*words, "--resume") == 0 and (tmp_path / "out.idx").exists()


def test_progress_bar_shows_no_percentage_before_the_first_block_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Starting workers, or one large document, may take many seconds, in which 0 % would look like
    a hang."""
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Display() as display:
        assert display._bar is not None
        (task,) = display._bar.tasks
        assert task.total is None, "the bar pulses"
        before = terminal.getvalue()
        assert "tokenizing the first block" in before and "%" not in before
        display.show(
            Progress(
                nbytes=3_000_000, total_nbytes=60_000_000, totals=Totals(documents=7, tokens=900)
            )
        )
        assert (task.completed, task.total) == (3_000_000, 60_000_000)
    assert "5% · 7 documents · 900 tokens" in terminal.getvalue()


# The command, except that it stops for a while after the first block.
SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background may have been started without
from megalith.cli import prepare
from megalith.cli.main import main

def slow(self, progress):
    print("first block", flush=True)
    time.sleep(60)

prepare.Display.show = slow
sys.exit(main(["prepare", *sys.argv[1:]]))
"""

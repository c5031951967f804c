"""`megalith quickstart`: train a tokenizer and a small GPT on two processes, evaluate and sample,
in minutes.

Runs the commands that a user would type, and prints each before it runs.
"""

import contextlib
import io
import json
import shlex
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megalith.cli import prepare
from megalith.cli.arguments import parse_options
from megalith.cli.main import run_command
from megalith.data.indexed import store_exists
from megalith.data.prepare import (
    LocalText,
    find_local_text,
    known_word_fraction,
    zlib_bits_per_byte,
)
from megalith.errors import ConfigError

VOCABULARY = 4096

NUM_SAMPLES = 4
"""Heuristic: in single samples of this small model, between half and nine tenths of the words
are known (docs/log.md)."""


@dataclass(frozen=True, kw_only=True)
class QuickstartCommand:
    """Train a small GPT on text that is already on this machine, on two processes, and generate
    a sample."""

    folder: str = "runs/quickstart"
    """Output folder; the same command resumes there."""

    nproc: int = 2
    """Number of training processes."""


def main(argv: list[str]) -> int:
    """Run every step; completed steps are skipped."""
    command = parse_options(QuickstartCommand, argv, prog="megalith quickstart")
    if command.nproc < 1:
        raise ConfigError(
            f"--nproc={command.nproc} must be at least 1. Use the number of processes to train on."
        )
    started = time.monotonic()
    run, text = Path(command.folder), find_local_text()
    data = run / "data"
    try:
        data.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=data).close()  # an existing folder may belong to another user
    except OSError as error:
        raise ConfigError(
            f"--folder={command.folder}: {data} is not writable ({error}). Use a writable folder."
        ) from error
    print(
        f"corpus: {_describe(text.training)} of this Python's standard library; held out: "
        f"{_describe(text.held_out)}"
    )
    code = _prepare(data, text) or _train(run, data, command.nproc)
    return code or _show_results(run, text, started)


def _prepare(data: Path, text: LocalText) -> int:
    """Create the tokenizer and the token stores; completed steps are skipped, and an interrupted
    one is resumed."""
    lists = {"train": text.training, "valid": text.held_out}
    for name, files in lists.items():
        if store_exists(f"{data}/{name}"):
            continue
        trained = (data / "tokenizer" / "tokenizer.json").exists()
        interrupted = (data / f"{name}.preparing").exists()
        _write_corpus(data / f"{name}.jsonl", files)
        words = [
            "--input",
            f"{data}/{name}.jsonl",
            "--output",
            f"{data}/{name}",
            "--tokenizer",
            f"{data}/tokenizer",
            *([] if trained else ["--train-tokenizer", str(VOCABULARY)]),
            "--workers",
            "2",
            *(["--resume"] if interrupted else []),
        ]
        _print_command("prepare", *words)
        code = prepare.main(words, resume_advice="Run the same command again to continue.")
        if code:
            return code
    return 0


def _train(run: Path, data: Path, nproc: int) -> int:
    return _run(
        "train",
        "quickstart",
        "--run",
        f"./{run}" if not run.is_absolute() else str(run),
        "--nproc",
        str(nproc),
        "--data.mock",
        "false",
        "--data.train_path",
        f"{data}/train",
        "--data.valid_path",
        f"{data}/valid",
        "--tokenizer.kind",
        "huggingface",
        "--tokenizer.path",
        f"{data}/tokenizer",
        "--tokenizer.vocab_size",
        "none",
    )


def _show_results(run: Path, text: LocalText, started: float) -> int:
    """Evaluate and sample, and print the results and the next commands."""
    evaluation = json.loads(_captured("evaluate", str(run), "--json"))
    results = json.loads(
        _captured("generate", str(run), *sample_words(seed=1, count=NUM_SAMPLES), "--json")
    )["results"]
    shares = {
        result["prompt"] + result["text"]: known_word_fraction(
            result["text"], (*text.training, *text.held_out)
        )
        for result in results
    }
    sample = max(shares, key=lambda text: shares[text])
    (run / "sample.txt").write_text(sample, encoding="utf-8")
    print(f"\n{sample[:600]}\n")
    print(
        f"held-out files: {evaluation['bits_per_byte']:.3f} bits per byte; "
        f"zlib -9 needs {zlib_bits_per_byte(text.held_out):.3f}\n"
        f"sample: {run}/sample.txt, the best of {NUM_SAMPLES}: {shares[sample]:.0%} of its words "
        "occur in the corpus "
        f"(on average {sum(shares.values()) / len(shares):.0%})\n"
        f"loss plot: {run}/plots/loss.png\n"
        f"total time: {time.monotonic() - started:.0f} s\n\n"
        f"try next:\n  megalith generate {run} 'class ' --temperature 0.8 --top-p 0.9\n"
        f"  megalith train {run} --run {run} --train.steps 2000      # continues the run\n"
        f"  megalith verify {run} --parallel.tp 2 --parallel.dp 2    # verify another layout "
        "on this machine\n  megalith recipes                                         # larger "
        "models"
    )
    return 0


def sample_words(seed: int, count: int = 1) -> tuple[str, ...]:
    """Return the arguments of `megalith generate RUN` for `count` samples.

    At a lower temperature the model repeats lists of invented constants.
    """
    return (
        *["def "] * count,
        "--max-new-tokens",
        "500",
        "--temperature",
        "0.8",
        "--top-p",
        "0.9",
        "--seed",
        str(seed),
        "--ignore-eod",
    )


def _print_command(*words: str) -> None:
    print(f"\n$ megalith {shlex.join(words)}", flush=True)


def _run(*words: str) -> int:
    _print_command(*words)
    return run_command(words[0], list(words[1:]))


def _captured(*words: str) -> str:
    _print_command(*words)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        run_command(words[0], list(words[1:]))
    return output.getvalue()


def _write_corpus(path: Path, files: Sequence[Path]) -> None:
    """Write the documents atomically: `prepare` resumes only with the file it started with."""
    if path.exists():
        return
    temporary = path.with_name(f"{path.name}.writing")
    temporary.write_text("".join(_as_line(file) for file in files), encoding="utf-8")
    temporary.replace(path)


def _as_line(file: Path) -> str:
    return json.dumps({"text": file.read_text(encoding="utf-8")}) + "\n"


def _describe(files: Sequence[Path]) -> str:
    return f"{len(files)} files, {sum(file.stat().st_size for file in files) / 1e6:.1f} MB"

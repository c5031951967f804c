"""`megalith prepare`: tokenize text files into the .bin/.idx files that training reads, and
optionally train a tokenizer."""

import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from megalith.cli.arguments import parse_options
from megalith.cli.output import print_json
from megalith.config.data import (
    FileKind,
    PrepareConfig,
    SplitPattern,
    TokenizerConfig,
    prepare_problems,
)
from megalith.data.corpus import find_sources, read_texts
from megalith.data.huggingface import train_bpe
from megalith.data.prepare import Progress, output_prefixes, prepare
from megalith.data.stores import Totals
from megalith.data.tokenizer import appends_eod, build_tokenizer, detect_tokenizer_kind
from megalith.errors import ConfigError, raise_all

STOPPED = 75  # exit code of stopped runs that can be resumed, as in `megalith train`
_LINE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class PrepareCommand:
    """Tokenize text files into a token store, OUTPUT.bin and OUTPUT.idx, which training reads with
    --data.path OUTPUT.

    A document is a JSON object per line (.jsonl) or a file (.txt and others); .gz and .zst are
    decompressed. Ctrl-C leaves no incomplete store, and --resume continues later.
    """

    input: tuple[str, ...]
    """Files, folders and globs."""
    output: str
    """Prefix of the store; OUTPUT_KEY for each key if there are several."""
    tokenizer: str = "byte"
    """`byte`, a folder with tokenizer.json, a hub name in the local cache, a GPT-2 vocab.json
    beside its merges.txt, a SentencePiece tokenizer.model, or a tiktoken vocabulary."""
    tokenizer_kind: FileKind | None = None
    """Type of the tokenizer file; default: by its name. Required for a tiktoken vocabulary in
    JSON."""
    tiktoken_pattern: SplitPattern | None = None
    """Pattern that splits text before byte-pair encoding; default: v2."""
    tiktoken_special_tokens: tuple[str, ...] = ()
    """Texts of the special tokens, in order of their ids."""
    tiktoken_num_special_tokens: int | None = None
    """Number of ids reserved for special tokens at the start of a JSON vocabulary; default:
    1000."""
    tiktoken_vocab_size: int | None = None
    """Number of ids of a JSON vocabulary, including special tokens; default: all."""
    train_tokenizer: int | None = None
    """Vocabulary size of a byte-level BPE tokenizer to train on the input first; written to
    --tokenizer FOLDER or OUTPUT.tokenizer. Default: train none."""
    train_tokenizer_mib: int = 1024
    """Maximum amount of input in MiB for training the tokenizer; larger inputs are sampled
    evenly."""
    eod: str | None = None
    """Text of the end-of-document token; default: the tokenizer's end-of-text token."""
    add_special_tokens: bool = True
    """Add the tokenizer's BOS and EOS tokens around each text."""
    append_eod: bool = True
    """Append the end-of-document token to every document that is not empty."""
    format: Literal["auto", "jsonl", "text"] = "auto"
    """Input format: each line (jsonl) or each file (text) is a document; auto: by the file
    extension."""
    keys: tuple[str, ...] = ("text",)
    """JSON keys whose text is tokenized, each into its own store."""
    workers: int = 1
    """Number of tokenizer processes."""
    strict: bool = False
    """Raise an error at the first line or file that cannot be used, instead of skipping and
    counting it."""
    resume: bool = False
    """Continue an interrupted run of the same command."""
    overwrite: bool = False
    """Overwrite an existing store, or an unfinished one, of the same name."""
    json: bool = False
    """Print one JSON document with the result."""


def main(argv: list[str], *, resume_advice: str = "Pass --resume to continue.") -> int:
    """Run `megalith prepare` and return its exit code. `resume_advice` ends the message of an
    interrupted run."""
    command = parse_options(PrepareCommand, argv, prog="megalith prepare")
    # This command uses one process per core; tokenizer threads would compete with them.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    signal.signal(signal.SIGTERM, _interrupt)
    config = build_prepare_config(command)
    raise_all(option_problems(command) + prepare_problems(config))
    try:
        if command.train_tokenizer is not None:
            _train_tokenizer(command, config)
        _warn_of_two_end_tokens(config)
        started = time.monotonic()
        with Display() as display:
            totals = prepare(config, report=display.show)
    except KeyboardInterrupt:
        print(
            f"stopped; finished parts are in {config.output}.preparing. {resume_advice}",
            file=sys.stderr,
        )
        return STOPPED
    _print_result(config, totals, time.monotonic() - started, json=command.json)
    return 0


def option_problems(command: PrepareCommand) -> list[str]:
    """Return errors of options that the settings do not check."""
    size, kind, count = (
        command.train_tokenizer_mib,
        command.tokenizer_kind,
        command.tiktoken_num_special_tokens,
    )
    problems = [] if size >= 1 else [f"--train-tokenizer-mib={size} must be at least 1. Use 1024."]
    if count is not None and count < 1:
        problems.append(f"--tiktoken-num-special-tokens={count} must be at least 1. Use 1000.")
    if kind is not None and command.tokenizer == "byte":
        problems.append(
            f"--tokenizer-kind={kind} with --tokenizer=byte, which has no file. Remove one of them."
        )
    if kind not in (None, "huggingface") and command.train_tokenizer is not None:
        problems.append(
            f"--tokenizer-kind={kind} with --train-tokenizer={command.train_tokenizer}, which "
            "writes a tokenizer.json. "
            f"Remove one of them."
        )
    return problems


def build_prepare_config(command: PrepareCommand) -> PrepareConfig:
    """Return the settings of a command line."""
    path = command.tokenizer
    if command.train_tokenizer is not None and path == "byte":
        path = f"{command.output}.tokenizer"
    tokenizer = TokenizerConfig(add_special_tokens=command.add_special_tokens)
    if path != "byte":
        trained = command.train_tokenizer is not None
        kind = command.tokenizer_kind or ("huggingface" if trained else detect_tokenizer_kind(path))
        tokenizer = replace(tokenizer, kind=kind, path=path)
    tokenizer = replace(
        tokenizer,
        pattern=command.tiktoken_pattern or tokenizer.pattern,
        vocab_size=command.tiktoken_vocab_size,
        special_tokens=command.tiktoken_special_tokens,
        num_special_tokens=command.tiktoken_num_special_tokens or tokenizer.num_special_tokens,
    )
    return PrepareConfig(
        input=command.input,
        output=command.output,
        tokenizer=replace(tokenizer, eod=command.eod),
        format=command.format,
        keys=command.keys,
        append_eod=command.append_eod,
        workers=command.workers,
        strict=command.strict,
        resume=command.resume,
        overwrite=command.overwrite,
    )


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _train_tokenizer(command: PrepareCommand, config: PrepareConfig) -> None:
    folder = Path(config.tokenizer.path or "")
    if os.path.exists(folder / "tokenizer.json"):  # False instead of PermissionError
        if command.resume:
            return  # trained by the interrupted run
        if not command.overwrite:
            raise ConfigError(
                f"--train-tokenizer {command.train_tokenizer}: {folder} already has a tokenizer. "
                "Pass --overwrite to "
                f"replace it, or use it with --tokenizer {folder} instead of --train-tokenizer."
            )
    assert command.train_tokenizer is not None
    sources = find_sources(config.input, config.format)
    texts = read_texts(sources, config.keys, max_bytes=command.train_tokenizer_mib << 20)
    print(f"training a tokenizer with {command.train_tokenizer} ids", file=sys.stderr)
    tokenizer = train_bpe(texts, vocab_size=command.train_tokenizer, path=str(folder))
    print(f"wrote {folder}: {tokenizer.vocab_size} ids", file=sys.stderr)


def _warn_of_two_end_tokens(config: PrepareConfig) -> None:
    if config.append_eod and appends_eod(build_tokenizer(config.tokenizer)):
        print(
            f"warning: {config.tokenizer.path} appends an end token to every text, so documents "
            "get two end "
            f"tokens. Pass --no-append-eod to add only one.",
            file=sys.stderr,
        )


class Display:
    """Progress display: a progress bar on a terminal, else a line every few seconds."""

    def __init__(self) -> None:
        self._started = self._last_printed = time.monotonic()
        self._bar: Bar | None = None
        if sys.stderr.isatty():
            columns = (TextColumn("prepare"), BarColumn(), TextColumn("{task.fields[status]}"))
            self._bar = Bar(
                *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)
            )
            # Without a total the bar pulses until the first block, which may be one large document,
            # is done.
            self._task: TaskID = self._bar.add_task(
                "prepare", total=None, status="tokenizing the first block"
            )

    def __enter__(self) -> "Display":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, progress: Progress) -> None:
        """Show how much of the input is tokenized."""
        seconds = time.monotonic() - self._started
        totals = progress.totals
        if self._bar is not None:
            percentage = f"{progress.nbytes / max(progress.total_nbytes, 1):.0%}"
            status = f"{percentage} · {totals.documents:,} documents · {totals.tokens:,} tokens"
            self._bar.update(
                self._task, completed=progress.nbytes, total=progress.total_nbytes, status=status
            )
        elif time.monotonic() - self._last_printed > _LINE_SECONDS:
            self._last_printed = time.monotonic()
            share = progress.nbytes / max(progress.total_nbytes, 1)
            left = seconds * (1 - share) / share if share else float("nan")
            print(
                f"prepare {share:.0%} · {totals.documents:,} documents · {totals.tokens:,} tokens "
                f"· {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )


def _print_result(config: PrepareConfig, totals: Totals, seconds: float, *, json: bool) -> None:
    outputs = output_prefixes(config)
    if json:
        document: dict[str, Any] = {
            "outputs": outputs,
            "tokenizer": config.tokenizer.path or "byte",
        }
        print_json({**document, **asdict(totals), "seconds": round(seconds, 3)})
        return
    print(
        f"wrote {', '.join(outputs)}: {totals.tokens:,} tokens, {totals.documents:,} documents "
        f"({totals.empty_documents:,} empty), {totals.text_bytes / 1e6:,.1f} MB of text in "
        f"{seconds:.1f} s"
    )
    if totals.rejected:
        reasons = ", ".join(
            f"{count:,} {reason}" for reason, count in sorted(totals.rejected.items())
        )
        print(f"skipped {sum(totals.rejected.values()):,} lines or files: {reasons}. The first:")
        for example in totals.examples:
            print(f"  {example}")

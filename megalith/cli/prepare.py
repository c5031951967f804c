"""`megalith prepare`: text files to the .bin/.idx pair that training reads, with a new tokenizer if
one is wanted."""

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
from megalith.config.prepare import PrepareConfig, prepare_problems
from megalith.config.tokenizer import FileKind, SplitPattern, TokenizerConfig
from megalith.data.corpus import find_sources, read_texts
from megalith.data.huggingface import train_bpe
from megalith.data.journal import Totals
from megalith.data.prepare import Progress, output_prefixes, prepare
from megalith.data.tokenizer import build_tokenizer, ends_texts_itself, kind_of
from megalith.errors import ConfigError, raise_all

STOPPED = 75  # as of a training run that was stopped after a save: run it again to go on
_LINE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class PrepareCommand:
    """Text files to a token store: OUTPUT.bin and OUTPUT.idx, which training reads with --data.path
    OUTPUT.

    One JSON object per line is a document (.jsonl), or one file is (.txt and others); .gz and .zst
    are unpacked on the way. Ctrl-C leaves nothing half-done under the final names, and --resume
    goes on later.
    """

    input: tuple[str, ...]
    """Files, folders and globs."""
    output: str
    """Prefix of the store; with several keys, OUTPUT_KEY for each."""
    tokenizer: str = "byte"
    """`byte`, a folder with tokenizer.json, a hub name in the local cache, a GPT-2 vocab.json
    with its merges.txt beside it, a SentencePiece tokenizer.model, or a tiktoken vocabulary."""
    tokenizer_kind: FileKind | None = None
    """What reads that file; unset: by its name. A tiktoken vocabulary in JSON has to be named."""
    tiktoken_pattern: SplitPattern | None = None
    """How text is cut before bytes are paired; unset: v2."""
    tiktoken_special_tokens: tuple[str, ...] = ()
    """Texts of the special tokens, in order."""
    tiktoken_num_special_tokens: int | None = None
    """Ids at the beginning that a JSON vocabulary keeps for special tokens; unset: 1000."""
    tiktoken_vocab_size: int | None = None
    """Ids of a JSON vocabulary, special tokens included; unset: all."""
    train_tokenizer: int | None = None
    """Train byte-level BPE with so many ids on the input first, into --tokenizer FOLDER or
    OUTPUT.tokenizer."""
    train_tokenizer_mib: int = 1024
    """Read at most so much of the input to train the tokenizer; of a larger input, blocks spread
    over all of it."""
    eod: str | None = None
    """Text of the token that ends a document. Unset: the tokenizer's own end-of-text token."""
    add_special_tokens: bool = True
    """Let the tokenizer put its own first and last tokens around each text."""
    append_eod: bool = True
    """Put the end-of-document token behind every document that is not empty."""
    format: Literal["auto", "jsonl", "text"] = "auto"
    """Whether lines (jsonl) or whole files (text) are documents; auto goes by the ending."""
    keys: tuple[str, ...] = ("text",)
    """The keys of a JSON object whose text is taken, each into a store of its own."""
    workers: int = 1
    """Processes that tokenize."""
    strict: bool = False
    """Refuse the first line or file that cannot be used, instead of counting it."""
    resume: bool = False
    """Go on where a stopped run of the same command left off."""
    overwrite: bool = False
    """Replace a store, or unfinished work, of the same name."""
    json: bool = False
    """Print one JSON document about the result."""


def main(argv: list[str], *, resume_advice: str = "Pass --resume to go on.") -> int:
    """Run `megalith prepare` and return its exit code. `resume_advice` ends the message of an
    interrupted run."""
    command = parse_options(PrepareCommand, argv, prog="megalith prepare")
    # Processes are how this command uses cores; threads inside them would only compete.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    signal.signal(signal.SIGTERM, _interrupt)
    config = config_of(command)
    raise_all(option_problems(command) + prepare_problems(config))
    try:
        if command.train_tokenizer is not None:
            _train_tokenizer(command, config)
        _warn_of_two_ends(config)
        started = time.monotonic()
        with Display() as display:
            totals = prepare(config, report=display.show)
    except KeyboardInterrupt:
        print(
            f"stopped; {config.output}.preparing keeps what is done. {resume_advice}",
            file=sys.stderr,
        )
        return STOPPED
    _print_result(config, totals, time.monotonic() - started, json=command.json)
    return 0


def option_problems(command: PrepareCommand) -> list[str]:
    """What cannot be, besides what the settings say."""
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
            f"--tokenizer-kind={kind} with --tokenizer=byte, which is read from no file. Remove "
            "one of them."
        )
    if kind not in (None, "huggingface") and command.train_tokenizer is not None:
        problems.append(
            f"--tokenizer-kind={kind} with --train-tokenizer={command.train_tokenizer}, which "
            "makes a tokenizer.json. "
            f"Remove one of them."
        )
    return problems


def config_of(command: PrepareCommand) -> PrepareConfig:
    """The settings behind a command line."""
    path = command.tokenizer
    if command.train_tokenizer is not None and path == "byte":
        path = f"{command.output}.tokenizer"
    tokenizer = TokenizerConfig(add_special_tokens=command.add_special_tokens)
    if path != "byte":
        trained = command.train_tokenizer is not None
        kind = command.tokenizer_kind or ("huggingface" if trained else kind_of(path))
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
    if os.path.exists(folder / "tokenizer.json"):  # no error where looking is not allowed
        if command.resume:
            return  # trained by the run that was stopped
        if not command.overwrite:
            raise ConfigError(
                f"--train-tokenizer {command.train_tokenizer}: {folder} has a tokenizer already. "
                "Pass --overwrite to "
                f"replace it, or leave out --train-tokenizer and pass --tokenizer {folder} to use "
                "it."
            )
    assert command.train_tokenizer is not None
    sources = find_sources(config.input, config.format)
    texts = read_texts(sources, config.keys, max_bytes=command.train_tokenizer_mib << 20)
    print(f"training a tokenizer with {command.train_tokenizer} ids", file=sys.stderr)
    tokenizer = train_bpe(texts, vocab_size=command.train_tokenizer, path=str(folder))
    print(f"wrote {folder}: {tokenizer.vocab_size} ids", file=sys.stderr)


def _warn_of_two_ends(config: PrepareConfig) -> None:
    if config.append_eod and ends_texts_itself(build_tokenizer(config.tokenizer)):
        print(
            f"warning: {config.tokenizer.path} ends every text by itself, so documents get two end "
            f"tokens. Pass --no-append-eod for one.",
            file=sys.stderr,
        )


class Display:
    """A progress bar with the time left on a terminal; elsewhere a plain line every few seconds."""

    def __init__(self) -> None:
        self._started = self._said = time.monotonic()
        self._bar: Bar | None = None
        if sys.stderr.isatty():
            columns = (TextColumn("prepare"), BarColumn(), TextColumn("{task.fields[status]}"))
            self._bar = Bar(
                *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)
            )
            # Without a total the bar pulses: worker processes start, and the first block may be one
            # large document.
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
        elif time.monotonic() - self._said > _LINE_SECONDS:
            self._said = time.monotonic()
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
        print(f"left out {sum(totals.rejected.values()):,} lines or files: {reasons}. The first:")
        for example in totals.examples:
            print(f"  {example}")

"""Settings of `megalith prepare`: input, tokenization, output."""

from dataclasses import dataclass, field
from typing import Literal

from megalith.config.tokenizer import TokenizerConfig, tokenizer_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig:
    """Tokenization of text files into one token store (.bin/.idx) per key."""

    input: tuple[str, ...]
    """Files, folders (all files below them, by name) and globs. Files ending in .gz and .zst are
    decompressed."""
    output: str
    """Output prefix: OUTPUT.bin and OUTPUT.idx, or OUTPUT_KEY.bin and .idx with several keys. A
    .tokenizer.yaml file beside them names the tokenizer."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """Tokenizer."""
    format: Literal["auto", "jsonl", "text"] = "auto"
    """Input format. jsonl: each line is a JSON object and a document; text: each file is a
    document; auto: by the file extension."""
    keys: tuple[str, ...] = ("text",)
    """JSON keys whose text is tokenized, each into its own store."""
    append_eod: bool = True
    """Append the end-of-document token to every document that is not empty."""
    workers: int = 1
    """Number of tokenizer processes. The output does not depend on it."""
    strict: bool = False
    """Raise an error at the first line or file that cannot be used. Off: skip and count it."""
    resume: bool = False
    """Continue an interrupted `prepare` of the same files and settings."""
    overwrite: bool = False
    """Overwrite an existing store, or an unfinished one of another `prepare`, of the same name."""


def prepare_problems(config: PrepareConfig) -> list[str]:
    """Return the violated rules as error messages. Accesses no file."""
    problems = tokenizer_problems(config.tokenizer)
    if not config.input:
        problems.append(f"input={config.input} is empty. Use one or more files, folders or globs.")
    if not config.keys or len(set(config.keys)) < len(config.keys):
        problems.append(f"keys={config.keys}: use one or more different keys.")
    if config.workers < 1:
        problems.append(f"workers={config.workers} must be 1 or more.")
    if config.resume and config.overwrite:
        problems.append(
            "resume=True and overwrite=True exclude each other. Use resume to continue, or "
            "overwrite to start again."
        )
    return problems

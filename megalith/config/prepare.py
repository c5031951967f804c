"""What `prepare` reads, how it becomes tokens, and where they are written."""

from dataclasses import dataclass, field
from typing import Literal

from megalith.config.tokenizer import TokenizerConfig, tokenizer_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig:
    """Text files to one token store per key."""

    input: tuple[str, ...]
    """Files, folders (everything below them, by name) and globs; .gz and .zst are unpacked on the
    way."""
    output: str
    """Prefix of the store: OUTPUT.bin and OUTPUT.idx, or OUTPUT_KEY.bin and .idx when there are
    several keys. Beside each, .tokenizer.yaml names the tokenizer."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """How text becomes ids."""
    format: Literal["auto", "jsonl", "text"] = "auto"
    """jsonl: one JSON object per line is a document. text: one file is. auto: by the ending of each
    file."""
    keys: tuple[str, ...] = ("text",)
    """The keys of a JSON object whose text is taken, each into a store of its own."""
    append_eod: bool = True
    """Put the end-of-document token behind every document that is not empty."""
    workers: int = 1
    """Processes that tokenize. The files do not depend on it."""
    strict: bool = False
    """Refuse the first line or file that cannot be used, instead of counting it."""
    resume: bool = False
    """Go on where a stopped `prepare` of the same files and settings left off."""
    overwrite: bool = False
    """Replace a store, or the unfinished work of another `prepare`, of the same name."""


def prepare_problems(config: PrepareConfig) -> list[str]:
    """Every rule that this config breaks, as texts. Touches no file."""
    problems = tokenizer_problems(config.tokenizer)
    if not config.input:
        problems.append(
            f"input={config.input} names no file. Use one or more files, folders or globs."
        )
    if not config.keys or len(set(config.keys)) < len(config.keys):
        problems.append(f"keys={config.keys}: use one or more different keys.")
    if config.workers < 1:
        problems.append(f"workers={config.workers} must be 1 or more.")
    if config.resume and config.overwrite:
        problems.append(
            "resume=True and overwrite=True ask for opposite things: use resume to go on, or "
            "overwrite to start again."
        )
    return problems

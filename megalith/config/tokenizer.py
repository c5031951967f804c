"""Which tokenizer turns text into token ids."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

SplitPattern = Literal["v1", "v2", "cl100k"]
"""Known ways to cut text before bytes are paired."""

FileKind = Literal["huggingface", "sentencepiece", "tiktoken"]
"""Kinds that are read from files."""

FILES: tuple[FileKind, ...] = get_args(FileKind)

VOCABULARY, MERGES = "vocab.json", "merges.txt"
"""What the names of the two files of a GPT-2 tokenizer end with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """A tokenizer: bytes, one read from files, or none for made-up data."""

    kind: Literal["byte", "huggingface", "sentencepiece", "tiktoken", "null"] = "byte"
    """`byte` needs no file; `huggingface`, `sentencepiece` and `tiktoken` read `path`; `null`
    writes ids as digits and goes with mock data."""
    path: str | None = None
    """huggingface: folder with tokenizer.json, that file, a hub name already in the local cache,
    or the vocab.json of a GPT-2 tokenizer with its merges.txt beside it; sentencepiece:
    tokenizer.model, or its folder; tiktoken: a .tiktoken file or a JSON vocabulary; unset with
    the other kinds."""
    vocab_size: int | None = None
    """Number of ids of the `null` tokenizer, the last of which ends documents, or of a tiktoken
    vocabulary in JSON; unset: the others know their own."""
    eod: str | None = None
    """Text of the token that ends a document. Unset: the tokenizer's own end-of-text token."""
    add_special_tokens: bool = True
    """Let the tokenizer put its own first and last tokens around a text, as its authors meant it
    to."""
    pattern: SplitPattern = "v2"
    """tiktoken: how text is cut before bytes are paired; cl100k is that of GPT-4 and Llama 3."""
    special_tokens: tuple[str, ...] = ()
    """tiktoken: texts of the special tokens, in order; in a .tiktoken file they follow the
    vocabulary."""
    num_special_tokens: int = 1000
    """tiktoken: ids at the beginning that a JSON vocabulary keeps for special tokens."""


def merges_beside(vocabulary: str) -> str | None:
    """Where the merges of a GPT-2 vocabulary are looked for; None: its file is not named as one.

    >>> merges_beside("gpt2/gpt2-vocab.json"), merges_beside("tokenizer.json")
    ('gpt2/gpt2-merges.txt', None)
    """
    return (
        f"{vocabulary.removesuffix(VOCABULARY)}{MERGES}"
        if vocabulary.endswith(VOCABULARY)
        else None
    )


def locate_tokenizer(tokenizer: TokenizerConfig, folder: Path) -> TokenizerConfig:
    """Return the tokenizer of the config.yaml in `folder`, read from the copy there if `path` names
    a file in it.

    Runs and checkpoints have a copy of their tokenizer and name it relative to their folder, so
    that it moves with them. Any other relative path is relative to the working directory.
    """
    if tokenizer.path is None or not (folder / tokenizer.path).is_file():
        return tokenizer
    return replace(tokenizer, path=str(folder / tokenizer.path))


def tokenizer_problems(tokenizer: TokenizerConfig) -> list[str]:
    """Every rule that this config breaks, as texts. Touches no file."""
    problems = []
    kind = tokenizer.kind
    if kind in FILES and not tokenizer.path:
        problems.append(f"tokenizer.kind={kind} needs tokenizer.path. Set it to {_wanted(kind)}.")
    if kind not in FILES:
        given = [
            f"tokenizer.{name}={value}"
            for name, value in _file_fields(tokenizer)
            if value is not None
        ]
        problems += [
            f"{field} belongs to a tokenizer read from files, but tokenizer.kind={kind}. "
            f"Set tokenizer.kind to one of {', '.join(FILES)}, or remove it."
            for field in given
        ]
    usual = TokenizerConfig()
    if kind != "tiktoken":
        problems += [
            f"tokenizer.{name}={getattr(tokenizer, name)} belongs to tiktoken vocabularies, but "
            f"tokenizer.kind={kind}. "
            f"Set tokenizer.kind=tiktoken, or remove it."
            for name in ("pattern", "special_tokens", "num_special_tokens")
            if getattr(tokenizer, name) != getattr(usual, name)
        ]
    elif (
        len(tokenizer.special_tokens) > tokenizer.num_special_tokens
        or tokenizer.num_special_tokens < 1
    ):
        problems.append(
            f"tokenizer.num_special_tokens={tokenizer.num_special_tokens} must be 1 or more, and "
            "as many as are named. "
            f"Set it to {max(1, len(tokenizer.special_tokens))} or more."
        )
    if kind == "null" and (tokenizer.vocab_size or 0) < 2:
        problems.append(
            f"tokenizer.vocab_size={tokenizer.vocab_size}: the null tokenizer has no vocabulary of "
            f"its own. Set tokenizer.vocab_size to 2 or more."
        )
    if kind not in ("null", "tiktoken") and tokenizer.vocab_size is not None:
        problems.append(
            f"tokenizer.vocab_size={tokenizer.vocab_size}: a {kind} tokenizer knows its own size. "
            f"Remove it, or set tokenizer.kind=null."
        )
    return problems


def _wanted(kind: str) -> str:
    """What `path` is for a kind, in words."""
    return {
        "huggingface": "a folder with tokenizer.json or to a hub name",
        "sentencepiece": "a tokenizer.model or its folder",
        "tiktoken": "a .tiktoken file or a JSON vocabulary",
    }[kind]


def _file_fields(tokenizer: TokenizerConfig) -> list[tuple[str, str | None]]:
    return [("path", tokenizer.path), ("eod", tokenizer.eod)]

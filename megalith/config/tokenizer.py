"""Tokenizer settings, and the rules they must satisfy."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, get_args

from megalith.config.fields import Ge

SplitPattern = Literal["v1", "v2", "cl100k"]
"""Regular expressions that split text before byte-pair encoding."""

FileKind = Literal["huggingface", "sentencepiece", "tiktoken"]
"""Tokenizer kinds that are read from files."""

FILES: tuple[FileKind, ...] = get_args(FileKind)

VOCABULARY, MERGES = "vocab.json", "merges.txt"
"""File name suffixes of the vocabulary and the merges of a GPT-2 tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """Tokenizer of a run: bytes, a tokenizer read from files, or none (`null`) for mock data."""

    kind: Literal["byte", "huggingface", "sentencepiece", "tiktoken", "null"] = "byte"
    """Tokenizer type. byte: UTF-8 bytes, needs no file; huggingface, sentencepiece and tiktoken:
    read from `path`; null: writes ids as digits, for mock data."""
    path: str | None = None
    """Tokenizer files. huggingface: a folder with tokenizer.json, that file, a hub name in the
    local cache, or the vocab.json of a GPT-2 tokenizer beside its merges.txt; sentencepiece:
    tokenizer.model or its folder; tiktoken: a .tiktoken file or a JSON vocabulary. Unset with
    the other kinds."""
    vocab_size: int | None = None
    """Vocabulary size of the `null` tokenizer, whose last id ends documents, or of a tiktoken
    vocabulary in JSON. Unset: the tokenizer's own size."""
    eod: str | None = None
    """Text of the end-of-document token. Unset: the tokenizer's end-of-text token."""
    add_special_tokens: bool = True
    """Add the tokenizer's BOS and EOS tokens around a text if its files define them."""
    pattern: SplitPattern = "v2"
    """tiktoken: pattern that splits text before byte-pair encoding; cl100k is that of GPT-4 and
    Llama 3."""
    special_tokens: tuple[str, ...] = ()
    """tiktoken: texts of the special tokens, in order of their ids; in a .tiktoken file they
    follow the vocabulary."""
    num_special_tokens: Annotated[int, Ge(1)] = 1000
    """tiktoken: number of ids reserved for special tokens at the start of a JSON vocabulary."""


def find_merges_file(vocabulary: str) -> str | None:
    """Return the path of the merges file of a GPT-2 vocabulary; None if the file name is not that
    of a vocabulary.

    >>> find_merges_file("gpt2/gpt2-vocab.json"), find_merges_file("tokenizer.json")
    ('gpt2/gpt2-merges.txt', None)
    """
    return (
        f"{vocabulary.removesuffix(VOCABULARY)}{MERGES}"
        if vocabulary.endswith(VOCABULARY)
        else None
    )


def locate_tokenizer(tokenizer: TokenizerConfig, folder: Path) -> TokenizerConfig:
    """Return the tokenizer of the config.yaml in `folder`; `path` becomes absolute if it names a
    file in that folder.

    Runs and checkpoints have a copy of their tokenizer and name it relative to their folder, so
    that it moves with them. Any other relative path is relative to the working directory.
    """
    if tokenizer.path is None or not (folder / tokenizer.path).is_file():
        return tokenizer
    return replace(tokenizer, path=str(folder / tokenizer.path))


def tokenizer_problems(tokenizer: TokenizerConfig) -> list[str]:
    """Return the violated rules as error messages. Accesses no file."""
    problems = []
    kind = tokenizer.kind
    if kind in FILES and not tokenizer.path:
        problems.append(
            f"tokenizer.kind={kind} needs tokenizer.path. Set it to {_describe_path(kind)}."
        )
    if kind not in FILES:
        given = [
            f"tokenizer.{name}={value}"
            for name, value in _file_fields(tokenizer)
            if value is not None
        ]
        problems += [
            f"{field} applies to tokenizers that are read from files, but tokenizer.kind={kind}. "
            f"Set tokenizer.kind to one of {', '.join(FILES)}, or remove it."
            for field in given
        ]
    defaults = TokenizerConfig()
    if kind != "tiktoken":
        problems += [
            f"tokenizer.{name}={getattr(tokenizer, name)} applies to tiktoken vocabularies, but "
            f"tokenizer.kind={kind}. "
            f"Set tokenizer.kind=tiktoken, or remove it."
            for name in ("pattern", "special_tokens", "num_special_tokens")
            if getattr(tokenizer, name) != getattr(defaults, name)
        ]
    elif len(tokenizer.special_tokens) > tokenizer.num_special_tokens:
        problems.append(
            f"tokenizer.num_special_tokens={tokenizer.num_special_tokens} must be at "
            "least the number of tokenizer.special_tokens. "
            f"Set it to {len(tokenizer.special_tokens)} or more."
        )
    if kind == "null" and (tokenizer.vocab_size or 0) < 2:
        problems.append(
            f"tokenizer.vocab_size={tokenizer.vocab_size}: the null tokenizer needs a vocabulary "
            f"size. Set tokenizer.vocab_size to 2 or more."
        )
    if kind not in ("null", "tiktoken") and tokenizer.vocab_size is not None:
        problems.append(
            f"tokenizer.vocab_size={tokenizer.vocab_size}: a {kind} tokenizer defines its own "
            f"size. Remove it, or set tokenizer.kind=null."
        )
    return problems


def _describe_path(kind: str) -> str:
    return {
        "huggingface": "a folder with tokenizer.json or to a hub name",
        "sentencepiece": "a tokenizer.model or its folder",
        "tiktoken": "a .tiktoken file or a JSON vocabulary",
    }[kind]


def _file_fields(tokenizer: TokenizerConfig) -> list[tuple[str, str | None]]:
    return [("path", tokenizer.path), ("eod", tokenizer.eod)]

"""Which tokenizer turns text into token ids."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """A tokenizer: bytes, a Hugging Face tokenizer.json, or none for made-up data."""

    kind: Literal["byte", "huggingface", "null"] = "byte"
    """`byte` needs no file; `huggingface` reads `path`; `null` writes ids as digits and goes with mock data."""
    path: str | None = None
    """Folder with tokenizer.json, that file, or a hub name already in the local cache; unset with the other kinds."""
    vocab_size: int | None = None
    """Number of ids of the `null` tokenizer, the last of which ends documents; unset: the others know their own."""
    eod: str | None = None
    """Text of the token that ends a document. Unset: the tokenizer's own end-of-text token."""
    add_special_tokens: bool = True
    """Let the tokenizer put its own first and last tokens around a text, as its authors meant it to."""


def tokenizer_problems(tokenizer: TokenizerConfig) -> list[str]:
    """Every rule that this config breaks, as texts. Touches no file."""
    problems = []
    kind = tokenizer.kind
    if kind == "huggingface" and not tokenizer.path:
        problems.append(
            "tokenizer.kind=huggingface needs tokenizer.path. Set it to a folder with tokenizer.json or to a hub name."
        )
    if kind != "huggingface":
        given = [f"tokenizer.{name}={value}" for name, value in _file_fields(tokenizer) if value is not None]
        problems += [
            f"{field} belongs to a tokenizer read from files, but tokenizer.kind={kind}. "
            f"Set tokenizer.kind=huggingface, or remove it."
            for field in given
        ]
    if kind == "null" and (tokenizer.vocab_size or 0) < 2:
        problems.append(
            f"tokenizer.vocab_size={tokenizer.vocab_size}: the null tokenizer has no vocabulary of its own. "
            f"Set tokenizer.vocab_size to 2 or more."
        )
    if kind != "null" and tokenizer.vocab_size is not None:
        problems.append(
            f"tokenizer.vocab_size={tokenizer.vocab_size}: a {kind} tokenizer knows its own size. "
            f"Remove it, or set tokenizer.kind=null."
        )
    return problems


def _file_fields(tokenizer: TokenizerConfig) -> list[tuple[str, str | None]]:
    return [("path", tokenizer.path), ("eod", tokenizer.eod)]

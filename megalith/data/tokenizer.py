"""Tokenizers: the interface, bytes, numbers for mock data, and selection by config."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megalith.config.data import FileKind, TokenizerConfig, locate_tokenizer, tokenizer_problems
from megalith.config.fields import range_problems
from megalith.data.huggingface import END_OF_TEXT, HuggingFaceTokenizer, find_tokenizer_file
from megalith.data.tokenizer_formats import (
    MODEL,
    Encoding,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    byte_to_char_spans,
    encode_parts,
    encode_with_special_tokens,
    find_model_file,
    is_sentencepiece,
    join_ids,
)
from megalith.errors import DataError, raise_all


class Tokenizer(Protocol):
    """Interface of all tokenizers. Ids are 0 to vocab_size - 1."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""

    @property
    def eod(self) -> int:
        """Id of the end-of-document token.

        Raises:
            DataError: the tokenizer has none.
        """

    @property
    def bos(self) -> int | None:
        """Id that the tokenizer adds before a text; None if it has none."""

    @property
    def fingerprint(self) -> str:
        """Text that changes when the ids of any text would."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text."""

    @property
    def specials(self) -> Mapping[str, int]:
        """Ids of the special tokens by text."""

    def encode_marked(self, text: str) -> list[int]:
        """Return the ids of a text that contains special tokens, as chat templates render it; none
        are added."""

    def encode_spans(self, text: str) -> Encoding:
        """Return the same ids, with the characters of each token."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts, in order."""

    def encode_joined(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the concatenated ids of all texts and the number of ids per text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids without special tokens; invalid UTF-8 becomes U+FFFD."""

    def num_bytes(self, ids: Sequence[int]) -> int:
        """Return the UTF-8 bytes of the text of the ids; 0 for special tokens and for ids without
        text."""

    def token_bytes(self) -> Sequence[bytes | None]:
        """Return the bytes of every id inside a text; None for special tokens and for ids without
        text.

        Raises:
            DataError: the format does not define them.
        """


class ByteTokenizer:
    """Tokenizer of the 256 bytes of UTF-8, with id 256 as end-of-document token."""

    vocab_size = 257
    eod = 256
    bos = None
    fingerprint = "byte"

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of the text."""
        return list(text.encode())

    @property
    def specials(self) -> Mapping[str, int]:
        """The end token, written as in GPT-2."""
        return {END_OF_TEXT: self.eod}

    def encode_marked(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of the text, and the end token where the text contains it."""
        return encode_parts(text, self.specials, self.encode)

    def encode_spans(self, text: str) -> Encoding:
        """Return the same ids, with the character of each byte."""
        return encode_with_special_tokens(text, self.specials, self._spans)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the UTF-8 bytes of each text."""
        return [self.encode(text) for text in texts]

    def encode_joined(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the UTF-8 bytes of all texts and the number of bytes per text."""
        parts = [text.encode() for text in texts]
        ids = np.frombuffer(b"".join(parts), np.uint8).astype(np.int64)
        return ids, np.array([len(part) for part in parts], np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the bytes without the end token."""
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def num_bytes(self, ids: Sequence[int]) -> int:
        """Return the number of ids other than the end token."""
        return sum(token < 256 for token in ids)

    def token_bytes(self) -> Sequence[bytes | None]:
        """Return the 256 bytes, and None for the end token."""
        return [*(bytes([byte]) for byte in range(256)), None]

    def _spans(self, text: str) -> Encoding:
        ids = self.encode(text)
        return Encoding(ids, byte_to_char_spans(text, [1] * len(ids)))


class NullTokenizer:
    """Tokenizer for mock data: ids written as numbers separated by spaces; the last id ends
    documents."""

    bos = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1
        self.fingerprint = f"null-{vocab_size}"

    def encode(self, text: str) -> list[int]:
        """Return the numbers in the text.

        Raises:
            DataError: a word is not one of the ids.
        """
        return [self._id(word) for word in text.split()]

    @property
    def specials(self) -> Mapping[str, int]:
        """Empty: text cannot contain special tokens."""
        return {}

    def encode_marked(self, text: str) -> list[int]:
        """Return the numbers in the text.

        Raises:
            DataError: a word is not one of the ids.
        """
        return self.encode(text)

    def encode_spans(self, text: str) -> Encoding:
        """Return the numbers in the text, with the characters of each.

        Raises:
            DataError: a word is not one of the ids.
        """
        return Encoding(self.encode(text), [word.span() for word in re.finditer(r"\S+", text)])

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the numbers in each text."""
        return [self.encode(text) for text in texts]

    def encode_joined(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the numbers in all texts and their number per text."""
        return join_ids(self.encode_batch(texts))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the ids as numbers, without the end token."""
        return " ".join(str(token) for token in ids if token != self.eod)

    def num_bytes(self, ids: Sequence[int]) -> int:
        """Return 0, because mock ids have no text."""
        return 0

    def token_bytes(self) -> Sequence[bytes | None]:
        """Raise an error, because mock ids have no text.

        Raises:
            DataError: always.
        """
        raise DataError("tokenizer.kind=null: its ids have no text. Use a model with a tokenizer.")

    def _id(self, word: str) -> int:
        if not word.isascii() or not word.isdigit() or int(word) >= self.vocab_size:
            raise DataError(
                f"tokenizer.kind=null: {word!r} is not an id. Use numbers from 0 to "
                f"{self.vocab_size - 1} with spaces "
                f"between, or choose tokenizer.kind=byte for text."
            )
        return int(word)


class StreamDecoder:
    """Incremental detokenizer: returns the text of each id as soon as its characters are
    complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # ids of returned text, needed because decoders treat the first token differently
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Add one id; return the new complete text, empty in the middle of a character."""
        self._pending.append(token)
        text = self._new_text()
        return "" if text.endswith("\ufffd") else self._accept(text)

    def finish(self) -> str:
        """Return the remaining text, with U+FFFD for an incomplete character."""
        return self._accept(self._new_text())

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._pending)[len(before) :]

    def _accept(self, text: str) -> str:
        if text:
            self._context, self._pending = self._pending, []
        return text


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Build the tokenizer of a config.

    Raises:
        ConfigError: the config is inconsistent.
        DataError: its files are missing or invalid.
    """
    raise_all(range_problems(config, "tokenizer") + tokenizer_problems(config))
    if config.kind == "null":
        assert config.vocab_size is not None
        return NullTokenizer(config.vocab_size)
    if config.path is None:
        return ByteTokenizer()
    if config.kind == "sentencepiece":
        return SentencePieceTokenizer(
            config.path, eod=config.eod, add_special_tokens=config.add_special_tokens
        )
    if config.kind == "tiktoken":
        return TiktokenTokenizer(
            config.path,
            pattern=config.pattern,
            special_tokens=config.special_tokens,
            num_special=config.num_special_tokens,
            vocab_size=config.vocab_size,
            eod=config.eod,
            add_special_tokens=config.add_special_tokens,
        )
    return HuggingFaceTokenizer(
        config.path, eod=config.eod, add_special_tokens=config.add_special_tokens
    )


def detect_tokenizer_kind(path: str) -> FileKind:
    """Return the library that reads a tokenizer, detected by file name and first byte."""
    place = Path(path)
    if place.is_dir():
        plain = (place / "tokenizer.json").is_file() or not is_sentencepiece(place)
        return "huggingface" if plain else "sentencepiece"
    if place.suffix == ".model":
        return "sentencepiece" if is_sentencepiece(place) or not place.is_file() else "tiktoken"
    return "tiktoken" if place.suffix == ".tiktoken" else "huggingface"


def main_file(config: TokenizerConfig) -> Path | None:
    """Return the file of a tokenizer; None for those without files.

    Raises:
        DataError: it is missing.
    """
    if config.path is None:
        return None
    if config.kind == "sentencepiece":
        return find_model_file(config.path)
    return Path(config.path) if config.kind == "tiktoken" else find_tokenizer_file(config.path)


def moved_to(config: TokenizerConfig, folder: Path) -> TokenizerConfig:
    """Return the config of the tokenizer after its main file was copied to `folder`."""
    file = None if config.path is None else main_file(config)
    if file is None:
        return config
    return replace(config, path=str(folder / file.name if config.kind == "tiktoken" else folder))


def locate_copied_tokenizer(config: TokenizerConfig, folder: Path) -> TokenizerConfig:
    """Return the config of the tokenizer's copy in a model folder; unchanged if there is none."""
    located = locate_tokenizer(config, folder)
    if config.path is None or located != config:
        return located
    names = {
        "huggingface": "tokenizer.json",
        "sentencepiece": MODEL,
        "tiktoken": Path(config.path).name,
    }
    file = folder / names[config.kind]
    return (
        replace(config, path=str(file if config.kind == "tiktoken" else folder))
        if file.is_file()
        else config
    )


def appends_eod(tokenizer: Tokenizer) -> bool:
    """Return whether the tokenizer appends the end token to every text."""
    return not isinstance(tokenizer, NullTokenizer) and tokenizer.encode("a")[-1:] == [
        tokenizer.eod
    ]


def encode_prompt(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a prompt, without an end token. An empty text begins a document.

    Raises:
        DataError: the text is not valid Unicode, or it is empty and the tokenizer has no token to
            begin with.
    """
    try:
        text.encode()
    except (
        UnicodeEncodeError
    ) as error:  # the shell passes bytes that are not UTF-8 as lone surrogates
        raise DataError(
            f"character {error.start + 1} is {text[error.start]!r}: must be UTF-8 text."
        ) from error
    ids = tokenizer.encode(text)
    if ids and appends_eod(tokenizer):
        ids = ids[:-1]
    if not ids:
        # In training documents are concatenated, so a document begins after an end token.
        ids = [tokenizer.eod if tokenizer.bos is None else tokenizer.bos]
    return ids

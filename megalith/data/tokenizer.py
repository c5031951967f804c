"""Text to token ids and back: bytes, a tokenizer read from files, or digits for made-up data."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megalith.config.tokenizer import (
    FileKind,
    TokenizerConfig,
    locate_tokenizer,
    tokenizer_problems,
)
from megalith.data.huggingface import END_OF_TEXT, HuggingFaceTokenizer, find_tokenizer_file
from megalith.data.marked import TokenSpans, encode_parts, places_of_bytes, spans_of_parts
from megalith.data.sentencepiece import (
    MODEL,
    SentencePieceTokenizer,
    find_model_file,
    is_sentencepiece,
)
from megalith.data.tiktoken import TiktokenTokenizer
from megalith.errors import DataError, raise_all


class Tokenizer(Protocol):
    """What every tokenizer can do. Ids run from 0 to vocab_size - 1."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""

    @property
    def eod(self) -> int:
        """The id that ends a document.

        Raises:
            DataError: the tokenizer has none.
        """

    @property
    def bos(self) -> int | None:
        """The id that the tokenizer puts before a text; None when it has none."""

    @property
    def fingerprint(self) -> str:
        """A text that changes when the ids of any text would."""

    def encode(self, text: str) -> list[int]:
        """The ids of one text."""

    @property
    def specials(self) -> Mapping[str, int]:
        """Ids of the special tokens, by their texts."""

    def encode_marked(self, text: str) -> list[int]:
        """The ids of a text in which special tokens are written out, as chat templates do; nothing
        is put around it."""

    def encode_spans(self, text: str) -> TokenSpans:
        """The same ids, and the characters that each stands for."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts, in order."""

    def encode_joined(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The ids of all texts one after another, and how many each has: the form that files
        take."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens left out; bytes that are no UTF-8 become U+FFFD."""

    def num_bytes(self, ids: Sequence[int]) -> int:
        """UTF-8 bytes of text that the ids stand for; special tokens stand for none. 0 where ids
        are no text at all."""


class ByteTokenizer:
    """The 256 bytes of UTF-8, and id 256 to end documents."""

    vocab_size = 257
    eod = 256
    bos = None
    fingerprint = "byte"

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of the text."""
        return list(text.encode())

    @property
    def specials(self) -> Mapping[str, int]:
        """The end token, as GPT-2 writes it."""
        return {END_OF_TEXT: self.eod}

    def encode_marked(self, text: str) -> list[int]:
        """The UTF-8 bytes of the text, and the end token where it is written out."""
        return encode_parts(text, self.specials, self.encode)

    def encode_spans(self, text: str) -> TokenSpans:
        """The same, and the character of each byte."""
        return spans_of_parts(text, self.specials, self._spans)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The UTF-8 bytes of each text."""
        return [self.encode(text) for text in texts]

    def encode_joined(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The UTF-8 bytes of all texts, and how many each has."""
        parts = [text.encode() for text in texts]
        ids = np.frombuffer(b"".join(parts), np.uint8).astype(np.int64)
        return ids, np.array([len(part) for part in parts], np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the bytes; the end token is left out."""
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def num_bytes(self, ids: Sequence[int]) -> int:
        """Every id but the end is a byte."""
        return sum(token < 256 for token in ids)

    def _spans(self, text: str) -> TokenSpans:
        ids = self.encode(text)
        return TokenSpans(ids, places_of_bytes(text, [1] * len(ids)))


class NullTokenizer:
    """Ids written as numbers with spaces between; the last id ends documents. It goes with mock
    data."""

    bos = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1
        self.fingerprint = f"null-{vocab_size}"

    def encode(self, text: str) -> list[int]:
        """The numbers in the text.

        Raises:
            DataError: a word is not one of the ids.
        """
        return [self._id(word) for word in text.split()]

    @property
    def specials(self) -> Mapping[str, int]:
        """None that text could name."""
        return {}

    def encode_marked(self, text: str) -> list[int]:
        """The numbers in the text.

        Raises:
            DataError: a word is not one of the ids.
        """
        return self.encode(text)

    def encode_spans(self, text: str) -> TokenSpans:
        """The numbers in the text, and their digits' places.

        Raises:
            DataError: a word is not one of the ids.
        """
        return TokenSpans(self.encode(text), [word.span() for word in re.finditer(r"\S+", text)])

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The numbers in each text."""
        return [self.encode(text) for text in texts]

    def encode_joined(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The numbers in all texts, and how many each has."""
        batch = self.encode_batch(texts)
        return np.array([token for ids in batch for token in ids], np.int64), np.array(
            [len(i) for i in batch], np.int32
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The ids as numbers; the end token is left out."""
        return " ".join(str(token) for token in ids if token != self.eod)

    def num_bytes(self, ids: Sequence[int]) -> int:
        """Made-up ids are no text."""
        return 0

    def _id(self, word: str) -> int:
        if not word.isascii() or not word.isdigit() or int(word) >= self.vocab_size:
            raise DataError(
                f"tokenizer.kind=null: {word!r} is not an id. Use numbers from 0 to "
                f"{self.vocab_size - 1} with spaces "
                f"between, or choose tokenizer.kind=byte for text."
            )
        return int(word)


class StreamDecoder:
    """Text of ids that arrive one at a time: whole characters come out as soon as they are
    complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[
            int
        ] = []  # ids whose text is out, kept because decoders treat a first token differently
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Take one id; return the text that is now certain, often empty in the middle of a
        character."""
        self._pending.append(token)
        text = self._new_text()
        return "" if text.endswith("\ufffd") else self._accept(text)

    def finish(self) -> str:
        """The text still held back, with U+FFFD for a character that never became whole."""
        return self._accept(self._new_text())

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._pending)[len(before) :]

    def _accept(self, text: str) -> str:
        if text:
            self._context, self._pending = self._pending, []
        return text


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that the config names.

    Raises:
        ConfigError: the config breaks a rule.
        DataError: its files are missing or are no tokenizer.
    """
    raise_all(tokenizer_problems(config))
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


def kind_of(path: str) -> FileKind:
    """Which library reads a tokenizer, by its file's name, and its first byte where the name says
    too little."""
    place = Path(path)
    if place.is_dir():
        plain = (place / "tokenizer.json").is_file() or not is_sentencepiece(place)
        return "huggingface" if plain else "sentencepiece"
    if place.suffix == ".model":
        return "sentencepiece" if is_sentencepiece(place) or not place.is_file() else "tiktoken"
    return "tiktoken" if place.suffix == ".tiktoken" else "huggingface"


def main_file(config: TokenizerConfig) -> Path | None:
    """The file that a tokenizer is read from; None for those that need none.

    Raises:
        DataError: it is gone.
    """
    if config.path is None:
        return None
    if config.kind == "sentencepiece":
        return find_model_file(config.path)
    return Path(config.path) if config.kind == "tiktoken" else find_tokenizer_file(config.path)


def moved_to(config: TokenizerConfig, folder: Path) -> TokenizerConfig:
    """The same tokenizer, read from a folder that its main file was copied to."""
    file = None if config.path is None else main_file(config)
    if file is None:
        return config
    return replace(config, path=str(folder / file.name if config.kind == "tiktoken" else folder))


def brought_along(config: TokenizerConfig, folder: Path) -> TokenizerConfig:
    """Return the tokenizer read from its copy in a model's folder, wherever that is now; unchanged
    without one."""
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


def ends_texts_itself(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer puts the end token behind every text of its own accord."""
    return not isinstance(tokenizer, NullTokenizer) and tokenizer.encode("a")[-1:] == [
        tokenizer.eod
    ]
